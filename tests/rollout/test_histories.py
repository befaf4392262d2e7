"""Random conversations over all chat templates: recorded tokens are trained tokens, each once.

A scripted policy draws its ids at random, whatever they spell, and an environment shows random
texts; what the templates, the context windows and the length limit make of them must not matter.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.algorithms.advantages import ADVANTAGES
from ragen.algorithms.batch import (
    Batch,
    collate,
    episode_index,
    minibatches,
    scatter_to_rows,
    to_episodes,
)
from ragen.algorithms.credit import credit
from ragen.algorithms.samples import to_samples
from ragen.config.reading import resolve
from ragen.config.sections import AdvantageConfig, LossConfig, RewardConfig, UpdateConfig
from ragen.core.types import Completion, Episode, Group, Prompt, Sample
from ragen.engines.exactness import verify, with_fingerprints
from ragen.engines.learner import Learner
from ragen.engines.sampler import Sampler
from ragen.models.loading import save_model
from ragen.rollout.chat import Chat
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import fingerprint
from ragen.rollout.setup import Setup
from ragen.training.progress import Watcher
from ragen.training.trainer import train
from tests.rogue import Rogue
from tests.tiny import TEMPLATES, tiny_model, tiny_tokenizer
from tests.tolerance import LOGPROB

WINDOWS = (0, 1, 2, 3)
ROOMY, TIGHT = 9999, 150
"""Tokens of a prompt with its completion: enough for everything, or for two turns or three."""
MAX_TOKENS = 12


@cache
def chat(template: str, history_thoughts: Literal["keep", "drop"] = "keep") -> Chat:
    return Chat(tiny_tokenizer(template), history_thoughts=history_thoughts)


class Tells(Rogue):
    """The corridor behind texts of somebody's choice, one a turn."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.texts, self.shown = texts, 0

    def _look(self) -> str:
        self.shown += 1
        return f"{super()._look()} {self.texts[self.shown % len(self.texts)]}"


@dataclass
class Drawn:
    """Says one reply after the other, from the first again when all are said."""

    replies: Sequence[tuple[int, ...]]
    ends: frozenset[int]
    decode: Any
    number: int = 0

    async def complete(self, prompt: Prompt) -> Completion:
        ids = self.replies[self.number % len(self.replies)]
        chooser = random.Random(self.number)
        self.number += 1
        logprobs = tuple(-chooser.random() for _ in ids)
        stopped = "stop" if ids[-1] in self.ends else "length"
        born = fingerprint(ids, logprobs)
        return Completion(ids, logprobs, self.decode(ids), stopped, 0, born)


@st.composite
def replies(draw: st.DrawFn, template: str) -> list[tuple[int, ...]]:
    """What is said in each turn: a valid answer or any ids, ended or cut."""
    found, size = chat(template), len(tiny_tokenizer(template))
    ordinary = st.integers(0, size - 1).filter(lambda token: token not in found.end_ids)
    answers = [found.encode(f"</think><answer>{name}</answer>") for name in ("Left", "Right")]
    turns = []
    for _ in range(draw(st.integers(1, 5))):
        noise = st.lists(ordinary, min_size=1, max_size=MAX_TOKENS - 1).map(tuple)
        said = draw(noise | st.sampled_from(answers))
        turns.append((*said, min(found.end_ids)) if draw(st.booleans()) else said)
    return turns


texts = st.lists(st.text(max_size=12) | st.just("P _\n_ G"), min_size=1, max_size=3)


def played(
    template: str,
    said: Sequence[tuple[int, ...]],
    shown: Sequence[str],
    window: int,
    max_length: int,
    history_thoughts: Literal["keep", "drop"] = "keep",
) -> list[Group]:
    """One group of two episodes, one after the other, with the same replies."""
    how = Setup(
        "tells",
        lambda: Tells(shown),
        turns=len(said),
        window=window,
        drops_thoughts=history_thoughts == "drop",
        chat=chat(template, history_thoughts),
        max_tokens=MAX_TOKENS,
        max_length=max_length,
    )
    policy = Drawn(said, chat(template).end_ids, chat(template).decode)
    return asyncio.run(run_groups(policy, how, [1], 2, (0, "train", 0), concurrency=1))


