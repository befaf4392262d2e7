"""RAGEN: train LLM agents with multi-turn reinforcement learning, and see why training works.

    import ragen

    result = ragen.train("bandit", {"steps": 10})
    print(result.after)
    print(ragen.evaluate("solver", {"env": "sokoban"}))

Everything here loads what it needs when it is called, so that importing costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragen.config.config import Config
    from ragen.core.errors import RagenError
    from ragen.envs.contract import Env
    from ragen.evaluation.results import Evaluation
    from ragen.training.progress import Watcher
    from ragen.training.running import Result

__version__ = "0.1.0"
__all__ = ["Env", "RagenError", "check", "evaluate", "make", "train"]


def train(
    recipe: str | Path | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Train an agent, with an evaluation before and after.

    Args:
        recipe: A recipe's name, a path to a ``.toml``, or a whole config.
        overrides: Values by key, such as ``{"seed": 1, "update.lr": 3e-4}``.
        out: The run's folder, which must not exist; by default numbered under ``runs/``.
        watcher: Who is told of the progress (`ragen.training.progress`); by default no one.

    Returns:
        The run's folder and its evaluations, sampled and greedy, before and after.

    Raises:
        RagenError: Something in the settings, the environment, the model or the disk does not
            allow it.
    """
    from ragen.config.config import Config
    from ragen.config.reading import flatten, resolve
    from ragen.training.trainer import train

    if isinstance(recipe, Config):
        config = resolve(None, {**flatten(recipe), **(overrides or {})})
    else:
        config = resolve(recipe, overrides)
    return train(config, None if out is None else Path(out), watcher=watcher)


def evaluate(
    target: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    episodes: int = 256,
    seed: int = 0,
    temperature: float = 1.0,
) -> Evaluation:
    """Measure a run, a model or a player on fixed levels.

    Args:
        target: A run folder or one of its checkpoints, ``"base"``, ``"random"``, ``"solver"``, a
            model folder or a hub id.
        overrides: Values by key, such as ``{"env": "sokoban"}``.
        episodes: Levels, one episode each.
        seed: Of the environment's events and of sampling; the levels are always the same.
        temperature: Of sampling; 0 is greedy.

    Returns:
        Success with its interval, beside random and optimal play on the same levels.

    Raises:
        RagenError: No such target or environment.
    """
    from ragen.evaluation.evaluation import evaluate_target

    return evaluate_target(
        str(target), overrides, episodes=episodes, seed=seed, temperature=temperature
    )


def make(name: str, **params: Any) -> Env:
    """Build an environment by its name, or by ``path/to/file.py:Class``.

    Raises:
        RagenError: No such environment or parameter.
    """
    from ragen.envs.registry import make

    return make(name, **params)


def check(env: Env) -> None:
    """Hold an environment to the contract that training relies on.

    Raises:
        RagenError: It breaks a rule; the message says which, and on which level.
    """
    from ragen.envs.checker import check

    check(env)


def __getattr__(name: str) -> Any:
    """`Env` and `RagenError`, loaded when they are first asked for."""
    if name == "Env":
        from ragen.envs.contract import Env

        return Env
    if name == "RagenError":
        from ragen.core.errors import RagenError

        return RagenError
    raise AttributeError(f"module 'ragen' has no attribute {name!r}")
