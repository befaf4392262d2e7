"""The players of an engine as one policy that plays whole episodes.

A player is a process that plays episodes: it has the environments, and talks to the samplers
itself. The episodes are divided about equally among the players, and among the samplers, each time
into consecutive pieces, so that the members of a group stay together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, last, mean
from ragen.core.types import Completion, Episode, Prompt
from ragen.core.user_code import Stopwatch
from ragen.engines.pool import Pool, ProcessLost, Request, Seat, divided
from ragen.engines.sampler_pool import SamplerPool, SamplerTold
from ragen.rollout.setup import EpisodeSpec, Setup

MOST_LOSSES = 3
"""An episode fails once this many players were lost while it was open: it may be what ends them."""


@dataclass(frozen=True, slots=True)
class Order:
    """An episode to play: by the name of its environment, the stage of the curriculum and its spec.

    `sampler` is the name of the sampler that should sample its completions.

    Example:
        >>> Order("bandit", 0, 1.0, EpisodeSpec(10000, 0, 3, (0, "train", 0)), "sampler 1").sampler
        'sampler 1'
    """

    env: str
    stage: int
    temperature: float
    spec: EpisodeSpec
    sampler: str = ""


@dataclass(frozen=True, slots=True)
class PlayerTold:
    """What a player reports about itself, and what samplers have reported to it since, by name.

    `busy_s` are the seconds in which it computed or waited for environments, `env_s` those in
    environments.

    Example:
        >>> PlayerTold(2.5, 1.0, {}).env_s
        1.0
    """

    busy_s: float
    env_s: float
    samplers: Mapping[str, SamplerTold]


class PlayerPool(Pool):
    """A policy that plays episodes in other processes (`ragen.rollout.episode.PlaysEpisodes`).

    `samplers` are those that the players sample with.
    """

    kind = "player"
    most_losses = MOST_LOSSES

    def __init__(
        self,
        samplers: SamplerPool,
        timeout_s: float,
        on_end: Callable[[Seat, ProcessLost | None], None],
    ) -> None:
        super().__init__(timeout_s, on_end)
        self.samplers = samplers
        self._at = Counter[str]()  # open episodes by the name of their sampler
        self._env_time = Stopwatch()

    @property
    def num_samplers(self) -> int:
        """See `ManySamplers`."""
        return self.samplers.num_samplers

    async def complete(self, prompt: Prompt) -> Completion:
        """See `SamplerPool.complete`."""
        return await self.samplers.complete(prompt)

    async def play(self, setup: Setup, spec: EpisodeSpec) -> Episode:
        """Play an episode.

        Raises:
            EngineLost: There has been no player, or no sampler, for too long.
            RagenError: As `play_episode`, or too many players were lost with it.
        """
        self._env_time = setup.env_time  # all set-ups of a run share it
        order = Order(setup.env, setup.stage, setup.temperature, spec)
        episode: Episode = await self.ask(order)
        return episode

    def metrics(self) -> Metrics:
        """Metrics since the last call: the players, and their idle share."""
        found, idle = {"engine/players": last(len(self.seats))}, self.idle_fraction()
        return found if idle is None else found | {"engine/player_idle_fraction": mean(idle)}

    @override
    def _heard(self, seat: Seat, told: PlayerTold) -> None:
        before = seat.told.env_s if seat.told is not None else 0.0
        self._env_time.seconds += (told.env_s - before) / len(self.seats)
        super()._heard(seat, told)
        self.samplers.hear(told.samplers)

    @override
    def _shares(self, requests: Sequence[Request]) -> Iterable[tuple[Seat, Sequence[Request]]]:
        names = [seat.name for seat in self.samplers.seats if not seat.leaves]
        if names:
            shares = divided(requests, [self._at[name] for name in names])
            for name, share in zip(names, shares, strict=True):
                for request in share:
                    self._sample_at(request, name)
        seats = self._taking
        return zip(seats, divided(requests, [len(seat.open) for seat in seats]), strict=True)

    def _sample_at(self, request: Request, name: str) -> None:
        """Count an episode at the sampler of this name; after its end, at an empty name."""
        self._at[request.work.sampler] -= 1
        self._at[name] += 1
        request.work = replace(request.work, sampler=name)

    @override
    def _withdraw(self, request: Request) -> None:
        super()._withdraw(request)
        self._sample_at(request, "")

    @override
    def _too_many_losses(self, request: Request) -> RagenError:
        spec: EpisodeSpec = request.work.spec
        return RagenError(
            f"{MOST_LOSSES} players were lost, each with the episode of level {spec.level_seed}, "
            f"member {spec.member}, and others open: {self._loss}; look for code in a reward term "
            "or a tool parser that hangs or ends its process, or set engine.players = 0"
        )
