"""The policies of a run for each thing that can fail: one small object each, with its numbers.

`recovery` carries out what they decide. docs/reproducibility.md has the whole list, also of what
stands elsewhere: `rollout.endpoint` sends a request again, and after a loss the processes of an
engine wait for each other (`cluster.lost.GRACE_S`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.estimator import compares_group
from ragen.config.sections import GuardConfig
from ragen.core.errors import last_line
from ragen.core.types import Episode
from ragen.diagnostics.collapse import WINDOW
from ragen.evaluation.outcomes import outcome_of, refuse_unplayable


@dataclass(frozen=True, slots=True)
class SmallGroup:
    """A group whose episodes are compared needs `compared` played ones; another group needs one."""

    compared: int = 2

    def min_played(self, estimator: str) -> int:
        """Played episodes that a group needs with this advantage estimator."""
        return self.compared if compares_group(find_estimator(estimator)) else 1


@dataclass(frozen=True, slots=True)
class FailedEpisodes:
    """A step raises an alarm if at least this share of its episodes failed; if all did, it ends.

    The run is then saved as it was before the step.
    """

    alarm_fraction: float = 0.5

    def complaint(self, episodes: Sequence[Episode]) -> str:
        """One line with the share and the commonest reason; empty if few episodes failed.

        Raises:
            UnplayableError: All episodes failed, or none had room for its first prompt.
        """
        refuse_unplayable([outcome_of(episode) for episode in episodes])
        reasons = Counter(last_line(each.error) for each in episodes if each.failed)
        if not reasons or reasons.total() < self.alarm_fraction * len(episodes):
            return ""
        ((reason, count),) = reasons.most_common(1)
        share = reasons.total() / len(episodes)
        return (
            f"{reasons.total()} of {len(episodes)} episodes ({share:.0%}) failed and are not "
            f"trained on, {count} of them with: {reason}"
        )


@dataclass(frozen=True, slots=True)
class UntrainedCalls:
    """A step raises an alarm if more than this share of an agent's tokens is not trained on."""

    alarm_fraction: float = 0.2

    def complaint(self, share: float) -> str:
        """One line with the share; empty if it is small."""
        if share <= self.alarm_fraction:
            return ""
        return (
            f"{share:.0%} of the tokens that were sampled for the agent are not trained on: their "
            "calls offer no tools, were lost or rejected, or say so (docs/agents.md)"
        )


@dataclass(frozen=True, slots=True)
class Rollback:
    """A run in trouble may go back `most` times; if another rollback is due, it stops.

    For `grace_steps` after a rollback or a stop no detector fires: trailing means still mix in old
    values. Checkpoints reach back `reach_steps`, because an onset lies a window before its alarm.
    """

    most: int = 2
    grace_steps: int = 2 * WINDOW
    reach_steps: int = 2 * WINDOW

    def kept_checkpoints(self, guard: GuardConfig, eval_every: int, spacing: int) -> int:
        """Regular checkpoints, `spacing` steps apart, that a rollback may need."""
        if "rollback" not in guard.responses.values():
            return 0
        # A drop of success shows in two evaluations in a row, and its onset lies before both.
        evaluations = 2 * eval_every * (guard.responses.get("reward_drop") == "rollback")
        return 1 + math.ceil(max(self.reach_steps, evaluations) / spacing)


@dataclass(frozen=True, slots=True)
class LostEngine:
    """A new engine continues from the last checkpoint, `most` times without a new checkpoint."""

    most: int = 3

    def ends_run(self, losses: int) -> bool:
        """True if a run has lost too many engines since its last checkpoint."""
        return losses > self.most


@dataclass(frozen=True, slots=True)
class Stall:
    """A run in which no phase made progress for `limit_s` seconds hangs: it may be stopped."""

    limit_s: float = 1800.0

    def limit(self, response: str) -> float:
        """The limit for a response of the detector ``stalled``; 0 where nobody looks."""
        return 0.0 if response == "off" else self.limit_s


SMALL_GROUP = SmallGroup()
FAILED_EPISODES = FailedEpisodes()
UNTRAINED_CALLS = UntrainedCalls()
ROLLBACK = Rollback()
LOST_ENGINE = LostEngine()
STALL = Stall()
