"""Random conversations over all chat templates: each recorded token is trained once.

A scripted policy replies with random ids, and an environment shows random texts. The result must
not depend on the template, the context window or the length limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.algorithms.batch import (
    collate,
    minibatches,
)
from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.types import Completion, Episode, Group, Prompt, Sample, fingerprint
from ragen.learning.exactness import verify, with_fingerprints
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup
from ragen.sampling.local_sampler import Sampler
from tests.rogue import Rogue
from tests.tiny import TEMPLATES, tiny_model, tiny_tokenizer
from tests.tolerance import LOGPROB

FEW = settings(max_examples=settings.default.max_examples // 4)
"""For what is shown over every template."""
Summary = Literal["none", "actions", "observations", "learned"]
VIEWS: list[tuple[int, Summary]] = [
    (0, "none"), *product((0, 1, 2, 3), ("actions", "observations"))
]  # fmt: skip
"""Windows and summaries."""
LEARNED: tuple[int, Summary] = (0, "learned")
ROOMY, TIGHT = 9999, 150
"""Limits on prompt and completion: room for all turns, or for two or three of them."""
MAX_TOKENS = 12


@cache
def make_chat(template: str, history_thoughts: Literal["keep", "drop"] = "keep") -> Chat:
    return Chat(tiny_tokenizer(template), history_thoughts=history_thoughts)


class TextCorridor(Rogue):
    """The corridor, followed by one of the given texts in each turn."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.texts, self.shown = texts, 0

    def _look(self) -> str:
        self.shown += 1
        return f"{super()._look()} {self.texts[self.shown % len(self.texts)]}"


@dataclass
class CyclingPolicy:
    """Gives one reply after the other, and starts again after the last."""

    replies: Sequence[tuple[int, ...]]
    ends: frozenset[int]
    decode: Any
    number: int = 0

    async def complete(self, prompt: Prompt) -> Completion:
        ids = self.replies[self.number % len(self.replies)]
        chooser = random.Random(self.number)
        self.number += 1
        logprobs = tuple(-chooser.random() for _ in ids)
        finish = "stop" if ids[-1] in self.ends else "length"
        sampled = fingerprint(ids, logprobs)
        return Completion(ids, logprobs, self.decode(ids), finish, 0, sampled)


@st.composite
def draw_replies(draw: st.DrawFn, template: str) -> list[tuple[int, ...]]:
    """The reply of each turn: a valid answer or random ids, ended or cut."""
    chat, size = make_chat(template), len(tiny_tokenizer(template))
    ordinary = st.integers(0, size - 1).filter(lambda token: token not in chat.end_ids)
    answers = [chat.encode(f"</think><answer>{name}</answer>") for name in ("Left", "Right")]
    turns = []
    for _ in range(draw(st.integers(1, 5))):
        noise = st.lists(ordinary, min_size=1, max_size=MAX_TOKENS - 1).map(tuple)
        reply = draw(noise | st.sampled_from(answers))
        turns.append((*reply, min(chat.end_ids)) if draw(st.booleans()) else reply)
    return turns


text_lists = st.lists(st.text(max_size=12) | st.just("P _\n_ G"), min_size=1, max_size=3)


def play(
    template: str,
    replies: Sequence[tuple[int, ...]],
    texts: Sequence[str],
    window: int,
    max_length: int,
    history_thoughts: Literal["keep", "drop"] = "keep",
    summary: Summary = "none",
) -> list[Group]:
    """One group of two episodes, played one after the other with the same replies."""
    setup = Setup(
        "corridor",
        lambda: TextCorridor(texts),
        turns=len(replies),
        window=window,
        summary=summary,
        drops_thoughts=history_thoughts == "drop",
        chat=make_chat(template, history_thoughts),
        max_tokens=MAX_TOKENS,
        max_length=max_length,
    )
    policy = CyclingPolicy(replies, make_chat(template).end_ids, make_chat(template).decode)
    return asyncio.run(run_groups(policy, setup, [1], 2, (0, "train", 0), concurrency=1))


def check(episodes: list[Episode], samples: list[Sample]) -> None:
    """The ids are those recorded; mask, logprobs and turn ends are where they were sampled."""
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
            prompt_ids = last.prompt.token_ids or ()
            assert sample.token_ids == prompt_ids + completion_ids(last.completion)
        recorded = [
            (number, token, logprob)
            for number, turn in enumerate(episode.turns)
            for token, logprob in zip(
                completion_ids(turn.completion), turn.completion.logprobs or (), strict=True
            )
        ]
        assert trained == recorded
        lengths = [len(completion_ids(turn.completion)) for turn in episode.turns]
        assert ends == [sum(lengths[: n + 1]) - 1 for n in range(len(lengths))]


