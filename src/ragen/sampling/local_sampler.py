"""The local sampler: many completions at once, one token of each per forward.

Requests occupy slots of a key–value cache. All slots step together. A slot that becomes free is
filled again before the next forward. If a prompt extends what a slot remembers, only the new tokens
are read. A prompt that several requests share is read once, and so is a long beginning of
different prompts (`ragen.sampling.slots`).

The order of all work follows from the order of the requests, and every request draws from its own
generator. So the same requests in the same order give the same tokens and logprobs, bit for bit.

Axes: **N** rows of a forward, **V** vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from ragen.chat.chat import Chat
from ragen.core.metrics import Metrics
from ragen.core.types import Completion, Prompt
from ragen.networks.decoder import PATHS, Decoder, make_decoder, set_independent
from ragen.networks.device import to_device
from ragen.networks.graphs import GraphDecoder, recorder
from ragen.networks.packing import BEGINNING
from ragen.rollout.policies import Place
from ragen.sampling.slots import SlotTable, Tokens, common
from ragen.sampling.weighted_policy import QueuedPolicy, quiet

PREFILL_TOKENS = 2048
"""Maximum number of new prompt tokens in one forward; it bounds the memory of attention scores."""


@dataclass(slots=True, eq=False)
class Seat:
    """A `Policy` for one episode, which the sampler then knows to be live."""

    sampler: Sampler
    place: Place

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion, as the sampler does."""
        return await self.sampler._answered(self.sampler._send, prompt, self)


@dataclass(slots=True, eq=False)
class _Request:
    prompt: Prompt
    tokens: Tokens
    seat: Seat | None
    slot: int = -1
    version: int = 0


