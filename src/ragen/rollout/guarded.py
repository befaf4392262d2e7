"""The guarded environment: every call of user code behind the boundary, every answer checked."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ragen.config.keys import BUDGETS
from ragen.core.pictures import PLACE, Picture
from ragen.core.user_code import (
    Stopwatch,
    UserCodeError,
    boundary,
    can_interrupt,
    hold_timer,
    release_timer,
)
from ragen.core.waiting import in_thread
from ragen.envs import answers
from ragen.envs.contract import Env, Reading
from ragen.envs.registry import CLOSE_S, close_env

T = TypeVar("T")


class GuardedEnv:
    """An environment whose calls cannot raise anything but `UserCodeError`.

    Every method but `close` raises it where the environment raises, takes longer than `timeout_s`
    (``None`` sets no limit), or returns a value of the wrong kind or a text that is too long. The
    calls of an environment that `waits` are made in threads, by `call`.
    `stopwatch` adds up the time of all calls. `rules`, `goal` and `actions` are the texts after the
    last `reset`, because they may depend on the level. `observation`, `terminated`, `truncated` and
    `info` are the answers to the last call, as plain values. `pictures` are those at the
    `ragen.core.pictures.PLACE`s of the observation.
    """

    def __init__(
        self,
        make: Callable[[], Env],
        timeout_s: float | None,
        stopwatch: Stopwatch | None = None,
        waits: bool = False,
    ) -> None:
        self.waits = waits
        self._timeout_s = timeout_s
        self._stopwatch = stopwatch or Stopwatch()
        self._step = self._calling("step")
        self.observation = ""
        self.pictures: tuple[Picture, ...] = ()
        self.terminated, self.truncated = False, False
        self.info: dict[str, Any] = {}
        with self._calling("being made"):
            self.env = make()
        try:
            with self._calling("being made"):
                self._keep_texts("being made")
                self.tools = answers.tools(self.env.tools)
                self._draws = bool(self.env.draws)
                self.reads_thoughts = bool(self.env.reads_thoughts)
                self.shows_pictures = bool(self.env.shows_pictures)
        except BaseException:
            close_env(self.env, timeout_s, self._stopwatch)
            raise
        self._release: Callable[[], None] = lambda: None
        if can_interrupt():
            hold_timer()
            self._release = release_timer

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that calls this environment: in a thread, if the environment waits.

        If the caller is cancelled, the call in the thread is made to end first.
        """
        if not self.waits:
            return function(*arguments)
        work = in_thread(function, *arguments)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self.env.interrupt()
            await asyncio.wait({work}, timeout=CLOSE_S)
            if work.done() and not work.cancelled():
                work.exception()  # marks it as seen, so that asyncio does not report it
            raise

    def reset(self, level_seed: int, noise_seed: int) -> str:
        """Begin an episode and return the first observation."""
        with self._calling("reset"):
            answer = self.env.reset(seed=level_seed, options={"noise_seed": noise_seed})
            observation, info = _parts(answer, "reset", 2)
            self._keep_texts("reset")
            self._observe(observation, "reset")
            self.info = answers.info(info, "reset")
        self.terminated, self.truncated = False, False
        return self.observation

    def step(self, action: str) -> float:
        """Carry out one action and return its reward."""
        with self._step:
            answer = self.env.step(action)
            observation, reward, terminated, truncated, info = _parts(answer, "step", 5)
            earned = answers.reward(reward)
            self._observe(observation, "step")
            self.info = answers.info(info, "step")
            self.terminated = answers.flag(terminated, "step", "terminated")
            self.truncated = answers.flag(truncated, "step", "truncated")
            if self.terminated and "success" not in self.info:
                raise UserCodeError(
                    "step ended the episode without info['success']: a bool is expected"
                )
        return earned

    def restore(self, state: Mapping[str, Any], observation: str) -> None:
        """Restore a snapshot of the present level, and the observation that belongs to it.

        The pictures are read anew from the restored environment.
        """
        with self._calling("set_state"):
            # A copy, because the environment may keep the object.
            self.env.set_state(copy.deepcopy(dict(state)))
            if self.shows_pictures:
                self.pictures = answers.pictures(self.env.pictures())
            if (places := observation.count(PLACE)) != len(self.pictures):
                raise UserCodeError(
                    f"pictures returned {len(self.pictures)} after set_state, where the recorded "
                    f"observation has {places}: its code or its parameters have changed since"
                )
        self.observation, self.info = observation, {}
        self.terminated, self.truncated = False, False

    def budgets(self) -> dict[str, int]:
        """The budgets of its episodes, by the keys of the section ``env``."""
        with self._calling("its budgets"):
            return {name: getattr(self.env, name) for name in BUDGETS}

    def prompt_style(self) -> str | None:
        """The style of prompts that it asks for, if any."""
        with self._calling("its prompt_style"):
            return self.env.prompt_style

    def read_thought(self, thought: str) -> Reading | None:
        """The environment's reading of a thought about the present state."""
        with self._calling("read_thought"):
            return answers.reading(self.env.read_thought(thought))

    def state(self) -> tuple[str, dict[str, Any]]:
        """The state key and an exact snapshot."""
        with self._calling("state_key"):
            key = answers.text(self.env.state_key(), "state_key", "key")
        with self._calling("get_state"):
            # A copy, because the environment may change the object.
            return key, answers.json_copy(self.env.get_state(), "get_state", "state")

    def drawing(self) -> tuple[str, ...] | None:
        """The drawing of the present state, ``None`` where the environment draws none."""
        if not self._draws:
            return None
        with self._calling("drawing"):
            return answers.drawing(self.env.drawing())

    def _observe(self, observation: Any, call: str) -> None:
        self.observation = answers.text(observation, call, "observation")
        if self.shows_pictures:
            self.pictures = answers.pictures(self.env.pictures())
            self.observation = answers.with_places(self.observation, self.pictures, call)

    def _calling(self, call: str) -> boundary:
        return boundary(call, self._timeout_s, self._stopwatch)

    def _keep_texts(self, call: str) -> None:
        self.rules = answers.text(self.env.rules, call, "rules")
        self.goal = answers.text(self.env.goal, call, "goal")
        self.actions = answers.action_names(self.env.actions, call)

    def close(self) -> None:
        """Let the environment free its resources; a failure here does not fail the episode."""
        close_env(self.env, self._timeout_s, self._stopwatch)
        self._release()
        self._release = lambda: None


def _parts(answer: Any, call: str, number: int) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or len(answer) != number:
        raise UserCodeError(
            f"{call} returned {type(answer).__name__}: a tuple of {number} is expected"
        )
    return answer