def check(episodes: list[Episode], samples: list[Sample]) -> None:
    """Recorded ids are training ids; mask, logprobs and turn ends are where they were sampled."""
    for index, episode in enumerate(episodes):
        trained: list[tuple[int, int, float]] = []
        ends: list[int] = []
        for sample in (each for each in samples if each.episode == index):
            for token, on, logprob, turn, end in zip(
                sample.token_ids,
                sample.loss_mask,
                sample.sampled_logprobs,
                sample.turn_index,
                sample.turn_ends,
                strict=True,
            ):
                assert on == (turn >= 0) and (on or (logprob == 0 and not end))
                trained += [(turn, token, logprob)] * on
                ends += [len(trained) - 1] * end
            last = episode.turns[max(sample.turn_index)]
            assert sample.token_ids == (last.prompt.token_ids or ()) + said_in(last.completion)
        recorded = [
            (number, token, logprob)
            for number, turn in enumerate(episode.turns)
            for token, logprob in zip(
                said_in(turn.completion), turn.completion.logprobs or (), strict=True
            )
        ]
        assert trained == recorded
        lengths = [len(said_in(turn.completion)) for turn in episode.turns]
        assert ends == [sum(lengths[: n + 1]) - 1 for n in range(len(lengths))]


def said_in(completion: Completion) -> tuple[int, ...]:
    assert completion.token_ids is not None
    return completion.token_ids


def credited(batch: Batch, episodes: list[Episode]) -> list[torch.Tensor]:
    """Rewards, returns and advantages along each episode, of all estimators, both placements."""
    index = episode_index(batch)
    values_ES = torch.linspace(0, 1, index.mask_ES.shape[1]) * index.mask_ES
    batch = replace(batch, values_BT=scatter_to_rows(values_ES, index))
    found = [index.turn_ES, index.turn_ends_ES]
    for placement, name in product(("episode", "turn"), ADVANTAGES):
        reward = RewardConfig(placement=placement)
        made = credit(batch, episodes, reward, AdvantageConfig(name=name), LossConfig(kl=0.0))
        fields = (made.rewards_BT, made.advantages_BT, made.returns_BT)
        found += [to_episodes(field_BT, index) for field_BT in fields if field_BT is not None]
    return found


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("max_length", [ROOMY, TIGHT])
@settings(max_examples=5)
@given(data=st.data())
def test_every_sampled_token_is_trained_once_in_every_window(
    template: str, max_length: int, data: st.DataObject
) -> None:
    said, shown = data.draw(replies(template)), data.draw(texts)
    alike = []
    for window in WINDOWS:
        groups = played(template, said, shown, window, max_length)
        samples, episodes = to_samples(groups)
        assert samples, "the first turn fits"
        check(episodes, samples)
        batch = with_fingerprints(collate(samples), episodes)
        for part in minibatches(batch, minibatch_episodes=1, epochs=1, seed=0):
            verify([part])
        alike.append(credited(batch, episodes))
    for others in alike[1:]:
        assert all(map(torch.equal, others, alike[0]))


NUMBERS = ["one", "two", "three", "four", "five"]


def thinking(template: str, number: str, cut: bool) -> tuple[int, ...]:
    """A thought that names its turn, and an answer; or the thought alone, cut by its length."""
    found = chat(template)
    if cut:
        return found.encode(f"Q{number}q")
    return (*found.encode(f"Q{number}q</think><answer>Left</answer>"), min(found.end_ids))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("max_length", [ROOMY, TIGHT])
