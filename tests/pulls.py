"""Environments of a few pulls of two arms, which have more than one turn and can be restored.

They have a file of their own so that tests can refer to them as ``tests/pulls.py:Luck``.
"""

from __future__ import annotations

from typing import Any

from ragen.envs.contract import Env, Info, Options, State, generators


class Pulls(Env):
    """Three pulls; Phoenix pays 1, and three of it are a success."""

    goal = "Pulls"
    rules = "Pull an arm."
    actions = ("Dragon", "Phoenix")
    max_turns = max_actions = 3
    actions_per_turn = 1

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        _, self.noise = generators(seed, options)
        self.pulls = self.wins = 0
        return "0 pulls", {}

    def pays(self) -> float:
        return 1.0

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        won = action == "Phoenix"
        self.pulls, self.wins = self.pulls + 1, self.wins + won
        info = {"success": self.wins == 3, "effective": True}
        return f"{self.pulls} pulls", self.pays() * won, self.pulls == 3, False, info

    def get_state(self) -> State:
        return {"pulls": self.pulls, "wins": self.wins}

    def set_state(self, state: Any) -> None:
        self.pulls, self.wins = state["pulls"], state["wins"]

    def state_key(self) -> str:
        return f"{self.pulls} {self.wins}"


class Luck(Pulls):
    """Phoenix pays with probability ½."""

    def pays(self) -> float:
        return float(self.noise.random() < 0.5)

    def get_state(self) -> State:
        return super().get_state() | {"noise": self.noise.bit_generator.state}

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.noise.bit_generator.state = state["noise"]


class Forgetful(Pulls):
    """It has no way back."""

    def set_state(self, state: Any) -> None:
        raise NotImplementedError("no way back")
