"""The venue of environments: the run's loop, threads, or worker processes."""

from __future__ import annotations

from ragen.core.user_code import Stopwatch, UserCodeError
from ragen.envs.contract import Waits
from ragen.envs.isolation import Workers

SLOW_S = 0.05
"""Seconds for which a whole episode may stop the run's loop, in the mean."""
FEW = 8
"""Episodes after which this is looked at."""


class Venue(Stopwatch):
    """Where the environments of a set-up run, and the seconds that the run's loop spent in them.

    In ``"threads"`` and in ``"workers"``, which are processes, episodes wait side by side. With
    ``"no"``, the loop itself calls them, one after the other. If an episode then takes longer than
    `SLOW_S`, the later ones are played in the `workers`, if there are any and they can start.
    `news` says so, once.
    """

    def __init__(self, waits: Waits = "no", workers: Workers | None = None) -> None:
        super().__init__()
        self._waits: Waits = waits
        self._workers = workers
        self._episodes = 0
        self.news = ""

    @property
    def waits(self) -> bool:
        """True if environments run outside of the run's loop."""
        return self._waits != "no"

    @property
    def workers(self) -> Workers | None:
        """The processes in which they run, if they do."""
        return self._workers if self._waits == "workers" else None

    def ended(self) -> None:
        """Count an episode, and move the next ones if episodes in the loop are slow."""
        self._episodes += 1
        each = self.seconds / self._episodes
        if self.waits or self._workers is None or self._episodes < FEW or each < SLOW_S:
            return
        slow = f"an episode waits {each:.2g} s for its environment"
        try:
            self._workers.give_back(self._workers.take())
        except UserCodeError as failure:
            self._workers, how = None, f"no worker process could start ({failure.reason})"
            self.news = f"{slow}, in which nothing else is done: {how}"
        else:
            self._waits = "workers"
            self.news = (
                f"{slow}: from here on, episodes wait side by side in worker processes "
                "(env.isolate = true does so from the start)"
            )

    def close(self) -> None:
        """Stop the worker processes, if there are any."""
        if self._workers is not None:
            self._workers.close()
