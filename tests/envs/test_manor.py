"""Manor: solvable houses, one choice that decides late, and baselines."""

from __future__ import annotations

import pytest

from ragen.envs.registry import make
from ragen.envs.worlds.manor import NO_DOOR, SLACK, WAYS, Position, generate, shortest_solution

SMALL = {"rooms": 5, "levers": 1, "delay": 5}
"""Level 123: the vault is west of the hall, the lever west of the vault, and iron is right."""
SIZES = [(10, 2, 2, 15), (5, 1, 2, 5), (4, 0, 4, 2), (14, 4, 3, 20)]


def begin(**params):
    env = make("manor", **{**SMALL, **params})
    env.reset(seed=123)
    return env


def play(env, *actions):
    """The results of actions; an observation comes first in each."""
    return [env.step(action) for action in actions]


def event(result):
    return result[0].splitlines()[0]


# Houses.


@pytest.mark.parametrize("sizes", SIZES)
def test_houses_are_whole_and_their_solution_is_as_long_as_asked_for(sizes):
    for seed in range(5):
        house = generate(seed, *sizes)
        assert len(set(house.rooms)) == len(house.rooms) == sizes[0] and house.rooms[0] == "hall"
        assert len({*house.levers, house.vault, 0}) == sizes[1] + 2
        assert len(set(house.keys)) == sizes[2] > house.right
        for room, doors in enumerate(house.doors):
            for way, other in enumerate(doors):
                assert other == NO_DOOR or house.doors[other][(way + 2) % 4] == room
        plan = shortest_solution(house, Position())
        assert plan[0].startswith("take") and plan[-1] == "unlock vault"
        assert sizes[3] <= len(plan) - 1 <= sizes[3] + SLACK // 2
        assert plan.count("pull lever") == sizes[1]


def test_at_least_15_turns_lie_between_choice_and_effect():
    env = make("manor")
    for seed in range(123, 128):
        env.reset(seed=seed)
        house = generate(seed, 10, 2, 2, 15)
        plan = shortest_solution(house, Position())
        assert 15 <= len(plan) - 1 <= 27 and len(plan) < env.max_turns == env.max_actions == 40
        # With the other key, too, the vault cannot be tried any earlier.
        wrong = Position(key=1 - house.right)
        assert shortest_solution(house, wrong) is None
        results = play(env, f"take {house.keys[1 - house.right]} key", *plan[1:])
        assert not any(result[2] for result in results[:-1])
        assert results[-1][1:4] == (0.0, True, False) and not results[-1][4]["success"]
        assert "breaks in the lock" in event(results[-1])


def test_the_plan_in_the_hall_shows_the_whole_house():
    for seed in range(2):
        house = generate(seed, 10, 2, 2, 15)
        text = house.look(Position())
        for room, name in enumerate(house.rooms):
            (line,) = [each for each in text.splitlines() if each.startswith(f"{name}: ")]
            assert ("a lever" in line) == (room in house.levers)
            assert ("the vault" in line) == (room == house.vault)
            for way, other in zip(WAYS, house.doors[room], strict=True):
                assert (f"{way} to " in line) == (other != NO_DOOR)
                assert other == NO_DOOR or f"{way} to {house.rooms[other]}" in line
        assert f"a lock for the {house.keys[house.right]} key" in text
        for room in range(1, 10):  # what is read in the hall has to be remembered
            there = house.look(Position(room=room, key=0))
            assert "plan" not in there and "note" not in there


# Play.


def test_what_is_not_possible_changes_nothing():
    env = begin()
    for actions, message in (
        (("north",), "There is no door to the north."),
        (("west",), "The doors stay shut until you have taken a key."),
        (("pull lever",), "There is no lever here."),
        (("unlock vault",), "There is no vault here."),
        (("take iron key", "take silver key"), "A bar covers the hooks."),
        (("west", "take silver key"), "There is no such key here."),
        (("unlock vault",), "An iron grille still covers the vault."),
        (("west", "pull lever", "pull lever"), "The lever is down already."),
    ):
        *before, last = play(env, *actions)
        assert all(result[4]["effective"] for result in before)
        assert event(last) == message and not last[4]["effective"] and last[1] == 0.0
    with pytest.raises(ValueError, match="knows no action 'take gold key'"):
        env.step("take gold key")


@pytest.mark.parametrize(("key", "success", "last"), [("iron", True, 1.0), ("silver", False, 0.0)])
def test_the_key_decides_and_levers_pay_either_way(key, success, last):
    results = play(begin(), f"take {key} key", "west", "west", "pull lever", "east", "unlock vault")
    assert [result[1] for result in results] == [0.0, 0.0, 0.0, 0.1, 0.0, last]
    assert [result[2] for result in results] == [False] * 5 + [True]
    assert results[-1][4] == {"success": success, "effective": True}


# Baselines.


def test_optimal_play_needs_the_length_of_the_shortest_solution():
    env = begin()
    assert [env.baselines(n, 1, n).optimal for n in (5, 6)] == [0.0, 1.0]
    assert env.baselines(6, 1, 6).optimal_return == pytest.approx(1.1)
    assert env.baselines(5, 1, 5).optimal_return == pytest.approx(0.1)
    env.step("take silver key")
    assert env.baselines(40, 1, 40).optimal == env.baselines(40, 1, 40).random == 0.0
    assert env.solve(40, 40, 1) == ["north"]


def test_one_random_action_is_the_paying_one_in_eight():
    env = begin()
    play(env, "take iron key", "west", "west")
    baselines = env.baselines(1, 1, 1)
    assert baselines.random == 0.0 and baselines.random_return == pytest.approx(0.1 / 8)
    play(env, "pull lever", "east")
    baselines = env.baselines(1, 1, 1)
    assert baselines.random == baselines.random_return == pytest.approx(1 / 8)
