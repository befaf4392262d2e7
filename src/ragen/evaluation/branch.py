"""`ragen branch`: replay a recorded episode from one of its turns, several times.

The environment returns to its snapshot of that turn, the prompt is rebuilt token for token, and a
policy plays the rest of the episode. The snapshot includes the state of the environment's
generators, so that all branches meet the original's noise and differ by the policy's draws alone.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragen.config.reading import changed
from ragen.core.errors import RagenError
from ragen.core.statistics import Interval, wilson
from ragen.core.stopping import run_async
from ragen.core.tables import Section
from ragen.core.types import Episode
from ragen.diagnostics.collapse import STAGE
from ragen.engines.factory import make_policy
from ragen.evaluation.outcomes import check_sampling, how_sampled
from ragen.models.names import resolve_model
from ragen.networks.machine import use_threads
from ragen.rollout.episode import require_unchanged
from ragen.rollout.groups import run_episodes
from ragen.rollout.setup import BranchSpec, Setup, at_stage, make_setup
from ragen.sampling.weighted_policy import WeightedPolicy
from ragen.settings.saved import run_config
from ragen.storage.branches import MOST, Request, write_branches
from ragen.storage.checkpoint import checkpoint_of, choose, folders, sound, step_of
from ragen.storage.database import check_run_folder
from ragen.storage.reader import read_attempts
from ragen.storage.stored_episodes import Recorded, read_episode


@dataclass(frozen=True, slots=True)
class BranchResult:
    """The original episode and its branches, all as whole episodes.

    `exact` is true if the model saw the original's tokens. Otherwise the conversation was rebuilt
    from text, since its tokens are unknown.
    """

    run: Path
    request: Request
    original: Recorded
    exact: bool
    episodes: tuple[Episode, ...]

    @property
    def success(self) -> Interval:
        """Share of successful branches, with Wilson's 95 % interval."""
        return wilson(sum(episode.success for episode in self.episodes), len(self.episodes))

    def record(self) -> dict[str, Any]:
        """The result as JSON-ready values."""
        first = self.request.turn
        return {
            "id": self.request.id,
            "run": str(self.run),
            **asdict(self.request),
            "exact": self.exact,
            "success": asdict(self.success),
            "original": _continuation_record(self.original.episode, first),
            "branches": [_continuation_record(episode, first) for episode in self.episodes],
        }


def _continuation_record(episode: Episode, first: int) -> dict[str, Any]:
    return {
        "success": episode.success,
        "reward": episode.reward,
        "stop_reason": episode.stop_reason,
        "turns": len(episode.turns),
        "error": episode.error,
        "continuation": [
            {
                "turn": number,
                "reply": turn.completion.text,
                "actions_executed": turn.actions_executed,
                "reward": turn.reward,
            }
            for number, turn in enumerate(episode.turns[first:], first)
        ],
    }


def branch(
    run: Path,
    episode: int,
    turn: int,
    n: int = 4,
    *,
    checkpoint: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
) -> BranchResult:
    """Replay a recorded episode from one of its turns, `n` times, and store the branches.

    The run's own database is only read, so that the run may continue meanwhile. `episode` is an id
    in it, and `turn` the first turn to play again, from 0. `checkpoint` is the step whose weights
    play, the newest by default. Without a checkpoint of step 0, or without any checkpoint, step 0
    is the model that the run started from. The default `temperature` is the run's.
    """
    check_run_folder(run)
    recorded, config = read_episode(run, episode), run_config(run)
    folder = checkpoint_folder(run, checkpoint)
    if folder is None:
        model, threads, version = config.model.path, config.threads, 0
        model = resolve_model(model, config.env.name)
    else:
        state, model = sound(folder, ()), str(folder)
        threads, version = int(state["loop"]["threads"]), int(state["engine"]["version"])
        config = changed(config, state["guard"]["changes"])
    alone = config.by_env().get(recorded.episode.env, config)
    config = at_stage(alone, stage_of(run, recorded))
    if temperature is None:
        temperature = config.rollout.temperature
    step = 0 if folder is None else step_of(folder)
    request = Request(episode, turn, step, n, temperature, seed)
    _refuse_out_of_range(request, recorded, config.rollout.sampler)
    use_threads(threads)
    specs = branch_specs(request, recorded, config.seed)
    with closing(replace(make_setup(config, None), temperature=temperature)) as setup:
        require_unchanged(setup, specs[0])  # before the model is loaded
        policy, chat = make_policy(config, model)
        policy.version = version
        setup = replace(setup, chat=chat)
        episodes = run_async(_played(policy, setup, specs, config.rollout.slots))
    exact = recorded.exact(turn)
    write_branches(run, request, episodes, exact, chat.text_of)
    return BranchResult(run, request, recorded, exact, tuple(episodes))


