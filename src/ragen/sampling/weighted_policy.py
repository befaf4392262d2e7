"""The common parts of samplers: token counts, publications, the task that answers requests."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.metrics import Metrics, mean
from ragen.core.types import Completion, FinishReason, Prompt, fingerprint

if TYPE_CHECKING:  # players do without torch
    from transformers import PreTrainedModel

    from ragen.chat.chat import Chat

QUIET_ROUNDS = 4
"""Rounds of the event loop without a new request after which the next forward begins.

An episode whose environment answers at once sends its next request within them, through the
rollout's own awaits."""


STOP_IDS = 128
"""Maximum number of tokens at which vLLM can stop a completion."""


async def quiet(arrived: Sized) -> None:
    """Wait until no episode sends another request right away; `arrived` are those so far."""
    rounds = 0
    while rounds < QUIET_ROUNDS:
        before = len(arrived)
        await asyncio.sleep(0)
        rounds = rounds + 1 if len(arrived) == before else 0


@dataclass(slots=True)
class Stats:
    """Counts so far: prompt tokens that were read or found in the cache, and sampled tokens.

    `forwards` counts the model's forwards; only the local sampler counts them.

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


class WeightedPolicy:
    """A `Policy` whose weights are published to it: the local sampler, vLLM, a server.

    A completion ends at the first token of the chat's `end_ids` or of its other `control_ids`,
    which it includes: nothing may be sampled after a control token. Otherwise it has
    `Prompt.max_tokens` tokens. The caller makes sure that a prompt and its completion have at most
    `max_length` tokens together. Completions carry the `version` of the weights. `stats` count
    tokens since they were last reset. `source` names the origin of the first weights in messages.
    """

    reads_pictures = False
    """A policy whose prompts may show pictures."""

    def __init__(self, chat: Chat, max_length: int) -> None:
        self.version = 0
        self.source = "the model"
        self.stats = Stats()
        self.max_length = max_length
        self.end_ids = sorted(chat.end_ids)
        self.last_ids = frozenset((*chat.end_ids, *chat.control_ids))
        self.stop_ids = [*self.end_ids, *sorted(self.last_ids - {*chat.end_ids})][:STOP_IDS]
        self._decode = chat.decode

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion: the next tokens of `prompt.token_ids`.

        Temperature 0 takes the most likely token and reports its logprob at temperature 1. The
        logprobs belong to the distribution that is actually drawn from.

        Raises:
            NotFiniteError: The logits are not finite.
        """
        raise NotImplementedError

    async def publish(self, model: PreTrainedModel, version: int) -> None:
        """Sample with these weights from now on, also while completions are open."""
        self.push(model)
        self.version = version

    def push(self, model: PreTrainedModel) -> None:
        """Take over the weights, or the adapter, and drop all keys and values of earlier ones."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop all keys and values."""
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """Metrics of the tokens since `stats` was reset; only what repeats with the run."""
        return self.stats.metrics()

    def rest(self) -> None:
        """Free memory that only sampling needs, until the next completion or publication."""

    async def close(self) -> None:
        """Free its resources."""

    def _checked_ids(self, prompt: Prompt) -> tuple[int, ...]:
        ids = prompt.token_ids
        assert ids, "the sampler needs token ids"
        if prompt.pictures and not self.reads_pictures:
            raise RagenError(
                "the environment shows pictures, which only RAGEN's own sampler reads: set "
                'rollout.sampler = "local"'
            )
        assert prompt.max_tokens > 0 and prompt.temperature >= 0
        assert len(ids) + prompt.max_tokens <= self.max_length, "over the model's length"
        return ids

    def _completion(
        self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], version: int | None = None
    ) -> Completion:
        """The record of sampled tokens; the text leaves the end token out.

        The weights of `version`, by default the present one, sampled the first token. All tokens
        after a control token are cut off, because not all control tokens fit into `stop_ids`.
        """
        for count, token in enumerate(token_ids, 1):
            if token in self.last_ids:
                token_ids, logprobs = token_ids[:count], logprobs[:count]
                break
        # A row of logits with a NaN or ∞ has no finite logprob. Here all samplers are checked, once
        # per completion, on numbers that are on the host anyway.
        if not math.isfinite(sum(logprobs)):
            raise NotFiniteError(f"the logits of {self.source}")
        ended = token_ids[-1] in self.end_ids
        finish: FinishReason = "control" if token_ids[-1] in self.last_ids else "length"
        return Completion(
            token_ids,
            logprobs,
            self._decode(token_ids[:-1] if ended else token_ids),
            "stop" if ended else finish,
            self.version if version is None else version,
            fingerprint(token_ids, logprobs),
        )


class QueuedPolicy(WeightedPolicy, ABC):
    """A policy with a task that samples while requests are open, and leaves none unanswered."""

    def __init__(self, chat: Chat, max_length: int) -> None:
        super().__init__(chat, max_length)
        self._open: dict[Any, asyncio.Future[Completion]] = {}  # sent and not answered
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def _send(self, prompt: Prompt) -> Any:
        """Queue a request; returns its key in `_open`."""

    @abstractmethod
    async def _drive(self) -> None:
        """Answer requests (`_answer`) until none is open."""

    @abstractmethod
    def _drop(self, requests: Iterable[Any]) -> None:
        """Stop sampling requests that were cancelled or failed."""

    @override
    async def complete(self, prompt: Prompt) -> Completion:
        return await self._answered(self._send, prompt)

    async def _answered(self, send: Callable[..., Any], *what: Any) -> Completion:
        loop = asyncio.get_running_loop()
        if self._task is not None and self._task.get_loop() is not loop:
            self._task = None  # left behind by a loop that was torn down
            self._abandon(None)
        if self._task is None:
            self._launch(loop)
        request, answer = send(*what), loop.create_future()
        self._open[request] = answer
        try:
            completion: Completion = await answer
            return completion
        finally:
            if self._open.pop(request, None) is not None:  # the caller was cancelled
                self._drop([request])

    def _answer(self, request: Any, completion: Completion) -> None:
        answer = self._open.pop(request)
        if not answer.done():
            answer.set_result(completion)

    def _launch(self, loop: asyncio.AbstractEventLoop) -> None:
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
        elif self._open:  # a request came between the task's last look and its end
            self._launch(task.get_loop())

    def _abandon(self, error: BaseException | None) -> None:
        """Drop all requests: fail them with an error, or cancel them if there is none."""
        dropped, self._open = self._open, {}
        self._drop(dropped)
        for answer in dropped.values():
            if answer.done() or answer.get_loop().is_closed():
                continue
            if error is None:
                answer.cancel()
            else:
                answer.set_exception(error)
