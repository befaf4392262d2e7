"""The Sokoban demonstrator: its thoughts are true, its actions valid, and it solves the level."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragen.bases.demonstrations import Reply
from ragen.bases.demonstrations_sokoban import optimal_push, pushes, sokoban_plan
from ragen.chat.actions import parse
from ragen.chat.prompt import Limits
from ragen.core.seeding import BASE_LEVELS
from ragen.envs.registry import make
from ragen.envs.worlds.grid import cell_name
from ragen.envs.worlds.sokoban import ACTIONS, Sokoban, shortest_solution

FULL = Limits(turn=1, turns_left=5, actions_left=10, actions_per_turn=5)


def level(number: int) -> Sokoban:
    env = make("sokoban", observation="named")
    assert isinstance(env, Sokoban)
    env.reset(seed=BASE_LEVELS + number)
    return env


def demonstrate(env: Sokoban, careful: float = 1.0, seed: int = 0, limits: Limits = FULL) -> Reply:
    return sokoban_plan(careful)(env, limits, np.random.Generator(np.random.PCG64(seed)))


def text(reply: Reply) -> str:
    return "".join(piece.text for piece in reply)


def from_map(rows: list[str]) -> Sokoban:
    """An environment with this map, in which P, X and O are on floor."""
    env = make("sokoban", rows=len(rows), cols=len(rows[0]), observation="named")
    assert isinstance(env, Sokoban)
    cells = dict(enumerate("".join(rows)))

    def where(symbols: str) -> list[int]:
        return [cell for cell, symbol in cells.items() if symbol in symbols]

    env.set_state(
        {
            "floor": where("_PXO"),
            "targets": where("O"),
            "player": where("P")[0],
            "boxes": where("X"),
        }
    )
    return env


CORRIDOR = from_map(["######", "#P___#", "#_X_O#", "#____#", "#____#", "######"])


def test_reply_golden() -> None:
    # The player walks one cell down, behind the box, and pushes it over c3 onto c4.
    assert text(demonstrate(CORRIDOR)) == (
        " P b1 X c2 O c4 push Right c1 c4 : b1 c1 _ Down c2 c3 _ Right c3 c4 O Right"
        "</think><answer>Down || Right || Right</answer>"
    )


def test_pushes_are_straight_and_stop_on_the_target() -> None:
    # Right to c3 or c4, where the environment ends; Down to d2 or e2; Left to c1; Up to b2.
    lines = pushes(CORRIDOR.room, CORRIDOR.board)
    ends = {
        ACTIONS[line[0].action]: [
            cell_name(*divmod(p.after.boxes.bit_length() - 1, 6)) for p in line
        ]
        for line in lines
    }
    assert ends == {"Up": ["b2"], "Down": ["d2", "e2"], "Left": ["c1"], "Right": ["c3", "c4"]}


def test_unsolvable_boards_get_slips_and_without_a_push_an_untrained_reply() -> None:
    upper_wall = from_map(["######", "#_X__#", "#P___#", "#____#", "#__O_#", "######"])
    corner = from_map(["######", "#XP__#", "#__O_#", "#____#", "#____#", "######"])
    for env in (upper_wall, corner):
        assert optimal_push(env.room, env.board) is None
    assert text(demonstrate(upper_wall)).startswith(" P c1 X b2 push ")
    assert [piece.trained for piece in demonstrate(corner)] == [False]


def test_careful_play_is_optimal_play() -> None:
    for number in range(10):
        env = level(number)
        best = shortest_solution(env.room, env.board)
        assert best is not None
        played = 0
        for _ in range(12):
            reply = "<think>" + text(demonstrate(env))
            actions = parse(reply, think=True, actions=ACTIONS, max_actions=5).actions
            played += len(actions)
            if any(env.step(action)[2] for action in actions):
                break
        assert played == len(best)


@given(st.integers(0, 10_000), st.integers(0, 2**32), st.integers(1, 10), st.booleans())
def test_replies_are_valid_true_and_deterministic(
    number: int, seed: int, actions_left: int, careful: bool
) -> None:
    env = level(number)
    before = env.get_state()
    limits = Limits(1, 5, actions_left, 5)
    reply = demonstrate(env, float(careful), seed, limits)
    assert reply == demonstrate(env, float(careful), seed, limits)
    assert env.get_state() == before
    parsed = parse("<think>" + text(reply), think=True, actions=ACTIONS, max_actions=actions_left)
    assert parsed.valid and parsed.actions == parsed.actions_asked and len(parsed.actions) <= 5
    head, _, steps = (parsed.thought or "").partition(" : ")
    shown = {cell_name(*divmod(cell, 6)): env.symbol(cell) for cell in range(36)}
    words = steps.split()
    seen = [index for index, word in enumerate(words) if word not in shown and word not in ACTIONS]
    assert all(words[index] == shown[words[index - 1]] for index in seen)
    assert tuple(word for word in words if word in ACTIONS) == parsed.actions
    places, _, choice = head.partition(" push ")
    facts = places.split()
    assert facts[::2] == (["P", "X", "O"] if careful else ["P", "X"])
    assert [shown[cell] for cell in facts[1::2]] == facts[::2]
    direction, _, end = choice.split()
    for action in parsed.actions:
        assert env.step(action)[4]["effective"]  # no action walks into a wall
    if parsed.actions[-1] == direction and len(parsed.actions) < min(5, actions_left):
        boxes = env.get_state()["boxes"]
        assert [cell_name(*divmod(cell, 6)) for cell in boxes] == [end]
