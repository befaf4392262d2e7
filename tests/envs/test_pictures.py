"""Pictures of environments: one alphabet, whatever the observation uses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ragen.core.boundary import UserCodeError
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Prompt
from ragen.envs.checker import check
from ragen.envs.contract import Env, Info, is_picture
from ragen.envs.isolation import Workers
from ragen.envs.registry import make
from ragen.rollout.episode import play_episode
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.policies import NoCompletion, ScriptedPolicy
from ragen.rollout.setup import EpisodeSpec, Setup
from tests.rogue import Rogue


def reply(*actions: str) -> str:
    return f"t</think><answer>{' || '.join(actions)}</answer>"


def episode(make: Any, *replies: str, **more: Any) -> Episode:
    setup = Setup("env", make, timeout_s=5.0, **more)
    return asyncio.run(
        play_episode(ScriptedPolicy(replies), setup, EpisodeSpec(123, 0, 0, (0, "test")))
    )


class Drawn(Rogue):
    """The corridor with a wall at each end."""

    name = "drawn"

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self.action_index(action)
        return super().step(action)

    def picture(self) -> list[str]:
        return [f"#{self._look().replace('A', 'P').replace('.', '_')}#"]


# The alphabet.


@pytest.mark.parametrize("observation", ["grid", "coord", "grid_coord", "named"])
def test_a_lake(observation: str) -> None:
    """Level 123 is ``___P / __O_ / ___O / _G_O``; a hole is no target, so it is drawn as H."""
    env = make("frozen-lake-still", observation=observation)
    env.reset(seed=123)
    assert env.picture() == ["___P", "__H_", "___H", "_G_H"]
    for action in ("Left", "Down"):
        env.step(action)
    assert env.picture() == ["____", "__@_", "___H", "_G_H"]
    env.reset(seed=123)
    for action in ("Left", "Left", "Down", "Down", "Down"):
        env.step(action)
    assert env.picture() == ["____", "__H_", "___H", "_*_H"]


@pytest.mark.parametrize("symbols", ["standard", "new"])
@pytest.mark.parametrize("observation", ["grid", "coord", "named"])
def test_a_store_room(symbols: str, observation: str) -> None:
    """The standard map, whatever the environment shows: from the start until it is solved."""
    env, plain = make("sokoban", symbols=symbols, observation=observation), make("sokoban")
    for each in (env, plain):
        each.reset(seed=123)
    seen, ended = set[str](), False
    while not ended:
        assert env.picture() == plain.state_key().split("\n")
        seen.update(*env.picture() or [])
        (action,) = plain.solve(1, 1, 1) or []
        plain.step(action)
        ended = env.step(action)[2]
    assert "√" in "".join(env.picture() or [])
    state = env.get_state()
    env.set_state({**state, "player": state["targets"][0], "boxes": []})
    seen.update(*env.picture() or [])
    assert seen == set("#_OXPS")


def test_a_bandit_draws_nothing() -> None:
    env = make("bandit")
    assert not env.draws and env.picture() is None
    assert make("sokoban").draws


# The contract.


BAD: list[Any] = [
    [],
    [""],
    "P_",
    ("P_",),
    [1],
    ["P_", "P"],
    ["P\n"],
    ["\u202eP"],
    ["e\u0301"],
    ["\ud83d"],
    [None],
]


@pytest.mark.parametrize("bad", BAD)
def test_invalid_pictures_are_refused(bad: Any) -> None:
    class Bad(Drawn):
        def picture(self) -> Any:
            return bad

    assert not is_picture(bad)
    with pytest.raises(RagenError, match="picture must return None or a list of rows"):
        check(Bad())
    env = GuardedEnv(Bad, None)
    env.reset(0, 0)
    with pytest.raises(UserCodeError, match="rows of one length are expected"):
        env.picture()
    found = episode(Bad, reply("Right"), turns=1)
    assert (found.stop_reason, found.turns, found.final_picture) == ("error", (), None)


def test_a_picture_must_not_change_the_environment() -> None:
    class Moving(Drawn):
        def picture(self) -> list[str]:
            self.where = (self.where + 1) % 5
            return super().picture()

    check(Drawn())
    with pytest.raises(RagenError, match="picture must not change the environment"):
        check(Moving())


def test_an_environment_may_draw_only_some_states() -> None:
    class Shy(Drawn):
        def picture(self) -> Any:
            return super().picture() if self.where == 1 else None

    found = episode(Shy, reply("Right"), reply("Right"), turns=2)
    assert [turn.picture for turn in found.turns] == [None, ("#_P___#",)]
    assert found.final_picture is None


# In an episode.


def test_each_turn_shows_the_board_before_it_and_the_episode_the_last() -> None:
    found = episode(Drawn, reply("Right", "Right"), "nonsense", reply("Right"), turns=3)
    boards = [("#P____#",), ("#__P__#",), ("#__P__#",)]
    assert [turn.picture for turn in found.turns] == boards
    assert found.stop_reason == "max_turns"
    assert (found.final_observation, found.final_picture) == ("...A.", ("#___P_#",))


def test_a_solved_level_shows_its_end() -> None:
    found = episode(lambda: make("frozen-lake-still"), reply("Left", "Left", *["Down"] * 3))
    assert found.success and found.final_picture == ("____", "__H_", "___H", "_*_H")


def test_without_a_picture_there_is_still_the_last_observation() -> None:
    found = episode(Rogue, reply("Right"), turns=1)
    assert (found.final_observation, found.final_picture) == (".A...", None)
    assert found.turns[0].picture is None


def test_an_environment_that_failed_shows_nothing_and_is_no_success() -> None:
    class Late(Drawn):
        def picture(self) -> list[str]:
            if self.where > 4:
                raise RuntimeError("no ink")
            return super().picture()

    found = episode(lambda: Drawn("raise"), reply("Right"))
    assert (found.stop_reason, found.final_observation, found.final_picture) == (
        "error",
        None,
        None,
    )
    solved = episode(Late, reply(*["Right"] * 5))
    assert (solved.stop_reason, solved.success, len(solved.turns)) == ("error", False, 1)
    assert solved.error is not None and "no ink" in solved.error


def test_a_server_that_fails_leaves_the_board_as_it_stands() -> None:
    class Fails:
        async def complete(self, prompt: Prompt) -> Completion:
            raise NoCompletion("gone")

    setup = Setup("env", Drawn)
    found = asyncio.run(play_episode(Fails(), setup, EpisodeSpec(0, 0, 0, (0, "test"))))
    assert (found.stop_reason, found.error, found.final_picture) == (
        "request",
        "gone",
        ("#P____#",),
    )


@pytest.mark.parametrize("name", ["frozen-lake-still", "sokoban-new-symbols", "bandit"])
def test_environments_in_processes_draw_the_same(name: str) -> None:
    workers = Workers(name, {}, timeout_s=10.0)
    try:
        proxy, plain = workers.make(), make(name)
        for env in (proxy, plain):
            env.reset(seed=5)
        assert proxy.picture() == plain.picture()
        assert proxy.draws == plain.draws == (name != "bandit")
        proxy.close()
        replies = [reply("Up", "Left"), reply("Down")]
        isolated = episode(workers.make, *replies, turns=2, workers=workers)
        assert isolated == episode(lambda: make(name), *replies, turns=2)
    finally:
        workers.close()


def test_an_environment_that_draws_nothing_is_not_asked() -> None:
    class Silent(Rogue):
        draws = False

        def picture(self) -> list[str]:
            raise AssertionError("nobody asks")

    assert issubclass(Silent, Env)
    assert episode(Silent, reply("Right"), turns=1).final_picture is None
