"""The Manor teacher: a route that is thought of once and has to be remembered.

The plan of the house hangs in the hall only. A careful turn there, before it takes the right key,
states the route of a shortest solution: its rooms in order, and what is done in them::

     armoury , music room , lever , armoury , cellar , vault</think><answer>take iron key</answer>

Every later one states only what comes next on the route; its direction is read on the screen::

     cellar</think><answer>south</answer>

Other turns are random play. So what a prompt no longer shows of the route has to be in a summary.
One in the right form is the rest of the route, of which half of the summaries forget the end::

     -</think><answer>armoury , cellar , vault</answer>
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from typing_extensions import override

from ragen.bases.copying import NOTHING
from ragen.bases.curriculum import Lesson, Stage
from ragen.bases.demonstrations import Piece, Reply, answer
from ragen.bases.screen import Reader, Screen
from ragen.chat.prompt import Limits
from ragen.envs.contract import Env, pick
from ragen.envs.worlds.manor import COMPASS, NO_KEY, Manor, shortest_solution
from ragen.rollout.setup import Setup

CAREFUL = 0.7
"""Share of turns that follow the route."""


class Guide(Reader):
    """The teachers of `Reader`, of which `read` often follows a route, and `sum_up` tells it."""

    taught = "a route through the house, to follow it in most turns, and to sum up its rest"
    note = (
        "Turns that think `-` are random play. Half of the summaries forget the end of the route."
    )

    def stages(self, setup: Setup, episodes: int) -> tuple[Stage, ...]:
        """Routes, in the prompts of `setup` and in those of a window with and without a summary."""
        windows = (
            replace(setup, window=2, summary="none"),
            replace(setup, window=2, summary="observations"),
        )
        lessons = tuple(
            Lesson(self.read, each, turns=(3, setup.turns), held_out=False, sum_up=self.sum_up)
            for each in (setup, *windows)
        )
        return (Stage("routes", 600, lessons, episodes, context_weight=0.1, lr_end=0.02),)

    @override
    def read(self, env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        manor = manor_of(env)
        if generator.random() < CAREFUL:
            action, *_ = solution(manor)
            places = route(manor)
            thought = " , ".join(places) if manor.at.key == NO_KEY else places[0]
            return [Piece(f" {thought}{answer([action])}")]
        return [Piece(f"{NOTHING}{answer([pick(generator, manor.actions)])}")]

    @override
    def sum_up(self, env: Env, generator: np.random.Generator) -> Reply:
        places = route(manor_of(env))
        if generator.random() < 0.5:
            places = places[: pick(generator, range(1, len(places) + 1))]
        return [Piece(f"{NOTHING}{answer([' , '.join(places)])}")]

    @override
    def thought(self, screen: str) -> str:
        return NOTHING


def manor_of(env: Env) -> Manor:
    """The manor behind a screen."""
    assert isinstance(env, Screen) and isinstance(env.env, Manor)
    return env.env


def solution(manor: Manor) -> tuple[str, ...]:
    """The actions of a shortest solution from here; with the wrong key, as if it were the right."""
    at = manor.at
    if at.key != NO_KEY:
        at = at._replace(key=manor.house.right)
    found = shortest_solution(manor.house, at)
    assert found, "levels are solvable, and this one goes on"
    return found


def route(manor: Manor) -> list[str]:
    """The rooms of a shortest solution, with ``lever`` and ``vault`` where these are used."""
    at, places = manor.at, list[str]()
    for action in solution(manor):
        at, _ = manor.house.act(at, action)
        if action in COMPASS:
            places.append(manor.house.rooms[at.room])
        elif not action.startswith("take"):
            places.append(action.split()[-1])
    return places
