"""Metrics of a step, and the signs of the Echo Trap on constructed curves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from records import episode, group, turn
from typing_extensions import override

from ragen.algorithms.losses import mismatch_kl
from ragen.core.metrics import values
from ragen.core.types import Group
from ragen.diagnostics.collapse import echo_trap_signs
from ragen.diagnostics.step_metrics import explained_variance, summarize, summarize_envs
from tests.tolerance import rounding
from tests.viewer_run import agent_episode


def test_summarize_golden() -> None:
    # A group of two episodes (rewards 1 and 0; two and one turns) and a failed one; a flat group.
    won = episode(
        turn(0.0, thought="go up", executed=2, info={"effective": 1}),
        turn(1.0, thought="go up", executed=1, info={"effective": 1}, sampled=(7, 8, 9, 9)),
        success=True,
        stop="solved",
    )
    lost = episode(turn(0.0, thought="a b c d a b c d", penalty=-0.1, executed=1))
    broken = episode(turn(9.0, thought="never"), stop="error")
    found = values(summarize([Group((won, lost, broken)), group(0.0, 0.0)], kept=[0]))
    expected = {
        "episodes/played": 4,
        "episodes/failed": 1,
        "filter/kept_fraction": 0.5,
        "reward/mean": 1 / 4,
        "reward/std_in_group": 0.5**0.5 / 2,  # 1 and 0: 1/√2; the other group 0
        "reward/std_in_group_max": 0.5**0.5,
        "reward/flat_group_fraction": 0.5,
        "success/mean": 1 / 4,
        "turns/mean": 5 / 4,
        "actions/per_turn": 4 / 5,
        "actions/effective_fraction": 2 / 3,  # the third turn does not report it
        "format/valid_fraction": 4 / 5,
        "length/completion_tokens": 12 / 5,
        "length/thought_tokens": 1,
        "length/cut_fraction": 0,
        "prompt/turns_dropped": 0,
        "text/degenerate_fraction": 0,
        "thought/unique_fraction": 2 / 3,
        "thought/repeated_ngram_fraction": 1 / 5,  # a b c d twice among five runs of four words
        "episodes/truncated_fraction": 1,
        "tokens/sampled": 12,
    }
    assert found == {name: pytest.approx(number) for name, number in expected.items()}


class Unsearched(list[int]):
    """A list in which nobody looks for an item: for each group of a step, that takes too long."""

    @override
    def __contains__(self, item: object) -> bool:
        raise AssertionError("a search through all kept groups for one group")


def test_the_calls_of_an_agent_golden() -> None:
    """Nine calls: two conversations, a fork, two titles of one token each and a lost reply."""
    one = agent_episode()
    retried = replace(one.turns[0], info={"retries": 2, "ignored": ["seed", "top_p"]})
    one = replace(one, turns=(retried, *one.turns[1:]))
    found = {
        name.removeprefix("agent/"): value
        for name, value in values(summarize([Group((one, one))], [0])).items()
        if name.startswith("agent/")
    }
    assert found == {
        "calls": 18,
        "roots": 4,
        "forks": 2,
        "retries": 4,
        "agent_tokens": 14,
        "auxiliary_tokens": 4,
        "discarded_tokens": 2,
        "ignored/seed": 2,
        "ignored/top_p": 2,
        "roots_per_episode": 2,
        "fork_fraction": 0.2,
        "verbatim_fraction": 0.6,
        "untrained_fraction": 0.3,
    }


def test_the_time_of_a_summary_grows_with_the_groups_and_not_with_their_square() -> None:
    groups, kept = [group(0.0, 1.0), group(0.0, 0.0)], Unsearched([0])
    assert values(summarize(groups, kept))["filter/kept_fraction"] == 0.5
    assert summarize_envs(groups, kept, [groups[0].env]) != {}


def test_one_repeated_token_makes_a_completion_degenerate() -> None:
    repeated, short = (7,) * 16, (7, 7, 7)
    late = (*range(8, 24), *(7,) * 9)  # 9 of 25: less than half
    turns = [turn(sampled=ids) for ids in (repeated, short, late, (*range(8, 16), *(7,) * 8))]
    found = values(summarize([Group((episode(*turns),))], kept=[0]))
    assert found["text/degenerate_fraction"] == 2 / 4


def test_metrics_that_cannot_be_computed_are_left_out() -> None:
    found = summarize([Group((episode(stop="error"),))], kept=[])
    assert values(found) == {
        "episodes/failed": 1,
        "episodes/played": 0,
        "filter/kept_fraction": 0,
        "tokens/sampled": 0,
    }
    assert "thought/unique_fraction" not in summarize([group(0.0)], kept=[0])
    assert "reward/std_in_group" not in summarize([group(0.0)], kept=[0])


def test_explained_variance_golden() -> None:
    returns_N = torch.tensor([0.0, 1.0, 2.0])
    name = "critic/explained_variance"
    assert explained_variance(returns_N, returns_N)[name].value == 1
    assert explained_variance(torch.full((3,), 7.0), returns_N)[name].value == pytest.approx(0)
    assert explained_variance(-returns_N, returns_N)[name].value == pytest.approx(-3)
    assert explained_variance(returns_N, torch.ones(3)) == {}


def test_mismatch_kl_golden() -> None:
    # x = 0 and ln ½: k3 = (0 + ½ − 1 + ln 2) / 2
    sampled_N = torch.tensor([-1.0, -1.0])
    found = values(mismatch_kl(sampled_N, sampled_N - torch.tensor([0.0, math.log(2)])))
    assert found["mismatch/kl"] == pytest.approx((0.5 - 1 + math.log(2)) / 2, abs=rounding(4))
    assert found["mismatch/max_abs"] == pytest.approx(math.log(2), abs=rounding(4))
    assert mismatch_kl(torch.zeros(0), torch.zeros(0)) == {}


def series(curve: Callable[[int], float], steps: int = 40) -> dict[int, float]:
    return {step: curve(step) for step in range(steps)}


COLLAPSE = {
    "reward/mean": series(lambda s: 0.5 if s < 5 else 0.8 if s < 25 else 0.1),
    "reward/std_in_group": series(lambda s: 0.4 if s < 12 else 0.01),
    "thought/unique_fraction": series(lambda s: 0.9 if s < 20 else 0.05),
    "gradient/policy_norm": series(lambda s: 30.0 if s == 33 else 1.0),
}


def test_a_collapse_shows_all_signs_in_order() -> None:
    # Trailing means of five: reward at most .8, first at 9; std .4·2/5 + .01·3/5 = .166 at 14;
    # unique thoughts .9·2/5 + .05·3/5 = .39 < .45 at 22; the reward falls from step 25.
    signs = echo_trap_signs(COLLAPSE)
    assert [(sign.name, sign.step) for sign in signs] == [
        ("early_gain", 9),
        ("std_before_reward", 14),
        ("thoughts_repeat", 22),
        ("gradient_spike", 33),
    ]
    spike = signs[-1]
    assert (spike.value, spike.baseline) == (30, 1)


def test_a_run_that_only_improves_shows_no_signs() -> None:
    history = {
        "reward/mean": series(lambda s: s / 40),
        "reward/std_in_group": series(lambda s: 0.4 if s < 20 else 0.1),
        "thought/unique_fraction": series(lambda s: 0.9 - s / 100),
        "gradient/policy_norm": series(lambda s: 1 + math.sin(s)),
    }
    assert echo_trap_signs(history) == []


def test_std_that_falls_after_the_reward_is_no_sign() -> None:
    late = series(lambda s: 0.4 if s < 30 else 0.01)
    names = {sign.name for sign in echo_trap_signs(COLLAPSE | {"reward/std_in_group": late})}
    assert "std_before_reward" not in names


def test_a_short_or_missing_history_shows_no_signs() -> None:
    assert echo_trap_signs({}) == []
    short = {name: dict(list(curve.items())[:5]) for name, curve in COLLAPSE.items()}
    assert echo_trap_signs(short) == []
