"""Baselines: the success of random and optimal play on the evaluated levels.

Random play spends the whole budget on uniformly random valid actions. Optimal play has the highest
probability of success under the same budgets. It chooses all actions of a turn before it observes
their outcome.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from ragen.core.errors import RagenError
from ragen.core.files import whole_file
from ragen.core.plugins import hash_code
from ragen.core.seeding import derive
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs import answers
from ragen.envs.adapters.adapted import Adapted
from ragen.envs.blocking import blocking
from ragen.envs.contract import Baselines, Env
from ragen.envs.registry import closing_env, env_class, make
from ragen.rollout.players import Player, has_random_play, random_player, solver

VERSION = 2
"""Part of the cache key, like the hashes of the environment's code. Raise it when this module's
results change."""

CALL_S = 60.0
"""Time limit in seconds for the exact baselines of a level, and for an episode."""

DRAWS = 64
"""Episodes of each player on a level whose baselines are sampled."""

DRAWS_WAITING = 8
"""The same where the environment waits, as for a service that may not be asked too often."""

SIDE_BY_SIDE = 64
"""Levels that are played at once where the environment waits."""

FEW = 4
"""`_most` gives up when failed calls outnumber successful ones by more than this."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Budget:
    """The budgets of an episode."""

    turns: int
    actions_per_turn: int
    actions: int


def measure_baselines(
    name: str,
    params: Mapping[str, Any],
    budget: Budget,
    levels: Sequence[int],
    *,
    build: Callable[[], Env] | None = None,
) -> Baselines:
    """Mean baselines over `levels` (seeds), from the cache if they were computed before.

    `Env.baselines` computes them where it can, which for nearly all of RAGEN's environments means
    exactly. Otherwise, both players play `DRAWS` episodes per level, and episodes in which the
    environment fails are left out. `make` takes `name` and `params`, and builds the environment in
    this process; `build` may build it elsewhere, such as in a worker process.

    An environment that waits, or that `build` makes, is played on several levels at once.

    Raises:
        RagenError: The environment cannot be made, or mostly fails when it is played.
        ValueError: No levels.
    """
    if not levels:
        raise ValueError("baselines need at least one level")
    waits = blocking(env_class(name)).waits != "no"
    draws = DRAWS_WAITING if waits else DRAWS
    key = {
        "version": VERSION,
        "sources": sources(env_class(name)),
        "env": name,
        "params": dict(params),
        "files": files_of(params),
        "budget": asdict(budget),
        "levels": list(levels),
        "draws": draws,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=repr).encode()).hexdigest()
    path = cache_folder() / "baselines" / f"{digest[:32]}.json"
    # If the file is missing or unreadable, the baselines are computed again.
    with suppress(OSError, ValueError, TypeError, RecursionError, UserCodeError):
        known = answers.baselines(Baselines(**json.loads(path.read_text(encoding="utf-8"))))
        if known is not None:
            return known
    try:
        if waits or build:
            at_once = partial(_together, build or partial(make, name, **params), budget, draws)
            baselines = at_once(levels)
        else:
            with closing_env(make(name, **params)) as played:
                baselines = compute_baselines(played, budget, levels, draws=draws)
    except UserCodeError as error:
        raise RagenError(
            f"the environment {name!r} failed while it was played for its baselines: "
            f"{error.reason}; run `ragen check` on it"
        ) from error
    with suppress(OSError):  # without a cache the baselines are computed every time
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(asdict(baselines)), encoding="utf-8")
    return baselines


