"""Synthetic turns, episodes, groups and samples; tests set only the fields that matter to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from ragen.algorithms.samples import to_samples
from ragen.core.types import (
    Completion,
    Episode,
    Group,
    Prompt,
    Sample,
    StopReason,
    Turn,
    fingerprint,
)
from ragen.storage.database import CONFIG, DATABASE


def edit_settings(run: Path, old: str, new: str) -> None:
    """Change a run's settings as if it had begun with them: `config.toml` and the copies of it."""
    text = (run / CONFIG).read_text(encoding="utf-8")
    assert text.count(old) == 1
    edited = text.replace(old, new)
    (run / CONFIG).write_text(edited, encoding="utf-8")
    with closing(sqlite3.connect(run / DATABASE)) as connection, connection:
        connection.execute("UPDATE settings SET text = ?", (edited,))


def turn(
    reward: float = 0.0,
    *,
    prompt: Sequence[int] = (1, 2),
    sampled: Sequence[int] = (7, 8),
    penalty: float = 0.0,
    thought: str | None = None,
    state: str = "",
    executed: int = 0,
    info: Mapping[str, Any] | None = None,
    value: float | None = None,
) -> Turn:
    logprobs = (-0.5,) * len(sampled)
    completion = Completion(tuple(sampled), logprobs, "", "stop", 0, fingerprint(sampled, logprobs))
    return Turn(
        observation="",
        prompt=Prompt((), tuple(prompt), 0, 64, 1.0, 0),
        completion=completion,
        thought=thought,
        thought_span=None if thought is None else (0, 1),
        actions_asked=("Up",) * executed,
        actions_executed=("Up",) * executed,
        reward=reward,
        penalty=penalty,
        valid=penalty == 0,
        state_key=state,
        info=info or {},
        state_value=value,
    )


def episode(*turns: Turn, stop: StopReason = "max_turns", success: bool = False) -> Episode:
    return Episode("w", 0, 0, 0, 0, turns, stop, False, True, success)


def group(*rewards: float) -> Group:
    """A group with one single-turn episode per reward."""
    return Group(tuple(episode(turn(reward)) for reward in rewards))


@st.composite
def groups(draw: st.DrawFn, min_episodes: int = 1) -> list[Group]:
    """Random groups of multi-turn episodes; a turn extends its history or starts a new sample.

    Hypothesis draws the seed alone: hundreds of draws would take longer than the tests.
    """
    random = Random(draw(st.integers(0, 2**32)))
    groups = []
    for _ in range(random.randint(1, 3)):
        episodes = []
        for _ in range(random.randint(min_episodes, 3)):
            history: tuple[int, ...] = ()
            turns = []
            for number in range(random.randint(1, 4)):
                glue = tuple(random.randint(1, 9) for _ in range(random.randint(1, 3)))
                prompt = history + glue if random.random() < 0.5 else (100 + number, *glue)
                sampled = tuple(random.randint(10, 19) for _ in range(random.randint(1, 4)))
                reward, penalty = random.randint(-4, 4) / 4, random.choice([0.0, -0.5])
                turns.append(turn(reward, prompt=prompt, sampled=sampled, penalty=penalty))
                history = prompt + sampled
            episodes.append(episode(*turns))
        groups.append(Group(tuple(episodes)))
    return groups


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    return to_samples(draw(groups()))[0]
