"""RAGEN: train LLM agents with multi-turn reinforcement learning, and see why training works.

    import ragen

    result = ragen.train("bandit", {"steps": 10})
    print(result.after)
    print(ragen.evaluate("solver", {"env": "sokoban"}))

Importing the package costs nothing: every function loads what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragen.config.config import Config
    from ragen.core.errors import RagenError
    from ragen.core.types import Completion, Prompt
    from ragen.envs.contract import Env
    from ragen.evaluation.compare import Comparison
    from ragen.evaluation.results import Evaluation
    from ragen.reports.run_data import RunData
    from ragen.rollout.policies import Policy
    from ragen.training.progress import Watcher
    from ragen.training.running import Result

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Config",
    "Env",
    "Evaluation",
    "Policy",
    "Prompt",
    "RagenError",
    "check",
    "compare",
    "evaluate",
    "load_run",
    "make",
    "resume",
    "train",
]


def train(
    recipe: str | Path | Config | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    env: type[Env] | str | None = None,
    advantage: Callable[..., Any] | str | None = None,
    loss: Callable[..., Any] | str | None = None,
    score: Callable[..., Any] | str | None = None,
    rewards: Mapping[Any, float] | None = None,
    detectors: Mapping[Any, str] | None = None,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Train an agent and evaluate it before and after.

    Args:
        recipe: A recipe's name, the path of a ``.toml``, or a config; without one, `env` is needed
            and brings its own budgets.
        overrides: Values by key, such as ``{"seed": 1, "update.lr": 3e-4}``.
        env: The environment: its class, or a name as for the key ``env.name``.
        advantage: The advantage estimator: a function, or a name as for ``advantage.name``.
        loss: The policy loss, as for ``loss.name``.
        score: The score that the filter ranks groups by, as for ``filter.score``.
        rewards: Reward terms and their weights, as for ``reward.terms``.
        detectors: Detectors and their responses, as for ``guard.responses``.
        out: The run's folder, which must not exist; by default numbered under ``runs/``.
        watcher: Receives the progress (`ragen.training.progress`); by default nothing does.

    Returns:
        The run's folder and its evaluations, sampled and greedy, before and after.

    Raises:
        RagenError: The settings, the environment, the model or the disk do not allow the run.
    """
    from ragen.config.keys import dotted
    from ragen.settings.resolve import resolve
    from ragen.training.trainer import train

    named = {
        "env.name": env,
        "advantage.name": advantage,
        "loss.name": loss,
        "filter.score": score,
        "reward.terms": rewards,
        "guard.responses": detectors,
    }
    values = dotted(
        {**(overrides or {}), **{key: value for key, value in named.items() if value is not None}}
    )
    config = resolve(recipe, values)
    return train(config, None if out is None else Path(out), watcher=watcher)


def resume(
    run: str | Path,
    *code: Any,
    overrides: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Continue a stopped run from its newest checkpoint, as if it had never stopped.

    Args:
        run: The run's folder.
        code: Classes and functions that were passed to the run in Python and are in no file.
        overrides: Settings that change from here on, such as ``{"steps": 200}``.
        watcher: Receives the progress; by default nothing does.

    Raises:
        RagenError: There is no run to continue, or code that it uses is missing or has changed.
    """
    from ragen.config.keys import dotted
    from ragen.core.plugins import reference_to
    from ragen.training.trainer import resume

    for each in code:
        reference_to(each)
    return resume(Path(run), watcher, dotted(overrides or {}))


def evaluate(
    target: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    episodes: int = 256,
    seed: int = 0,
    temperature: float = 1.0,
) -> Evaluation:
    """Evaluate a run, a model or a player on fixed levels.

    Args:
        target: A run folder or one of its checkpoints, ``"base"``, ``"random"``, ``"solver"``, a
            model folder or a hub id.
        overrides: Values by key, such as ``{"env": "sokoban"}``.
        episodes: The number of levels, one episode each.
        seed: Seed of the environment's events and of sampling; the levels are always the same.
        temperature: Sampling temperature; 0 is greedy.

    Returns:
        Success with its interval, and random and optimal play on the same levels as baselines.

    Raises:
        RagenError: There is no such target or environment.
    """
    from ragen.config.keys import dotted
    from ragen.evaluation.evaluation import evaluate_target

    values = dotted(overrides or {})
    evaluation, _ = evaluate_target(
        str(target), values, episodes=episodes, seed=seed, temperature=temperature
    )
    return evaluation


def compare(
    a: str | Sequence[str],
    b: str | Sequence[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    episodes: int = 256,
    seed: int = 0,
    temperature: float = 1.0,
) -> Comparison:
    """Compare two agents, or two methods by several training seeds each, on the same levels.

    Args:
        a: A target as for `evaluate`, or the runs of one method's training seeds.
        b: The same for the second side.
        overrides: Values by key; without an environment, that of the first run.
        episodes: The number of levels.
        seed: Seed of the environment's events and of sampling.
        temperature: Sampling temperature; 0 is greedy.

    Returns:
        The paired difference of success with its interval, and what this sample could show.

    Raises:
        RagenError: There is no such target or environment, or the two do not fit together.
    """
    from ragen.config.keys import dotted
    from ragen.evaluation.compare import compare

    values = dotted(overrides or {})
    return compare(a, b, values, episodes=episodes, seed=seed, temperature=temperature)


def load_run(path: str | Path) -> RunData:
    """Read a run's folder: its config, metrics as columns, episodes, evaluations and events.

    Raises:
        RagenError: The folder holds no run.
    """
    from ragen.reports.run_data import load_run

    return load_run(path)


def make(name: str, **params: Any) -> Env:
    """Build an environment by its name, or by ``path/to/file.py:Class``.

    Raises:
        RagenError: There is no such environment or parameter.
    """
    from ragen.envs.registry import make

    return make(name, **params)


def check(env: Env) -> None:
    """Check that an environment keeps the contract that training relies on.

    Raises:
        RagenError: It breaks a rule, which the message names, or it raises.
    """
    from ragen.envs.checker import check

    check(env)


_PUBLIC = {
    "Completion": "ragen.core.types",
    "Config": "ragen.config.config",
    "Env": "ragen.envs.contract",
    "Evaluation": "ragen.evaluation.results",
    "Policy": "ragen.rollout.policies",
    "Prompt": "ragen.core.types",
    "RagenError": "ragen.core.errors",
}


def __getattr__(name: str) -> Any:
    """A public class, loaded on first use."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'ragen' has no attribute {name!r}")
