"""Modules of the front end agree with the package: names, and functions over turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from ragen.algorithms.filters import FILTERS, SCORES
from ragen.core.types import StopReason
from ragen.viewer.episode_page import TRAINED
from tests.browser.visitor import Visitor

SAME: dict[str, Any] = {"state_key": "a", "actions_executed": ["Up"]}
"""A turn that is the same in all episodes of a group, and three that differ from it."""
LEFT, STILL = SAME | {"actions_executed": ["Left", "Up"]}, SAME | {"actions_executed": []}
ELSEWHERE = SAME | {"state_key": "b"}


@pytest.fixture(scope="module")
def call_module(contexts: Any, viewer: str) -> Iterator[Any]:
    """Evaluates a function body in the page, in which `m` is a module of the front end."""
    visitor = Visitor(contexts(), viewer)
    page = visitor.visit("#/")

    def call(module: str, expression: str, given: Any = None) -> Any:
        script = f"async (given) => {{ const m = await import('/static/{module}'); {expression} }}"
        return page.evaluate(script, given)

    yield call
    visitor.close()


def test_names_of_the_package_have_descriptions(call_module: Any) -> None:
    """Rules and scores of the filter, stop reasons, and the series that colour tokens."""
    rules = call_module("pages/group.js", "return Object.keys(m.RULES)")
    assert {*rules, "all"} == FILTERS.keys()
    assert call_module("pages/group.js", "return Object.keys(m.SCORES)") == list(SCORES)
    assert set(call_module("turns.js", "return Object.keys(m.ENDS)")) == set(get_args(StopReason))
    series = call_module("tokens.js", "return Object.values(m.COLOURS).map((each) => each.series)")
    assert {*filter(None, series), "return"} == TRAINED.keys()


@pytest.mark.parametrize("kind", ["ANY", "WHOLE"])
def test_every_axis_has_at_least_three_numbers(call_module: Any, kind: str) -> None:
    """Whatever its ends and however little room there is; whole numbers need a range of two."""
    ends = [(0, 2), (0, 3), (0, 11), (1, 14), (17, 1000), (0, 250_001)]
    if kind == "ANY":
        ends += [(0, 1), (0, 1.02), (0.9965, 0.9983), (-3e-4, 8e-4), (-1e9, 1e9), (5.0, 5.001)]
    axes = [(low, high, room * (high - low)) for low, high in ends for room in (0.1, 0.3, 0.9)]
    script = f"return given.map((axis) => m.ticks(m.{kind}, ...axis))"
    for (low, high, _), numbers in zip(axes, call_module("paint.js", script, axes), strict=True):
        assert 3 <= len(numbers) <= 12 and len(set(numbers)) == len(numbers), (low, high)
        assert low - 1e-9 <= numbers[0] and numbers[-1] <= high * (1 + 1e-9)


PARTINGS: list[tuple[list[Any], list[Any], tuple[str, list[Any]] | None]] = [
    ([SAME, SAME], [SAME, SAME], None),
    ([SAME, LEFT], [SAME, SAME], ("actions", [["Up", 2], ["Left, Up", 1]])),
    ([SAME, STILL], [SAME, STILL], ("actions", [["nothing", 2], ["Up", 1]])),
    # The same actions led to another state, as on slippery ice.
    ([SAME, ELSEWHERE], [SAME, SAME], ("env", [["a", 2], ["b", 1]])),
    ([SAME], [SAME, SAME], ("env", [["a", 2], ["over", 1]])),
]


def test_episodes_of_a_group_part_at_the_first_difference(call_module: Any) -> None:
    for second, third, parting in PARTINGS:
        episodes = [{"turns": turns} for turns in ([SAME, SAME], second, third)]
        expected = parting and {"turn": 1, "by": parting[0], "counts": parting[1]}
        assert call_module("turns.js", "return m.partingOf(given)", episodes) == expected


MATCHES = [
    (["Up", "Down"], ["Up", "Down"], []),
    (["up", "Down"], ["Up"], ["Down"]),  # in the environment's spelling; one is over the budget
    (["fly", "Up"], ["Up"], ["fly"]),  # no action of the environment
    (["Up", "Up", "Up"], ["Up"], ["Up", "Up"]),
    (["Up"], [], ["Up"]),
]


def test_actions_that_were_not_executed_are_found(call_module: Any) -> None:
    rest = "return m.matched(...given).filter((each) => !each.done).map((each) => each.action)"
    for requested, executed, struck in MATCHES:
        assert call_module("turns.js", rest, [requested, executed]) == struck
