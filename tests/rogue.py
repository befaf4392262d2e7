"""A small environment that follows the contract, or breaks it in one chosen way.

It has a file of its own so that tests can refer to it as ``tests/rogue.py:Rogue``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import Any

from ragen.core.errors import RagenError
from ragen.envs.contract import Env, Info, State, generators
from tests.limits import Hung, hang


class Rogue(Env):
    """A corridor of five cells, entered at the left end.

    Each step has reward 0.25, and a step to the right from the last cell solves the level. With
    probability `slip`, a step does not move.

    On levels divisible by `every`, `misdeed` happens in the first step, or in the method that its
    name gives.
    """

    goal = "Corridor"

    def __init__(self, misdeed: str = "", every: int = 1, slip: float = 0.0) -> None:
        if misdeed == "refuse":
            raise RagenError("misdeed = refuse is no misdeed")
        if misdeed == "raise in init":
            raise KeyError("no key")
        if misdeed == "hang in init":
            hang()
        self.misdeed, self.every, self.slip = misdeed, every, slip
        self.where, self.level = 0, 0

    @property
    def rules(self) -> str:
        return "Go right."

    @property
    def actions(self) -> tuple[str, ...]:
        return ("Left", "Right")

    def close(self) -> None:
        if self._misbehaves("hang in close"):
            hang()

    def _misbehaves(self, misdeed: str) -> bool:
        return misdeed == self.misdeed and self.level % self.every == 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        _, self.noise = generators(seed, options)
        self.level, self.where = seed or 0, 0
        if self._misbehaves("raise in reset"):
            raise LookupError("no such level")
        if self._misbehaves("hang in reset"):
            hang()
        if self._misbehaves("no observation"):
            return None, {}  # type: ignore[return-value]
        return self._look(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self._fail_in_step()
        before = self.where
        if self.noise.random() >= self.slip:
            self.where = max(0, self.where + (1 if action == "Right" else -1))
        solved = self.where > 4
        info: Any = {"success": solved, "effective": self.where != before}
        reward: Any = 0.25
        if self._misbehaves("nan"):
            reward = float("nan")
        if self._misbehaves("text as reward"):
            reward = "much"
        if self._misbehaves("list as info"):
            info = [1]
        return self._look(), reward, solved, False, info

    def _fail_in_step(self) -> None:
        if self._misbehaves("raise"):
            raise ZeroDivisionError("by zero")
        if self._misbehaves("exit"):
            sys.exit(3)
        if self._misbehaves("exit at once"):
            os._exit(7)
        if self._misbehaves("die"):  # as a bug in C does
            ctypes.string_at(0)
        if self._misbehaves("hang"):
            while True:
                with suppress(Exception):  # a timeout must also stop code that swallows exceptions
                    hang()
                if Hung.happened:
                    break
        if self._misbehaves("hang in C"):
            sum(range(10**12))

    def get_state(self) -> State:
        return {"where": self.where, "level": self.level, "noise": self.noise.bit_generator.state}

    def set_state(self, state: State) -> None:
        _, self.noise = generators(0, None)
        self.where, self.level = state["where"], state["level"]
        self.noise.bit_generator.state = state["noise"]

    def state_key(self) -> str:
        if self._misbehaves("raise in state_key"):
            raise RuntimeError("no key today")
        return self._look()

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        if self._misbehaves("raise in solve"):
            raise RuntimeError("no plan")
        return ["Right"] * min(actions_left, actions_per_turn, 5 - self.where)

    def _look(self) -> str:
        return "." * self.where + "A" + "." * (4 - self.where)


class Unreadable(Rogue):
    """The corridor, with one attribute that raises, ends the program, hangs or is empty."""

    def __init__(self, attribute: str = "reads_thoughts", then: str = "raise") -> None:
        super().__init__()
        self.then, self.attribute = then, attribute

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name == own.get("attribute"):
            if own["then"] == "hang":
                hang()
            if own["then"] == "be empty":
                return ()
            raise SystemExit(3) if own["then"] == "exit" else ZeroDivisionError("by zero")
        return object.__getattribute__(self, name)
