"""Drawings of environments: one alphabet, independent of the observation."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from ragen.core.errors import RagenError
from ragen.core.types import Episode
from ragen.core.user_code import UserCodeError
from ragen.envs import answers
from ragen.envs.checker import check
from ragen.envs.contract import Info
from ragen.envs.registry import make
from ragen.rollout.episode import play_episode
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.setup import EpisodeSpec, Setup
from tests.rogue import Rogue
from tests.scripted_policy import ScriptedPolicy


def reply(*actions: str) -> str:
    return f"t</think><answer>{' || '.join(actions)}</answer>"


def play(make: Any, *replies: str, **more: Any) -> Episode:
    setup = Setup("env", make, timeout_s=5.0, **more)
    return asyncio.run(
        play_episode(ScriptedPolicy(replies), setup, EpisodeSpec(123, 0, 0, (0, "test")))
    )


class DrawnCorridor(Rogue):
    """The corridor with a wall at each end."""

    name = "drawn"

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self.action_index(action)
        return super().step(action)

    def drawing(self) -> list[str]:
        return [f"#{self._look().replace('A', 'P').replace('.', '_')}#"]


# The alphabet.


@pytest.mark.parametrize("observation", ["grid", "coord", "grid_coord", "named", "picture"])
def test_the_picture_of_frozen_lake_is_the_same_for_any_observation(observation: str) -> None:
    """Level 123 is ``___P / __O_ / ___O / _G_O``; a hole is drawn as H; O means a target."""
    env = make("frozen-lake-still", observation=observation)
    env.reset(seed=123)
    assert env.drawing() == ["___P", "__H_", "___H", "_G_H"]
    for action in ("Left", "Down"):
        env.step(action)
    assert env.drawing() == ["____", "__@_", "___H", "_G_H"]
    env.reset(seed=123)
    for action in ("Left", "Left", "Down", "Down", "Down"):
        env.step(action)
    assert env.drawing() == ["____", "__H_", "___H", "_*_H"]


@pytest.mark.parametrize(("symbols", "observation"), [("standard", "coord"), ("new", "grid")])
def test_the_picture_of_sokoban_is_the_same_for_any_observation(
    symbols: str, observation: str
) -> None:
    """The drawing is the map in standard symbols, from the start to the solution."""
    env, plain = make("sokoban", symbols=symbols, observation=observation), make("sokoban")
    for each in (env, plain):
        each.reset(seed=123)
    symbols_seen, terminated = set[str](), False
    while not terminated:
        assert env.drawing() == plain.state_key().split("\n")
        symbols_seen.update(*env.drawing() or [])
        (action,) = plain.solve(1, 1, 1) or []
        plain.step(action)
        terminated = env.step(action)[2]
    assert "√" in "".join(env.drawing() or [])
    state = env.get_state()
    env.set_state({**state, "player": state["targets"][0], "boxes": []})
    symbols_seen.update(*env.drawing() or [])
    assert symbols_seen == set("#_OXPS")


# The contract.


INVALID_DRAWINGS: list[Any] = [
    *([], [""], "P_", ("P_",), [1], ["P_", "P"], ["P\n"], ["\u202eP"], ["e\u0301"], ["\ud83d"]),
    [None],
]


def test_invalid_pictures_are_refused() -> None:
    class InvalidDrawing(DrawnCorridor):
        def drawing(self) -> Any:
            return INVALID_DRAWINGS[-1]

    for each in INVALID_DRAWINGS:
        with pytest.raises(UserCodeError, match="rows of one length are expected"):
            answers.drawing(each)
    with pytest.raises(RagenError, match="rows of one length are expected"):
        check(InvalidDrawing())
    with closing(GuardedEnv(InvalidDrawing, None)) as env:
        env.reset(0, 0)
        with pytest.raises(UserCodeError, match="rows of one length are expected"):
            env.drawing()
    episode = play(InvalidDrawing, reply("Right"), turns=1)
    assert (episode.stop_reason, episode.turns, episode.final_drawing) == ("error", (), None)


# In episodes.


def test_a_turn_has_the_picture_before_it_and_the_episode_the_final_one() -> None:
    episode = play(DrawnCorridor, reply("Right", "Right"), "nonsense", reply("Right"), turns=3)
    boards = [("#P____#",), ("#__P__#",), ("#__P__#",)]
    assert [turn.drawing for turn in episode.turns] == boards
    assert episode.stop_reason == "max_turns"
    assert (episode.final_observation, episode.final_drawing) == ("...A.", ("#___P_#",))


def test_an_environment_that_raises_has_no_final_picture_and_no_success() -> None:
    class FailingFinalDrawing(DrawnCorridor):
        def drawing(self) -> list[str]:
            if self.where > 4:
                raise RuntimeError("no ink")
            return super().drawing()

    failed = play(lambda: DrawnCorridor("raise"), reply("Right"))
    assert (failed.stop_reason, failed.final_observation, failed.final_drawing) == (
        "error",
        None,
        None,
    )
    solved = play(FailingFinalDrawing, reply(*["Right"] * 5))
    assert (solved.stop_reason, solved.success, len(solved.turns)) == ("error", False, 1)
    assert solved.error is not None and "no ink" in solved.error
