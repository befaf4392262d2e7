"""The embedded models that see: what their look-ups show, and that they read their boards."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ragen.bases.curriculum import SEE_BOX, SEE_LAKE, SEEN_BOX, SEEN_LAKE, Lesson
from ragen.bases.demonstrations import CELL, Chart, SeenLookup
from ragen.envs.registry import make
from ragen.envs.worlds.grid import GridEnv, cell_name


def tiles_of(env: GridEnv | SeenLookup) -> dict[str, bytes]:
    """The pixels of each cell, by its name."""
    (board,) = env.pictures()
    rows, cols = (length // CELL for length in board.shape[:2])
    cells = board.reshape(rows, CELL, cols, CELL, 3).swapaxes(1, 2)
    return {cell_name(r, c): cells[r, c].tobytes() for r in range(rows) for c in range(cols)}


@pytest.mark.parametrize(("lesson", "name"), [(SEEN_LAKE, SEE_LAKE), (SEEN_BOX, SEE_BOX)])
def test_look_ups_call_a_tile_what_thoughts_in_play_call_it(lesson: Lesson, name: str) -> None:
    lookup, env = lesson.setup.make(), make(name)
    assert isinstance(lookup, SeenLookup) and isinstance(env, GridEnv)
    known: dict[bytes, set[str]] = defaultdict(set)
    for level in range(30):
        lookup.reset(seed=level)
        for cell, symbol in lookup.contents.items():
            known[tiles_of(lookup)[cell]].add(symbol)
    for level in range(30):
        env.reset(seed=level)
        shown, chart = tiles_of(env), Chart(env)
        for number, tile in enumerate(shown.values()):
            known[tile].add(chart.fact(number).split()[1])
        assert shown.keys() == tiles_of(lookup).keys()
    assert len(known) == len(lookup.symbols) and all(len(said) == 1 for said in known.values())
