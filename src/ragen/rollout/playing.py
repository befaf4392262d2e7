"""An episode while it is played: the frame around the turns of environments and of agents.

Environments are user code and are called only through `GuardedEnv`. If one raises, takes too long
or returns nonsense, the episode fails and keeps the traceback: a failed episode is data. Any other
exception is a bug, and ends the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ragen.core.pictures import Picture
from ragen.core.types import Episode, StopReason, Turn
from ragen.core.user_code import UserCodeError
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.setup import EpisodeSpec, Setup


class Playing:
    """The turns and state of an episode so far; `stop_reason` holds unless something ends it."""

    def __init__(self, setup: Setup, spec: EpisodeSpec, stop_reason: StopReason) -> None:
        self.setup, self.spec, self.stop_reason = setup, spec, stop_reason
        self.turns: list[Turn] = []
        self.others: tuple[Turn, ...] = ()
        self.success = False
        self.error: str | None = None
        self.final: tuple[str | None, tuple[str, ...] | None, tuple[Picture, ...]]
        self.final = None, None, ()

    async def run(self, play: Callable[[GuardedEnv], Awaitable[None]]) -> Episode:
        """The episode that `play` makes in an environment, which is opened and closed here."""
        try:
            env = await self.setup.open_env()
            try:
                await play(env)
            finally:
                await env.call(env.close)
        except UserCodeError as failure:
            self.stop_reason = "timeout" if failure.timed_out else "error"
            self.error, self.success = str(failure), False
        self.setup.venue.ended()
        terminated = self.stop_reason in ("solved", "failed")
        return Episode(
            self.setup.env,
            self.spec.level_seed,
            self.spec.noise_seed,
            self.spec.group,
            self.spec.member,
            tuple(self.turns),
            self.stop_reason,
            terminated,
            not terminated,
            self.success,
            self.error,
            *self.final,
            others=self.others,
        )
