"""Environments that show pictures: a corridor that is seen and not read."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from ragen.envs.contract import Info
from tests.rogue import Rogue


class Seen(Rogue):
    """The corridor as a picture of five cells; the player's is white, the others are black.

    From the middle on, a second picture shows the level as a colour.
    """

    name = "seen"
    goal = "Corridor"
    rules = "Go right. The picture shows you as a white cell."  # type: ignore[assignment]

    def _look(self) -> str:
        return "You see <image>." if self.where < 2 else "<image><image>"

    def state_key(self) -> str:
        return str(self.where)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self.action_index(action)
        return super().step(action)

    def pictures(self) -> Any:
        cells = np.zeros((4, 20), np.uint8)
        cells[:, 4 * self.where : 4 * self.where + 4] = 255
        level = Image.new("RGB", (4, 4), (self.level, 0, 0))
        return [cells] if self.where < 2 else [cells, level]


class SeenLater(Seen):
    """The same, asynchronous."""

    async def pictures(self) -> Any:
        return super().pictures()
