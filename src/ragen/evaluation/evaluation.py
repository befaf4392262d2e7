"""Evaluation: play fixed levels, store each episode, and report success with its interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from ragen.config.extensions import load, short_name
from ragen.config.reading import changed, dump
from ragen.config.sections import MOST_EPISODES
from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS, TRAIN_LEVELS
from ragen.core.stopping import run_async
from ragen.core.types import Episode, Group
from ragen.evaluation.baselines import Budget, measure_baselines
from ragen.evaluation.kept_episodes import FOLDER, KeptEpisodes
from ragen.evaluation.outcomes import (
    Outcome,
    check_sampling,
    outcome_of,
    refuse_unplayable,
)
from ragen.evaluation.results import Evaluation, summarize, together
from ragen.evaluation.targets import load_target, outcome_settings
from ragen.models.names import resolve_model
from ragen.rollout.endpoint import Server
from ragen.rollout.groups import run_episodes, run_groups
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import Closable, Policy
from ragen.rollout.setup import EpisodeSpec, Setup, forget_facts, make_setup
from ragen.settings.target import config_for
from ragen.storage.checkpoint import run_of

EVALS = Path(FOLDER)
"""The folder of evaluations of targets that are no run."""

CONCURRENCY = 16
"""Default number of concurrent episodes through an endpoint."""

LONGEST_REPLY = 300
"""How many characters of an invalid reply are shown."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a run's evaluations, `slots` at once; `seed` decides events and sampling."""

    episodes: int
    slots: int
    target: str
    seed: int


class Options(TypedDict, total=False):
    """The options of `evaluate_target`, which explains them."""

    episodes: int
    seed: int
    temperature: float
    samples: int
    concurrency: int | None
    out: Path | None


def default_out(target: str, server: Server | None = None) -> Path:
    """Where ``ragen eval`` stores episodes: the target's run, or `EVALS` for other targets."""
    return (None if server else run_of(target)) or EVALS


