"""What the samplers share: token counts, the record of a completion, the task that drives requests.

Loads no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ragen.core.metrics import Metrics, mean
from ragen.core.types import Completion
from ragen.rollout.policies import fingerprint

QUIET_ROUNDS = 4
"""Rounds of the event loop without a new request after which the next forward begins.

An episode whose environment answers at once sends its next request within them, through the
rollout's own awaits."""


@dataclass(slots=True)
class Stats:
    """Token counts so far: prompt tokens read, prompt tokens found in the cache, tokens sampled.

    Example:
        >>> Stats(prefilled=30, reused=10).metrics()["rollout/prefix_cache_hit_fraction"].value
        0.25
    """

    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    forwards: int = 0

    def metrics(self) -> Metrics:
        """The share of prompt tokens found in the cache; empty before the first prompt."""
        prompts = self.prefilled + self.reused
        if not prompts:
            return {}
        return {"rollout/prefix_cache_hit_fraction": mean(self.reused / prompts, prompts)}


def completion_of(
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    end_ids: Container[int],
    decode: Callable[[Sequence[int]], str],
    version: int,
) -> Completion:
    """The record of sampled tokens: its text leaves the end token out, its fingerprint is set here.

    Example:
        >>> completion = completion_of((8, 9, 2), (-0.5, -0.25, -0.125), {2}, str, 3)
        >>> completion.text, completion.finish_reason
        ('(8, 9)', 'stop')
    """
    ended = token_ids[-1] in end_ids
    return Completion(
        token_ids,
        logprobs,
        decode(token_ids[:-1] if ended else token_ids),
        "stop" if ended else "length",
        version,
        fingerprint(token_ids, logprobs),
    )


class Driver:
    """A task that samples while there are requests, and never leaves one without an answer.

    `drive` samples until no request is open (`is_open`), then returns. `abandon` drops all requests
    and fails them with an error, or cancels them if it is ``None``.
    """

    def __init__(
        self,
        drive: Callable[[], Coroutine[Any, Any, None]],
        is_open: Callable[[], bool],
        abandon: Callable[[BaseException | None], None],
    ) -> None:
        self._drive, self._is_open, self._abandon = drive, is_open, abandon
        self._task: asyncio.Task[None] | None = None

    def ensure(self) -> None:
        """Make sure that the task runs in the current event loop; call before adding a request."""
        loop = asyncio.get_running_loop()
        if self._task is not None and self._task.get_loop() is not loop:
            self._task = None  # left behind by a loop that was torn down
            self._abandon(None)
        if self._task is None:
            self._start(loop)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._drive())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task is not self._task:
            return
        self._task = None
        if task.cancelled():
            self._abandon(None)
        elif (error := task.exception()) is not None:
            self._abandon(error)
        elif self._is_open():  # a request came between the task's last look and its end
            self._start(task.get_loop())


def fail(answers: Iterable[asyncio.Future[Any]], error: BaseException | None) -> None:
    """Give every answer that is still awaited an error, or cancel it if there is none."""
    for answer in answers:
        if answer.done() or answer.get_loop().is_closed():
            continue
        if error is None:
            answer.cancel()
        else:
            answer.set_exception(error)
