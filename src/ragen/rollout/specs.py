"""Episode specifications: which level an episode plays, and where its randomness comes from."""

from __future__ import annotations

from dataclasses import dataclass

from ragen.core.errors import RagenError
from ragen.core.seeding import derive
from ragen.core.types import Turn


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """The level, the place in its group, and the seeds of one episode.

    `path` begins with the run's seed. `derive(*path, "noise", …)` gives every number that the
    episode needs, so an episode can be played again alone.

    Example:
        >>> first = EpisodeSpec(10000, 0, 3, (0, "train", 0))
        >>> second = EpisodeSpec(10000, 0, 5, (0, "train", 0))
        >>> first.noise_seed == second.noise_seed
        False
    """

    level_seed: int
    group: int
    member: int
    path: tuple[int | str, ...]

    @property
    def noise_seed(self) -> int:
        """Seed of the environment's random events."""
        return _derive(self.path, "noise", self.group, self.member)

    def request_seed(self, turn: int) -> int:
        """Seed of one completion's sampling."""
        return _derive(self.path, "sample", self.group, self.member, turn)


@dataclass(frozen=True, slots=True)
class BranchSpec(EpisodeSpec):
    """A recorded episode that is played anew from one of its turns.

    `turns` are the recorded turns up to that one. Of the last, only what came before the reply
    counts: the environment restarts from its snapshot. `noise` is the recorded episode's noise
    seed, so the random events stay the same; `path` decides the sampling alone.

    Raises:
        RagenError: The last turn has no snapshot.
    """

    noise: int
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if self.turns[-1].snapshot is None:
            raise RagenError(
                f"no snapshot of the environment is kept of turn {len(self.turns) - 1}"
            )

    @property
    def noise_seed(self) -> int:
        """The noise seed of the recorded episode."""
        return self.noise


def _derive(path: tuple[int | str, ...], *rest: int | str) -> int:
    run_seed, *above = path
    return derive(int(run_seed), *above, *rest)
