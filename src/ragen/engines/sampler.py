"""The local sampler: many completions at once, one token of each per forward.

Requests occupy slots of a key–value cache. All slots step together; one that ends is refilled
before the next forward. A finished slot remembers its tokens, so the episode's next prompt, which
extends them, reads only what is new; a prompt that several requests share is read once and copied.

The order of everything follows from the order of the requests, and every request draws from its own
generator: the same requests in the same order give the same tokens and logprobs, bit for bit.

Axes: **N** rows of a forward, **V** vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.metrics import Metrics, mean
from ragen.core.types import Completion, Prompt
from ragen.models.decoder import make_decoder
from ragen.rollout.policies import fingerprint

PREFILL_TOKENS = 1024
"""New prompt tokens that one forward reads at most (more only for a single longer prompt)."""
QUIET_ROUNDS = 4
"""Rounds of the event loop without a new request after which the next forward begins.

An episode whose environment answers at once comes back within them, through the rollout's own
awaits."""
TAIL = 8
"""Last tokens by which a remembered sequence is found before it is compared in full."""

Tokens = tuple[int, ...]


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
        """The share of prompt tokens that were found in the cache; nothing before there are any."""
        prompts = self.prefilled + self.reused
        if not prompts:
            return {}
        return {"rollout/prefix_cache_hit_fraction": mean(self.reused / prompts, prompts)}


@dataclass(slots=True, eq=False)
class _Request:
    prompt: Prompt
    tokens: Tokens
    answer: asyncio.Future[Completion]
    slot: int = -1


class Sampler:
    """A `Policy` on a local model.

    Args:
        model: Any causal language model of transformers with a key–value cache. Its weights are
            read as they are; call `publish` after changing them.
        end_ids: Tokens that end a completion. The one drawn is part of it.
        decode: Token ids (without the end token) to text.
        slots: Completions that are sampled at once.
        max_length: Tokens that a prompt and its completion may have together; the caller keeps to
            it.
        fast: Use the fast path where the architecture has one.

    Attributes:
        version: The policy version written into completions; whoever publishes weights sets it.
        stats: Token counts since the start.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
        *,
        slots: int = 64,
        max_length: int = 1024,
        fast: bool = True,
    ) -> None:
        assert slots > 0
        self.version = 0
        self.stats = Stats()
        self.max_length = max_length
        self.end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._decoder = make_decoder(model, slots, max_length, fast=fast)
        self._decode = decode

        self._driver: asyncio.Task[None] | None = None
        self._open: dict[_Request, None] = {}  # asked and not answered, in order
        self._waiting: list[_Request] = []
        self._running: dict[int, _Request] = {}
        self._rows: NDArray[np.int64] | None = None  # the running slots; None after a change

        # What the cache holds. `_remembered[slot]` of an idle slot are its tokens, the last not yet
        # read.
        self._num_slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._remembered: dict[int, Tokens] = {}  # idle slots, the longest idle first
        self._by_tail: dict[tuple[int, Tokens], list[int]] = {}
        self._first_prompt: list[Tokens | None] = [None] * slots
        self._holder: dict[Tokens, int] = {}  # a first prompt -> a slot whose cache begins with it

        # The running requests as arrays over slots, so that a step costs no Python per slot.
        self._length = np.zeros(slots, dtype=np.int64)
        self._next_token = np.zeros(slots, dtype=np.int64)
        self._count = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros((slots, max_length), dtype=np.int64)
        self._logprobs = np.zeros((slots, max_length))
        self._uniforms = np.zeros((slots, max_length))
        self._max_tokens = np.zeros(slots, dtype=np.int64)
        self._temperature = np.ones(slots)

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion: the next tokens of `prompt.token_ids`.

        Temperature 0 takes the most likely token and reports its logprob at temperature 1. The
        logprobs are those of the distribution actually drawn from.
        """
        assert prompt.token_ids, "the sampler needs token ids"
        assert prompt.max_tokens > 0 and prompt.temperature >= 0
        assert len(prompt.token_ids) + prompt.max_tokens <= self.max_length, (
            "over the model's length"
        )
        loop = asyncio.get_running_loop()
        request = _Request(prompt, tuple(prompt.token_ids), loop.create_future())
        if self._driver is None or self._driver.get_loop() is not loop:
            if self._driver is not None:  # left behind by a loop that was torn down
                self._abandon()
            self._driver = loop.create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)
        self._open[request] = None
        self._waiting.append(request)
        try:
            return await request.answer
        finally:
            self._open.pop(request, None)
            if request.answer.cancelled() and self._running.get(request.slot) is request:
                self._stop(request)
                self._free.append(request.slot)

    async def publish(self, model: PreTrainedModel, version: int) -> None:
        """Count a change of the weights, which are read in place."""
        self.version = version
        self.forget()

    def rest(self) -> None:
        """Keys and values stay: they are few beside what a model of this sampler's size needs."""

    async def close(self) -> None:
        """Nothing is held beyond the model's own memory."""

    def forget(self) -> None:
        """Drop all keys and values."""
        assert not self._running, "weights may not change while completions are sampled"
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._remembered.clear()
        self._by_tail.clear()
        self._holder.clear()
        self._first_prompt = [None] * self._num_slots
        self._decoder.refresh()

    # The driver: one task that lives while there are requests.

    async def _drive(self) -> None:
        while True:
            await self._settle()
            self._admit()
            if self._running:
                self._step()
            elif not self._waiting:
                return

    async def _settle(self) -> None:
        """Let everyone who can ask do so."""
        quiet = 0
        while quiet < QUIET_ROUNDS:
            before = len(self._waiting)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == before else 0

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        """Nobody may wait for a driver that is gone: pass its failure on to all requests."""
        if driver is not self._driver:
            return
        self._driver = None
        error = None if driver.cancelled() else driver.exception()
        if error is not None or driver.cancelled():
            for request in self._abandon():
                if request.answer.done():
                    continue
                if error is None:
                    request.answer.cancel()
                else:
                    request.answer.set_exception(error)
        elif self._waiting:  # asked between the driver's last look and its end
            self._driver = driver.get_loop().create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)

    def _abandon(self) -> list[_Request]:
        dropped = list(self._open)
        self._open.clear()
        self._running.clear()
        self._waiting.clear()
        self._rows = None
        self.forget()
        return dropped

    # Slots.

    def _admit(self) -> None:
        """Give waiting requests their slots, read their prompts and draw their first tokens."""
        self._waiting = [r for r in self._waiting if not r.answer.done()]
        resumed = [r for r in self._waiting if self._remembered and self._resume(r)]
        fresh = []
        for request in self._waiting:
            if request.slot < 0:
                if not self._take_slot(request):
                    break
                fresh.append(request)
        admitted = resumed + fresh
        if not admitted:
            return
        self._waiting = [r for r in self._waiting if r.slot < 0]
        logits_NV = self._read(resumed, fresh)
        for request in admitted:
            self._start(request)
        self._draw(np.array([r.slot for r in admitted]), logits_NV)

    def _read(self, resumed: list[_Request], fresh: list[_Request]) -> Tensor:
        """Bring the prompts into the cache; the logits after each (N, V), in the order given."""
        reads = [(request, int(self._length[request.slot])) for request in resumed]
        rows = list(range(len(resumed)))  # of each request's logits
        leaders: dict[Tokens, int] = {}
        followers = []
        for request in fresh:
            row = leaders.setdefault(request.tokens, len(reads))
            rows.append(row)
            if row < len(reads):  # the same prompt is in this round already
                followers.append((row, request))
                continue
            known = 0
            holder = self._holder.get(request.tokens)
            if holder is not None:  # the last token is read again, for its logits
                known = len(request.tokens) - 1
                self._decoder.copy(holder, request.slot, known)
            reads.append((request, known))
        logits_NV = self._prefill(reads)
        for row, request in followers:
            self._decoder.copy(reads[row][0].slot, request.slot, len(request.tokens))
        for request in fresh:
            self._first_prompt[request.slot] = request.tokens
            self._holder.setdefault(request.tokens, request.slot)
        prompts = sum(len(request.tokens) for request in resumed + fresh)
        prefilled = sum(len(request.tokens) - known for request, known in reads)
        self.stats.prefilled += prefilled
        self.stats.reused += prompts - prefilled
        return logits_NV[rows] if followers else logits_NV

    def _resume(self, request: _Request) -> bool:
        """Claim an idle slot whose tokens this request's prompt begins with, the longest such."""
        best: list[int] = []
        longest = 0
        for (length, tail), slots in self._by_tail.items():
            if (
                longest < length <= len(request.tokens)
                and request.tokens[max(0, length - TAIL) : length] == tail
                and self._remembered[slots[0]] == request.tokens[:length]
            ):
                best, longest = slots, length
        if not best:
            return False
        request.slot = best[0]
        self._forget(request.slot)
        self._length[request.slot] = longest - 1  # the last sampled token was never read
        return True

    def _take_slot(self, request: _Request) -> bool:
        """Claim a free slot, else the one that has been idle longest."""
        if self._free:
            slot = self._free.pop()
        elif self._remembered:
            slot = next(iter(self._remembered))
            self._forget(slot)
        else:
            return False
        first = self._first_prompt[slot]
        if first is not None and self._holder.get(first) == slot:
            del self._holder[first]
        self._first_prompt[slot] = None
        request.slot = slot
        return True

    def _forget(self, slot: int) -> None:
        tokens = self._remembered.pop(slot)
        key = (len(tokens), tokens[-TAIL:])
        self._by_tail[key].remove(slot)
        if not self._by_tail[key]:
            del self._by_tail[key]

    def _start(self, request: _Request) -> None:
        slot, prompt = request.slot, request.prompt
        self._running[slot] = request
        self._rows = None
        self._length[slot] = len(request.tokens)
        self._count[slot] = 0
        self._max_tokens[slot] = prompt.max_tokens
        self._temperature[slot] = prompt.temperature
        generator = np.random.Generator(np.random.PCG64(prompt.seed))
        self._uniforms[slot, : prompt.max_tokens] = generator.random(prompt.max_tokens)

    def _stop(self, request: _Request) -> None:
        del self._running[request.slot]
        self._rows = None

    def _finish(self, slot: int) -> None:
        """Deliver a completion and let its slot idle, remembering what it holds."""
        request = self._running[slot]
        self._stop(request)
        count = int(self._count[slot])
        token_ids = tuple(self._tokens[slot, :count].tolist())
        tokens = request.tokens + token_ids
        self._remembered[slot] = tokens
        self._by_tail.setdefault((len(tokens), tokens[-TAIL:]), []).append(slot)
        self.stats.sampled += count
        if not request.answer.done():
            logprobs = tuple(self._logprobs[slot, :count].tolist())
            request.answer.set_result(
                completion_of(token_ids, logprobs, self.end_ids, self._decode, self.version)
            )

    # Forwards.

    def _prefill(self, reads: list[tuple[_Request, int]]) -> Tensor:
        logits, batch, size = [], [], 0
        for k, (request, known) in enumerate(reads):
            batch.append((request.slot, known, request.tokens[known:]))
            size += len(request.tokens) - known
            upcoming = reads[k + 1][0].tokens[reads[k + 1][1] :] if k + 1 < len(reads) else ()
            if not upcoming or size + len(upcoming) > PREFILL_TOKENS:
                slots, starts, tokens = zip(*batch, strict=True)
                logits.append(self._decoder.prefill(slots, starts, tokens))
                self.stats.forwards += 1
                batch, size = [], 0
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _step(self) -> None:
        """One token of every running request."""
        if self._rows is None:
            self._rows = np.array(sorted(self._running), dtype=np.int64)
        slots = self._rows
        logits_NV = self._decoder.decode(
            torch.from_numpy(slots),
            torch.from_numpy(self._length[slots]),
            torch.from_numpy(self._next_token[slots]),
        )
        self._length[slots] += 1
        self.stats.forwards += 1
        self._draw(slots, logits_NV)

    def _draw(self, slots: NDArray[np.int64], logits_NV: Tensor) -> None:
        count = self._count[slots]
        tokens, logprobs = draw(logits_NV, self._temperature[slots], self._uniforms[slots, count])
        self._tokens[slots, count] = tokens
        self._logprobs[slots, count] = logprobs
        self._next_token[slots] = tokens
        self._count[slots] = count + 1
        done = np.isin(tokens, self.end_ids) | (count + 1 >= self._max_tokens[slots])
        for slot in slots[done].tolist():
            self._finish(slot)


