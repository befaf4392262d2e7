"""What runs in a child: a local engine or a sampler, and the set-ups that it plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from typing_extensions import override

from ragen.chat.chat import Chat
from ragen.cluster.child import Host
from ragen.config.config import Config
from ragen.core.types import Episode
from ragen.engines.factory import make_policy
from ragen.engines.local import LocalEngine
from ragen.networks.machine import use_threads
from ragen.rollout.groups import run_episodes
from ragen.rollout.setup import EpisodeSpec, Setup, open_setups, open_stages
from ragen.sampling.weighted_policy import Stats, WeightedPolicy
from ragen.sampling.weights import checksums

OF_PROCESS = ("make", "chat", "venue", "agent")
"""The fields of a `Setup` that each process has for itself."""


class ChildHost(Host):
    """One process of a `ProcessEngine`, or of a `SpreadSampler` without a learner."""

    _policy: WeightedPolicy
    _chat: Chat

    def __init__(self) -> None:
        self._stack, self._era = ExitStack(), 0
        self._setups: dict[tuple[str, int], Setup] | None = None

    @override
    def close(self) -> None:
        self._stack.close()

    async def ready(self) -> None:
        """Answers once all modules are loaded."""

    async def start(self, threads: int, config: Config, path: str, *of_rank: Any) -> None:
        """Load the model; of an engine, with its learner, whose place the last arguments say.

        Raises:
            RagenError: The model cannot be loaded.
        """
        use_threads(threads)
        self._config = config
        if of_rank:
            self._engine = LocalEngine(config, path, *of_rank)
            self._policy, self._chat = self._engine.policy, self._engine.chat
        else:
            self._policy, self._chat = make_policy(config, path)

    async def play(
        self,
        kinds: Sequence[Mapping[str, Any]],
        which: Sequence[int],
        specs: Sequence[EpisodeSpec],
        concurrency: int,
        era: int,
    ) -> Stats:
        """Play episodes, each of which is news when it ends; returns the sampler's counts.

        `kinds` are the fields of the set-ups, and `which` says which of them each episode has. A
        later era begins without keys and values.
        """
        if era > self._era:
            self._era = era
            self._policy.forget()
            self._policy.stats = Stats()
        setups = [self._own(kind) for kind in kinds]
        own = [setups[number] for number in which]
        await run_episodes(self._policy, own, specs, concurrency, self._ended)
        return self._policy.stats

    def _ended(self, episode: Episode) -> None:
        self.tell(episode)

    def _own(self, kind: Mapping[str, Any]) -> Setup:
        if self._setups is None:
            full = open_setups(self._config, self._chat, self._stack)
            early = open_stages(self._config, self._chat, self._stack)
            self._setups = {(each.env, each.stage): each for each in (*full.values(), *early)}
        return replace(self._setups[kind["env"], kind["stage"]], **kind)

    async def call(self, method: str, *arguments: Any) -> dict[str, int] | None:
        """Compute this process's share of a method; returns the checksums of other weights."""
        await getattr(self._engine, method)(*arguments)
        has_others = method in ("publish", "load")
        return checksums(self._engine.learner.trained_weights()) if has_others else None
