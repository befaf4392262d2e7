"""Breadth-first search for the shortest way from a state of an environment to its goal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Where = TypeVar("Where", bound=Hashable)
Action = TypeVar("Action")


def shortest_path(
    start: Where,
    actions: Sequence[Action],
    after: Callable[[Where, Action], Where],
    is_goal: Callable[[Where], bool],
) -> tuple[Action, ...] | None:
    """A shortest sequence of actions from `start` to a goal; ``None`` if there is none.

    `after` is the state after an action. Of several shortest sequences, the result is the first
    that tries the actions of each state in their order.
    """
    came_from: dict[Where, tuple[Where, Action] | None] = {start: None}
    frontier = [start]
    for here in frontier:  # which grows meanwhile
        if is_goal(here):
            path = []
            while (back := came_from[here]) is not None:
                here, action = back
                path.append(action)
            return tuple(reversed(path))
        for action in actions:
            there = after(here, action)
            if there not in came_from:
                came_from[there] = here, action
                frontier.append(there)
    return None
