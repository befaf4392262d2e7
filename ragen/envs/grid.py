"""How worlds on a grid are shown: as a map, as coordinates, as both, or cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

Observation: TypeAlias = Literal["grid", "coord", "grid_coord", "named"]
"""A map of symbols; sizes and (row, column) of what matters; both; each cell with its name."""
Cell: TypeAlias = tuple[int, int]
"""Row and column, from 0 at the top left."""


def observe(
    rows: Sequence[str],
    places: Mapping[str, Sequence[Cell]],
    observation: Observation,
    border: int = 0,
) -> str:
    r"""A grid in one of the formats.

    Args:
        rows: The map, one string a row, one symbol a cell.
        places: What `coord` tells, such as ``{"Player": [(0, 0)]}``.
        observation: The format.
        border: Width of the outer wall, which `named` leaves out (it never changes). The names
            of the other cells stay those of the whole map.

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


def format_note(observation: Observation) -> str:
    """A sentence for the rules that says how the state is written."""
    return {
        "grid": "The state is a map, one row a line.",
        "coord": "The state gives sizes and zero-based (row, column) positions, rows from the top.",
        "grid_coord": "The state is a map, one row a line, followed by zero-based (row, column) "
        "positions, rows from the top.",
        "named": "The state lists each cell: its name (row letter, column number), what is there.",
    }[observation]
