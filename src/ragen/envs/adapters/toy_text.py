"""Gymnasium's toy-text environments in words: their rules, actions and observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Cells = list[list[str]]


@dataclass(frozen=True, slots=True)
class About:
    """The description of an environment; `show` converts an observation to text."""

    goal: str
    rules: str
    actions: tuple[str, ...]
    show: Callable[[Any], str]
    turns: int = 10
    actions_per_turn: int = 5
    success: Literal["reward", "end"] = "reward"


def find(env: Any) -> About | None:
    """The description of a bare environment, if it is one of these."""
    about = TOY_TEXT.get(f"{type(env).__module__}:{type(env).__name__}")
    return None if about is None else about(env)


def _frozen_lake(env: Any) -> About:
    # A move that slips has three transitions, of which the second goes as intended.
    slips = (
        " The ice is slippery: a move goes as intended with probability "
        f"{env.P[0][0][1][0]:.2g}, otherwise to one of its two sides."
        if len(env.P[0][0]) > 1
        else ""
    )
    rules = (
        "Cross the frozen lake from S to G without falling into a hole. P is you, F is ice, H is "
        f"a hole, which ends the game.{slips} Reaching G pays 1. A move off the map does nothing."
    )
    actions = ("Left", "Down", "Right", "Up")
    per_turn = 2 if env.nrow * env.ncol <= 16 else 4
    return About("Cross the frozen lake to G", rules, actions, partial(_lake, env), 10, per_turn)


def _lake(env: Any, position: int) -> str:
    cells = [[bytes(cell).decode() for cell in row] for row in env.desc]
    return _with_player(cells, int(position))


def _with_player(cells: Cells, position: int) -> str:
    cells[position // len(cells[0])][position % len(cells[0])] = "P"
    return "\n".join("".join(row) for row in cells)


def _cliff(env: Any) -> About:
    slips = " The ground is slippery: a move may go to one of its sides." if env.is_slippery else ""
    rules = (
        "Walk from the lower left corner to G, which ends the game. P is you, C is the cliff: "
        "whoever steps on it is back at the start and loses 100. Every other move costs 1. A move "
        f"off the map does nothing.{slips}"
    )
    actions = ("Up", "Right", "Down", "Left")
    return About(
        "Walk to G around the cliff", rules, actions, partial(_cliff_map, env), 5, 5, "end"
    )


def _cliff_map(env: Any, position: int) -> str:
    rows, columns = env.shape
    cells = [["." for _ in range(columns)] for _ in range(rows)]
    cells[-1][1:] = [*("C" * (columns - 2)), "G"]
    return _with_player(cells, int(position))


_PLACES = ("Red", "Green", "Yellow", "Blue")


def _taxi(env: Any) -> About:
    drawn = "\n".join("".join(bytes(cell).decode() for cell in row) for row in env.desc)
    places = ", ".join(
        f"{name} at row {row}, column {column}"
        for name, (row, column) in zip(_PLACES, env.locs, strict=True)
    )
    rules = (
        f"Drive the taxi on a map of 5 rows and 5 columns:\n{drawn}\nThe places are {places}. A | "
        "is a wall, a : can be passed; row 0 is in the north. Go to the passenger, pick them up, "
        "go to the destination and drop them off, which pays 20 and ends the game. Every move "
        "costs 1, a pick-up or drop-off at the wrong place 10."
    )
    actions = ("South", "North", "East", "West", "Pickup", "Dropoff")
    return About(
        "Bring the passenger to the destination", rules, actions, partial(_taxi_places, env), 10, 4
    )


def _taxi_places(env: Any, state: int) -> str:
    row, column, passenger, destination = env.decode(int(state))
    where = "in the taxi" if passenger == len(_PLACES) else f"at {_PLACES[passenger]}"
    return (
        f"taxi at row {row}, column {column}; passenger {where}; destination {_PLACES[destination]}"
    )


def _blackjack(env: Any) -> About:
    rules = (
        "Beat the dealer: get a higher sum of cards without going over 21. Face cards count 10, "
        "an ace 11 where that is not over 21 (a usable ace), else 1. Hit draws a card; over 21 "
        "you lose. Stick ends your turn: the dealer draws to 17 or more. A win pays 1, a draw 0, "
        "a loss -1."
    )
    return About("Beat the dealer at Blackjack", rules, ("Stick", "Hit"), partial(_hand, env), 5, 1)


def _hand(_: Any, observation: tuple[int, int, int]) -> str:
    total, dealer, ace = map(int, observation)
    shows = "an ace" if dealer == 1 else dealer
    return f"your sum {total}{', with a usable ace' if ace else ''}; the dealer shows {shows}"


_WHERE = "gymnasium.envs.toy_text"
TOY_TEXT: dict[str, Callable[[Any], About]] = {
    f"{_WHERE}.frozen_lake:FrozenLakeEnv": _frozen_lake,
    f"{_WHERE}.cliffwalking:CliffWalkingEnv": _cliff,
    f"{_WHERE}.taxi:TaxiEnv": _taxi,
    f"{_WHERE}.blackjack:BlackjackEnv": _blackjack,
}
"""The descriptions of environments, by module and class."""
