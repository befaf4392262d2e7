"""An application of OpenEnv's own library: a walk from a place that the seed chooses to 3."""

from __future__ import annotations

import os
from typing import Any, Literal

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Move(Action):
    move: Literal["left", "right"]


class Place(Observation):
    text: str
    process: int


class Walk(Environment[Move, Place, State]):
    """Walk to 3."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Place:
        self.place = (seed or 0) % 3 - 1
        return self.look()

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Place:
        self.place += 1 if action.move == "right" else -1
        return self.look()

    def look(self) -> Place:
        won, ended = self.place == 3, abs(self.place) == 3
        text = f"You are at {self.place}."
        return Place(text=text, process=os.getpid(), done=ended, reward=float(won))

    @property
    def state(self) -> State:
        return State()


app = create_app(Walk, Move, Place, env_name="walk", max_concurrent_envs=16)