def evaluate_target(
    target: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    server: Server | None = None,
    episodes: int = 256,
    seed: int = 0,
    temperature: float = 1.0,
    samples: int = 1,
    concurrency: int | None = None,
    out: Path | None = None,
    on_outcome: Callable[[Outcome, int], None] = lambda outcome, left: None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[Evaluation, list[Outcome]]:
    """Evaluate a run, a checkpoint, a model, an endpoint or a player on fixed levels.

    Args:
        target: A run folder (its newest checkpoint), one of its checkpoints, ``base``, ``random``,
            ``solver``, a model folder or a hub id; with `server`, the model's name there.
        overrides: Values by config key, such as ``{"env": "sokoban"}``.
        server: The endpoint that serves the model.
        episodes: Number of levels. They are the same for every target and never used in training.
        seed: Seed of the environment's events and of sampling; the levels do not depend on it.
        temperature: Sampling temperature; 0 is greedy.
        samples: Episodes per level.
        concurrency: Number of concurrent episodes; ``None`` takes the target's default.
        out: A run, or a folder for other targets, below which each episode and its outcome are
            stored when it ends (`KeptEpisodes`). The same call then resumes after a kill, plays
            only new levels and samples, and repeats episodes for which the server failed. ``None``
            reads and writes no file.
        on_outcome: Called with each outcome and the number of episodes still to play; stored
            outcomes come first.
        note: Receives what the user has to tell an agent outside.

    Returns:
        Success, returns and counts, with random and optimal play as baselines; and the outcome of
        each episode, in the order of (level, sample).

    Raises:
        RagenError: There is no such target or environment, the target cannot play it, a number is
            out of its range, every episode failed, or the episodes cannot be stored.
    """
    start = time.monotonic()
    load.cache_clear()  # a parser may have been edited, or another one passed under its name
    forget_facts()  # in a notebook, a server may have other tools since the last evaluation
    _refuse_out_of_range(episodes, samples, concurrency)
    config = config_for(target, overrides or {}, server)
    check_sampling(seed, temperature, config.rollout.sampler)
    settings = outcome_settings(target, config, server, seed, temperature)
    specs = {
        (level, sample): EpisodeSpec(level, group, sample, (seed, "eval"))
        for group, level in enumerate(range(EVAL_LEVELS, EVAL_LEVELS + episodes))
        for sample in range(samples)
    }
    known: dict[tuple[int, int], Outcome] = {}

    def add(outcome: Outcome) -> None:
        known[outcome.level_seed, outcome.sample] = outcome
        on_outcome(outcome, len(specs) - len(known))

    model = resolve_model(target, config.env.name) if run_of(target) else target
    played = {"eval.episodes": episodes, "eval.temperature": temperature}
    own = changed(config, {"steps": 0, "seed": seed, "model.path": model, **played})
    with closing(KeptEpisodes(out, target, config.env.name, dump(own), settings)) as kept:
        for outcome in kept.known:
            if outcome.stop_reason != "request" and (outcome.level_seed, outcome.sample) in specs:
                add(outcome)

        if missing := [spec for place, spec in specs.items() if place not in known]:
            policy, setup = load_target(target, config, server)
            setup = replace(setup, temperature=temperature)
            text_of = None if setup.chat is None else setup.chat.text_of

            def on_episode(episode: Episode) -> None:
                kept.add(episode, text_of)
                add(outcome_of(episode))

            at_once = config.rollout.slots * max(1, config.engine.processes)
            slots = concurrency or (CONCURRENCY if server else at_once)
            run_async(play_episodes(policy, setup, missing, slots, on_episode, note))
        outcomes = [known[place] for place in specs]
        with closing(make_setup(config, None)) as setup:
            setup = replace(setup, temperature=temperature)
            evaluation = evaluation_of(outcomes, setup, target, start)
        if evaluation.valid_fraction < 0.5 and (reason := kept.invalid[1]):
            shown = (setup.prefill + kept.invalid[0])[:LONGEST_REPLY]
            evaluation = replace(evaluation, invalid_reply=shown, invalid_reason=reason)
        kept.finish(evaluation.record())
        return replace(evaluation, folder=str(kept.folder or "")), outcomes


def _refuse_out_of_range(episodes: int, samples: int, concurrency: int | None) -> None:
    most = TRAIN_LEVELS - EVAL_LEVELS
    if not 1 <= episodes <= most:
        raise RagenError(f"episodes = {episodes}: expected a whole number from 1 to {most}")
    if episodes * samples > MOST_EPISODES:
        raise RagenError(
            f"episodes · samples = {episodes} · {samples}: expected at most {MOST_EPISODES}"
        )
    for name, number in (("samples", samples), ("concurrency", concurrency)):
        if number is not None and number < 1:
            raise RagenError(f"{name} = {number}: expected a whole number ≥ 1")


async def play_episodes(
    policy: Policy | PlayerPolicy,
    setup: Setup,
    specs: Sequence[EpisodeSpec],
    slots: int = 1,
    on_episode: Callable[[Episode], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Episode]:
    """Play episodes, then release the connections and the memory of policy and set-up."""
    with closing(setup):
        try:
            if said := setup.invite():
                note(said)
            return await run_episodes(policy, setup, specs, slots, on_episode)
        finally:
            if isinstance(policy, Closable):
                await policy.close()


async def evaluate_envs(
    policy: Policy | PlayerPolicy,
    setups: Mapping[str, Setup],
    levels: Levels,
    on_episode: Callable[[Episode], None] | None = None,
) -> tuple[Evaluation, list[Group]]:
    """Play one episode on each level, in each environment of a run on the same levels.

    The evaluation of a mixture covers all episodes together, and its `parts` are the evaluations of
    the environments. The episodes are returned in groups of one, numbered through all environments.
    """
    parts, groups = list[Evaluation](), list[Group]()
    path, seeds = (levels.seed, "eval"), range(EVAL_LEVELS, EVAL_LEVELS + levels.episodes)
    for setup in setups.values():
        start = time.monotonic()
        played = await run_groups(policy, setup, seeds, 1, path, levels.slots, on_episode)
        outcomes = [outcome_of(group.episodes[0]) for group in played]
        parts.append(evaluation_of(outcomes, setup, levels.target, start))
        for number, group in enumerate(played, len(groups)):
            groups.append(Group((replace(group.episodes[0], group=number),)))
    if len(parts) == 1:
        return parts[0], groups
    outcomes = [outcome_of(group.episodes[0]) for group in groups]
    return together("+".join(map(short_name, setups)), parts, outcomes), groups


def evaluation_of(
    outcomes: Sequence[Outcome], setup: Setup, target: str, start: float
) -> Evaluation:
    """The evaluation that began at `start`, with the baselines under the budgets of `setup`."""
    refuse_unplayable(outcomes)
    budget = Budget(setup.turns, setup.actions_per_turn, setup.actions)
    levels = list(dict.fromkeys(outcome.level_seed for outcome in outcomes))
    build = setup.venue.workers.make if setup.venue.workers else None
    baselines = measure_baselines(setup.env, setup.params, budget, levels, build=build)
    seconds = time.monotonic() - start
    return summarize(outcomes, baselines, target, setup.temperature, seconds)


def play_target(
    target: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> Episode:
    """Play one evaluation level, number `seed`, and return the episode.

    `note` receives what the user has to tell an agent outside.
    """
    config = changed(config_for(target, overrides or {}), {"engine.processes": 1})
    loaded = load_target(target, config)
    spec = EpisodeSpec(EVAL_LEVELS + seed, 0, 0, (seed, "play"))
    return run_async(play_episodes(*loaded, [spec], note=note))[0]
