"""FrozenLake's demonstrators: their thoughts are true, and their actions valid and consistent."""

import re
from dataclasses import replace

import numpy as np
import pytest

from ragen.bases.demonstrations import Chart
from ragen.bases.demonstrations_lake import (
    CAREFUL_MOVES,
    careful_turn,
    hard_level,
    lake_turns,
    moves_from,
    safe_walk,
)
from ragen.chat.actions import parse
from ragen.chat.prompt import Limits
from ragen.envs.registry import make
from ragen.envs.worlds.frozen_lake import MOVES

LIMITS = Limits(turn=1, turns_left=5, actions_left=10, actions_per_turn=5)
LEVELS = range(40)
LOOK = re.compile(rf"(\w\d) (\w\d) (\S)(?: ({'|'.join(MOVES)}))?")


def generator(seed):
    return np.random.Generator(np.random.PCG64(seed))


def lake(level):
    env = make("frozen-lake-still", observation="named")
    env.reset(seed=level)
    return env


def cells(env):
    return dict(re.findall(r"(\w\d) (\S)", env.observe()))


def parse_reply(reply, max_actions=5):
    return parse("<think>" + reply, think=True, actions=tuple(MOVES), max_actions=max_actions)


def reply_text(env, seed, careful, **options):
    pieces = lake_turns(careful_turn, careful, **options)(env, LIMITS, generator(seed))
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("careful", [0.0, 1.0])
def test_replies_are_valid_and_their_facts_are_true(careful):
    for level in LEVELS:
        env = lake(level)
        before, shown = env.get_state(), cells(env)
        parsed = parse_reply(reply_text(env, level, careful))
        assert parsed.valid and 1 <= len(parsed.actions) <= 4
        assert env.get_state() == before
        head, _, body = parsed.thought.partition(":")
        name = Chart(env).name
        for symbol, cell in re.findall(r"([PG]) (\w\d)", head):
            assert shown[cell] == symbol
        here, directions = env.player, []
        for stand, cell, symbol, direction in LOOK.findall(body):
            assert stand == name(here) and shown[cell] == symbol
            around = [name(near) for _, near in moves_from(env, here)]
            assert cell in around
            if direction:
                here = env.lake.neighbours[list(MOVES).index(direction)][here]
                directions.append(direction)
                assert careful or cell == name(here)
        assert "".join(f" {' '.join(filter(None, look))}" for look in LOOK.findall(body)) == body
        assert tuple(directions) == parsed.actions


def test_careful_play_reaches_the_goal_by_a_shortest_path():
    for level in LEVELS:
        env = lake(level)
        steps, turns = env.lake.distances()[env.player], 0
        taken, terminated, info = 0, False, {}
        while not terminated:
            for action in parse_reply(careful_turn(env, LIMITS, generator(level))).actions:
                *_, terminated, _, info = env.step(action)
                taken += 1
            turns += 1
        assert info["success"]
        assert (taken, turns) == (steps, -(-taken // CAREFUL_MOVES))


def test_safe_walk_never_enters_a_hole():
    for level in LEVELS:
        env = lake(level)
        parsed = parse_reply(safe_walk(env, LIMITS, generator(level))[0].text)
        assert parsed.valid
        outcomes = [env.step(action) for action in parsed.actions]
        assert all(outcome[4]["success"] == outcome[2] for outcome in outcomes)


def test_replies_respect_the_action_budgets():
    env = lake(123)
    for limits, most in (
        (replace(LIMITS, actions_per_turn=1), 1),
        (replace(LIMITS, actions_left=1), 1),
        (replace(LIMITS, actions_left=2), 2),
    ):
        for careful in (0.0, 1.0):
            reply = lake_turns(careful_turn, careful)(env, limits, generator(0))
            assert len(parse_reply(reply[0].text).actions) <= most


def test_only_random_walks_are_excluded_from_training():
    env = lake(7)
    write = lake_turns(careful_turn, 0.5, walks_trained=False)
    pieces = [piece for seed in range(100) for piece in write(env, LIMITS, generator(seed))]
    assert {(" G " in piece.text.partition(":")[0], piece.trained) for piece in pieces} == {
        (True, True),
        (False, False),
    }
    assert all(piece.trained for piece in lake_turns(careful_turn, 0.0)(env, LIMITS, generator(0)))


def test_hard_levels_are_distant_or_need_a_detour():
    assert hard_level(lake(123))  # five steps
    hard = [lake(level) for level in LEVELS if hard_level(lake(level))]
    assert all(env.lake.distances()[env.player] >= 3 for env in hard)
    assert 0.2 < len(hard) / len(LEVELS) < 0.4
