"""Evaluation: success with its interval, beside random and optimal play on the same levels."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.rules import vllm_refuses
from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS, TRAIN_LEVELS, eval_level
from ragen.core.statistics import bootstrap_mean, pass_at_k, success_rate
from ragen.core.stopping import run_async
from ragen.core.types import Episode, Group
from ragen.envs.contract import Baselines
from ragen.evaluation.baselines import Budget, measure_baselines
from ragen.evaluation.outcomes import Outcome, Store, how_sampled, key_of, outcome_of
from ragen.evaluation.targets import config_for, opponent, run_of, settings_of
from ragen.rollout.endpoint import Server
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import Closable, Policy
from ragen.rollout.rollout import Place, Setup, play, run_groups, run_places, setup_of
from ragen.storage.reader import read_evaluations

EVALS = Path("evals")
"""The folder of results whose target is no run."""

CONCURRENCY = 16
"""Episodes that are played at once through an endpoint."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an agent reached on a fixed set of levels, `samples` episodes each.

    `success` is a share of episodes with its 95 % interval (`statistics.success_rate`); failed
    episodes (an environment or a server that broke) count as no success. `pass_at_k` is the chance
    that
    one of k = `samples` episodes of a level succeeds, `pass_at` that of one of fewer: for k = 1, 2,
    4, … up to `samples` the chance and its interval, where there are several. `random` and
    `optimal` are the success of uniformly random and of optimal play on the same levels under the
    same budgets; `optimal` is ``None`` for environments without a solver. Returns are sums of the
    environment's rewards, format penalties left out.

    Of a turn: `valid_fraction` had a valid reply, `completion_tokens` and `thought_words` are means
    where they are known. `effective_fraction` is the share of actions that changed the environment.
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
    pass_at_k: float = math.nan
    pass_at_k_low: float = math.nan
    pass_at_k_high: float = math.nan
    thought_words: float = 0.0
    effective_fraction: float = 0.0
    total_prompt_tokens: int = 0
    total_completion_tokens: int = 0
    pass_at: dict[str, list[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line: success with its interval, beside floor and ceiling."""
        optimal = "" if self.optimal is None else f", optimal play {self.optimal:.1%}"
        return (
            f"{self.how}: success {self.success:.1%} "
            f"[{self.success_low:.1%}, {self.success_high:.1%}] on {self.episodes} levels "
            f"(random play {self.random:.1%}{optimal})"
        )

    @property
    def how(self) -> str:
        """How tokens were chosen (`how_sampled`)."""
        return how_sampled(self.temperature)

    def record(self) -> dict[str, Any]:
        """The evaluation as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation and when it was made in its run."""

    attempt: int
    step: int
    evaluation: Evaluation


def evaluations_of(run: Path) -> list[Evaluated]:
    """A run's evaluations in the order in which they were made.

    Raises:
        RagenError: There is no run, its database cannot be read, or another version wrote it.
    """
    found = []
    for record in read_evaluations(run):
        attempt, step = record.pop("attempt"), record.pop("step")
        try:
            found.append(Evaluated(attempt, step, Evaluation(**record)))
        except TypeError as error:
            raise RagenError(
                f"{run} was evaluated by another version of RAGEN ({error}); use that one"
            ) from None
    return found


async def evaluate_policy(
    policy: Policy | PlayerPolicy,
    setup: Setup,
    params: dict[str, Any],
    *,
    target: str,
    episodes: int,
    seed: int = 0,
    first_level: int = EVAL_LEVELS,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> tuple[Evaluation, list[Group]]:
    """Play one episode on each of `episodes` fixed levels.

    Args:
        policy: Who plays.
        setup: Environment, budgets, prompts and temperature.
        params: Parameters of the environment, for its references.
        target: What `policy` is called in the result.
        episodes: Levels, counted up from `first_level`.
        seed: Of the environment's events and of sampling; the levels do not depend on it.
        first_level: The first level seed.
        concurrency: Episodes played at once.
        on_episode: Called as each episode ends.

    Returns:
        The result and the episodes, a group of one each.

    Raises:
        RagenError: Every episode failed (the first one's error is in the message), or had no room.
    """
    start = time.monotonic()
    levels = [eval_level(index, first_level) for index in range(episodes)]
    groups = await run_groups(policy, setup, levels, 1, (seed, "eval"), concurrency, on_episode)
    played = [group.episodes[0] for group in groups]
    outcomes = [outcome_of(episode) for episode in played]
    refuse_unplayable(outcomes)
    floor = floor_and_ceiling(setup, params, levels)
    seconds = time.monotonic() - start
    return summarised(outcomes, floor, target, setup.temperature, seconds), groups


def floor_and_ceiling(setup: Setup, params: Mapping[str, Any], levels: Sequence[int]) -> Baselines:
    """Random and optimal play on the levels, under the budgets of `setup`."""
    budget = Budget(setup.turns, setup.actions_per_turn, setup.actions)
    build = setup.make if setup.workers else None
    return measure_baselines(setup.env, params, budget, levels, build=build)


def summarised(
    outcomes: Sequence[Outcome],
    floor: Baselines,
    target: str,
    temperature: float,
    seconds: float,
) -> Evaluation:
    """The numbers of an evaluation from those of its episodes, as many on each level.

    Args:
        outcomes: What came of the episodes.
        floor: Random and optimal play on their levels.
        target: What the agent is called.
        temperature: Of its sampling.
        seconds: How long it took.
    """
    levels = [outcome.level_seed for outcome in outcomes]
    samples = Counter(levels)
    (num_samples,) = set(samples.values())
    solved = Counter(outcome.level_seed for outcome in outcomes if outcome.success)
    success = success_rate([outcome.success for outcome in outcomes], levels)
    passed = {
        k: pass_at_k([solved[level] for level in samples], num_samples, k)
        for k in tries(num_samples)
    }
    in_any = passed[num_samples]
    mean_return = bootstrap_mean([outcome.total_reward for outcome in outcomes], levels)
    turns = sum(outcome.num_turns for outcome in outcomes)
    actions = sum(outcome.num_actions for outcome in outcomes)

    def a_turn(total: int) -> float:
        return total / max(1, turns)

    completion_tokens = sum(outcome.completion_tokens for outcome in outcomes)
    return Evaluation(
        env=outcomes[0].env,
        target=target,
        temperature=temperature,
        episodes=len(samples),
        success=success.value,
        success_low=success.low,
        success_high=success.high,
        random=floor.random,
        optimal=floor.optimal,
        mean_return=mean_return.value,
        mean_return_low=mean_return.low,
        mean_return_high=mean_return.high,
        random_return=floor.random_return,
        optimal_return=floor.optimal_return,
        mean_turns=turns / len(outcomes),
        mean_actions=actions / len(outcomes),
        valid_fraction=a_turn(sum(outcome.valid_turns for outcome in outcomes)),
        completion_tokens=a_turn(completion_tokens),
        failed=sum(outcome.failed for outcome in outcomes),
        first_level=min(levels),
        seconds=seconds,
        samples=num_samples,
        pass_at_k=in_any.value,
        pass_at_k_low=in_any.low,
        pass_at_k_high=in_any.high,
        thought_words=a_turn(sum(outcome.thought_words for outcome in outcomes)),
        effective_fraction=sum(outcome.effective_actions for outcome in outcomes) / max(1, actions),
        total_prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        total_completion_tokens=completion_tokens,
        pass_at={str(k): [p.value, p.low, p.high] for k, p in passed.items() if num_samples > 1},
    )


def tries(samples: int) -> list[int]:
    """The k of which pass@k is told: the powers of two below the samples of a level, and those.

    Example:
        >>> tries(6), tries(1)
        ([1, 2, 4, 6], [1])
    """
    return [2**power for power in range((samples - 1).bit_length())] + [samples]


def refuse_unplayable(outcomes: Sequence[Outcome]) -> None:
    """Refuse an environment that breaks or leaves no room in every episode.

    Raises:
        RagenError: All of the episodes failed, or none had room for its first prompt.
    """
    if outcomes and all(outcome.failed for outcome in outcomes):
        first = outcomes[0]
        if first.stop_reason == "request":
            raise RagenError(f"the server failed in every episode: {first.reason}")
        raise RagenError(
            f"the environment {first.env!r} failed in every episode: {first.reason}; "
            "run `ragen check` on it"
        )
    if outcomes and all(o.stop_reason == "context" and not o.num_turns for o in outcomes):
        raise RagenError(
            f"no first prompt of the environment {outcomes[0].env!r} leaves room for a reply; "
            "raise model.max_length, or lower rollout.max_tokens"
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be measured; as the arguments of `outcomes_of`.

    Raises:
        RagenError: A number is out of its range.

    Example:
        >>> Ask("random", {}, episodes=2).levels
        [123, 124]
    """

    target: str
    overrides: Mapping[str, Any]
    episodes: int = 256
    seed: int = 0
    temperature: float = 1.0
    samples: int = 1
    server: Server | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        most = TRAIN_LEVELS - EVAL_LEVELS
        if not 1 <= self.episodes <= most:
            raise RagenError(
                f"episodes = {self.episodes}: expected a whole number from 1 to {most}"
            )
        if not 0 <= self.temperature < math.inf:
            raise RagenError(f"temperature = {self.temperature}: expected a number ≥ 0")
        if self.seed < 0:
            raise RagenError(f"seed = {self.seed}: expected a whole number ≥ 0")
        for name in ("samples", "concurrency"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise RagenError(f"{name} = {number}: expected a whole number ≥ 1")

    @property
    def levels(self) -> list[int]:
        """The level seeds."""
        return [eval_level(index) for index in range(self.episodes)]


def evaluate_target(
    target: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    episodes: int = 256,
    seed: int = 0,
    temperature: float = 1.0,
) -> Evaluation:
    """`outcomes_of` with one sample a level, which reads and writes no file.

    Raises:
        RagenError: As `outcomes_of`.
    """
    ask = Ask(target, overrides or {}, episodes, seed, temperature)
    evaluation, _ = _answered(ask, None)
    return evaluation


def outcomes_of(
    target: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    episodes: int = 256,
    seed: int = 0,
    temperature: float = 1.0,
    samples: int = 1,
    server: Server | None = None,
    concurrency: int | None = None,
    out: Path | None = None,
    on_outcome: Callable[[Outcome, int], None] | None = None,
) -> tuple[Evaluation, list[Outcome]]:
    """Evaluate a run, a model or a player, or read what is stored for exactly these settings.

    Each outcome is stored when its episode ends, so that the same call goes on where another one
    was killed; one with more levels or samples plays only those that are new. Episodes for which a
    server failed are played again.

    Args:
        target: A run folder (its newest checkpoint), one of its checkpoints, ``base``, ``random``,
            ``solver``, a model folder or a hub id; with `server`, the model's name there.
        overrides: Values by config key, such as ``{"env": "sokoban"}``.
        episodes: Levels; the same ones for every target, none of training's.
        seed: Of the environment's events and of sampling.
        temperature: Of sampling; 0 is greedy.
        samples: Episodes a level.
        server: Where an endpoint is.
        concurrency: Episodes that are played at once; ``None`` takes what suits the target.
        out: The folder whose database keeps the outcomes; ``None`` takes that of the target's run,
            and `EVALS` for a target without one.
        on_outcome: Called when an episode ends, with how many are still to be played; those that
            were stored come first.

    Returns:
        The result, and what came of each episode, in the order of (level, sample).

    Raises:
        RagenError: No such target or environment, the environment cannot be played by it, a number
            is out of its range, every episode failed, or the outcomes cannot be stored.
    """
    ask = Ask(target, overrides or {}, episodes, seed, temperature, samples, server, concurrency)
    folder = out or (None if server else run_of(target)) or EVALS
    return _answered(ask, folder, on_outcome)


def _answered(
    ask: Ask, folder: Path | None, on_outcome: Callable[[Outcome, int], None] | None = None
) -> tuple[Evaluation, list[Outcome]]:
    """Play what `folder` does not hold, keep it there, and sum up."""
    start = time.monotonic()
    config = config_for(ask.target, ask.overrides, ask.server)
    if config.rollout.sampler == "vllm" and (reason := vllm_refuses(ask.temperature)):
        raise RagenError(
            f"temperature = {ask.temperature:g}: {reason}, or greedily at 0; "
            'for another set rollout.sampler = "local"'
        )
    settings = settings_of(ask.target, config, ask.server, ask.seed, ask.temperature)
    key, path = key_of(settings), (ask.seed, "eval")
    wanted = {
        (level, sample): Place(level, group, sample, path)
        for group, level in enumerate(ask.levels)
        for sample in range(ask.samples)
    }
    found: dict[tuple[int, int], Outcome] = {}

    def keep(outcome: Outcome) -> None:
        found[outcome.level_seed, outcome.sample] = outcome
        if on_outcome is not None:
            on_outcome(outcome, len(wanted) - len(found))

    with Store(folder) if folder else nullcontext() as store:
        for outcome in store.outcomes(key) if store else ():
            if outcome.stop_reason != "request" and (outcome.level_seed, outcome.sample) in wanted:
                keep(outcome)
        missing = [place for at, place in wanted.items() if at not in found]

        def on_episode(episode: Episode) -> None:
            outcome = outcome_of(episode)
            if store is not None:
                store.add(key, outcome)
            keep(outcome)

        if missing:
            run_async(_played(ask, config, missing, on_episode))
        outcomes = [found[at] for at in wanted]
        refuse_unplayable(outcomes)
        with closing(setup_of(config, None)) as setup:
            floor = floor_and_ceiling(setup, config.env.params, ask.levels)
        seconds = time.monotonic() - start
        evaluation = summarised(outcomes, floor, ask.target, ask.temperature, seconds)
        # Who was killed between its last episode and here left outcomes without a result.
        if store is not None and (missing or not store.holds(key, ask.episodes, ask.samples)):
            store.finish(key, settings, evaluation.record())
    return evaluation, outcomes


async def _played(
    ask: Ask, config: Config, places: Sequence[Place], on_episode: Callable[[Episode], None]
) -> None:
    """Play the episodes of `places`."""
    policy, setup = opponent(ask.target, config, ask.server)
    playing = replace(setup, temperature=ask.temperature, min_tokens=0)
    slots = ask.concurrency or (CONCURRENCY if ask.server else config.rollout.slots)
    with closing(setup):
        try:
            await run_places(policy, playing, places, slots, on_episode)
        finally:
            await _let_go(policy)


def play_target(
    target: str, overrides: Mapping[str, Any] | None = None, *, seed: int = 0
) -> Episode:
    """Let a target play one evaluation level, the one that `seed` counts to; for watching."""
    config = config_for(target, overrides or {})
    policy, setup = opponent(target, config)
    place = Place(eval_level(seed), 0, 0, (seed, "play"))

    async def watched() -> Episode:
        with closing(setup):
            try:
                return await play(policy, setup, place)
            finally:
                await _let_go(policy)

    return run_async(watched())


async def _let_go(policy: Policy | PlayerPolicy) -> None:
    """Close a policy that holds connections or memory: another may follow in this process."""
    if isinstance(policy, Closable):
        await policy.close()
