"""A policy turns a prompt into a completion. That is all the rollout knows of models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from ragen.core.types import Completion, Prompt, StopReason


class Policy(Protocol):
    """π(completion | prompt): a local sampler, a server, or a script."""

    async def complete(self, prompt: Prompt) -> Completion:
        """Draw one completion, with its `fingerprint` where it has ids.

        Must not raise for anything that the prompt may contain.

        Raises:
            NoCompletion: A server failed for good.
        """
        ...


@runtime_checkable
class Closable(Protocol):
    """A policy that holds connections or memory, until it is closed."""

    async def close(self) -> None:
        """Free them."""
        ...


class NoCompletion(Exception):
    """What a policy raises that cannot answer: it ends the episode, which is data.

    Args:
        text: Why, in one line.
        stop_reason: How the episode ends: ``"request"`` where a server failed, ``"context"`` where
            the prompt left no room for a reply.
    """

    def __init__(self, text: str, stop_reason: StopReason = "request") -> None:
        super().__init__(text)
        self.stop_reason = stop_reason


class ScriptedPolicy:
    """Says what it is told to: a list of replies, or a function of the prompt.

    `encode` turns a reply into token ids (its end-of-turn token included); without it completions
    carry text only, as a chat endpoint's do. The reply follows the prompt's prefill. What a script
    says is certain, so its logprobs are 0.

    Example:
        >>> import asyncio
        >>> policy = ScriptedPolicy(["go</think><answer>Up</answer>"])
        >>> asyncio.run(policy.complete(Prompt((), None, 0, 8, 1.0, 0))).text
        'go</think><answer>Up</answer>'
    """

    def __init__(
        self,
        script: Sequence[str] | Callable[[Prompt], str],
        encode: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        self._replies = iter(script) if not callable(script) else None
        self._script = script
        self._encode = encode

    async def complete(self, prompt: Prompt) -> Completion:
        """The next reply of the list (`StopIteration` is the script's bug), or the function's."""
        if self._replies is not None:
            text = next(self._replies)
        else:
            assert callable(self._script)
            text = self._script(prompt)
        return spoken(text, self._encode)


def spoken(text: str, encode: Callable[[str], tuple[int, ...]] | None) -> Completion:
    """A completion that somebody wrote instead of sampling it: certain, so its logprobs are 0."""
    if encode is None:
        return Completion(None, None, text, "stop", 0)
    ids = encode(text)
    logprobs = (0.0,) * len(ids)
    return Completion(ids, logprobs, text, "stop", 0, fingerprint(ids, logprobs))


def fingerprint(token_ids: ArrayLike, logprobs: ArrayLike) -> int:
    """A hash of sampled ids and their logprobs, below 2⁶³, so that it fits into a tensor.

    Every policy that gives ids puts it into its completions where they are sampled. Ids count as 64
    bits, logprobs as float32, the precision that a batch holds them in.

    Example:
        >>> born = fingerprint((8, 9), (-0.5, -0.25))
        >>> born == fingerprint([8, 9], [-0.5, -0.25]), born == fingerprint((9, 8), (-0.5, -0.25))
        (True, False)
    """
    ids, floats = np.asarray(token_ids, dtype="<i8"), np.asarray(logprobs, dtype="<f4")
    assert ids.shape == floats.shape, "every sampled token has one logprob"
    digest = hashlib.blake2b(ids.tobytes() + floats.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
