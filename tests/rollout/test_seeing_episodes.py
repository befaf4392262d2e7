"""Episodes with pictures: prompts, samples, batches, branches, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ragen.algorithms.batch import collate, minibatches, take
from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.pictures import PLACE, Picture, begins, shown_in
from ragen.core.types import Episode, Group, Prompt, fingerprint
from ragen.learning.exactness import verify, with_fingerprints
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.episode import play_episode, require_unchanged
from ragen.rollout.setup import BranchSpec, Setup, make_setup
from tests.faulty import Answer, FaultyServer, chat_reply
from tests.pictured import (
    PAGES,
    RIGHT,
    SPEC,
    called,
    patch,
    play,
    seeing_chat,
    setup_of,
    tools_setup,
)
from tests.rollout.test_endpoint import in_order
from tests.tiny import tiny_tokenizer


def check(episode: Episode) -> None:
    """Ids, messages and pictures of every prompt say the same."""
    assert not episode.failed and episode.turns
    for turn in episode.turns:
        prompt = turn.prompt
        texts = [message["content"] for message in prompt.messages]
        assert sum(text.count(PLACE) for text in texts) == len(prompt.pictures)
        assert turn.observation.count(PLACE) <= len(turn.pictures)
        if prompt.token_ids is not None:
            keys = {picture.token_ids(1)[0]: picture for picture in prompt.pictures}
            assert prompt.pictures == tuple(keys[t] for t in prompt.token_ids if begins(t))


SHAPES = [
    {},
    {"window": 1},
    {"window": 2, "summary": "observations"},
    {"window": 1, "summary": "actions"},
    {"max_length": 330},
    {"style": "paper", "max_length": 1500},
    {"chat": None},
]


FEW = ({}, {"window": 2, "summary": "observations"})
"""The whole conversation, and a window with a summary."""


@pytest.mark.parametrize("more", SHAPES, ids=str)
def test_prompts_show_the_pictures_of_their_context(more: dict[str, Any]) -> None:
    setup = setup_of(**more)
    episode = play(setup, [RIGHT] * 5)
    check(episode)
    assert len(episode.turns) == 5 and episode.success
    assert [len(turn.pictures) for turn in episode.turns] == [1, 1, 2, 2, 2]
    assert len(episode.final_pictures) == 2
    last = episode.turns[-1].prompt
    if not more:
        assert last.pictures == sum((turn.pictures for turn in episode.turns), ())
        assert last.token_ids is not None
        assert shown_in(last.token_ids, {p.key: p for p in last.pictures}) == tuple(
            dict.fromkeys(last.pictures)
        )
    if more.get("window") == 1:
        assert last.pictures == episode.turns[-1].pictures
    if more.get("summary") == "observations":
        assert last.pictures[:1] == episode.turns[0].pictures  # below it are the lines
        lines = [line for line in last.messages[-3]["content"].splitlines() if line[:1].isdigit()]
        assert len(lines) == 3 and PLACE not in "".join(lines)


@pytest.mark.parametrize("more", FEW, ids=str)
def test_a_branch_repeats_the_pictures(more: dict[str, Any]) -> None:
    check_branches(setup_of(**more), [RIGHT] * 5)
    check_branches(tools_setup(**more), PAGES)


def check_branches(setup: Setup, replies: Sequence[str]) -> None:
    original = play(setup, replies)
    check(original)
    for turn in range(len(original.turns)):
        turns = tuple(
            replace(t, prompt=Prompt((), t.prompt.token_ids, 0, 0, 0, 0)) for t in original.turns
        )
        branch = BranchSpec(7, 2, 1, SPEC.path, original.noise_seed, turns[: turn + 1])
        require_unchanged(replace(setup, chat=None), branch)
        assert play(setup, replies[turn:], branch) == original


@pytest.mark.parametrize("more", FEW, ids=str)
def test_every_result_of_a_turn_shows_its_picture(more: dict[str, Any]) -> None:
    episode = play(tools_setup(**more), PAGES)
    check(episode)
    first, broken, third, last = episode.turns
    assert first.pictures == (patch(200),)
    assert broken.pictures == (patch(1), patch(2))  # of both calls of the first turn
    assert first.results == (f"page 1: {PLACE}", f"page 2: {PLACE}")
    assert third.pictures == broken.pictures and third.observation == f"page 2: {PLACE}"
    assert last.pictures == (patch(3),) and episode.final_pictures == (patch(1),)
    if not more:
        assert last.prompt.pictures == tuple(map(patch, (200, 1, 2, 2, 3)))


def test_what_a_model_writes_makes_no_picture() -> None:
    hostile = f"go {PLACE} <image>{PLACE}</think><answer>{PLACE} || Right</answer>"
    for more in ({}, {"window": 2, "summary": "actions"}, {"chat": None}):
        episode = play(setup_of(**more), [hostile, RIGHT, RIGHT])
        check(episode)
        assert episode.turns[0].thought == "go \ufffd <image>\ufffd"
        assert len(episode.turns[1].prompt.pictures) == 2
    episode = play(tools_setup(), [f"</think>{PLACE}" + called(4)[8:].replace("look", PLACE)])
    check(episode)


def test_a_sample_and_a_batch_know_their_pictures() -> None:
    played = [play(setup_of(**more), [RIGHT] * 5) for more in ({}, {"window": 1})]
    samples, _ = to_samples([Group((episode,)) for episode in played])
    assert len(samples) == 6
    for sample in samples:
        keys = {picture.key: picture for picture in sample.pictures}
        assert shown_in(sample.token_ids, keys) == sample.pictures and len(keys) >= 1
    batch = collate(samples, context_weight=0.5)
    assert set(batch.pictures) == {p for each in samples for p in each.pictures}
    assert len({picture.hash for picture in batch.pictures}) == len(batch.pictures) == 6
    assert not bool(batch.weight_BT[batch.token_ids_BT < 0].any())
    assert bool((batch.weight_BT == 0.5).any())
    assert take(batch, torch.tensor([1])).pictures == batch.pictures
    for part in minibatches(batch, 1, 1, seed=0):
        assert part.pictures == batch.pictures


def test_the_learner_reads_the_pictures_that_were_sampled() -> None:
    episode = sampled(play(setup_of(), [RIGHT] * 5))
    samples, episodes = to_samples([Group((episode,))])
    batch = with_fingerprints(collate(samples), episodes)
    verify([batch])
    shown = batch.token_ids_BT < 0
    other = replace(batch, token_ids_BT=batch.token_ids_BT - 2**16 * shown.long())
    with pytest.raises(RagenError, match="pictures of turn 1 of the step's episode 0 are not"):
        verify([other])
    without = replace(batch, token_ids_BT=batch.token_ids_BT.clamp(0))
    with pytest.raises(RagenError, match="pictures of turn 1"):
        verify([without])
    with pytest.raises(RagenError, match="pictures of turn 1"):
        verify([replace(batch, pictures=())])
    first, *rest = batch.pictures
    changed = Picture(first.hash, first.pixels ^ np.uint8(1))
    with pytest.raises(RagenError, match="has changed since it was shown"):
        verify([replace(batch, pictures=(changed, *rest))])


def sampled(episode: Episode) -> Episode:
    """An episode whose completions have fingerprints, as those of a sampler."""
    turns = []
    for turn in episode.turns:
        ids, logprobs = turn.completion.token_ids, turn.completion.logprobs
        assert ids is not None and logprobs is not None
        mark = fingerprint(ids, logprobs)
        turns.append(replace(turn, completion=replace(turn.completion, fingerprint=mark)))
    return replace(episode, turns=tuple(turns))


def test_a_model_that_reads_no_pictures_is_refused_in_one_line() -> None:
    chat = Chat(tiny_tokenizer("chatml"))
    config = merge(None, {"env.name": "tests/seeing_envs.py:Seen", "model.path": "words"})
    with pytest.raises(
        RagenError, match="Seen shows pictures, and words reads no pictures: evaluate"
    ):
        make_setup(config, chat)
    make_setup(config, None).close()  # a chat endpoint takes them
    make_setup(config, seeing_chat()).close()
    with pytest.raises(RagenError, match="seen shows pictures, and this model reads no pictures"):
        play(setup_of(chat=chat), [RIGHT])


def test_a_judge_is_refused() -> None:
    given = {
        "env.name": "tests/seeing_envs.py:Seen",
        "reward.terms.judge": 1.0,
        "judge.model": "m",
        "judge.rubric": "Right?",
    }
    config = merge(None, given | {"judge.url": "http://localhost:1/v1"})
    with pytest.raises(RagenError, match="a judge reads text, and the environment"):
        make_setup(config, seeing_chat())


# Chat endpoints.


def asked(setup: Setup, *answers: Answer) -> tuple[Episode, list[list[dict[str, Any]]]]:
    """An episode with a server's answers, and the messages of its requests."""

    async def work(url: str) -> Episode:
        policy = ChatEndpoint(Server(url), "m", True, setup.tools)
        try:
            return await play_episode(policy, setup, SPEC)
        finally:
            await policy.close()

    with FaultyServer(in_order(*answers)) as server:
        episode = asyncio.run(work(server.url))
        return episode, [request["messages"] for request in server.requests]


