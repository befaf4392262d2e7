"""The teachers: their thoughts are true, their actions valid, and careful play is optimal."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.bases.demonstrations import Chart, Reply, Teacher
from ragen.bases.demonstrations_lake import (
    CAREFUL_MOVES,
    careful_turn,
    hard_level,
    in_parts,
    lake_turns,
    moves_from,
    safe_walk,
    slippery_turn,
    unthinking,
    wander,
)
from ragen.bases.demonstrations_manor import Guide
from ragen.bases.demonstrations_sokoban import optimal_push, pushes, sokoban_plan
from ragen.bases.screen import random_actions, with_screen
from ragen.chat.actions import Parsed, parse
from ragen.chat.prompt import Limits
from ragen.core.seeding import BASE_LEVELS
from ragen.envs.contract import Env
from ragen.envs.registry import make
from ragen.envs.worlds.frozen_lake import MOVES, FrozenLake
from ragen.envs.worlds.grid import cell_name
from ragen.envs.worlds.sokoban import ACTIONS, Sokoban, shortest_solution
from ragen.rollout.reward_terms import thought_parts

FULL = Limits(turn=1, turns_left=5, actions_left=10, actions_per_turn=5)
LOOK = re.compile(rf"(\w\d) (\w\d) (\S)(?: ({'|'.join(MOVES)}))?")
WALK, CAREFUL = lake_turns(careful_turn, 0.0), lake_turns(careful_turn, 1.0)
TEACHERS = {
    "careful": ("frozen-lake-still", CAREFUL),
    "slippery": ("frozen-lake", lake_turns(slippery_turn, 1.0)),
    "walk": ("frozen-lake-still", WALK),
    "wanderer": ("frozen-lake-still", wander),
    "push": ("sokoban", sokoban_plan(1.0)),
    "slip": ("sokoban", sokoban_plan(0.0)),
}


def write(teacher: Teacher, env: Env, seed: int = 0, limits: Limits = FULL) -> Reply:
    return teacher(env, limits, np.random.Generator(np.random.PCG64(seed)))


def text(reply: Reply) -> str:
    return "".join(piece.text for piece in reply)


def read(env: Env, reply: Reply, max_actions: int = 5) -> Parsed:
    actions = env.actions
    return parse("<think>" + text(reply), think=True, actions=actions, max_actions=max_actions)


def lake(number: int) -> FrozenLake:
    env = make("frozen-lake-still", observation="named")
    assert isinstance(env, FrozenLake)
    env.reset(seed=number)
    return env


def sokoban(number: int) -> Sokoban:
    env = make("sokoban", observation="named")
    assert isinstance(env, Sokoban)
    env.reset(seed=BASE_LEVELS + number)
    return env


@pytest.mark.parametrize("name", TEACHERS)
@given(st.integers(0, 10_000), st.integers(0, 2**32), st.integers(1, 10), st.integers(1, 5))
def test_replies_are_valid_true_and_deterministic(
    name: str, number: int, seed: int, actions_left: int, per_turn: int
) -> None:
    """The environment reads the thought: all facts are true, and the plan is the answer."""
    env_name, teacher = TEACHERS[name]
    env = make(env_name, observation="named")
    env.reset(seed=BASE_LEVELS + number)
    before, limits = env.get_state(), Limits(1, 5, actions_left, per_turn)
    reply = write(teacher, env, seed, limits)
    assert reply == write(teacher, env, seed, limits) and env.get_state() == before
    parsed = read(env, reply, min(actions_left, per_turn))
    assert parsed.valid and parsed.actions and parsed.actions == parsed.actions_asked
    assert parsed.thought is not None
    reading = env.read_thought(parsed.thought)
    assert reading is not None and reading.true == reading.stated > 0
    assert reading.plan == parsed.actions


# FrozenLake.


@pytest.mark.parametrize("is_careful", [False, True])
def test_each_look_is_from_the_players_cell_at_a_neighbour(is_careful: bool) -> None:
    for number in range(40):
        env = lake(number)
        name, here = Chart(env).name, env.player
        thought = read(env, write(CAREFUL if is_careful else WALK, env, number)).thought or ""
        body = thought.partition(":")[2]
        for stand, cell, _, direction in LOOK.findall(body):
            assert stand == name(here)
            assert cell in [name(near) for _, near in moves_from(env, here)]
            if direction:
                here = env.lake.neighbours[list(MOVES).index(direction)][here]
                assert is_careful or cell == name(here)
        assert "".join(f" {' '.join(filter(None, look))}" for look in LOOK.findall(body)) == body


def test_careful_play_reaches_the_goal_by_a_shortest_path() -> None:
    for number in range(40):
        env = lake(number)
        steps, turns = env.lake.distances()[env.player], 0
        taken, terminated, info = 0, False, {}
        while not terminated:
            for action in read(env, write(CAREFUL, env, number)).actions:
                *_, terminated, _, info = env.step(action)
                taken += 1
            turns += 1
        assert info["success"]
        assert (taken, turns) == (steps, -(-taken // CAREFUL_MOVES))


@pytest.mark.parametrize("asked", ["free", "state", "transition", "world"])
def test_the_parts_of_a_thought_are_true(asked: str) -> None:
    teacher = in_parts(0.5)
    for number in range(20):
        env = make("frozen-lake-still", thoughts=asked)
        assert env.goal == ("FrozenLake" if asked == "free" else f"FrozenLake : {asked}")
        env.reset(seed=number)
        parsed = read(env, write(teacher, env, number))
        silent = text(write(unthinking(teacher), env, number))
        assert silent.removesuffix("</answer>").split(" || ") == list(parsed.actions)
        assert parsed.valid and parsed.thought is not None
        parts = thought_parts(parsed.thought)
        named = {"state": {"observation"}, "transition": {"prediction"}, "free": set()}
        assert parts.keys() == named.get(asked, {"observation", "prediction"})
        if "observation" in parts:
            reading = env.read_thought(parts["observation"])
            assert reading is not None and reading.f1 == 1
        for action in parsed.actions:
            env.step(action)
        if "prediction" in parts:
            reading = env.read_thought(parts["prediction"])
            assert reading is not None and reading.f1 == 1


def test_safe_walk_never_enters_a_hole() -> None:
    for number in range(40):
        env = lake(number)
        parsed = read(env, write(safe_walk, env, number))
        outcomes = [env.step(action) for action in parsed.actions]
        assert parsed.valid
        assert all(outcome[4]["success"] == outcome[2] for outcome in outcomes)


def test_only_random_walks_are_excluded_from_training() -> None:
    env = lake(7)
    mixed = lake_turns(careful_turn, 0.5, walks_trained=False)
    pieces = [piece for seed in range(100) for piece in write(mixed, env, seed)]
    assert {(" G " in piece.text.partition(":")[0], piece.trained) for piece in pieces} == {
        (True, True),
        (False, False),
    }
    assert all(piece.trained for piece in write(WALK, env))


def test_hard_levels_are_distant_or_need_a_detour() -> None:
    assert hard_level(lake(123))  # five steps
    hard = [lake(number) for number in range(40) if hard_level(lake(number))]
    assert all(env.lake.distances()[env.player] >= 3 for env in hard)
    assert 0.2 < len(hard) / 40 < 0.4


# Sokoban.


def from_map(rows: list[str]) -> Sokoban:
    """An environment with this map, in which P, X and O are on floor."""
    env = make("sokoban", rows=len(rows), cols=len(rows[0]), observation="named")
    assert isinstance(env, Sokoban)
    cells = dict(enumerate("".join(rows)))

    def where(symbols: str) -> list[int]:
        return [cell for cell, symbol in cells.items() if symbol in symbols]

    places = {"floor": where("_PXO"), "targets": where("O"), "boxes": where("X")}
    env.set_state(places | {"player": where("P")[0]})
    return env


PLAN = sokoban_plan(1.0)
CORRIDOR = from_map(["######", "#P___#", "#_X_O#", "#____#", "#____#", "######"])


def test_reply_golden() -> None:
    # The player walks one cell down, behind the box, and pushes it over c3 onto c4.
    assert text(write(PLAN, CORRIDOR)) == (
        " P b1 X c2 O c4 push Right c1 c4 : b1 c1 _ Down c2 c3 _ Right c3 c4 O Right"
        "</think><answer>Down || Right || Right</answer>"
    )


def test_pushes_are_straight_and_stop_on_the_target() -> None:
    # Right to c3 or c4, where the environment ends; Down to d2 or e2; Left to c1; Up to b2.
    ends = {
        ACTIONS[line[0].action]: [
            cell_name(*divmod(p.after.boxes.bit_length() - 1, 6)) for p in line
        ]
        for line in pushes(CORRIDOR.room, CORRIDOR.board)
    }
    assert ends == {"Up": ["b2"], "Down": ["d2", "e2"], "Left": ["c1"], "Right": ["c3", "c4"]}


def test_unsolvable_boards_get_slips_and_without_a_push_an_untrained_reply() -> None:
    upper_wall = from_map(["######", "#_X__#", "#P___#", "#____#", "#__O_#", "######"])
    corner = from_map(["######", "#XP__#", "#__O_#", "#____#", "#____#", "######"])
    for env in (upper_wall, corner):
        assert optimal_push(env.room, env.board) is None
    assert text(write(PLAN, upper_wall)).startswith(" P c1 X b2 push ")
    assert [piece.trained for piece in write(PLAN, corner)] == [False]


def test_careful_play_is_optimal_play() -> None:
    for number in range(10):
        env = sokoban(number)
        best = shortest_solution(env.room, env.board)
        assert best is not None
        played = 0
        for _ in range(12):
            actions = read(env, write(PLAN, env)).actions
            played += len(actions)
            if any(env.step(action)[2] for action in actions):
                break
        assert played == len(best)


@pytest.mark.parametrize("careful", [0.0, 1.0])
def test_a_push_moves_the_box_where_it_says_and_no_action_meets_a_wall(careful: float) -> None:
    for number in range(40):
        env = sokoban(number)
        parsed = read(env, write(sokoban_plan(careful), env, number), 10)
        places, _, choice = (parsed.thought or "").partition(" : ")[0].partition(" push ")
        assert places.split()[::2] == (["P", "X", "O"] if careful else ["P", "X"])
        direction, _, end = choice.split()
        assert all(env.step(action)[4]["effective"] for action in parsed.actions)
        if parsed.actions[-1] == direction and len(parsed.actions) < 5:
            boxes = env.get_state()["boxes"]
            assert [cell_name(*divmod(cell, 6)) for cell in boxes] == [end]


def test_the_guide_follows_its_route_and_a_summary_is_what_is_left_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragen.bases.demonstrations_manor.CAREFUL", 1.0)
    env = with_screen(make("manor", rooms=5, levers=1, delay=5))
    env.reset(seed=123)
    guide = Guide([], random_actions)
    left = ["armoury", "music room", "lever", "armoury", "vault"]
    thoughts, ended = [], False
    for turn in range(6):
        told = read_summary(guide, env, turn)
        assert told == left[: len(told)], "some forget the end"
        parsed = read(env, write(guide.read, env))
        thoughts.append(parsed.thought)
        _, _, ended, _, info = env.step(*parsed.actions)
        left = left[turn > 0 :]
    assert ended and info["success"]
    assert thoughts == [
        " armoury , music room , lever , armoury , vault",
        *(" armoury", " music room", " lever", " armoury", " vault"),
    ]


def read_summary(guide: Guide, env: Env, seed: int) -> list[str]:
    reply = "<think>" + text(guide.sum_up(env, np.random.Generator(np.random.PCG64(seed))))
    (told,) = parse(reply, think=True, actions=None, max_actions=1).actions
    return told.split(" , ")