def stage_of(run: Path, recorded: Recorded) -> int:
    """The stage of the curriculum in which an episode was played; 0 for an evaluated episode."""
    if recorded.phase != "train":
        return 0
    stages: dict[int, float] = {}
    for attempt, metrics in read_attempts(run).items():  # an attempt continues those before it
        if attempt.number <= recorded.attempt:
            stages |= metrics.get(STAGE, {})
    return int(stages.get(recorded.step, 0))


def checkpoint_folder(run: Path, step: int | None) -> Path | None:
    """The checkpoint of a step, or the newest; ``None`` is the model that the run began with."""
    if step is None and not folders(run):
        return None
    return None if step == 0 and checkpoint_of(run, 0) is None else choose(run, step)


def _refuse_out_of_range(request: Request, recorded: Recorded, sampler: str) -> None:
    num_turns = len(recorded.episode.turns)
    if num_turns == 0:
        raise RagenError(
            f"episode {recorded.id} ended before its first turn, so it has no branches: choose "
            "another one"
        )
    if not 0 <= request.turn < num_turns:
        raise RagenError(
            f"turn = {request.turn}: episode {recorded.id} has turns 0 to {num_turns - 1}"
        )
    if not 1 <= request.n <= MOST:
        raise RagenError(f"n = {request.n}: expected a whole number from 1 to {MOST}")
    check_sampling(request.seed, request.temperature, sampler)


def branch_specs(request: Request, recorded: Recorded, seed: int) -> list[BranchSpec]:
    """The start of each branch, with sampling seeds of its own."""
    episode, path = recorded.episode, (seed, *request.path)
    origin = episode.level_seed, episode.group
    replayed = episode.noise_seed, episode.turns[: request.turn + 1]
    return [BranchSpec(*origin, member, path, *replayed) for member in range(request.n)]


async def _played(
    policy: WeightedPolicy, setup: Setup, specs: list[BranchSpec], slots: int
) -> list[Episode]:
    try:
        require_unchanged(setup, specs[0])
        return await run_episodes(policy, setup, specs, slots)
    finally:
        await policy.close()


def branch_table(branched: BranchResult) -> Section:
    """The result as a table."""
    request, original, rate = branched.request, branched.original, branched.success
    title = f"Episode {original.id} from turn {request.turn} on, checkpoint {request.checkpoint}"
    lines = [
        f"{rate.value:.0%} of {request.n} succeed [{rate.low:.0%}, {rate.high:.0%}]; the original "
        f"{'succeeded' if original.episode.success else 'did not'}",
        "All branches meet the same noise; only the policy's draws differ.",
    ]
    if not branched.exact:
        lines.append("The conversation was rebuilt from text.")
    columns = ("branch", "success", "return", "turns", "ended by", "actions")
    named = ("original", original.episode), *enumerate(branched.episodes)
    rows = tuple(_row(f"{name}", episode, request.turn) for name, episode in named)
    title = f"{title}, {how_sampled(request.temperature)}"
    return Section(title, tuple(lines), columns, rows)


def _row(name: str, episode: Episode, first: int) -> tuple[str, ...]:
    actions = " | ".join(" ".join(t.actions_executed) or "–" for t in episode.turns[first:])
    success, turns = "yes" if episode.success else "no", str(len(episode.turns))
    return name, success, f"{episode.reward:.3g}", turns, episode.stop_reason, actions