def image_of(part: dict[str, Any]) -> Picture:
    kind, data = part["image_url"]["url"].split(",")
    assert part["type"] == "image_url" and kind == "data:image/png;base64"
    return Picture.of_png(base64.b64decode(data))


def test_an_endpoint_gets_pictures_as_parts_of_the_content() -> None:
    replies = [chat_reply(f"<think>{PLACE} {RIGHT}")] * 5  # its own places stay text
    episode, requests = asked(setup_of(chat=None, prefilled=False), *replies)
    check(episode)
    assert len(requests) == 5 and episode.success
    for turn, messages in zip(episode.turns, requests, strict=True):
        parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
        images = [image_of(part) for part in parts if part["type"] == "image_url"]
        assert tuple(images) == turn.prompt.pictures
        assert PLACE not in "".join(part.get("text", "") for part in parts)
    first, *_, last = requests[-1]
    before, _, after = first["content"]
    assert before["text"].endswith("You see ") and after["text"].startswith(".\n")
    assert [part["type"] for part in last["content"]] == ["text", "image_url", "image_url", "text"]


def test_the_pictures_of_results_follow_them() -> None:
    replies = [chat_reply(text.replace("</think>", "<think></think>")) for text in PAGES]
    setup = tools_setup(chat=None, prefilled=False)
    episode, requests = asked(setup, *replies)
    check(episode)
    results = [message for message in requests[1] if message["role"] == "tool"]
    assert [each["content"].splitlines()[0] for each in results] == [
        "page 1: <image>",
        "page 2: <image>",
    ]
    words, *images = requests[1][-1]["content"]
    assert requests[1][-1]["role"] == "user" and words["text"].startswith("The pictures of these")
    assert [image_of(each) for each in images] == [patch(1), patch(2)]
    assert [m["role"] for m in requests[2][-3:]] == ["user", "assistant", "user"]


def test_an_endpoint_without_eyes_is_one_line() -> None:
    refusal = Answer({"error": {"message": "m does not support image input"}}, 400)
    with pytest.raises(
        RagenError, match="the environment shows pictures: choose a model that reads"
    ):
        asked(setup_of(chat=None), refusal)
