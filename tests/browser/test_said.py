"""What the pages of episodes say agrees with what RAGEN means: the same words, the same numbers."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from ragen.algorithms.filters import FILTERS, SCORES
from ragen.core.types import StopReason
from ragen.viewer.episode_page import TRAINED
from tests.browser.visitor import Visitor

ALIKE = {"state_key": "a", "actions_executed": ["Up"]}
"""A turn."""


@pytest.fixture
def said(visitor: Visitor) -> Any:
    """Asks a module of the front end: an expression in which `m` is the module."""
    page = visitor.visit("#/")

    def ask(module: str, expression: str, given: Any = None) -> Any:
        script = f"async (given) => {{ const m = await import('/static/{module}'); {expression} }}"
        return page.evaluate(script, given)

    return ask


def test_every_rule_and_score_of_the_filter_has_its_words(said: Any) -> None:
    rules = said("pages/group.js", "return Object.keys(m.RULES)")
    assert {*rules, "all"} == FILTERS.keys()
    assert said("pages/group.js", "return Object.keys(m.SCORES)") == list(SCORES)


def test_every_end_has_its_words(said: Any) -> None:
    assert set(said("turns.js", "return Object.keys(m.ENDS)")) == set(get_args(StopReason))


def test_tokens_are_coloured_by_what_the_api_tells(said: Any) -> None:
    series = said("tokens.js", "return Object.values(m.COLOURS).map((each) => each.series)")
    assert {*filter(None, series), "return"} == TRAINED.keys()


@pytest.mark.parametrize(
    ("second", "third", "parting"),
    [
        ([ALIKE, ALIKE], [ALIKE, ALIKE], None),
        (
            [ALIKE, {**ALIKE, "actions_executed": ["Left", "Up"]}],
            [ALIKE, ALIKE],
            {"turn": 1, "by": "actions", "counts": [["Up", 2], ["Left, Up", 1]]},
        ),
        (
            [ALIKE, {**ALIKE, "actions_executed": []}],
            [ALIKE, {**ALIKE, "actions_executed": []}],
            {"turn": 1, "by": "actions", "counts": [["nothing", 2], ["Up", 1]]},
        ),
        (  # the same actions led elsewhere: on slippery ice the environment has its own say
            [ALIKE, {**ALIKE, "state_key": "b"}],
            [ALIKE, ALIKE],
            {"turn": 1, "by": "env", "counts": [["a", 2], ["b", 1]]},
        ),
        (
            [ALIKE],
            [ALIKE, ALIKE],
            {"turn": 1, "by": "env", "counts": [["a", 2], ["over", 1]]},
        ),
    ],
)
def test_members_part_at_the_first_difference(
    said: Any, second: list[Any], third: list[Any], parting: dict[str, Any] | None
) -> None:
    episodes = [{"turns": turns} for turns in ([ALIKE, ALIKE], second, third)]
    assert said("turns.js", "return m.partingOf(given)", episodes) == parting


@pytest.mark.parametrize(
    ("asked", "executed", "struck"),
    [
        (["Up", "Down"], ["Up", "Down"], []),
        (
            ["up", "Down"],
            ["Up"],
            ["Down"],
        ),  # in the environment's spelling; no budget for the second
        (["fly", "Up"], ["Up"], ["fly"]),  # no action of the environment
        (["Up", "Up", "Up"], ["Up"], ["Up", "Up"]),
        (["Up"], [], ["Up"]),
    ],
)
def test_what_was_not_executed_is_found(
    said: Any, asked: list[str], executed: list[str], struck: list[str]
) -> None:
    rest = "return m.matched(...given).filter((each) => !each.done).map((each) => each.action)"
    assert said("turns.js", rest, [asked, executed]) == struck
