"""The venue of environments: the run's loop, threads, or worker processes."""

from __future__ import annotations

from ragen.core.user_code import Stopwatch
from ragen.envs.contract import Waits
from ragen.envs.isolation import Workers

SLOW_S = 0.05
"""Seconds for which a whole episode may stop the run's loop, in the mean."""
FEW = 8
"""Episodes after which this is looked at."""


class Venue(Stopwatch):
    """Where the environments of a set-up run, and the seconds that the run's loop spent in them.

    In threads and in the processes of `workers`, episodes wait side by side. Otherwise, the loop
    itself calls environments, one after the other; if that is slow, `news` says so, once.
    """

    def __init__(self, waits: Waits = "no", workers: Workers | None = None) -> None:
        super().__init__()
        self.waits, self.workers = waits != "no", workers
        self._episodes = 0
        self.news = ""

    def ended(self) -> None:
        """Count an episode, and look at the time that the first ones took."""
        self._episodes += 1
        each = self.seconds / self._episodes
        if self._episodes == FEW and each >= SLOW_S:
            self.news = (
                f"an episode waits {each:.2g} s for its environment, in which nothing else is "
                "done: with env.isolate = true, episodes wait side by side in worker processes"
            )

    def close(self) -> None:
        """Stop the worker processes, if there are any."""
        if self.workers is not None:
            self.workers.close()
