"""Results: the record of an evaluation, how it follows from outcomes, and how runs keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from ragen.core.statistics import Interval, bootstrap_mean, pass_at_k, success_rate
from ragen.envs.contract import Baselines
from ragen.evaluation.baselines import mean_baselines
from ragen.evaluation.outcomes import Outcome, how_sampled
from ragen.storage.reader import read_evaluations, standing


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation on a fixed set of levels, `samples` episodes per level.

    Shares lie between 0 and 1, and intervals have 95 % confidence. Failed episodes (the environment
    or the server broke) count as no success. Returns are sums of the environment's rewards without
    format penalties. `ragen eval --json` prints these fields.

    Attributes:
        target: The name of the agent, as it was given.
        temperature: Sampling temperature; 0 is greedy.
        episodes: Number of levels.
        success, success_low, success_high: Share of successful episodes and the ends of its
            interval (`statistics.success_rate`).
        random: Success of uniformly random play on the same levels and budgets.
        optimal: Success of optimal play; ``None`` if the environment has no solver.
        mean_return, mean_return_low, mean_return_high: Mean return per episode and the ends of its
            interval (`statistics.bootstrap_mean`).
        random_return, optimal_return: Mean returns of random and optimal play.
        mean_turns, mean_actions: Turns and executed actions per episode.
        valid_fraction: Share of turns whose reply had the required form and legal actions only.
        completion_tokens: Sampled tokens per turn; 0 for players that are no model.
        first_level: The first level seed.
        thought_words: Words of thought per turn.
        effective_fraction: Share of executed actions that changed the environment.
        total_prompt_tokens, total_completion_tokens: Tokens read and sampled, over all turns.
        pass_at: The chance that at least one of k episodes of a level succeeds, and the ends of its
            interval, as ``[chance, low, high]`` by ``str(k)``, k = 1, 2, 4, … and `samples`. It is
            empty with one sample.
        invalid_reply: The beginning of a reply that was not valid, if most were not.
        invalid_reason: The reason why it was not valid.
        folder: Where the episodes are kept; empty if they are not. No database has this field.
        parts: The evaluations of a mixture's environments; the other fields cover all episodes.

    Example:
        >>> from ragen.evaluation.evaluation import evaluate_target
        >>> evaluation, _ = evaluate_target("solver", {"env": "bandit"}, episodes=8)
        >>> evaluation.success, evaluation.random, evaluation.optimal
        (1.0, 0.5, 1.0)
        >>> print(evaluation)
        T=1: success 100.0% [67.6%, 100.0%] on 8 levels (random play 50.0%, optimal play 100.0%)
    """

    env: str
    target: str
    temperature: float
    episodes: int
    success: float
    success_low: float
    success_high: float
    random: float
    optimal: float | None
    mean_return: float
    mean_return_low: float
    mean_return_high: float
    random_return: float
    optimal_return: float | None
    mean_turns: float
    mean_actions: float
    valid_fraction: float
    completion_tokens: float
    failed: int
    first_level: int
    seconds: float
    samples: int = 1
    thought_words: float = 0.0
    effective_fraction: float = 0.0
    total_prompt_tokens: int = 0
    total_completion_tokens: int = 0
    pass_at: dict[str, list[float]] = field(default_factory=dict)
    invalid_reply: str = ""
    invalid_reason: str = ""
    folder: str = ""
    parts: tuple[Evaluation, ...] = ()

    def __str__(self) -> str:
        optimal = "" if self.optimal is None else f", optimal play {self.optimal:.1%}"
        parts = "".join(f"; {part.env}: {part._interval}" for part in self.parts)
        return (
            f"{self.how}: success {self._interval} on {self.episodes} levels "
            f"(random play {self.random:.1%}{optimal}){parts}"
        )

    @property
    def _interval(self) -> str:
        return f"{self.success:.1%} [{self.success_low:.1%}, {self.success_high:.1%}]"

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Evaluation:
        """The evaluation that `record` wrote."""
        return cls(**{**record, "parts": tuple(map(cls.of_record, record.get("parts", ())))})

    @property
    def by_env(self) -> tuple[Evaluation, ...]:
        """The evaluations of the single environments."""
        return self.parts or (self,)

    @property
    def how(self) -> str:
        """How tokens were chosen (`how_sampled`)."""
        return how_sampled(self.temperature)

    @property
    def interval(self) -> Interval:
        """Success with its interval."""
        return Interval(self.success, self.success_low, self.success_high)

    def row(self, player: str) -> tuple[str, ...]:
        """A row of a table: the player, success, its interval, mean return."""
        interval = f"{self.success_low:.1%} – {self.success_high:.1%}"
        return player, f"{self.success:.1%}", interval, f"{self.mean_return:.3f}"

    def with_baselines(self, rows: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        """Rows of players between the rows of random and optimal play."""
        random = "random play", f"{self.random:.1%}", "", f"{self.random_return:.3f}"
        if self.optimal is None:
            return random, *rows
        optimal_return = "" if self.optimal_return is None else f"{self.optimal_return:.3f}"
        return random, *rows, ("optimal play", f"{self.optimal:.1%}", "", optimal_return)

    def record(self) -> dict[str, Any]:
        """The evaluation as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunEvaluation:
    """An evaluation that a run made, with its attempt and step."""

    attempt: int
    step: int
    evaluation: Evaluation


def load_evaluations(run: Path) -> list[RunEvaluation]:
    """A run's own evaluations in the order in which they were made, without those rolled back."""
    found, stands = [], standing(run)
    for record in read_evaluations(run):
        attempt, step = record.pop("attempt"), record.pop("step")
        if stands(attempt, step):
            found.append(RunEvaluation(attempt, step, Evaluation.of_record(record)))
    return found


def summarize(
    outcomes: Sequence[Outcome],
    baselines: Baselines,
    target: str,
    temperature: float,
    seconds: float,
) -> Evaluation:
    """An evaluation from its outcomes, equally many on each level, and the levels' baselines."""
    levels = [outcome.level_seed for outcome in outcomes]
    samples = Counter(levels)
    (num_samples,) = set(samples.values())
    solved = Counter(outcome.level_seed for outcome in outcomes if outcome.success)
    success = success_rate([outcome.success for outcome in outcomes], levels)
    mean_return = bootstrap_mean([outcome.reward for outcome in outcomes], levels)

    def total(name: str) -> int:
        return sum(getattr(outcome, name) for outcome in outcomes)

    num_turns, num_actions = max(1, total("num_turns")), max(1, total("num_actions"))
    return Evaluation(
        env=outcomes[0].env,
        target=target,
        temperature=temperature,
        episodes=len(samples),
        success=success.value,
        success_low=success.low,
        success_high=success.high,
        random=baselines.random,
        optimal=baselines.optimal,
        mean_return=mean_return.value,
        mean_return_low=mean_return.low,
        mean_return_high=mean_return.high,
        random_return=baselines.random_return,
        optimal_return=baselines.optimal_return,
        mean_turns=total("num_turns") / len(outcomes),
        mean_actions=total("num_actions") / len(outcomes),
        valid_fraction=total("valid_turns") / num_turns,
        completion_tokens=total("completion_tokens") / num_turns,
        failed=total("failed"),
        first_level=min(levels),
        seconds=seconds,
        samples=num_samples,
        thought_words=total("thought_words") / num_turns,
        effective_fraction=total("effective_actions") / num_actions,
        total_prompt_tokens=total("prompt_tokens"),
        total_completion_tokens=total("completion_tokens"),
        pass_at={
            str(k): list(astuple(pass_at_k([solved[level] for level in samples], num_samples, k)))
            for k in pass_at_ks(num_samples)
            if num_samples > 1
        },
    )


def together(env: str, parts: Sequence[Evaluation], outcomes: Sequence[Outcome]) -> Evaluation:
    """The evaluation of a mixture: all its outcomes, which have one sample of each level.

    Every environment counts by its levels, and the baselines are means over the environments.
    """
    first, same = parts[0], {(part.episodes, part.first_level) for part in parts}
    assert len(same) == 1, "every environment has the same levels"
    baselines = mean_baselines(
        [Baselines(e.random, e.optimal, e.random_return, e.optimal_return) for e in parts]
    )
    # A level of each environment is a level of its own.
    own = [replace(each, level_seed=seed) for each, seed in zip(outcomes, count(first.first_level))]
    seconds = sum(part.seconds for part in parts)
    whole = summarize(own, baselines, first.target, first.temperature, seconds)
    return replace(whole, env=env, parts=tuple(parts))


def pass_at_ks(samples: int) -> list[int]:
    """The k for which pass@k is reported: the powers of two below `samples`, and `samples`.

    Example:
        >>> pass_at_ks(6), pass_at_ks(1)
        ([1, 2, 4, 6], [1])
    """
    return [2**power for power in range((samples - 1).bit_length())] + [samples]
