"""Environments that wait in each step: the same game in every form."""

import asyncio
import os
import time
from typing import Any, ClassVar

from ragen.core.user_code import seconds_left
from ragen.envs.contract import Env, Info, Options, State
from ragen.envs.tools import ToolEnv, tool
from ragen.envs.worlds.bandit import Bandit

Step = tuple[str, float, bool, bool, Info]


class Count(Env):
    """Counts three steps; each waits `delay` seconds, times 1 to 3 by level. Does not wait itself.

    Its info has the process, and how many steps at most waited together in it so far.
    """

    goal = "Count"
    rules = "Count to three."
    actions = ("on",)
    max_turns = max_actions = 3
    actions_per_turn = 1
    now: ClassVar[int] = 0
    together: ClassVar[int] = 0

    def __init__(self, delay: float = 0.0, deed: str = "") -> None:
        self.delay, self.deed = delay, deed
        self.number = self.level = 0

    def begin(self, seed: int | None) -> tuple[str, Info]:
        self.level, self.number = seed or 0, 0
        return f"level {self.level}", {}

    def enter(self) -> float:
        Count.now += 1
        Count.together = max(Count.together, Count.now)
        if self.deed == "raise" and self.level % 2:
            raise KeyError("no such page")
        return 60.0 if self.deed == "hang" and self.level % 2 else self.delay * (self.level % 3 + 1)

    def leave(self) -> Step:
        self.number += 1
        over = self.number == 3
        info = {"success": over, "effective": True}
        info |= {"process": os.getpid(), "together": Count.together}
        return f"{self.number} of 3", 1.0, over, False, info

    def get_state(self) -> State:
        return {"number": self.number}

    def state_key(self) -> str:
        return str(self.number)

    def reset(self, *, seed: int | None = None, options: Options = None) -> Any:
        return self.begin(seed)

    def set_state(self, state: State) -> Any:
        self.number = state["number"]

    def step(self, action: str) -> Any:
        self.action_index(action)
        try:
            time.sleep(self.enter())
        finally:
            Count.now -= 1
        return self.leave()


class InWorkers(Count):
    waits = "workers"


class Odd(Count):
    waits = "sometimes"  # type: ignore[assignment]


class InThreads(Count):
    waits = "threads"

    def step(self, action: str) -> Step:
        self.action_index(action)
        try:
            wanted = self.enter()
            left = seconds_left(wanted)
            time.sleep(wanted if left is None else left)
            if left is not None and left < wanted:
                raise TimeoutError
        finally:
            Count.now -= 1
        return self.leave()


class Asynchronous(Count):
    async def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        await asyncio.sleep(0)
        return self.begin(seed)

    async def set_state(self, state: State) -> None:
        await self.reset(seed=self.level)  # its own methods are as they were written
        self.number = state["number"]

    async def step(self, action: str) -> Step:
        self.action_index(action)
        try:
            await asyncio.sleep(self.enter())
        finally:
            Count.now -= 1
        return self.leave()


class Arms(Bandit):
    """The two arms of Bandit, which answer after a while."""

    waits = "threads"

    def step(self, action: str) -> Step:
        time.sleep(0.3)
        return super().step(action)


class Library(ToolEnv):
    """Ask once, then answer."""

    goal = rules = "Find the word."

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        self.asked = 0
        return "Which word?", {}

    @tool
    async def search(self, page: int) -> str:
        """Search a page."""
        await asyncio.sleep(0)
        self.asked += 1
        return f"page {page}: owl"

    async def answer(self, text: str) -> Step:
        await asyncio.sleep(0)
        return "over", 1.0, True, False, {"success": text == "owl", "effective": True}

    def get_state(self) -> State:
        return {"asked": self.asked}

    def set_state(self, state: State) -> None:
        self.asked = state["asked"]

    def state_key(self) -> str:
        return str(self.asked)
