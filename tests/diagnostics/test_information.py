"""Mutual information of prompts and thoughts, on policies for which it is known exactly."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import episode, turn
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.metrics import values
from ragen.core.pictures import Picture
from ragen.core.types import Group, Turn
from ragen.diagnostics import information
from ragen.diagnostics.collapse import REGIMES
from ragen.diagnostics.information import (
    Information,
    draw_thoughts,
    measure,
    measure_thoughts,
    prompt_and_thought,
    retrieval,
)
from ragen.networks.model import cross_scores, rectangles
from tests.networks.test_model import tiny
from tests.tolerance import assert_close, rounding

NEVER = -math.inf
SHARES = (0.5, 0.25, 0.125, 0.125)
COUNTS = (32, 16, 8, 8)
PROMPT_ENTROPY = 1.75 * math.log(2)  # ½·1 + ¼·2 + 2·⅛·3 bits


# Constructed policies. Four prompts occur 32, 16, 8 and 8 times; a thought is one of four words:
# with probability c the word of its prompt, else any word:  p(z|x) = c [z = x] + (1 − c)/4.


def probability(copies: float, word: int, prompt: int) -> float:
    return copies * (word == prompt) + (1 - copies) / 4


def word_pairs(copies: float) -> list[tuple[int, int]]:
    """Prompt and word of 64 thoughts in the exact proportions of the policy."""
    return [
        (prompt, word)
        for prompt, count in enumerate(COUNTS)
        for word in range(4)
        for _ in range(round(count * probability(copies, word, prompt)))
    ]


def expected_mi(copies: float) -> float:
    """Σ w_x p(z|x) log (p(z|x) ÷ p(z)), p(z) = c w_z + (1 − c)/4."""
    total = 0.0
    for prompt, share in enumerate(SHARES):
        for word in range(4):
            p = probability(copies, word, prompt)
            if p:
                marginal = copies * SHARES[word] + (1 - copies) / 4
                total += share * p * math.log(p / marginal)
    return total


def log(p: float) -> float:
    return math.log(p) if p else NEVER


POLICIES = {"ignores": 0.0, "half": 0.5, "copies": 1.0}


@pytest.mark.parametrize("copies", POLICIES.values(), ids=POLICIES)
def test_mi_of_constructed_policies(copies: float) -> None:
    pairs = word_pairs(copies)
    assert len(pairs) == 64
    scores = [[log(probability(copies, word, x)) for x in range(4)] for _, word in pairs]
    found = measure(torch.tensor(scores), [x for x, _ in pairs], [1] * 64)
    assert found.mi == pytest.approx(expected_mi(copies), abs=1e-6)
    assert found.prompt_entropy == pytest.approx(PROMPT_ENTROPY)
    assert found.prompts == 4 and found.thoughts == 64
    if copies == 1:
        assert found.mi == pytest.approx(PROMPT_ENTROPY)
        assert found.conditional_entropy == 0 and found.retrieval_1 == 1
        assert found.regime == "compressed"
    if copies == 0:
        assert found.mi == pytest.approx(0, abs=1e-6) and abs(found.mi_zscore) < 1e-3
        assert found.conditional_entropy == pytest.approx(math.log(4))
        assert found.retrieval_1 == found.chance_1 == 0.25
        assert found.regime == "template collapse"
    if copies == 0.5:
        # −(5/8 ln 5/8 + 3/8 ln 1/8), and in 5 of 8 cases the own prompt scores highest.
        assert found.conditional_entropy == pytest.approx(1.07354, abs=1e-5)
        assert found.retrieval_1 == pytest.approx(5 / 8)
    assert found.retrieval_5 == found.chance_5 == 1


# The measures.


def test_measure_golden() -> None:
    # p(z|x): thought 1 (own x0) ½ and ¼; thought 2 (own x1) ⅛ and ½. Shares ½ each.
    # marginals: ½·½ + ½·¼ = 3/8, ½·⅛ + ½·½ = 5/16.
    # gains: ln (½ ÷ 3/8) = ln 4/3, ln (½ ÷ 5/16) = ln 8/5.
    scores = torch.tensor([[1 / 2, 1 / 4], [1 / 8, 1 / 2]]).double().log()
    found = measure(scores, [0, 1], [1, 2])
    gains = math.log(4 / 3), math.log(8 / 5)
    marginals = math.log(3 / 8), math.log(5 / 16)
    assert found.mi == pytest.approx(sum(gains) / 2)
    assert found.conditional_entropy == pytest.approx(math.log(2))
    assert found.entropy == pytest.approx(-sum(marginals) / 2)
    # Divided by 1 and 2 tokens, after the sum over prompts.
    per_token = (gains[0] + gains[1] / 2) / 2
    assert found.mi_per_token == pytest.approx(per_token)
    assert found.conditional_entropy_per_token == pytest.approx(0.75 * math.log(2))
    assert found.entropy_per_token == pytest.approx(-(marginals[0] + marginals[1] / 2) / 2)
    spread = abs(marginals[0] - marginals[1] / 2) / 2  # of two numbers
    assert found.mi_zscore == pytest.approx(per_token / (spread + 1e-3))
    assert (found.retrieval_1, found.chance_1) == (1, 0.5)
    assert found.prompt_entropy == pytest.approx(math.log(2))
    assert found.regime == "undecidable"


@given(st.data())
def test_measure_bounds_and_identities(data: st.DataObject) -> None:
    num_prompts = data.draw(st.integers(1, 4))
    more = data.draw(st.lists(st.integers(0, num_prompts - 1), max_size=6))
    own = [*range(num_prompts), *more]
    number = st.floats(-50, 0, width=32)
    scores = torch.tensor([[data.draw(number) for _ in range(num_prompts)] for _ in own])
    lengths = [data.draw(st.integers(1, 9)) for _ in own]
    found = measure(scores, own, lengths)
    assert found.mi <= found.prompt_entropy + 1e-9 <= math.log(num_prompts) + 1e-6
    assert found.mi == pytest.approx(found.entropy - found.conditional_entropy, abs=1e-9)
    # A factor of a thought that is constant over prompts has no information about the prompt.
    shifted = measure(scores + torch.arange(len(own))[:, None], own, lengths)
    assert shifted.mi == pytest.approx(found.mi, abs=rounding(1, 60.0))
    # The same prompt in two columns counts by its share, not by columns.
    twice = torch.cat([scores, scores[:, :1]], dim=1)
    first_owners = [i for i, prompt in enumerate(own) if prompt == 0]
    if len(first_owners) > 1:
        split = [num_prompts if i == first_owners[0] else prompt for i, prompt in enumerate(own)]
        assert measure(twice, split, lengths).mi == pytest.approx(found.mi, abs=1e-9)


def test_retrieval_counts_ties_by_their_expectation() -> None:
    same = torch.zeros(3, 4)
    own = torch.tensor([0, 1, 3])
    assert retrieval(same, own, 1) == 1 / 4
    assert retrieval(same, own, 2) == 2 / 4
    # One score is higher, two are equal: the own prompt is second half of the time.
    assert retrieval(torch.tensor([[0.0, -1.0, -1.0]]), torch.tensor([1]), 2) == 1 / 2


def regime_of(**numbers: float) -> str:
    found = measure(torch.zeros(8, 4), [0, 1, 2, 3] * 2, [1] * 8)
    return replace(found, **numbers).regime


def test_regimes_follow_the_thresholds() -> None:
    high, low = 0.51 * math.log(4), 0.49 * math.log(4)  # of H(w) = log 4
    assert regime_of(conditional_entropy=0.70, mi=high) == "diverse"
    assert regime_of(conditional_entropy=0.70, mi=low) == "template collapse"
    assert regime_of(conditional_entropy=0.69, mi=high) == "compressed"
    assert regime_of(conditional_entropy=0.69, mi=low) == "low-entropy collapse"
    assert regime_of(conditional_entropy=0.70, mi=high, prompts=3) == "undecidable"


def test_metrics_hold_every_field_and_the_regime() -> None:
    found = measure(torch.zeros(8, 4), [0, 1, 2, 3] * 2, [1] * 8)
    metrics = found.metrics("information/first")
    assert {name.rpartition("/")[2] for name in metrics} == {*Information.__slots__, "regime"}
    assert REGIMES[int(metrics["information/first/regime"].value)] == "low-entropy collapse"
    assert metrics["information/first/mi"].weight == 8


# Drawing thoughts.


def thinking_turn(
    prompt: Sequence[int], thought: Sequence[int], opened: Sequence[int] = ()
) -> Turn:
    """A turn that samples `opened`, its thought and a closing token 99."""
    text = " ".join(map(str, thought))
    base = turn(prompt=prompt, sampled=(*opened, *thought, 99), thought=text)
    span = (len(opened), len(opened) + len(thought))
    return replace(base, observation=f"sees {prompt[-1]}", thought_span=span)


def test_the_prompt_ends_where_the_thought_begins() -> None:
    assert prompt_and_thought(thinking_turn((1, 2), (7, 8))) == ((1, 2), (7, 8, 99))
    assert prompt_and_thought(thinking_turn((1, 2), (7, 8), opened=(5, 6))) == (
        (1, 2, 5, 6),
        (7, 8, 99),
    )
    assert prompt_and_thought(turn(prompt=(1, 2))) is None
    text = thinking_turn((1, 2), (7,))
    assert prompt_and_thought(replace(text, prompt=replace(text.prompt, token_ids=None))) is None


def unclosed(prompt: Sequence[int], reply: Sequence[int]) -> Turn:
    """A turn whose pre-filled thought has no end."""
    base = turn(prompt=prompt, sampled=tuple(reply))
    return replace(base, prompt=replace(base.prompt, num_prefill=1))


def test_every_opened_thought_has_tokens() -> None:
    assert prompt_and_thought(thinking_turn((1, 2), ())) == ((1, 2), (99,))
    assert prompt_and_thought(unclosed((1, 2), (7, 8, 7))) == ((1, 2), (7, 8, 7))


def informed(turns_of: dict[int, list[Turn]], score: Any, monkeypatch: Any) -> dict[str, float]:
    """The information of first turns, by prompt; all of them are drawn."""
    monkeypatch.setattr(information, "THOUGHTS", 10_000)
    groups = [Group(tuple(map(episode, turns))) for turns in turns_of.values()]
    engine: Any = Scorer(score)
    metrics, _ = asyncio.run(measure_thoughts(engine, groups, 0, 0))
    return values(metrics)


def test_information_is_exact_over_all_replies_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reply of three tokens at most, as often as it is likely: ended, empty and cut ones."""
    chances = {1: {7: 0.5, 8: 0.25, 99: 0.25}, 2: {7: 0.25, 8: 0.25, 99: 0.5}}
    every = [z for n in (1, 2, 3) for z in product((7, 8, 99), repeat=n)]
    replies = [z for z in every if 99 not in z[:-1] and (z[-1] == 99 or len(z) == 3)]

    def chance(x: int, z: Sequence[int]) -> float:
        return math.prod(chances[x][token] for token in z)

    def turn_of(x: int, z: Sequence[int]) -> Turn:
        return thinking_turn((x,), z[:-1]) if z[-1] == 99 else unclosed((x,), z)

    assert all(sum(chance(x, z) for z in replies) == 1 for x in chances)
    turns = {
        x: [turn_of(x, z) for z in replies for _ in range(int(64 * chance(x, z)))] for x in chances
    }
    found = informed(turns, lambda x, z: log(chance(x[0], z)), monkeypatch)
    expected = sum(
        chance(x, z) / 2 * log(chance(x, z) / (chance(1, z) / 2 + chance(2, z) / 2))
        for x in chances
        for z in replies
    )
    assert found["information/first/mi"] == pytest.approx(expected, abs=1e-6)
    assert found["information/first/left_out"] == 0
    assert 0 < expected <= found["information/first/prompt_entropy"] == pytest.approx(log(2))