@pytest.mark.parametrize("kept", ["keep", "drop"])
@settings(max_examples=5)
@given(shown=texts, window=st.sampled_from(WINDOWS), cut=st.sets(st.integers(0, 4)))
def test_all_earlier_thoughts_are_kept_or_none(
    template: str,
    max_length: int,
    kept: Literal["keep", "drop"],
    shown: list[str],
    window: int,
    cut: set[int],
) -> None:
    """Whatever the template does of itself, and also where old turns had to go for their length."""
    said = [thinking(template, number, n in cut) for n, number in enumerate(NUMBERS)]
    groups = played(template, said, shown, window, max_length, kept)
    samples, episodes = to_samples(groups)
    check(episodes, samples)
    for episode in episodes:
        for number, turn in enumerate(episode.turns):
            seen = chat(template).decode(turn.prompt.token_ids or ())
            told = "".join(message["content"] for message in turn.prompt.messages)
            first = max(0, number + 1 - window) if window else 0
            first += turn.prompt.turns_dropped
            for n, name in enumerate(NUMBERS):
                is_there = kept == "keep" and first <= n < number
                assert (f"Q{name}q" in seen) == (f"Q{name}q" in told) == is_there
    if kept == "keep" and window == 0 and max_length == ROOMY:
        assert len(samples) == len(episodes), "an episode is one sample"


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=3)
@given(
    shown=texts,
    window=st.sampled_from(WINDOWS),
    max_length=st.sampled_from([ROOMY // 10, TIGHT]),
    temperature=st.sampled_from([0.7, 1.0]),
    seed=st.integers(0, 99),
)
def test_recomputed_logprobs_equal_sampled_ones(
    template: str, shown: list[str], window: int, max_length: int, temperature: float, seed: int
) -> None:
    """A random model in float32, through the real sampler and the real learner."""
    tokenizer = tiny_tokenizer(template)
    model, found = tiny_model(tokenizer, seed=seed), chat(template)
    how = Setup(
        "tells",
        lambda: Tells(shown),
        turns=4,
        window=window,
        chat=found,
        max_tokens=MAX_TOKENS,
        max_length=max_length,
        temperature=temperature,
    )
    sampler = Sampler(model, found.end_ids, found.decode, slots=4, max_length=max_length)
    groups = asyncio.run(run_groups(sampler, how, [1, 2], 2, (seed, "train", 0)))
    samples, episodes = to_samples(groups)
    check(episodes, samples)
    batch = with_fingerprints(collate(samples), episodes)
    learner = Learner(model, UpdateConfig(), LossConfig(kl=0.0), temperature=temperature)
    recomputed_BT, _ = learner.logprobs(batch)
    gap_BT = (recomputed_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs()
    assert gap_BT.max() < LOGPROB


class Noted(Watcher):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(("kept", "told"), [("keep", "here they stay"), ("drop", "are left out")])
def test_a_run_reports_whether_thoughts_are_kept(tmp_path: Path, kept: str, told: str) -> None:
    """From the setting to the samples, with a template that would drop them."""
    tokenizer = tiny_tokenizer("reasoner")
    save_model(tiny_model(tokenizer), tokenizer, tmp_path / "model")
    wanted = {"steps": 1, "threads": 1, "rollout.num_groups": 1, "rollout.group_size": 2}
    sizes = {"rollout.max_tokens": 8, "rollout.slots": 2, "env.max_turns": 3, "eval.episodes": 0}
    keys = {"model.path": str(tmp_path / "model"), "record.tokens_every": 1, "filter.rule": "all"}
    more = {"filter.include_zero": True, "prompt.history_thoughts": kept}
    config = resolve("frozen-lake-still", wanted | sizes | keys | more)
    noted = Noted()
    train(config, tmp_path / "run", watcher=noted)
    _, note = noted.notes  # the first says for which models the recipe is
    assert told in note
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as database:
        (samples,) = database.execute("SELECT COUNT(*) FROM samples").fetchone()
        (turns,) = database.execute("SELECT COUNT(*) FROM turns").fetchone()
    assert turns == 6
    assert samples == (2 if kept == "keep" else 6)
