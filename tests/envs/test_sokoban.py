"""Sokoban: pushes, generated levels, the solver, and exact random play."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.envs.registry import make
from ragen.envs.worlds.sokoban import (
    Board,
    Room,
    generate,
    random_play,
    shortest_solution,
)


def parse(*rows):
    """The room and the board of a map in the standard symbols."""
    cols, text = len(rows[0]), "".join(rows)

    def where(symbols):
        return sum(1 << i for i, symbol in enumerate(text) if symbol in symbols)

    room = Room(len(rows), cols, where("_O√XPS"), where("O√S"))
    return room, Board(where("PS").bit_length() - 1, where("X√"))


def env_at(*rows, **params):
    env = make("sokoban", rows=len(rows), cols=len(rows[0]), **params)
    env.room, env.board = parse(*rows)
    return env


@pytest.mark.parametrize(("low", "high"), [(1, 2), (4, 4), (6, 9)])
def test_solutions_lie_within_their_bounds(low, high):
    for seed in range(8):
        level = generate(seed, 6, 6, 1, 300, low, high)
        assert low <= len(shortest_solution(*level)) <= high
        assert generate(seed, 6, 6, 1, 300, 1, 99) == generate(seed, 6, 6, 1, 300)


def test_a_solution_of_one_push_pays_10_9():
    env = env_at("#####", "#PXO#", "#___#", "#####")
    observation, reward, terminated, truncated, info = env.step("Right")
    assert observation == "#####\n#_P√#\n#___#\n#####"
    assert reward == pytest.approx(10.9)  # −0.1 + 1 + 10
    assert terminated and not truncated and info == {"success": True, "effective": True}


def test_a_box_pushed_off_a_target_costs_one():
    env = env_at("######", "#P√_X#", "#__O_#", "######", boxes=2)
    assert env.step("Right")[1] == pytest.approx(-1.1)


def test_a_push_from_target_to_target_neither_pays_nor_costs():
    env = env_at("######", "#P√OX#", "#____#", "######", boxes=2)
    assert env.step("Right")[1] == pytest.approx(-0.1)
    assert env.state_key().split("\n")[1] == "#_S√X#"


@pytest.mark.parametrize(
    "row", ["#_PX#", "#PXX_#", "#P#__#"], ids=["wall behind", "box behind", "wall"]
)
def test_blocked_moves_leave_the_board_unchanged(row):
    border = "#" * len(row)
    room, board = parse(border, row, border)
    assert room.push(board, 1) == board


def test_new_symbols_draw_the_same_levels():
    old, new = make("sokoban"), make("sokoban-new-symbols")
    table = str.maketrans("#_O√XPS", "W.GCBA@")
    for level in range(123, 143):
        assert old.reset(seed=level)[0].translate(table) == new.reset(seed=level)[0]
    assert "@ player on target" in new.rules


def test_the_named_observation_omits_the_outer_wall_and_keeps_the_coordinates():
    env = env_at("#####", "#PXO#", "#___#", "#####", observation="named")
    assert env.step("Left")[0] == "b1 P b2 X b3 O\nc1 _ c2 _ c3 _"


@given(
    st.integers(0, 2**63 - 1),
    st.integers(5, 9),
    st.integers(5, 9),
    st.integers(1, 2),
    st.sampled_from([10, 40]),
)
def test_every_level_is_solvable_and_begins_unsolved(seed, rows, cols, boxes, depth):
    room, board = generate(seed, rows, cols, boxes, depth)
    assert room.targets.bit_count() == board.boxes.bit_count() == boxes
    assert board.boxes & room.targets == 0 and not board.boxes >> board.player & 1
    assert (board.boxes | room.targets | 1 << board.player) & ~room.floor == 0
    solution = shortest_solution(room, board)
    assert solution
    for action in solution:
        board = room.push(board, room.steps[action])
    assert board.boxes == room.targets


def test_no_shorter_sequence_solves_a_level():
    env = make("sokoban")
    for level in range(123, 127):
        env.reset(seed=level)
        solution = shortest_solution(env.room, env.board)
        boards = {env.board}
        for _ in range(len(solution) - 1):
            boards = {env.room.push(board, step) for board in boards for step in env.room.steps}
            assert all(board.boxes != env.room.targets for board in boards)


def test_an_unsolvable_board_has_no_solution_and_solve_returns_a_move():
    env = env_at("#####", "#X__#", "#P_O#", "#####")
    assert shortest_solution(env.room, env.board) is None
    assert env.solve(5, 10, 5) == ["Up"]


def test_exact_random_play_equals_enumeration():
    room, board = parse("#####", "#PXO#", "#___#", "#####")
    wins, total = 0, 0.0
    for actions in itertools.product(room.steps, repeat=4):
        here = board
        for step in actions:
            after = room.push(here, step)
            total += room.reward(here, after)
            here = after
            if here.boxes == room.targets:
                wins += 1
                break
    chance, expected = random_play(room, board, 4)
    assert chance == pytest.approx(wins / 4**4) and expected == pytest.approx(total / 4**4)