class Sampler(QueuedPolicy):
    """A `WeightedPolicy` on a local model.

    `model` is any causal language model of transformers with a key–value cache. Its weights are
    read in place; call `publish` after changing them. `slots` completions are sampled at once.
    `fast` uses the fast path if the architecture has one, `graphs` CUDA graphs on a GPU, where the
    launches of kernels take most of a decode otherwise.
    """

    reads_pictures = True

    def __init__(
        self,
        model: PreTrainedModel,
        chat: Chat,
        *,
        slots: int = 64,
        max_length: int = 1024,
        fast: bool = True,
        graphs: bool = True,
    ) -> None:
        super().__init__(chat, max_length)
        if graphs and model.device.type == "cuda":
            self._decoder: Decoder = GraphDecoder(model, slots, max_length, recorder())
        else:
            self._decoder = make_decoder(model, slots, max_length, fast=fast)
        self._ordered = self._independent = False
        self._seats: set[Seat] = set()  # of live episodes
        self._news = asyncio.Event()  # for a round that waits for live episodes
        self._arrived: list[_Request] = []
        self._waiting: list[_Request] = []
        self._running: dict[int, _Request] = {}
        self._rows: NDArray[np.int64] | None = None  # the running slots; None after a change
        self._table = SlotTable(slots)
        self._outdated: set[int] = set()  # running slots with keys and values of earlier weights
        self._is_broken = False  # keys and values that are not finite may be stored

        # The running requests as arrays over slots, so that a step costs no Python per slot.
        self._length = np.zeros(slots, dtype=np.int64)
        self._next_token = np.zeros(slots, dtype=np.int64)
        self._count = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros((slots, max_length), dtype=np.int64)
        self._logprobs = np.zeros((slots, max_length))
        self._uniforms = np.zeros((slots, max_length))
        self._max_tokens = np.zeros(slots, dtype=np.int64)
        self._temperature = np.ones(slots)

    @property
    def path(self) -> str:
        """How the model is decoded, in words."""
        return next(words for kind, words in PATHS.items() if isinstance(self._decoder, kind))

    def push(self, model: PreTrainedModel) -> None:
        """Drop the cache; the weights are read in place.

        Open completions continue with the new weights on the keys and values of the earlier ones,
        as in PipelineRL (arXiv:2509.19128). No later request reads these keys and values.
        """
        self.forget()

    def forget(self) -> None:
        """Drop all keys and values but those that open completions need."""
        self._outdated.update(self._running)
        self._table.clear(self._running)
        self._decoder.refresh(is_idle=not self._running)
        if self._is_broken and not self._running:
            self._decoder.erase()
            self._is_broken = False

    @property
    def ordered(self) -> bool:
        """True if completions do not depend on when their requests arrive (`Seating`).

        Where the decoder's rows do not depend on each other, requests are answered as they come.
        Elsewhere they are answered in rounds, one of each live episode, in the order of places.
        """
        return self._ordered

    @ordered.setter
    def ordered(self, ordered: bool) -> None:
        if ordered == self._ordered:
            return
        assert self.is_idle, "open completions began otherwise"
        self._ordered = ordered
        self._independent = set_independent(self._decoder, ordered)
        self.forget()

    @property
    def is_idle(self) -> bool:
        """True if no seat is taken and no request is open."""
        return not (self._open or self._seats)

    @override
    def metrics(self) -> Metrics:
        # Which independent rows share a beginning depends on when their requests arrive.
        return {} if self._independent else super().metrics()

    @contextmanager
    def seat(self, place: Place) -> Iterator[Seat]:
        """The sampler for one episode; its slot is its own until it ends."""
        seat = Seat(self, place)
        self._seats.add(seat)
        try:
            yield seat
        finally:
            self._seats.remove(seat)
            self._table.disown(seat)
            self._news.set()

    def _send(self, prompt: Prompt, seat: Seat | None = None) -> _Request:
        request = _Request(prompt, self._checked_ids(prompt), seat)
        self._arrived.append(request)
        self._news.set()
        return request

    async def _drive(self) -> None:
        while True:
            await self._settle()
            self._admit()
            if self._running:
                self._step()
            elif not self._waiting:
                return

    async def _settle(self) -> None:
        """Wait until no episode sends another request right away."""
        await quiet(self._arrived)
        while self._is_incomplete():
            self._news = asyncio.Event()
            await self._news.wait()
            await quiet(self._arrived)

    @property
    def in_rounds(self) -> bool:
        """True if it waits for a request of each seat before it answers one."""
        return self._ordered and not self._independent

    def _is_incomplete(self) -> bool:
        """True if the next round of a sampler in lockstep has requests, but not of all seats."""
        if not self.in_rounds or self._running or self._waiting or not self._arrived:
            return False
        return len(self._seats.difference(request.seat for request in self._arrived)) > 0

    def _drop(self, requests: Iterable[_Request]) -> None:
        for request in requests:
            if request in self._arrived:
                self._arrived.remove(request)
            elif request in self._waiting:
                self._waiting.remove(request)
            elif self._running.get(request.slot) is request:
                self._stop(request)
                self._outdated.discard(request.slot)
                self._table.free(request.slot)

    def _abandon(self, error: BaseException | None) -> None:
        self._running.clear()
        self._arrived.clear()
        self._waiting.clear()
        self._outdated.clear()
        self._rows = None
        self.forget()
        super()._abandon(error)

    # From waiting to running to answered.

    def _admit(self) -> None:
        """Give waiting requests their slots, read their prompts and draw their first tokens."""
        if not self.in_rounds:
            self._waiting += self._arrived
            self._arrived = []
        elif not self._running and not self._waiting:  # a new round
            self._waiting = sorted(self._arrived, key=lambda r: r.seat.place if r.seat else ())
            self._arrived = []
        self._waiting = [r for r in self._waiting if not self._open[r].done()]
        resumed = [r for r in self._waiting if self._resume(r)]
        fresh = []
        for request in self._waiting:
            if request.slot < 0:
                slot = self._table.take()
                if slot is None:
                    break
                request.slot = slot
                fresh.append(request)
        admitted = resumed + fresh
        if not admitted:
            return
        self._waiting = [r for r in self._waiting if r.slot < 0]
        logits_NV = self._read(resumed, fresh)
        for request in admitted:
            self._start(request)
        self._draw(np.array([r.slot for r in admitted]), logits_NV)

    def _resume(self, request: _Request) -> bool:
        """Claim the slot that remembers the longest beginning of the request's prompt.

        The slot of another episode may not have the same keys bit for bit.
        """
        if self._independent:
            found = self._table.resume_own(request.seat, request.tokens)
        else:
            found = self._table.resume(request.tokens)
        if found is None:
            return False
        request.slot, known = found
        self._length[request.slot] = known - 1  # the last sampled token was never read
        return True

    def _read(self, resumed: list[_Request], fresh: list[_Request]) -> Tensor:
        """Bring the prompts into the cache; returns the logits (N, V) after each, in order."""
        reads = [(request, int(self._length[request.slot])) for request in resumed]
        rows = list(range(len(resumed)))  # of each request's logits
        leaders: dict[Tokens, int] = {}
        followers = []
        admitted = resumed + fresh
        self._decoder.album.show(chain.from_iterable(r.prompt.pictures for r in admitted))
        for request in fresh:
            row = leaders.setdefault(request.tokens, len(reads))
            rows.append(row)
            if row < len(reads):  # the same prompt is already part of this round
                followers.append((row, request))
                continue
            known = 0
            holder = self._table.holder(request.tokens)
            if holder is not None:  # the last token is read again, for its logits
                known = self._shareable(len(request.tokens) - 1)
                self._decoder.copy(holder, request.slot, known)
            reads.append((request, known))
        before = self.stats.prefilled
        logits_NV = self._prefill(self._share_beginnings(reads))
        for row, request in followers:
            self._decoder.copy(reads[row][0].slot, request.slot, len(request.tokens))
        for request in fresh:
            self._table.set_first_prompt(request.slot, request.tokens)
        prompts = sum(len(request.tokens) for request in admitted)
        self.stats.reused += prompts - (self.stats.prefilled - before)
        return logits_NV[rows] if followers else logits_NV

    def _share_beginnings(self, reads: list[tuple[_Request, int]]) -> list[tuple[_Request, int]]:
        """Copy a beginning that prompts share from a slot that holds it, or read it in one of them.

        `reads` are requests with the number of tokens of each prompt that are in the cache already.
        Returns them with the new numbers.
        """
        alike: dict[Tokens, list[int]] = {}
        for row, (request, known) in enumerate(reads):
            if known == 0 and len(request.tokens) > BEGINNING:
                alike.setdefault(request.tokens[:BEGINNING], []).append(row)
        shared = list(reads)
        for head, (first, *rows) in alike.items():
            leader, _ = reads[first]
            slot, tokens = leader.slot, leader.tokens
            found = self._table.beginning(head)
            if found is not None:
                (slot, tokens), rows = found, [first, *rows]
            elif rows:
                count = min(common(tokens, reads[row][0].tokens) for row in rows)
                count = self._shareable(count)
                shared[first] = leader, self._read_until(leader, 0, count)
                tokens = tokens[: count + 1]
            for row in rows:
                request, _ = reads[row]
                count = self._shareable(common(tokens, request.tokens))
                self._decoder.copy(slot, request.slot, count)
                shared[row] = request, count
        return shared

    def _shareable(self, count: int) -> int:
        """How many of the first `count` keys another slot may have computed: whole blocks."""
        return count // BEGINNING * BEGINNING if self._independent else count

    def _start(self, request: _Request) -> None:
        slot, prompt = request.slot, request.prompt
        request.version = self.version
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
        """Deliver a completion; its slot idles with its tokens, unless its keys are outdated."""
        request = self._running[slot]
        self._stop(request)
        count = int(self._count[slot])
        token_ids = tuple(self._tokens[slot, :count].tolist())
        if slot in self._outdated:
            self._outdated.remove(slot)
            self._table.free(slot)
        else:
            owner = request.seat if self._independent else None
            self._table.remember(slot, request.tokens + token_ids, owner)
        self.stats.sampled += count
        logprobs = tuple(self._logprobs[slot, :count].tolist())
        self._answer(request, self._completion(token_ids, logprobs, request.version))

    # Forwards.

    def _prefill(self, reads: list[tuple[_Request, int]]) -> Tensor:
        reads = [(request, self._read_ahead(request, known)) for request, known in reads]
        self.stats.prefilled += sum(len(request.tokens) - known for request, known in reads)
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

    def _read_ahead(self, request: _Request, known: int) -> int:
        """Read a long prompt up to its last `PREFILL_TOKENS`; returns how many tokens are known."""
        parts = (len(request.tokens) - known - 1) // PREFILL_TOKENS
        return self._read_until(request, known, known + parts * PREFILL_TOKENS)

    def _read_until(self, request: _Request, known: int, end: int) -> int:
        """Read a prompt's tokens before `end`, or up to the end of a picture there; returns it."""
        start = known
        while start < end:
            stop = picture_end(request.tokens, min(start + PREFILL_TOKENS, end))
            self._decoder.prefill([request.slot], [start], [request.tokens[start:stop]])
            self.stats.forwards += 1
            start = stop
        self.stats.prefilled += start - known
        return start

    def _step(self) -> None:
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
        self._is_broken |= not np.isfinite(logprobs).all()
        self._tokens[slots, count] = tokens
        self._logprobs[slots, count] = logprobs
        self._next_token[slots] = tokens
        self._count[slots] = count + 1
        last = np.array([token in self.last_ids for token in tokens.tolist()], dtype=bool)
        done = last | (count + 1 >= self._max_tokens[slots])
        for slot in slots[done].tolist():
            self._finish(slot)