def files_of(params: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Size and time of change of each file at a parameter such as `path`, or in its folder.

    A whole path of a file counts under any name, also with a function in it as of a verifier. A
    dangling link, such as the lock file of an editor, has neither and is left out.
    """
    found = []
    for name, value in params.items():
        if not isinstance(value, str) or not value:
            continue
        path = Path(value.rpartition(":")[0] if ".py:" in value else value)
        if not name.endswith("path") and (not path.is_absolute() or os.path.isdir(path)):
            continue
        for file in sorted(path.rglob("*")) if os.path.isdir(path) else [path]:
            with suppress(OSError, ValueError):  # of a text that is no path, too
                state = file.stat()
                found.append((str(file), state.st_size, state.st_mtime_ns))
    return found


def compute_baselines(
    env: Env, budget: Budget, levels: Sequence[int], *, draws: int = DRAWS
) -> Baselines:
    """`measure_baselines` without the cache.

    Raises:
        UserCodeError: The environment failed on most levels, or in most episodes.
    """
    return _mean(_most(partial(level_baselines, env, budget, level, draws) for level in levels))


def _together(
    build: Callable[[], Env], budget: Budget, draws: int, levels: Sequence[int]
) -> Baselines:
    """`compute_baselines`, with an environment and a thread for each level."""

    def play(level: int) -> Baselines:
        with closing_env(build()) as env:
            return level_baselines(env, budget, level, draws)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        playing = [threads.submit(play, level) for level in levels]
        return _mean(_most(each.result for each in playing))


def _mean(parts: Sequence[Baselines]) -> Baselines:
    return replace(mean_baselines(parts), draws=sum(part.draws or 0 for part in parts) or None)


def mean_baselines(parts: Sequence[Baselines]) -> Baselines:
    """The means over levels or environments; optimal play is known only where all have it."""
    optimal = [part.optimal for part in parts if part.optimal is not None]
    optimal_return = [part.optimal_return for part in parts if part.optimal_return is not None]
    complete = len(optimal) == len(parts) == len(optimal_return)
    return Baselines(
        random=fmean(part.random for part in parts),
        optimal=fmean(optimal) if complete else None,
        random_return=fmean(part.random_return for part in parts),
        optimal_return=fmean(optimal_return) if complete else None,
    )


def level_baselines(env: Env, budget: Budget, level: int, draws: int) -> Baselines:
    """Baselines on one level: the environment's exact answer, or sampled ones."""
    with boundary("a level's baselines", CALL_S):
        env.reset(seed=level, options={"noise_seed": 0})
        known = env.baselines(budget.turns, budget.actions_per_turn, budget.actions)
        exact = answers.baselines(known)
    return exact if exact is not None else sample_baselines(env, budget, level, draws)


def sample_baselines(env: Env, budget: Budget, level: int, draws: int) -> Baselines:
    """Baselines on one level, sampled by `draws` episodes of each player.

    In free text without `Env.random_action`, random play counts as no success and no reward.
    """

    def means(player: Player) -> tuple[float, float]:
        played = _most(partial(_play, env, player, budget, level, draw) for draw in range(draws))
        return fmean(success for success, _ in played), fmean(total for _, total in played)

    random = random_return = 0.0
    with boundary("reset", CALL_S):
        env.reset(seed=level, options={"noise_seed": 0})
    if has_random_play(env):
        random, random_return = means(random_player(derive(0, "reference", level)))
    with boundary("solve", CALL_S):
        env.reset(seed=level, options={"noise_seed": 0})
        plan = env.solve(budget.turns, budget.actions, budget.actions_per_turn)
    optimal, optimal_return = (None, None) if plan is None else means(solver)
    return Baselines(random, optimal, random_return, optimal_return, draws)


def _most(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """The results of the calls that succeed; calls of user code may fail now and then."""
    results, failures = [], []
    for call in calls:
        try:
            results.append(call())
        except UserCodeError as failure:
            failures.append(failure)
            if failure.timed_out or len(failures) > len(results) + FEW:
                raise
    if failures and len(failures) >= len(results):
        raise failures[-1]
    return results


def _play(env: Env, player: Player, budget: Budget, level: int, draw: int) -> tuple[bool, float]:
    total, actions_left = 0.0, budget.actions
    with boundary("an episode of its baselines", CALL_S):
        env.reset(seed=level, options={"noise_seed": derive(0, "reference noise", level, draw)})
        for turns_left in range(budget.turns, 0, -1):
            most = min(actions_left, budget.actions_per_turn)  # the limits of an episode
            for action in player(env, turns_left, actions_left, budget.actions_per_turn)[:most]:
                _, reward, terminated, truncated, info = env.step(action)
                total += answers.reward(reward)
                actions_left -= 1
                if terminated or truncated:
                    won = terminated and answers.flag(info["success"], "step", "info['success']")
                    return bool(won), total
            if actions_left <= 0:
                break
    return False, total


def cache_folder() -> Path:
    """The folder of the cache: `XDG_CACHE_HOME`, or the system's cache folder."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "ragen"
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return Path(folder) / "ragen" / "cache"
    home = Path(os.path.expanduser("~"))
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ragen"


def sources(cls: type[Env]) -> list[str]:
    """Hashes of the code of an environment class and its base classes (`hash_code`).

    A class from a notebook, or without a file, has a new random hash in each process. An
    environment of another library also has the versions of its packages. RAGEN's own environments
    also have the hashes of the modules of `ragen.envs` that they import.
    """
    bases = [base for base in cls.__mro__ if issubclass(base, Env)]
    hashes = set(cls.versions) if issubclass(cls, Adapted) else set()
    for base in bases:
        try:
            file = Path(inspect.getsourcefile(base) or "")
            hashes.add(hash_code(file, file.read_bytes()))
        except (OSError, TypeError):
            hashes.add(_unknown_code(base))
    for name in _imported_envs({base.__module__ for base in bases}):
        file = Path(str(sys.modules[name].__file__))
        hashes.add(hash_code(file, file.read_bytes()))
    return sorted(hashes)


def _imported_envs(modules: set[str]) -> set[str]:
    """The given modules that are in `ragen.envs`, and all modules that they import from there."""
    seen: set[str] = set()
    while new := {name for name in modules - seen if name.startswith("ragen.envs.")}:
        seen |= new
        values = (value for name in new for value in vars(sys.modules[name]).values())
        modules = {str(getattr(value, "__module__", "")) for value in values}
    return seen


@cache
def _unknown_code(_: type[Env]) -> str:
    """A random hash for a class without readable code, so that the cache never matches it."""
    return secrets.token_hex(16)
