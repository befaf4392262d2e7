"""What runs in a player's process: the environments of a run, and the episodes played in them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ragen.config.config import Config
from ragen.core.types import Completion, Episode, Prompt
from ragen.engines.hosts import LOOK_S, Failure, ServingHost, or_failure
from ragen.engines.machine import use_threads
from ragen.engines.player_pool import Order, PlayerTold
from ragen.engines.pool import ProcessLost, Remote, Seat
from ragen.engines.sampler_pool import SamplerPool, SamplerTold
from ragen.rollout.episode import play_episode
from ragen.rollout.setup import Setup, make_chat, open_setups, open_stages


class PlayerHost(ServingHost):
    """A player process: it has the environments of a run, and plays episodes in them.

    Calls of user code have a time limit only in the main thread, and the event loop of this process
    runs in another one. So only `env.isolate` stops environments that hang.
    """

    def start(self, config: Config, tokenizer: Any) -> Failure | None:
        """Make the set-ups of the run's environments."""

        async def work() -> None:
            chat, stack = make_chat(config, tokenizer), ExitStack()
            setups = open_setups(config, chat, stack)
            if "torch" in sys.modules:  # an environment or a judge has loaded it
                use_threads(1)
            self._env_time = next(iter(setups.values())).env_time
            self._env_time.counts_cpu = True
            stages = open_stages(config, chat, stack, self._env_time)
            self._samplers = SamplerPool(
                4 * config.episodes_at_once, config.engine.timeout_s, lambda seat, loss: None
            )
            every = {(each.env, each.stage): each for each in (*setups.values(), *stages)}
            self._work = partial(_play, self._samplers, every)
            self._began = time.process_time()
            self._reported: dict[str, SamplerTold] = {}
            self._tick()

        return or_failure(lambda: self._run(work()))

    def meet(self, name: str, sampler: Remote) -> None:
        """Sample with a sampler from now on; it replaces one of the same name."""

        async def work() -> None:
            self._remove(name, f"{name} was replaced")
            self._samplers.join(Seat(name, sampler))

        self._run(work())

    def part(self, name: str, loss: str) -> None:
        """Give the requests of a lost sampler to others; `loss` says what happened to it."""

        async def work() -> None:
            self._remove(name, loss)

        self._run(work())

    def avoid(self, name: str) -> None:
        """Send no more requests to a sampler that is asked to end."""

        async def work() -> None:
            if (seat := self._samplers.seat_of(name)) is not None:
                self._samplers.leave(seat)

        self._run(work())

    def _remove(self, name: str, loss: str) -> None:
        if (seat := self._samplers.seat_of(name)) is not None:
            self._samplers.remove(seat, ProcessLost(loss))

    def _tick(self) -> None:
        """Show life regularly, because the stacks do not change while it waits for samplers."""
        self._pulse.move()
        self._loop.call_later(LOOK_S, self._tick)

    def _forget(self) -> None:
        self._samplers.forget(self._era)

    def _told(self) -> PlayerTold:
        env_s = self._env_time.seconds
        # What environments compute in this process is in both times.
        outside_s = time.process_time() - self._began - self._env_time.cpu_s
        # Only what is new: with many samplers, the driver would spend most of its time on the rest.
        told = {
            seat.name: seat.told
            for seat in self._samplers.seats
            if seat.told is not None and seat.told is not self._reported.get(seat.name)
        }
        self._reported |= told
        return PlayerTold(outside_s + env_s, env_s, told)


class _PreferredSampler:
    """The samplers as the policy of an episode, which prefers the sampler of a name."""

    def __init__(self, samplers: SamplerPool, name: str) -> None:
        self._samplers, self._name = samplers, name

    async def complete(self, prompt: Prompt) -> Completion:
        """See `Policy.complete`."""
        return await self._samplers.complete(prompt, self._name)


async def _play(
    samplers: SamplerPool, setups: Mapping[tuple[str, int], Setup], order: Order
) -> Episode:
    """Play an episode as the driver would."""
    setup = replace(setups[order.env, order.stage], temperature=order.temperature)
    return await play_episode(_PreferredSampler(samplers, order.sampler), setup, order.spec)
