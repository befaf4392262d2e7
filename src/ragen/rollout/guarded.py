"""The guarded environment: every call of user code behind the boundary, every answer checked."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from reprlib import repr as shortened
from typing import Any

from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.contract import Env, Reading, is_picture


class Stopwatch:
    """A context manager that adds up the seconds spent inside in `seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


class GuardedEnv:
    """An environment whose calls cannot raise anything but `UserCodeError`.

    Every method raises `UserCodeError` where the environment raises, takes longer than `timeout_s`
    or returns a value of the wrong kind. `timeout_s` of ``None`` sets no limit. `stopwatch` adds up
    the time of all calls.

    Attributes:
        env: The environment itself.
        rules, goal, actions: Its texts after the last `reset`: they may depend on the level.
        observation, terminated, truncated, info: What the last call returned.
    """

    def __init__(
        self, make: Callable[[], Env], timeout_s: float | None, stopwatch: Stopwatch | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._stopwatch = stopwatch or Stopwatch()
        self.observation = ""
        self.terminated, self.truncated = False, False
        self.info: dict[str, Any] = {}
        with self._calling("being made"):
            self.env = make()
            self.rules, self.goal, self.actions = self.env.rules, self.env.goal, self.env.actions

    def reset(self, level_seed: int, noise_seed: int) -> str:
        """Begin an episode and return the first observation."""
        with self._calling("reset"):
            observation, info = self.env.reset(seed=level_seed, options={"noise_seed": noise_seed})
            self.rules, self.goal, self.actions = self.env.rules, self.env.goal, self.env.actions
        self._keep("reset", observation, info)
        return self.observation

    def step(self, action: str) -> float:
        """Carry out one action and return its reward."""
        with self._calling("step"):
            observation, reward, terminated, truncated, info = self.env.step(action)
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise UserCodeError(f"step returned {reward!r} as reward: a finite number is expected")
        self._keep("step", observation, info)
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        return float(reward)

    def restore(self, state: Mapping[str, Any], observation: str) -> None:
        """Restore a snapshot of the present level, and the observation that belongs to it."""
        with self._calling("set_state"):
            # A copy, because the environment may keep the object.
            self.env.set_state(copy.deepcopy(dict(state)))
        self.observation, self.info = observation, {}
        self.terminated, self.truncated = False, False

    def read_thought(self, thought: str) -> Reading | None:
        """What the thought says about the present state."""
        with self._calling("read_thought"):
            reading = self.env.read_thought(thought)
        if not (reading is None or isinstance(reading, Reading)):
            kind = type(reading).__name__
            raise UserCodeError(f"read_thought returned {kind}: a Reading or None is expected")
        return reading

    def state(self) -> tuple[str, dict[str, Any]]:
        """The state key and an exact snapshot."""
        with self._calling("state_key"):
            key = str(self.env.state_key())
        with self._calling("get_state"):
            # A copy, because the environment may change the object; it also shows what is no JSON.
            return key, json.loads(json.dumps(self.env.get_state()))

    def picture(self) -> tuple[str, ...] | None:
        """The picture of the present state, ``None`` where the environment draws none."""
        if not self.env.draws:
            return None
        with self._calling("picture"):
            rows = self.env.picture()
        if not is_picture(rows):
            raise UserCodeError(
                f"picture returned {shortened(rows)}: rows of one length are expected, of single "
                "printable characters"
            )
        return None if rows is None else tuple(rows)

    @contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        with self._stopwatch, boundary(call, self._timeout_s):
            yield

    def _keep(self, call: str, observation: Any, info: Any) -> None:
        if not isinstance(observation, str):
            kind = type(observation).__name__
            raise UserCodeError(f"{call} returned {kind} as observation: text is expected")
        if not isinstance(info, dict):
            kind = type(info).__name__
            raise UserCodeError(f"{call} returned {kind} as info: a dict is expected")
        self.observation, self.info = observation, info

    def close(self) -> None:
        """Let the environment free its resources; a failure here does not fail the episode."""
        with suppress(UserCodeError), self._calling("close"):
            self.env.close()
