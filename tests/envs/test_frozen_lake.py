"""FrozenLake: levels, slipping, observations, and the planner compared with brute force."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.envs.registry import make
from ragen.envs.worlds.frozen_lake import (
    FrozenLake,
    Lake,
    Planner,
    generate,
    transition_matrices,
)

CORRIDOR = Lake(2, frozenset({2}), 0, 3)  # P _ / O G: Right, then Down


@given(st.integers(0, 2**63 - 1), st.integers(2, 7), st.sampled_from([0.3, 0.8, 0.9, 1.0]))
def test_every_level_has_a_path_to_the_goal(seed, size, p_frozen):
    lake = generate(seed, size, p_frozen)
    assert lake.start != lake.goal
    assert not lake.holes & {lake.start, lake.goal}
    still = Planner(lake, 1.0)
    assert still.values(size * size, size * size, 1)[lake.start] == 1.0


@given(st.integers(0, 2**63 - 1), st.integers(1, 4), st.integers(0, 2))
def test_distances_from_start_to_goal_lie_within_their_bounds(seed, low, more):
    lake = generate(seed, 4, 0.8, low, low + more)
    assert low <= lake.distances()[lake.start] <= low + more
    assert generate(seed, 4, 0.8, 1, 16) == generate(seed, 4, 0.8), "16 cells: no bound at all"


def test_a_bound_draws_the_levels_of_a_seed_until_one_fits():
    """So the first level of seed 123, at distance 4, is the one with bounds that it meets."""
    free = make("frozen-lake")
    assert free.reset(seed=123)[0] == "___P\n__O_\n___O\n_G_O"
    assert make("frozen-lake", max_distance=5).reset(seed=123)[0] == free.observe()
    near = make("frozen-lake", max_distance=1)
    near.reset(seed=123)
    assert near.baselines(1, 1, 1).optimal == pytest.approx(1 / 3), "one step, which may slip"


def test_steps_move_reward_and_terminate():
    env = FrozenLake(size=2, success_probability=1.0)
    start = env.get_state() | {"holes": [2], "start": 0, "goal": 3, "player": 0}
    env.set_state(start)
    assert env.state_key() == "P_\nOG"
    assert env.step("Up")[1:] == (0.0, False, False, {"success": False, "effective": False})
    assert env.step("Right")[0] == "_P\nOG"
    assert env.step("Down") == ("__\nO√", 1.0, True, False, {"success": True, "effective": True})
    env.set_state(start)
    assert env.step("Down") == ("__\nXG", 0.0, True, False, {"success": False, "effective": True})


@pytest.mark.parametrize("success_probability", [1 / 3, 0.8])
def test_slips_go_sideways_and_never_back(success_probability):
    env = FrozenLake(size=3, success_probability=success_probability)
    n, ends = 400, Counter()
    for noise_seed in range(n):
        env.reset(seed=0, options={"noise_seed": noise_seed})
        middle = {"holes": [], "start": 0, "goal": 8, "player": 4}
        env.set_state(env.get_state() | middle)
        env.step("Up")
        ends[env.get_state()["player"]] += 1
    side = (1 - success_probability) / 2
    for cell, chance in {1: success_probability, 3: side, 5: side, 7: 0.0}.items():
        assert abs(ends[cell] / n - chance) <= 4 * (chance * (1 - chance) / n) ** 0.5


def test_the_named_and_grid_coord_observations():
    env = FrozenLake(size=2, success_probability=1.0, observation="named")
    env.set_state(env.get_state() | {"holes": [2], "start": 0, "goal": 3, "player": 0})
    assert env.step("Up")[0] == "a0 P a1 _\nb0 O b1 G"
    env = FrozenLake(size=2, success_probability=1.0, observation="grid_coord")
    env.set_state(env.get_state() | {"holes": [2], "start": 0, "goal": 3, "player": 0})
    assert env.step("Up")[0] == ("P_\nOG\nSize: 2 x 2\nPlayer: (0, 0)\nGoal: (1, 1)\nHoles: (1, 0)")


def brute_force(lake, q, cell, turns, actions, per_turn):
    """The best chance of success over all action sequences of all turns."""
    if cell == lake.goal:
        return 1.0
    if cell in lake.holes or not turns or not actions:
        return 0.0
    matrices = transition_matrices(lake, q)

    def success_chance(plan):
        chances = np.eye(lake.size**2)[cell]
        for action in plan:
            chances = chances @ matrices[action]
        return sum(
            chance * brute_force(lake, q, here, turns - 1, actions - len(plan), per_turn)
            for here, chance in enumerate(chances)
            if chance
        )

    lengths = range(1, min(per_turn, actions) + 1)
    return max(success_chance(p) for k in lengths for p in itertools.product(range(4), repeat=k))


@pytest.mark.parametrize(
    ("q", "budget"), [(1 / 3, (1, 3, 3)), (0.8, (2, 3, 2)), (0.8, (3, 3, 1)), (1.0, (2, 3, 2))]
)
def test_the_planner_equals_brute_force(q, budget):
    planner = Planner(CORRIDOR, q)
    for cell in range(4):
        expected = brute_force(CORRIDOR, q, cell, *budget)
        assert planner.values(*budget)[cell] == pytest.approx(expected)


def test_the_planner_solves_a_corridor_computed_by_hand():
    # Right succeeds with 0.8 (0.1 stays, 0.1 falls into the hole), then Down with 0.8.
    # One turn of two actions: 0.8 · 0.8 = 0.64.
    assert Planner(CORRIDOR, 0.8).values(1, 2, 2)[0] == pytest.approx(0.64)
    assert Planner(CORRIDOR, 0.8).best(0, 1, 2, 2) == [2, 1]


def test_optimal_play_is_unknown_with_more_actions_a_turn_than_it_compares():
    env = make("frozen-lake")
    env.reset(seed=123)
    known = env.baselines(2, 6, 12)
    assert (known.optimal, known.optimal_return) == (None, None)
    assert env.solve(2, 12, 6) == env.solve(2, 12, 5)
    assert known.random == env.baselines(12, 1, 12).random


def test_solve_returns_a_shortest_path_without_slipping():
    env = make("frozen-lake-still")
    for level in (123, 124):
        env.reset(seed=level)
        state = env.get_state()
        lake = Lake(4, frozenset(state["holes"]), state["start"], state["goal"])
        plan = env.solve(1, 5, 5)
        assert len(plan) == lake.distances()[lake.start]
        assert [env.step(action)[2] for action in plan][-1]
