"""Chats of a model that reads pictures, episodes that it plays, and a run with these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.config.reading import dump, merge
from ragen.core.pictures import Picture
from ragen.core.types import Episode, Group
from ragen.envs.contract import Env, Info, State
from ragen.envs.tools import Call, ToolEnv, tool
from ragen.rollout.episode import play_episode
from ragen.rollout.setup import EpisodeSpec, Setup
from ragen.storage.recorder import Recorder
from tests.scripted_policy import ScriptedPolicy
from tests.seeing_envs import Seen
from tests.tiny import tiny_tokenizer
from tests.tool_templates import tool_tokenizer


def patch(shade: int, size: int = 2) -> Picture:
    """A grey picture."""
    return Picture.of(np.full((size, size), shade, np.uint8))


def form(picture: Picture) -> tuple[int, ...]:
    """A token for each row of pixels, between two words."""
    return (3, *picture.token_ids(picture.size[0]), 4)


@cache
def seeing_chat(template: str = "chatml", **options: Any) -> Chat:
    """A chat of a model that reads pictures in this `form`."""
    return Chat(tiny_tokenizer(template), pictures=form, **options)


SPEC = EpisodeSpec(7, 2, 1, (0, "test"))
RIGHT = "go</think><answer>Right</answer>"


class Album(ToolEnv):
    """Shows a picture for each number that it is asked for; the rules are in its first picture."""

    goal, rules = "Album", "Look at the pictures."

    @tool
    def look(self, page: int) -> str:
        """Look at a page."""
        self._pages = [page]
        return f"page {page}: <image>"

    def answer(self, text: str) -> tuple[str, float, bool, bool, Info]:
        self._pages = [1]
        return "<image> right", 1.0, True, False, {"success": text == "done"}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        self._pages = [200]
        return "Look: <image>", {}

    def result(self, call: Call) -> str:
        self._pages = []
        return super().result(call)

    def state_key(self) -> str:
        return str(self._pages)

    def get_state(self) -> State:
        return {"pages": self._pages}

    def set_state(self, state: State) -> None:
        self._pages = state["pages"]

    def pictures(self) -> Sequence[Any]:
        return [patch(page).pixels for page in self._pages]


def called(*pages: int) -> str:
    calls = (
        f'<tool_call>\n{{"name": "look", "arguments": {{"page": {p}}}}}\n</tool_call>'
        for p in pages
    )
    return "</think>" + "\n".join(calls)


def setup_of(make: Callable[[], Env] = Seen, template: str = "chatml", **more: Any) -> Setup:
    given: dict[str, Any] = {"chat": seeing_chat(template), "max_length": 9999, "max_tokens": 64}
    return Setup("seen", make, timeout_s=5.0, **{**given, **more})


def play(setup: Setup, replies: Sequence[str], spec: EpisodeSpec = SPEC) -> Episode:
    chat = setup.chat

    def encode(text: str) -> tuple[int, ...]:
        assert chat is not None
        return (*chat.encode(text), chat.end)

    script = iter(replies)
    policy = ScriptedPolicy(lambda prompt: next(script, RIGHT), None if chat is None else encode)
    return asyncio.run(play_episode(policy, setup, spec))


PAGES = [called(1, 2), called(9)[:-5], called(3), "</think>done"]


def tools_setup(**more: Any) -> Setup:
    env = Album()
    chat = Chat(tool_tokenizer("hermes"), tools=env.tools, pictures=form)
    return setup_of(Album, **{"chat": chat, "tools": env.tools, **more})


def seen_episodes() -> list[Episode]:
    """One that grows, one in a window, one with calls of tools, and one of an endpoint."""
    made = [play(setup_of(**more), [RIGHT] * 5) for more in ({}, {"window": 1})]
    return [*made, play(tools_setup(), PAGES), play(setup_of(chat=None), [RIGHT] * 5)]


def picture_run(folder: Path, episodes: Sequence[Episode]) -> Path:
    """A run of two steps with these episodes; of the first there are recorded samples."""
    folder.mkdir(parents=True)
    config = dump(merge(None, {"env.name": "tests/seeing_envs.py:Seen"}))
    with Recorder.create(folder, config, seeing_chat().text_of) as recorder:
        for step in (0, 1):
            groups = [Group((replace(each, group=n),)) for n, each in enumerate(episodes)]
            recorder.episodes(step, groups)
            names = ("token_ids", "loss_mask", "turn_index", "sampled_logprobs")
            (sample,) = to_samples(groups[:1])[0]
            place = {"group": 0, "member": episodes[0].member}
            recorder.samples(step, [place | {name: getattr(sample, name) for name in names}])
    return folder
