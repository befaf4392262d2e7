"""`ragen check judge`: how much a judge's scores depend on the order in which it reads a group.

The judge reads recorded groups of a run in the order of the run, and in the opposite order. The
rubric, the model and the episodes are the same, so that every difference comes from the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path

from ragen.config.extensions import JUDGE
from ragen.core.errors import RagenError
from ragen.core.seeding import derive
from ragen.core.statistics import Interval, bootstrap_mean
from ragen.core.stopping import run_async
from ragen.core.tables import Section
from ragen.rollout.groups import together
from ragen.rollout.judge import Failure, Judge, shuffled
from ragen.storage.database import check_run_folder
from ragen.storage.settings import run_config
from ragen.storage.stored_episodes import Recorded, read_episodes

Scores = dict[str, float]
"""The scores of a group's texts, in the order in which they were shown."""


@dataclass(frozen=True, slots=True)
class OrderBias:
    """What the order changes, with 95 % intervals over groups.

    Attributes:
        groups: Groups that got scores in both orders.
        failed: Groups that did not.
        pairs: Pairs of episodes that differ.
        changed: Share of the pairs that change their order by score; a tie in only one of the
            orders is half a change.
        earlier: What the earlier place adds to a score: the mean difference of an episode's scores
            in its two places.
    """

    groups: int
    failed: int
    pairs: int
    changed: Interval
    earlier: Interval

    def section(self, title: str) -> Section:
        """The result as a table."""
        named = (
            ("share of pairs whose order changes", self.changed),
            ("score added by the earlier place", self.earlier),
        )
        rows = tuple(
            (name, f"{each.value:.3f}", f"[{each.low:.3f}, {each.high:.3f}]")
            for name, each in named
        )
        lost = f"; {self.failed} more got no score" if self.failed else ""
        line = f"{self.groups} groups with {self.pairs} pairs of different episodes, in two orders"
        return Section(title, (f"{line}{lost}.",), ("measure", "mean", "95 % interval"), rows)


def measure_order_bias(run: Path, num_groups: int = 20) -> OrderBias:
    """Ask a run's judge about its last recorded groups in two orders.

    The answers are kept with those of the run, so that the first order often costs nothing.

    Raises:
        RagenError: There is no run, its judge compares no groups, it recorded none with different
            episodes, or the judge scores none.
    """
    check_run_folder(run)
    config = run_config(run)
    if JUDGE not in config.reward.terms or config.judge.mode != "group":
        raise RagenError(
            f'{run} has no judge that compares groups (reward.terms.judge, judge.mode = "group"), '
            "so there is no order to check"
        )
    groups = deque(_groups(run, config.seed), maxlen=num_groups)
    if not groups:
        raise RagenError(
            f"{run} recorded no group with different episodes: train with record.episodes_every "
            "above 0"
        )

    from ragen.engines.judges import open_judge

    async def ask() -> list[tuple[Scores, Scores] | None]:
        async with open_judge(config, run) as judge:
            assert judge is not None
            return await together(_in_two_orders(judge, *group) for group in groups)

    answers = run_async(ask())
    scored = [answer for answer in answers if answer is not None]
    if not scored:
        raise RagenError(
            f"the judge {config.judge.model} gave no score for any of the groups; check the rubric "
            "and the server of the run's judge"
        )
    return order_bias(scored, len(answers) - len(scored))


def _groups(run: Path, seed: int) -> Iterator[tuple[int, list[str]]]:
    """The step and the shuffled texts of each recorded group with different episodes."""

    def key(recorded: Recorded) -> tuple[int, int, int]:
        return recorded.attempt, recorded.step, recorded.episode.group

    trained = (each for each in read_episodes(run) if each.phase == "train")
    for (_, step, group), members in groupby(trained, key):
        played = [each.episode for each in members]
        judged = [episode for episode in played if episode.turns and not episode.failed]
        texts = shuffled(judged, derive(seed, "judge", step - 1, group))
        if len(texts) > 1:
            yield step - 1, texts


async def _in_two_orders(judge: Judge, step: int, texts: list[str]) -> tuple[Scores, Scores] | None:
    orders = [await judge.scores_of(order, step) for order in (texts, texts[::-1])]
    one, other = (
        {text: score for text, score in order.items() if not isinstance(score, Failure)}
        for order in orders
    )
    return (one, other) if len(one) == len(other) == len(texts) else None


def order_bias(answers: list[tuple[Scores, Scores]], failed: int = 0) -> OrderBias:
    """What the order changes, for groups that were scored in one order and in its opposite.

    Example:
        >>> forth, back = {"a": 0.75, "b": 0.5}, {"b": 0.75, "a": 0.5}  # the first one is better
        >>> bias = order_bias([(forth, back)])
        >>> bias.changed.value, bias.earlier.value
        (1.0, 0.25)
    """
    changes: list[tuple[int, float]] = []
    gains: list[tuple[int, float]] = []
    for number, (one, other) in enumerate(answers):
        texts = list(one)
        for a, b in combinations(texts, 2):
            before, after = _sign(one[a] - one[b]), _sign(other[a] - other[b])
            changes.append((number, abs(before - after) / 2))
        for place, text in enumerate(texts):
            opposite = len(texts) - 1 - place
            if place != opposite:
                gain = one[text] - other[text]
                gains.append((number, gain if place < opposite else -gain))
    intervals = [
        bootstrap_mean([value for _, value in each], [number for number, _ in each])
        for each in (changes, gains)
    ]
    return OrderBias(len(answers), failed, len(changes), *intervals)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