def test_equal_prompts_and_thoughts_are_scored_once() -> None:
    groups = [
        Group((episode(thinking_turn((1,), (7, 8))), episode(thinking_turn((1,), (7, 8))))),
        Group((episode(thinking_turn((2,), (7, 8))), episode(thinking_turn((2,), (9,))))),
    ]
    requests: list[Any] = []

    class FixedScores:
        async def cross_scores(self, prompts: Any, thoughts: Any, pictures: Any) -> Tensor:
            requests.append((prompts, thoughts))
            return torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])

    engine: Any = FixedScores()
    _, matrices = asyncio.run(measure_thoughts(engine, groups, 0, 0))
    assert requests == [([(1,), (2,)], [(7, 8, 99), (9, 99)])] * 2
    for matrix in matrices:
        assert matrix.own_N == (0, 0, 1, 1)
        assert matrix.scores_NM.tolist() == [[-1, -2]] * 3 + [[-3, -4]]
        assert matrix.thoughts == ("7 8", "7 8", "7 8", "9")
        assert matrix.prompts == ("sees 1", "sees 2")


def test_turns_without_a_thought_are_left_out_and_counted() -> None:
    without_thought, with_thought = turn(prompt=(1,)), thinking_turn((2,), (7,))
    groups = [
        Group(
            (
                episode(without_thought, with_thought),
                episode(with_thought, without_thought),
                episode(with_thought, stop="error"),
            )
        ),
        Group((episode(),)),
    ]
    drawn, left_out = draw_thoughts(groups, "first", 64, 0)
    assert (len(drawn), left_out) == (1, 1)
    for seed in range(20):  # a turn is drawn before its thought is checked
        drawn, left_out = draw_thoughts(groups, "any", 64, seed)
        assert len(drawn) + left_out == 2
    assert {draw_thoughts(groups, "any", 64, seed)[1] for seed in range(20)} == {0, 1, 2}