def completion_of(
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    end_ids: Container[int],
    decode: Callable[[Sequence[int]], str],
    version: int,
) -> Completion:
    """The record of what was sampled: its end token is no part of the text, and it is hashed here.

    Example:
        >>> said = completion_of((8, 9, 2), (-0.5, -0.25, -0.125), {2}, str, 3)
        >>> said.text, said.finish_reason
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


def draw(
    logits_NV: Tensor, temperatures_N: NDArray[np.float64], uniforms_N: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw a token of each row by the inverse CDF: the first whose cumulated probability exceeds u.

    Probabilities are a float32 softmax, summed in float64 and scaled by their own sum, so rounding
    moves no more than 1e-7 of probability and a token of probability zero is never drawn.

    Args:
        logits_NV: Logits, float32; −∞ excludes a token.
        temperatures_N: What each row is divided by; 0 takes the most likely token.
        uniforms_N: One number in [0, 1) for each row.

    Returns:
        Token ids and their logprobs under the distribution drawn from (temperature 1 for greedy
        rows).

    Example:
        >>> logits = torch.tensor([[0.25, 0.75]]).log()
        >>> [int(draw(logits, np.ones(1), np.array([u]))[0][0]) for u in (0.2, 0.3)]
        [0, 1]
    """
    device = logits_NV.device
    greedy_N = temperatures_N == 0
    divisors_N = np.where(greedy_N, 1.0, temperatures_N)
    if (divisors_N != 1.0).any():
        logits_NV = logits_NV / torch.from_numpy(divisors_N).to(device, torch.float32)[:, None]
    log_p_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = log_p_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:]
    below_N1 = torch.from_numpy(uniforms_N).to(device)[:, None] * total_N1
    below_N1 = torch.minimum(below_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_N1 = torch.searchsorted(cdf_NV, below_N1, right=True)
    if greedy_N.any():
        best_N1 = logits_NV.argmax(dim=-1, keepdim=True)
        tokens_N1 = torch.where(torch.from_numpy(greedy_N).to(device)[:, None], best_N1, tokens_N1)
    # Both in one transfer, since each waits for a GPU; float64 holds every id.
    drawn_2N1 = torch.stack((tokens_N1.double(), log_p_NV.gather(1, tokens_N1).double()))
    tokens, logprobs = drawn_2N1[:, :, 0].cpu().numpy()
    return tokens.astype(np.int64), logprobs