def picture_end(tokens: Tokens, end: int) -> int:
    """The first place from `end` on that cuts no picture, whose tokens may see each other."""
    while end < len(tokens) - 1 and tokens[end] < 0 and tokens[end] == tokens[end - 1] - 1:
        end += 1
    return end


def draw(
    logits_NV: Tensor, temperatures_N: NDArray[np.float64], uniforms_N: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw one token per row by the inverse CDF: the first whose cumulated probability exceeds u.

    Probabilities are a float32 softmax, summed in float64 and scaled by their own sum, so rounding
    moves no more than 1e-7 of probability and a token of probability zero is never drawn.

    Logits are float32, and −∞ excludes a token. Each row is divided by its temperature; 0 takes the
    most likely token. The uniforms are in [0, 1), one for each row. Returns token ids and their
    logprobs under the distribution drawn from (temperature 1 for greedy rows). A row without a
    distribution, because it has a NaN or ∞, gives an arbitrary token with the logprob NaN.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75]]).log()
        >>> [int(draw(logits, np.ones(1), np.array([u]))[0][0]) for u in (0.2, 0.3)]
        [0, 1]
    """
    device = logits_NV.device
    greedy_N = temperatures_N == 0
    divisors_N = np.where(greedy_N, 1.0, temperatures_N)
    if (divisors_N != 1.0).any():
        logits_NV = logits_NV / to_device(torch.from_numpy(divisors_N).float(), device)[:, None]
    log_p_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = log_p_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:]
    below_N1 = to_device(torch.from_numpy(uniforms_N), device)[:, None] * total_N1
    below_N1 = torch.minimum(below_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    # The clamp matters if a row is all NaN: an index past the end would be an error of the device.
    tokens_N1 = torch.searchsorted(cdf_NV, below_N1, right=True).clamp_(max=cdf_NV.shape[1] - 1)
    if greedy_N.any():
        best_N1 = logits_NV.argmax(dim=-1, keepdim=True)
        greedy_N1 = to_device(torch.from_numpy(greedy_N), device)[:, None]
        tokens_N1 = torch.where(greedy_N1, best_N1, tokens_N1)
    # Both in one transfer, the only wait for a GPU in a step; float64 holds every id.
    drawn_2N1 = torch.stack((tokens_N1.double(), log_p_NV.gather(1, tokens_N1).double()))
    tokens, logprobs = drawn_2N1[:, :, 0].cpu().numpy()
    return tokens.astype(np.int64), logprobs