def test_the_drawn_thoughts_depend_on_the_seed_only() -> None:
    turns = [thinking_turn((1, number), (7, number)) for number in range(3)]
    groups = [Group(tuple(episode(*turns) for _ in range(40)))]
    assert draw_thoughts(groups, "any", 10, 5) == draw_thoughts(groups, "any", 10, 5)
    assert draw_thoughts(groups, "any", 10, 5) != draw_thoughts(groups, "any", 10, 6)
    assert len(draw_thoughts(groups, "any", 10, 5)[0]) == 10
    counts = Counter[int]()
    for seed in range(50):
        drawn, _ = draw_thoughts(groups, "any", 40, seed)
        counts.update(prompt[1] for prompt, _, _ in drawn)
    # 2,000 draws, a third each: within 4 standard errors, √(2000 · 2/9) = 21.
    assert all(abs(counts[number] - 2000 / 3) < 84 for number in range(3))


# The matrix.


def plain_score(
    model: PreTrainedModel, prompt: Sequence[int], thought: Sequence[int], t: float
) -> Any:
    logits = model(torch.tensor([[*prompt, *thought]])).logits[0] / t
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(thought)[:, None]).sum()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "max_tokens", "temperature"),
    [
        *(("qwen2", 1, 1.0), ("qwen2", 40, 0.7), ("qwen2", 8192, 1.0)),
        *(("llama", 40, 1.0), ("gpt2", 8192, 0.7)),
    ],
)
def test_cross_scores_equal_those_of_concatenated_sequences(
    kind: str, max_tokens: int, temperature: float
) -> None:
    model = tiny(kind)
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, 40, (length,), generator=generator).tolist()

    prompts = [tokens(length) for length in (3, 20, 20, 1)]
    thoughts = [tokens(length) for length in (5, 1, 9, 4, 2)]
    found = cross_scores(model, prompts, thoughts, temperature, max_tokens)
    expected = [[plain_score(model, x, z, temperature) for x in prompts] for z in thoughts]
    assert_close(found, torch.tensor(expected).double())
    ranks = [
        cross_scores(model, prompts, thoughts, temperature, max_tokens, r, 3) for r in range(3)
    ]
    assert_close(sum(ranks), found)
    assert [each.any(0).sum() for each in ranks] == [2, 1, 1], "they take the prompts in turn"


