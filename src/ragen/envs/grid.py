"""Environments on a grid: observations as a map, as coordinates, as both, or cell by cell."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from ragen.envs.contract import Reading

Observation: TypeAlias = Literal["grid", "coord", "grid_coord", "named"]
"""A map of symbols; sizes and (row, column) positions; both; every cell with its name."""
Cell: TypeAlias = tuple[int, int]
"""Row and column, from 0 at the top left."""


def observe(
    rows: Sequence[str],
    places: Mapping[str, Sequence[Cell]],
    observation: Observation,
    border: int = 0,
) -> str:
    r"""The observation of a grid in one of the formats.

    `rows` is the map, one string for each row and one symbol for each cell. `places` are the
    positions of `coord`, such as ``{"Player": [(0, 0)]}``. `named` leaves out the outer wall,
    `border` cells wide, because it never changes; the other cells keep the names that they have on
    the whole map.

    Example:
        >>> observe(["P_", "OG"], {"Player": [(0, 0)], "Goal": [(1, 1)]}, "named")
        'a0 P a1 _\nb0 O b1 G'
        >>> observe(["P_", "OG"], {"Player": [(0, 0)], "Goal": [(1, 1)]}, "coord")
        'Size: 2 x 2\nPlayer: (0, 0)\nGoal: (1, 1)'
    """
    grid = "\n".join(rows)
    if observation == "grid":
        return grid
    if observation == "named":
        return "\n".join(
            " ".join(
                f"{cell_name(r, c)} {rows[r][c]}" for c in range(border, len(rows[0]) - border)
            )
            for r in range(border, len(rows) - border)
        )
    lines = [f"Size: {len(rows)} x {len(rows[0])}"]
    for what, cells in places.items():
        lines.append(f"{what}: {', '.join(f'({r}, {c})' for r, c in cells) or 'none'}")
    coordinates = "\n".join(lines)
    return coordinates if observation == "coord" else f"{grid}\n{coordinates}"


def cell_name(row: int, col: int) -> str:
    """Row letter and column number.

    Example:
        >>> cell_name(1, 3)
        'b3'
    """
    return f"{chr(ord('a') + row)}{col}"


def cell_named(word: str) -> Cell | None:
    """The cell that a word names, on a map of any size; ``None`` where it names none.

    Example:
        >>> cell_named("b3"), cell_named("Right")
        ((1, 3), None)
    """
    if not re.fullmatch(r"[a-z][0-9]{1,2}", word):
        return None
    return ord(word[0]) - ord("a"), int(word[1:])


def read_notes(
    thought: str,
    rows: Sequence[str],
    places: Mapping[str, Collection[Cell]],
    actions: Sequence[str],
) -> Reading | None:
    """The facts and the plan of a thought in the embedded models' notation.

    The thought begins with positions (``P b0 G c1``). After a colon come looks and the actions of
    the plan. The last two words of a look are a fact (``b0 c0 O``: from b0, there is a hole at c0).
    Other words in between, such as Sokoban's ``push Right c1 c4``, state no fact. All facts are
    about the map before the turn. A thought that does not begin with a symbol and a cell is prose,
    and gives ``None``. `places` are the cells of each symbol that may come before the colon.

    Example:
        >>> places = {"P": [(0, 0)], "G": [(1, 1)]}  # and the hole is at b0, not a1
        >>> read_notes("P a0 G b1 : a0 a1 O a0 b0 O Down", ["P_", "OG"], places, ["Down", "Right"])
        Reading(stated=4, true=3, plan=('Down',))
        >>> read_notes("I am at a0 and go Down", ["P_", "OG"], places, ["Down", "Right"])
    """
    words = thought.split()
    facts = []
    for symbol, word in zip(words[::2], words[1::2], strict=False):
        if symbol not in places or (cell := cell_named(word)) is None:
            break
        facts.append(cell in places[symbol])
    if not facts:
        return None
    looks = words[words.index(":") + 1 :] if ":" in words else []
    at = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    facts += [
        at.get(cell) == symbol
        for word, symbol in pairwise(looks)
        if len(symbol) == 1 and symbol != ":" and (cell := cell_named(word)) is not None
    ]
    plan = tuple(word for word in looks if word in actions)
    return Reading(len(facts), sum(facts), plan or None)


def format_note(observation: Observation) -> str:
    """The sentence of the rules that describes the format of the state."""
    return {
        "grid": "The state is a map, one row a line.",
        "coord": "The state gives sizes and zero-based (row, column) positions, rows from the top.",
        "grid_coord": "The state is a map, one row a line, followed by zero-based (row, column) "
        "positions, rows from the top.",
        "named": "The state lists each cell: its name (row letter, column number), what is there.",
    }[observation]