def completion_ids(completion: Completion) -> tuple[int, ...]:
    assert completion.token_ids is not None
    return completion.token_ids


@pytest.mark.parametrize("template", TEMPLATES)
@FEW
@given(data=st.data())
def test_every_sampled_token_is_trained_once(template: str, data: st.DataObject) -> None:
    replies, texts = data.draw(draw_replies(template)), data.draw(text_lists)
    window, summary = data.draw(st.sampled_from([*VIEWS, LEARNED]))
    max_length = data.draw(st.sampled_from([ROOMY, TIGHT]))
    samples, episodes = to_samples(
        play(template, replies, texts, window, max_length, "keep", summary)
    )
    assert samples, "the first turn fits into every limit"
    check(episodes, samples)
    batch = with_fingerprints(collate(samples), episodes)
    for part in minibatches(batch, minibatch_episodes=1, epochs=1, seed=0):
        verify([part])


NUMBERS = ["one", "two", "three", "four", "five"]


def thinking(template: str, number: str, cut: bool) -> tuple[int, ...]:
    """A thought that names its turn, and an answer; or the thought alone, cut by its length."""
    chat = make_chat(template)
    if cut:
        return chat.encode(f"Q{number}q")
    return (*chat.encode(f"Q{number}q</think><answer>Left</answer>"), min(chat.end_ids))


@pytest.mark.parametrize("template", TEMPLATES)
@FEW
@given(
    max_length=st.sampled_from([ROOMY, TIGHT]),
    kept=st.sampled_from(["keep", "drop"]),
    texts=text_lists,
    view=st.sampled_from(VIEWS),
    cut=st.sets(st.integers(0, 4)),
)
def test_earlier_thoughts_are_all_kept_or_all_dropped(
    template: str,
    max_length: int,
    kept: Literal["keep", "drop"],
    texts: list[str],
    view: tuple[int, Summary],
    cut: set[int],
) -> None:
    """Whatever the template does by itself, also if old turns were dropped for their length."""
    replies = [thinking(template, number, n in cut) for n, number in enumerate(NUMBERS)]
    window, summary = view
    groups = play(template, replies, texts, window, max_length, kept, summary)
    samples, episodes = to_samples(groups)
    check(episodes, samples)
    for episode in episodes:
        for number, turn in enumerate(episode.turns):
            rendered = make_chat(template).decode(turn.prompt.token_ids or ())
            content = "".join(message["content"] for message in turn.prompt.messages)
            first = max(0, number + 1 - window) if window else 0
            first += turn.prompt.turns_dropped
            for n, name in enumerate(NUMBERS):
                expected = kept == "keep" and first <= n < number
                assert (f"Q{name}q" in rendered) == (f"Q{name}q" in content) == expected
    if kept == "keep" and window == 0 and max_length == ROOMY:
        assert len(samples) == len(episodes), "an episode is one sample"


@FEW
@given(
    template=st.sampled_from(list(TEMPLATES)),
    texts=text_lists,
    view=st.sampled_from([*VIEWS, LEARNED]),
    max_length=st.sampled_from([ROOMY // 10, TIGHT]),
    temperature=st.sampled_from([0.7, 1.0]),
    seed=st.integers(0, 99),
)
def test_recomputed_logprobs_equal_sampled_ones(
    template: str,
    texts: list[str],
    view: tuple[int, Summary],
    max_length: int,
    temperature: float,
    seed: int,
) -> None:
    """A random model in float32, with the real sampler and the real learner."""
    tokenizer = tiny_tokenizer(template)
    model, chat = tiny_model(tokenizer, seed=seed), make_chat(template)
    setup = Setup(
        "corridor",
        lambda: TextCorridor(texts),
        turns=4,
        window=view[0],
        summary=view[1],
        chat=chat,
        max_tokens=MAX_TOKENS,
        max_length=max_length,
        temperature=temperature,
    )
    sampler = Sampler(model, chat, slots=4, max_length=max_length)
    groups = asyncio.run(run_groups(sampler, setup, [1, 2], 2, (seed, "train", 0)))
    samples, episodes = to_samples(groups)
    check(episodes, samples)
    batch = with_fingerprints(collate(samples), episodes)
    learner = Learner(Models(model, temperature=temperature), UpdateConfig(), LossConfig(kl=0.0))
    recomputed_BT, _ = learner.logprobs(batch)
    gap_BT = (recomputed_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs()
    assert gap_BT.max() < LOGPROB
