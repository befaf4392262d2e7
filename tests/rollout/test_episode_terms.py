"""Reward terms of episodes and of groups: what they see, what they add, and how they fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from records import episode, turn

from ragen.algorithms.filters import reward_std
from ragen.core.metrics import values
from ragen.core.types import Episode, Group
from ragen.diagnostics.step_metrics import summarize
from ragen.rollout import reward_terms
from ragen.rollout.episode_terms import apply_episode_terms
from tests.limits import needs_timer

CODE = """
import asyncio
from collections.abc import Sequence
from ragen.core.types import Episode, Turn

def short(episode: Episode):
    return 1 / len(episode.turns)

async def patient(episode: Episode):
    await asyncio.sleep(0.001)
    return -0.5

def ranked(episodes: Sequence[Episode]):
    order = sorted(episodes, key=lambda episode: len(episode.turns))
    return [order.index(episode) / max(1, len(episodes) - 1) for episode in episodes]

def per_turn(turn: Turn):
    return -1.0

def raises_on_two(episode: Episode):
    return [1.0][len(episode.turns) - 1]

def too_large(episode: Episode):
    return 1.5

def not_finite(episodes: Sequence[Episode]):
    return [float("nan")] * len(episodes)

def too_few(episodes: Sequence[Episode]):
    return [1.0]

def texts(episodes: Sequence[Episode]):
    return ["one", "two"]

async def hangs(episodes: Sequence[Episode]):
    await asyncio.sleep(60)

async def leaves(episode: Episode):
    raise SystemExit

async def cancels(episode: Episode):
    part = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(part.cancel)
    await part
"""
ONE = replace(episode(turn(reward=0.25)), member=0)
TWO = replace(episode(turn(reward=1.0), turn(penalty=-0.1)), member=1)
LOST = replace(episode(turn(), stop="error"), member=2)
EMPTY = replace(episode(stop="context"), member=3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "terms.py").write_text(CODE)
    return tmp_path / "terms.py"


def apply(weights: dict[str, float], *episodes: Episode) -> tuple[Episode, ...]:
    return asyncio.run(apply_episode_terms(Group(episodes), weights, None, 0, 0)).episodes


def test_terms_are_added_to_the_last_turns_reward(file: Path) -> None:
    weights = {f"{file}:short": 2.0, f"{file}:ranked": 1.0, f"{file}:patient": 0.5}
    weights |= {f"{file}:per_turn": 1.0}
    one, two, lost, empty = apply(weights, ONE, TWO, LOST, EMPTY)
    # .25 + 2 · 1 + 0 − .25; the first turn keeps its 1, the last has 2 · 1/2 + 1 − .25
    assert [each.reward for each in one.turns] == [2.0]
    assert [each.reward for each in two.turns] == [1.0, 1.75]
    assert [each.penalty for each in two.turns] == [0.0, -0.1]
    assert two.turns[-1].info["reward_terms"] == {"short": 1.0, "patient": -0.25, "ranked": 1.0}
    assert (lost, empty) == (LOST, EMPTY), "what failed or has no turn is not judged"
    metrics = values(summarize([Group((one, two, lost))], [0]))
    # Means of two episodes: (2 + 1) / 2, (0 + 1) / 2, −.25, and the rewards (2 + 2.75) / 2.
    assert metrics["reward_terms/short"] == 1.5
    assert metrics["reward_terms/ranked"] == 0.5
    assert metrics["reward_terms/patient"] == -0.25
    assert metrics["reward/mean"] == 2.375


def test_filters_see_what_a_term_tells_apart(file: Path) -> None:
    equal = ONE, replace(TWO, turns=(turn(reward=0.25), turn()))
    assert reward_std(Group(equal)) == 0
    assert reward_std(Group(apply({f"{file}:short": 1.0}, *equal))) > 0


FAILURES = {
    "raises_on_two": ([False, True], "IndexError: list index out of range"),
    "too_large": ([True, True], "it returned 1.5: a number from -1 to 1 is expected"),
    "not_finite": ([True, True], "it returned nan: a number from -1 to 1 is expected"),
    "too_few": ([True, True], "it returned 1 numbers for 2 episodes"),
    "texts": ([True, True], "could not convert string to float: 'one'"),
    "hangs": ([True, True], "took longer than 0.05 s"),
    "leaves": ([True, True], "SystemExit"),
    "cancels": ([True, True], "CancelledError"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=needs_timer if each == "hangs" else ()) for each in FAILURES]
)
def test_a_term_that_fails_fails_what_it_judged(
    file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_terms, "TERM_S", 0.05)
    failed, reason = FAILURES[name]
    after = apply({f"{file}:{name}": 1.0}, ONE, TWO)
    assert [each.failed for each in after] == failed
    last = after[-1]
    assert last.stop_reason == ("timeout" if name == "hangs" else "error")
    assert last.error is not None and reason in last.error.splitlines()[-1]
    assert f"the reward term {file}:{name} failed" in last.error
    assert not last.success and last.truncated and not last.terminated
    assert last.reward == TWO.reward
