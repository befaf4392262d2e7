"""An inspection of a model: its prompts, its trained tokens, and its cost on this machine.

A model is loaded as for an evaluation. Its first prompt, a conversation of three turns and one
sampled reply take the path of training; memory comes from the plan, speed from a short decode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen.config.config import Config
from ragen.config.keys import Flat
from ragen.config.reading import flatten, merge
from ragen.core.errors import RagenError
from ragen.core.pictures import Picture
from ragen.core.seeding import EVAL_LEVELS
from ragen.core.stopping import run_async
from ragen.core.types import Completion, Prompt, Turn
from ragen.core.user_code import UserCodeError
from ragen.evaluation.outcomes import outcome_of
from ragen.models.hub import read_sizes
from ragen.models.memory import GIB, plans
from ragen.models.names import base_of, local_config, resolve_model
from ragen.rollout.episode import opening, play_episode, read_reply, require_room
from ragen.rollout.players import Player, PlayerPolicy, random_player
from ragen.rollout.setup import EpisodeSpec, Setup, facts_of, make_chat, make_setup
from ragen.settings.target import Overrides, config_for
from ragen.storage.checkpoint import run_of

if TYPE_CHECKING:
    from ragen.chat.chat import Chat
    from ragen.sampling.weighted_policy import WeightedPolicy

ENV = "sokoban"
"""Where a model plays if no environment is named: its episodes last several turns."""
TURNS = 3
SQUARE = 64, 64
"""Height and width of the picture whose tokens are counted if the environment shows none."""
REPLIES, TOKENS = 8, 16
"""The short decode: replies at the same time, and tokens of each."""
REPLY_S = 20.0
"""About how many seconds a reply is sampled; at the measured speed, the rest is cut off."""
METHODS = {"GRPO": "starpo-s/grpo", "PPO": "starpo-s/ppo"}
DTYPES = "float32", "bfloat16"
RANK = 64
"""Rank of the adapters in the table of memory, as in the papers."""
MEMORY_KEYS = (
    "env.",
    "prompt.",
    "model.",
    "rollout.slots",
    "rollout.max_tokens",
    "rollout.sampler",
    "rollout.gpu_memory",
)
"""Prefixes of the keys that memory depends on; the methods of training may exclude others."""
FITS = "too large", "fits short episodes", "fits"


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one kind, as text: a control token, sampled and therefore trained, or neither."""

    text: str
    num_tokens: int
    trained: bool = False
    control: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one method of training, in GiB.

    `certain` is what weights, gradients and optimiser take, `peak` the most if episodes are as long
    as the settings allow. `verdict` is one of `FITS`, or empty if free memory is not known.
    """

    method: str
    adapters: bool
    dtype: str
    certain: float
    peak: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled reply, with its pre-filled beginning.

    `problem` is what is wrong with it, or ``None`` if it is valid; `actions` would be carried out.
    """

    text: str
    num_tokens: int
    problem: str | None
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model under the settings with which it is evaluated in `config`'s environment.

    Attributes:
        architecture: The class of transformers that computes it.
        stored: The dtype of its weights' files.
        decoder: The way in which it decodes (`ragen.networks.decoder.PATHS`).
        end, pad, controls: Tokens that end a turn, the padding token if there is one, and all
            tokens that no text becomes, each with its id.
        header: What the template writes before a reply in the history alone, and every prompt here.
        loses_blanks: A message loses the white space that it begins with.
        pictures: How many tokens a picture has, in words; empty if the model reads none.
        samples, turns: The training samples of a conversation, and its turns.
        why: Why its turns are one sample, or one each.
        memory: A row for each method of training; `free` GiB are free on the device.
        tokens_per_s: Tokens a second of `REPLIES` replies at once, and of one alone.
    """

    target: str
    config: Config
    device: str
    architecture: str
    parameters: int
    stored: str
    decoder: str
    end: dict[str, int]
    pad: dict[str, int]
    controls: dict[str, int]
    header: str
    loses_blanks: bool
    pictures: str
    prompt: list[Piece]
    samples: list[list[Piece]]
    turns: int
    why: str
    memory: list[Memory]
    free: float | None
    tokens_per_s: tuple[float, float]
    reply: Reply

    def record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(replace(self, config=self.config.model_dump()))  # type: ignore[arg-type]


def inspect_model(target: str, overrides: Overrides | None = None) -> Inspection:
    """Load a model, a run or ``base``, and measure what training it on this machine takes.

    `overrides` are as for `evaluate_target`; without an environment it is the run's, or `ENV`.
    """
    given = dict(overrides or {})
    if run_of(target) is None and given.keys().isdisjoint(("env", "env.name")):
        given["env"] = ENV
    config = config_for(target, given)
    facts_of(config.env)
    path = resolve_model(target, config.env.name)
    memory, free = memory_table(flatten(config), path)  # while no weights take any
    sizes = read_sizes(base_of(path))
    from ragen.engines.factory import load_model
    from ragen.networks.machine import use_threads
    from ragen.networks.pictures import reader_of
    from ragen.sampling.local_sampler import Sampler

    use_threads(config.threads)
    model, tokenizer = load_model(config.model, path)
    chat = make_chat(config, tokenizer)
    policy = Sampler(model, chat, slots=REPLIES, max_length=config.model.max_length)
    setup = make_setup(config, chat)
    require_room(setup)
    with closing(setup):
        turns, spec = conversation(setup, chat)
        prompt, names = opening(setup, spec)
        samples, why = samples_of(turns, setup, chat)
        speeds, completion = run_async(sample(policy, prompt))
    reply = _parsed(setup, prompt, completion, names)
    pad, written = tokenizer.pad_token_id, local_config(path)
    return Inspection(
        target=target,
        config=config,
        device=model.device.type,
        architecture=type(model).__name__,
        parameters=sizes.numbers,
        stored=str(written.get("dtype") or written.get("torch_dtype") or "float32"),
        decoder=policy.path,
        end=tokens_by_text(chat, chat.end_ids),
        pad={} if pad is None else tokens_by_text(chat, [pad]),
        controls=tokens_by_text(chat, chat.control_ids),
        header=chat.header,
        loses_blanks=chat.loses_blanks,
        pictures=of_picture(reader_of(tokenizer), prompt.pictures),
        prompt=pieces(chat, prompt.token_ids or ()),
        samples=samples,
        turns=len(turns),
        why=why,
        memory=memory,
        free=free,
        tokens_per_s=speeds,
        reply=reply,
    )


def of_picture(reader: Any, shown: Sequence[Picture]) -> str:
    """How many tokens the first of the pictures has, or a square one if none are shown."""
    if reader is None:
        return ""
    picture = shown[0] if shown else Picture.of(np.zeros((*SQUARE, 3), np.uint8))
    height, width = picture.size
    return (
        f"one of {height} × {width} pixels is {reader.count(picture)} picture tokens, "
        f"{len(reader(picture))} with the model's own around them"
    )


def _parsed(
    setup: Setup, prompt: Prompt, completion: Completion, names: tuple[str, ...] | None
) -> Reply:
    most = min(setup.actions_per_turn, setup.actions)
    try:
        parsed = read_reply(setup, completion, names, most)
    except UserCodeError as failure:
        raise RagenError(
            f"prompt.tool_parser failed: {failure.reason}; run `ragen check` on it"
        ) from failure
    count = len(completion.token_ids or ())
    problem = parsed.problem
    if completion.finish_reason == "length" and count < prompt.max_tokens:
        problem = f"It was cut off here after {count} of {prompt.max_tokens} tokens, to save time."
    return Reply(setup.prefill + completion.text, count, problem, parsed.actions)


def conversation(setup: Setup, chat: Chat) -> tuple[tuple[Turn, ...], EpisodeSpec]:
    """The first `TURNS` turns of an episode of random play with one action a turn, and its spec."""

    def first_action(seed: int) -> Player:
        play = random_player(seed)
        return lambda env, turns, actions, per_turn: play(env, turns, actions, 1)

    player = PlayerPolicy(
        first_action,
        setup.think,
        setup.prefill,
        lambda text: (*chat.encode_text(text), chat.end),
        lambda actions, _: f"I try {actions[0]}.",
        setup.write,
    )
    spec = EpisodeSpec(EVAL_LEVELS, 0, 0, (0, "look"))
    episode = run_async(play_episode(player, setup, spec))
    if episode.failed:
        raise RagenError(
            f"the environment {setup.env!r} failed: {outcome_of(episode).reason}; run "
            "`ragen check` on it"
        )
    return episode.turns[:TURNS], spec


def samples_of(turns: Sequence[Turn], setup: Setup, chat: Chat) -> tuple[list[list[Piece]], str]:
    """The training samples of a conversation, and why they are one or several."""
    from ragen.algorithms.samples import join

    samples = join([(turn.prompt, turn.completion) for turn in turns], 0, 0)
    if chat.warning is not None:
        why = chat.warning
    elif len(turns) == 1:
        why = "the episode has one turn"
    elif setup.window:
        why = f"a prompt shows {setup.window} turns (prompt.window), not all of them"
    else:
        why = (
            "each prompt extends the tokens so far, the reply's own among them, by what the chat "
            "template puts before the next reply"
        )
    return [pieces(chat, each.token_ids, each.loss_mask) for each in samples], why


def pieces(chat: Chat, ids: Sequence[int], trained: Sequence[bool] = ()) -> list[Piece]:
    """Tokens as text, cut where their kind changes."""
    masks = zip(trained or [False] * len(ids), ids, strict=True)
    found, end, before = list[Piece](), 0, ""
    for kind, run in groupby((mask, token in chat.control_ids) for mask, token in masks):
        count = len(list(run))
        end += count
        text = chat.spell(ids[:end])
        found.append(Piece(text[len(before) :], count, *kind))
        before = text
    return found


def tokens_by_text(chat: Chat, ids: Iterable[int]) -> dict[str, int]:
    """Tokens with their ids, by text."""
    return {chat.text_of(token): token for token in sorted(ids)}


def memory_table(settings: Flat, path: str) -> tuple[list[Memory], float | None]:
    """The memory of each method of training with a model, and the free memory, in GiB."""
    saved = {k: v for k, v in settings.items() if k.startswith(MEMORY_KEYS)}
    rows, free = list[Memory](), None
    for (method, algorithm), rank, dtype in product(METHODS.items(), (0, RANK), DTYPES):
        asked = {"algorithm": algorithm, "model.path": path, "model.dtype": dtype}
        try:
            (planned,) = plans(merge(None, asked, saved=saved | {"lora.rank": rank}))
        except RagenError:
            if not rank:
                raise
            continue  # adapters do not suit the model
        free = planned.available
        verdict = ""
        if free is not None:
            verdict = FITS[(planned.certain <= free) + (planned.needed <= free)]
        sizes = planned.certain / GIB, planned.total / GIB
        rows.append(Memory(method, rank > 0, dtype, *sizes, verdict))
    return rows, None if free is None else free / GIB


async def sample(policy: WeightedPolicy, prompt: Prompt) -> tuple[tuple[float, float], Completion]:
    """Tokens a second of `REPLIES` short replies and of one alone, and a whole reply."""

    async def speed(count: int, tokens: int = TOKENS) -> float:
        few = replace(prompt, max_tokens=min(tokens, prompt.max_tokens))
        short = [replace(few, seed=seed) for seed in range(count)]
        start = time.perf_counter()
        replies = await asyncio.gather(*map(policy.complete, short))
        sampled = sum(len(reply.token_ids or ()) for reply in replies)
        return sampled / (time.perf_counter() - start)

    await speed(1, 1)  # reads the prompt, which is not timed
    together, alone = await speed(REPLIES), await speed(1)
    most = min(prompt.max_tokens, max(TOKENS, int(REPLY_S * alone)))
    return (together, alone), await policy.complete(replace(prompt, max_tokens=most))