@given(st.lists(st.integers(1, 30), min_size=1), st.integers(1, 20), st.integers(1, 200))
def test_rectangles_cover_all_rows_within_the_token_limit(
    lengths: list[int], prefix: int, max_tokens: int
) -> None:
    parts = rectangles(lengths, prefix, max_tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        longest = max(lengths[row] for row in part)
        assert len(part) == 1 or len(part) * (prefix + longest) <= max_tokens
        assert all(2 * lengths[row] > longest for row in part)


# Measurement of groups, as in a run.


class Scorer:
    """An engine whose only method scores thoughts by a constructed policy."""

    def __init__(self, score: Callable[[Sequence[int], Sequence[int]], float]) -> None:
        self.score = score

    async def cross_scores(
        self,
        prompts: Sequence[Sequence[int]],
        thoughts: Sequence[Sequence[int]],
        pictures: Sequence[Picture] = (),
    ) -> Tensor:
        return torch.tensor([[self.score(x, z) for x in prompts] for z in thoughts])


def test_without_thoughts_nothing_is_measured() -> None:
    engine: Any = Scorer(lambda x, z: 0.0)
    metrics, matrices = asyncio.run(measure_thoughts(engine, [Group((episode(turn()),))], 0, 0))
    assert values(metrics) == {"information/first/left_out": 1, "information/any/left_out": 1}
    assert matrices == []
