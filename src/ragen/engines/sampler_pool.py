"""The samplers of an engine as one policy.

A conversation stays with the sampler that holds its keys and values. Any other request goes to the
sampler that it names, or else to one with few open requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from ragen.core.metrics import Metrics, last, mean
from ragen.core.types import Completion, Prompt
from ragen.engines.pool import Pool, ProcessLost, Request, Seat, divided
from ragen.engines.sampling import Stats
from ragen.engines.slots import TAIL, Tokens


@dataclass(frozen=True, slots=True)
class SamplerTold:
    """What a sampler reports about itself: its seconds of work, and its token counts in an era.

    Example:
        >>> SamplerTold(0.5, 2, Stats(sampled=3)).stats.sampled
        3
    """

    busy_s: float
    era: int
    stats: Stats


class SamplerPool(Pool):
    """A `Policy` over samplers in other processes, which remembers `most_known` conversations."""

    kind = "sampler"

    def __init__(
        self, most_known: int, timeout_s: float, on_end: Callable[[Seat, ProcessLost | None], None]
    ) -> None:
        super().__init__(timeout_s, on_end)
        self._most_known = most_known
        self._known: dict[tuple[int, Tokens], dict[Tokens, Seat]] = {}  # by length and last tokens
        self._lengths = Counter[int]()  # of what is known
        self._order: dict[Tokens, None] = {}  # what is known, the oldest first

    @property
    def num_samplers(self) -> int:
        """See `ManySamplers`."""
        return len(self.seats)

    async def complete(self, prompt: Prompt, sampler: str = "") -> Completion:
        """Sample one completion: the next tokens of `prompt.token_ids`.

        `sampler` is the name of the one that should begin a conversation, if it matters.

        Raises:
            EngineLost: There has been no sampler for too long.
            NotFiniteError: The logits are not finite.
        """
        completion: Completion = await self.ask(prompt, sampler)
        return completion

    @override
    def forget(self, era: int = 0) -> None:
        super().forget(era)
        self._known.clear()
        self._lengths.clear()
        self._order.clear()

    @override
    def remove(self, seat: Seat, loss: ProcessLost | None) -> None:
        for tokens in [each for each in self._order if self._seat_knowing(each) is seat]:
            self._forget(tokens)
        super().remove(seat, loss)

    def metrics(self) -> Metrics:
        """Metrics since the last call: samplers, their idle share, their caches' share of hits."""
        stats, idle = Stats(), self.idle_fraction()
        for seat in self.seats:
            stats.prefilled += seat.stats.prefilled
            stats.reused += seat.stats.reused
        found = stats.metrics() | {"engine/samplers": last(len(self.seats))}
        if idle is not None:
            found["engine/sampler_idle_fraction"] = mean(idle)
        return found

    def hear(self, reports: Mapping[str, SamplerTold]) -> None:
        """Take what samplers have reported to another client, unless a later report is known."""
        for seat in self.seats if reports else ():
            told = reports.get(seat.name)
            if told is not None and told.busy_s >= seat.busy_s:
                self._heard(seat, told)

    @override
    def _heard(self, seat: Seat, told: SamplerTold) -> None:
        super()._heard(seat, told)
        if told.era == self.era:
            seat.stats = told.stats

    @override
    def _shares(self, requests: Sequence[Request]) -> Iterable[tuple[Seat, Sequence[Request]]]:
        """The requests that each sampler gets.

        Requests that belong to no sampler are divided into consecutive pieces. Equal prompts are
        neighbours, so that a sampler reads most of them only once.
        """
        shares: dict[Seat, list[Request]] = {}
        rest = []
        for request in requests:
            seat = self._knowing(request.work.token_ids or ())
            if seat is None and request.at:
                seat = self.seat_of(request.at)
            if seat is None or seat.leaves:
                rest.append(request)
            else:
                shares.setdefault(seat, []).append(request)
        if rest:  # otherwise it does not matter how many samplers there are
            seats = self._taking
            loads = [len(seat.open) + len(shares.get(seat, ())) for seat in seats]
            for seat, share in zip(seats, divided(rest, loads), strict=True):
                if share:
                    shares.setdefault(seat, []).extend(share)
        return shares.items()

    @override
    def _answered(self, seat: Seat, request: Request, answer: Completion) -> None:
        prompt: Prompt = request.work
        if prompt.token_ids and answer.token_ids:
            self._remember(prompt.token_ids + answer.token_ids, seat)

    # Which sampler knows which conversation.

    def _remember(self, tokens: Tokens, seat: Seat) -> None:
        if tokens in self._order:
            return
        self._order[tokens] = None
        self._lengths[len(tokens)] += 1
        self._known.setdefault((len(tokens), tokens[-TAIL:]), {})[tokens] = seat
        if len(self._order) > self._most_known:
            self._forget(next(iter(self._order)))

    def _seat_knowing(self, tokens: Tokens) -> Seat:
        return self._known[len(tokens), tokens[-TAIL:]][tokens]

    def _forget(self, tokens: Tokens) -> None:
        del self._order[tokens]
        key = len(tokens), tokens[-TAIL:]
        del self._known[key][tokens]
        if not self._known[key]:
            del self._known[key]
        self._lengths[len(tokens)] -= 1
        if not self._lengths[len(tokens)]:
            del self._lengths[len(tokens)]

    def _knowing(self, tokens: Tokens) -> Seat | None:
        """The sampler that knows the longest beginning of `tokens`; the beginning is forgotten."""
        for length in range(len(tokens), 0, -1):
            if length not in self._lengths:
                continue
            known = self._known.get((length, tokens[max(0, length - TAIL) : length]))
            if known is not None and (seat := known.get(tokens[:length])) is not None:
                self._forget(tokens[:length])
                return seat
        return None
