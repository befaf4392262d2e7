"""Environments on a grid: the agent reads a map, coordinates, both or each cell, or sees a picture.

A map is a list of rows, with one symbol for each cell. Marks say what the symbols stand for, such
as ``{"Player": "PX√", "Goal": "G√"}``.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from typing_extensions import override

from ragen.core.pictures import MARK
from ragen.envs.contract import Env, Reading
from ragen.envs.worlds import tiles

Observation: TypeAlias = Literal["grid", "coord", "grid_coord", "named", "picture"]
"""A map of symbols; sizes and (row, column) positions; both; every cell with its name; or a picture
of `tiles`."""
Thoughts: TypeAlias = Literal["free", "state", "transition", "world"]
"""What the rules ask of a thought: nothing, the state before the actions, the state after them, or
both, as in VAGEN (arXiv:2510.16907)."""
Cell: TypeAlias = tuple[int, int]
"""Row and column, from 0 at the top left."""


MOST_VIEWS = 256
"""Maximum number of observations kept for a level."""


class GridEnv(Env):
    """An environment whose state is a map.

    `marks` has three entries, and `letters` has their names in thoughts, in the same order. `named`
    observations leave out the outer wall, which is `border` cells wide, because it never changes.
    `views` holds the texts of the present level so far, by `moving`; drawings where pictures are
    shown, which are larger. All environments that play the level in the same format share it.
    """

    marks: Mapping[str, str]
    letters: str
    observation: Observation
    tile: tiles.Tile
    thoughts: Thoughts
    border = 0
    views: dict[Hashable, Any]

    @property
    @abstractmethod
    def moving(self) -> Hashable:
        """The part of the state that actions change."""

    @abstractmethod
    def rows(self) -> list[str]:
        """The map."""

    def symbol(self, cell: int) -> str:
        """The symbol of a cell; cells are numbered row by row."""
        return "".join(self.rows())[cell]

    def state_key(self) -> str:
        """The map as text."""
        return "\n".join(self.rows())

    def observe(self) -> str:
        """The observation of the present state."""
        return MARK if self.shows_pictures else self._view()

    @override
    def pictures(self) -> Sequence[tiles.Pixels]:
        return [tiles.board(self._view(), self.tile)] if self.shows_pictures else []

    def _view(self) -> Any:
        """The text of the present state; its drawing where a picture is shown."""
        views, moving = self.views, self.moving
        shown = views.get(moving)
        if shown is None:
            if self.shows_pictures:
                shown = self.drawing()
            else:
                shown = observe(self.rows(), self.marks, self.observation, self.border)
            if len(views) < MOST_VIEWS:
                views[moving] = shown
        return shown

    @property
    @override
    def shows_pictures(self) -> bool:
        return self.observation == "picture"

    @override
    def read_thought(self, thought: str) -> Reading | None:
        marks = dict(zip(self.letters, self.marks.values(), strict=True))
        return read_notes(thought, self.rows(), marks, self.actions or ())


def observe(
    rows: Sequence[str], marks: Mapping[str, str], observation: Observation, border: int = 0
) -> str:
    r"""The observation of a map in one of the formats.

    `coord` gives the positions of each mark. `named` leaves out the border; the other cells keep
    the names that they have on the whole map.

    Example:
        >>> observe(["P_", "OG"], {"Player": "P", "Goal": "G"}, "named")
        'a0 P a1 _\nb0 O b1 G'
        >>> observe(["P_", "OG"], {"Player": "P", "Goal": "G"}, "coord")
        'Size: 2 x 2\nPlayer: (0, 0)\nGoal: (1, 1)'
    """
    grid = "\n".join(rows)
    if observation == "grid":
        return grid
    if observation == "named":
        cols = range(border, len(rows[0]) - border)
        lines = [
            " ".join(f"{cell_name(r, c)} {rows[r][c]}" for c in cols)
            for r in range(border, len(rows) - border)
        ]
        return "\n".join(lines)
    lines = [f"Size: {len(rows)} x {len(rows[0])}"]
    for what, symbols in marks.items():
        found = [f"({r}, {c})" for (r, c), symbol in cells_of(rows).items() if symbol in symbols]
        lines.append(f"{what}: {', '.join(found) or 'none'}")
    coordinates = "\n".join(lines)
    return coordinates if observation == "coord" else f"{grid}\n{coordinates}"


def cells_of(rows: Sequence[str]) -> dict[Cell, str]:
    """The symbol of each cell, row by row."""
    return {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}


def cell_name(row: int, col: int) -> str:
    """Row letter and column number."""
    return f"{chr(ord('a') + row)}{col}"


def cell_named(word: str) -> Cell | None:
    """The cell that a word names, on a map of any size; ``None`` where it names none."""
    if not re.fullmatch(r"[a-z][0-9]{1,2}", word):
        return None
    return ord(word[0]) - ord("a"), int(word[1:])


def read_notes(
    thought: str, rows: Sequence[str], marks: Mapping[str, str], actions: Sequence[str]
) -> Reading | None:
    """The facts and the plan of a thought in the embedded models' notation.

    The thought begins with positions (``P b0 G c1``). After a colon come looks and the actions of
    the plan. The last two words of a look are a fact (``b0 c0 O``: from b0, there is a hole at c0).
    Other words in between, such as Sokoban's ``push Right c1 c4``, state no fact. All facts are
    about the map. A thought that does not begin with a letter of `marks` and a cell is prose, and
    gives ``None``. `Reading.f1` compares the positions with those of all marks.

    Example:
        >>> marks = {"P": "P", "G": "G"}  # and the hole is at b0, not a1
        >>> read_notes("P a0 G b1 : a0 a1 O a0 b0 O Down", ["P_", "OG"], marks, ["Down", "Right"])
        Reading(stated=4, true=3, plan=('Down',), f1=1.0)
        >>> read_notes("I am at a0 and go Down", ["P_", "OG"], marks, ["Down", "Right"])
    """
    words, at = thought.split(), cells_of(rows)
    stated = []
    for letter, word in zip(words[::2], words[1::2], strict=False):
        if letter not in marks or (cell := cell_named(word)) is None:
            break
        stated.append((letter, cell))
    if not stated:
        return None
    true = {(letter, cell) for letter in marks for cell in at if at[cell] in marks[letter]}
    facts = [fact in true for fact in stated]
    f1 = 2 * len(true.intersection(stated)) / (len(true) + len(set(stated)))
    looks = words[words.index(":") + 1 :] if ":" in words else []
    facts += [
        at.get(cell) == symbol
        for word, symbol in pairwise(looks)
        if len(symbol) == 1 and symbol != ":" and (cell := cell_named(word)) is not None
    ]
    plan = tuple(word for word in looks if word in actions)
    return Reading(len(facts), sum(facts), plan or None, f1)


def thought_note(parts: Thoughts, letters: str, marks: Iterable[str]) -> str:
    """The sentences of the rules about a thought in parts, if it has any."""
    if parts == "free":
        return ""
    names = {
        "state": ("observation", "reasoning"),
        "transition": ("reasoning", "prediction"),
        "world": ("observation", "reasoning", "prediction"),
    }[parts]
    when = {"observation": "before your actions", "prediction": "after your actions"}
    asked = " and ".join(f"in <{name}> {when[name]}" for name in names if name in when)
    example = " ".join(map(" ".join, zip(letters, ("c1", "d3", "b2"), strict=True)))
    each = ", ".join(map(" ".join, zip(letters, map(str.lower, marks), strict=True)))
    return (
        "\nYour thought, inside <think>, has these parts: "
        f"{''.join(f'<{name}> … </{name}>' for name in names)}. Say where everything is, "
        f"{asked}, as {example}: a letter ({each}) and a cell for each thing. A cell is a row "
        "letter and a column number, and a0 is at the top left."
    )


def format_note(observation: Observation, symbols: str, seen: str) -> str:
    """The sentences of the rules about the state: its symbols or what is seen, and its format."""
    if observation == "picture":
        return f"The state is a picture of the map. {seen}"
    form = {
        "grid": "The state is a map, one row a line.",
        "coord": "The state gives sizes and zero-based (row, column) positions, rows from the top.",
        "grid_coord": "The state is a map, one row a line, followed by zero-based (row, column) "
        "positions, rows from the top.",
        "named": "The state lists each cell: its name (row letter, column number), what is there.",
    }[observation]
    return f"The meaning of each symbol in the state is: {symbols}. {form}"
