"""Policies turn a prompt into a completion; the rollout knows nothing else about models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar, runtime_checkable

from ragen.core.types import Completion, Prompt, StopReason, fingerprint

T = TypeVar("T")

Place = tuple[int | str, ...]
"""The path of an episode's seeds, its group and its member."""


class Policy(Protocol):
    """π(completion | prompt): a local sampler, a server, or a script."""

    async def complete(self, prompt: Prompt) -> Completion:
        """Draw one completion, with its `fingerprint` where it has ids.

        Nothing that the prompt contains may make it raise another exception.

        Raises:
            NoCompletion: A server failed for good, or the prompt left no room for a reply.
            RagenError: A server refuses every request, or is gone.
        """
        ...


@runtime_checkable
class Seating(Protocol):
    """A policy that can make its completions independent of the order of the requests.

    While it is `ordered`, a request's tokens and logprobs depend on its prompt and seed and on the
    requests of its `seat` before it, but not on when they arrive. Set it while it `is_idle`.
    """

    ordered: bool

    @property
    def is_idle(self) -> bool:
        """True if no seat is taken and no request is open."""
        ...

    @property
    def in_rounds(self) -> bool:
        """True if it waits for a request of each seat before it answers one."""
        ...

    def seat(self, place: Place) -> AbstractContextManager[Policy]:
        """The policy for one episode, from before its environment is made to its end.

        An episode's requests follow each other. `place` is its own, and a fixed order of the
        episodes that are played at once.
        """
        ...


def seated(policy: T, place: Place) -> AbstractContextManager[T | Policy]:
    """A policy for one episode, with a seat if it gives any."""
    return policy.seat(place) if isinstance(policy, Seating) else nullcontext(policy)


@runtime_checkable
class Closable(Protocol):
    """A policy that holds connections or memory until it is closed."""

    async def close(self) -> None:
        """Release them."""
        ...


class NoCompletion(Exception):
    """A policy has no completion for a prompt: the episode ends and is kept as data.

    `stop_reason` is ``"request"`` if a server failed, ``"context"`` without room for a reply.
    """

    def __init__(self, text: str, stop_reason: StopReason = "request") -> None:
        super().__init__(text)
        self.stop_reason = stop_reason


def written_completion(
    text: str, encode: Callable[[str], tuple[int, ...]] | None = None
) -> Completion:
    """A completion that was written, not sampled: its probability is 1 and its logprobs are 0."""
    if encode is None:
        return Completion(None, None, text, "stop", 0)
    ids = encode(text)
    logprobs = (0.0,) * len(ids)
    return Completion(ids, logprobs, text, "stop", 0, fingerprint(ids, logprobs))
