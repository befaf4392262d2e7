"""The registry: environments by name, from RAGEN, an installed package, a library or a file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from ragen.config.extensions import ENV, library_of, load
from ragen.core.errors import RagenError, nearest
from ragen.core.plugins import LOAD_S, installed, load_object
from ragen.core.user_code import Stopwatch, UserCodeError, boundary
from ragen.envs.blocking import blocking
from ragen.envs.contract import Env, Waits

Built = TypeVar("Built")

CLOSE_S = 5.0
"""Seconds that an environment may take to close after it was tried or its baselines were played."""

GROUP = "ragen.envs"
"""Entry-point group under which packages register their environments."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """A registered environment: where its class is, its parameters, and a description."""

    entry: str
    params: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


BANDIT = "ragen.envs.worlds.bandit:Bandit"
COUNTDOWN = "ragen.envs.worlds.countdown:Countdown"
FROZEN_LAKE = "ragen.envs.worlds.frozen_lake:FrozenLake"
HAYSTACK = "ragen.envs.worlds.haystack.haystack:Haystack"
MANOR = "ragen.envs.worlds.manor:Manor"
SOKOBAN = "ragen.envs.worlds.sokoban:Sokoban"
SORTING = "ragen.envs.worlds.sorting:Sorting"
SUDOKU = "ragen.envs.worlds.sudoku:Sudoku"
WEBSHOP = "ragen.envs.worlds.webshop.shop:WebShop"
WORD_PROBLEMS = "ragen.envs.worlds.word_problems:WordProblems"
ENVS: dict[str, EnvSpec] = {
    "bandit": EnvSpec(BANDIT, {}, "Two named arms, one pull: tell from the names which pays more."),
    "bandit-rev": EnvSpec(
        BANDIT,
        {"reverse": True},
        "Bandit with the meanings swapped: the name that sounds safe is the risky arm.",
    ),
    "countdown": EnvSpec(
        COUNTDOWN, {}, "Reach a target with + - * / over three or four given numbers."
    ),
    "frozen-lake": EnvSpec(
        FROZEN_LAKE, {}, "Cross slippery ice: a third of the moves go as intended."
    ),
    "frozen-lake-still": EnvSpec(
        FROZEN_LAKE,
        {"success_probability": 1.0},
        "FrozenLake without slipping: a shortest path around the holes.",
    ),
    "frozen-lake-picture": EnvSpec(
        FROZEN_LAKE,
        {"success_probability": 1.0, "observation": "picture"},
        "FrozenLake without slipping, as a picture.",
    ),
    "haystack": EnvSpec(
        HAYSTACK, {}, "Find one moment of a film of 600 frames by looks, which are tools."
    ),
    "manor": EnvSpec(
        MANOR, {}, "Open a vault: the key that is chosen first decides it fifteen turns later."
    ),
    "sokoban": EnvSpec(SOKOBAN, {}, "Push one box onto its target; a wrong push may be final."),
    "sokoban-large": EnvSpec(
        SOKOBAN,
        {"rows": 8, "cols": 8, "boxes": 2, "search_depth": 10},
        "Sokoban on 8×8 cells with two boxes.",
    ),
    "sokoban-picture": EnvSpec(SOKOBAN, {"observation": "picture"}, "Sokoban as a picture."),
    "sokoban-new-symbols": EnvSpec(
        SOKOBAN,
        {"symbols": "new"},
        "Sokoban drawn with other symbols: does the skill carry over?",
    ),
    "sorting": EnvSpec(SORTING, {}, "Find the order of four balls with a scale, which is a tool."),
    "sudoku": EnvSpec(SUDOKU, {}, "Fill the six blanks of a board of 4×4 cells."),
    "sudoku-large": EnvSpec(
        SUDOKU, {"size": 9, "blanks": 40}, "Sudoku on 9×9 cells with 40 blanks."
    ),
    "webshop": EnvSpec(
        WEBSHOP, {}, "Search a shop, choose a product and its options, and buy what is asked for."
    ),
    "word-problems": EnvSpec(
        WORD_PROBLEMS, {}, "Answer a question with a number; a file in GSM8K's format, or a sample."
    ),
}
"""The environments that come with RAGEN; `registered_envs` adds those of installed packages."""


def registered_envs() -> dict[str, EnvSpec]:
    """All environments with a name; RAGEN's own take precedence over entry points of that name."""
    others = {
        name: EnvSpec(point.value, {}, f"from {point.dist.name}" if point.dist else "")
        for name, point in installed(GROUP).items()
    }
    return others | ENVS


def make(name: str, **params: Any) -> Env:
    """Build an environment.

    The name is a registered one, ``LIBRARY:NAME`` for an environment of another library,
    ``path/to/file.py:Class`` or ``package.module:Class``. `params` are parameters of the class and
    override those of the registered name.

    Raises:
        RagenError: There is no such environment, file, class or parameter, or a value does not fit.

    Example:
        >>> env = make("frozen-lake", size=5)
        >>> env.reset(seed=123)[0].count("G")
        1
    """
    return build_env(env_factory(name, **params), name)


def build_env(build: Callable[[], Built], name: str) -> Built:
    """Call a function that builds an environment, or does a part of that, behind the boundary.

    Raises:
        RagenError: The class refuses its parameters, raises, or takes too long.
    """
    try:
        with boundary("being made", LOAD_S):
            return build()
    except UserCodeError as failure:
        if isinstance(failure.__cause__, RagenError):
            raise failure.__cause__ from None
        raise RagenError(f"environment {name} cannot be made: {failure.reason}") from failure


@contextmanager
def closing_env(env: Env) -> Iterator[Env]:
    """Close an environment after the body, behind the boundary; a failure to close is ignored."""
    try:
        yield env
    finally:
        close_env(env, CLOSE_S)


def close_env(env: Env, timeout_s: float | None, stopwatch: Stopwatch | None = None) -> None:
    """Close an environment behind the boundary; a failure to close is ignored.

    After one hang, its class is no longer closed: each environment could take the whole limit.
    """
    if type(env) in _HANGING:
        return
    try:
        with boundary("close", timeout_s, stopwatch):
            env.close()
    except UserCodeError as failure:
        if failure.timed_out:
            _HANGING.add(type(env))


_HANGING: set[type[Env]] = set()
"""The classes that hung in `close`."""


def env_factory(name: str, **params: Any) -> Callable[[], Env]:
    """A function that builds as `make` does; the name and the parameters are checked once, here."""
    cls = blocking(env_class(name))
    settings = {**(ENVS[name].params if name in ENVS else {}), **params}
    build_env(partial(_check_params, name, cls, settings), name)

    def factory() -> Env:
        env = cls(**settings)
        if ":" not in name or library_of(name):
            env.name = name
        elif not hasattr(env, "name"):
            env.name = cls.__name__
        return env

    return factory


def env_class(name: str) -> type[Env]:
    """The class of an environment.

    Raises:
        RagenError: It does not exist, cannot be loaded, or lacks a method of the contract.
    """
    if library_of(name):
        adapted: type[Env] = build_env(partial(load, name, ENV), name).object
        return adapted
    if name not in ENVS and ":" not in name and name not in (known := registered_envs()):
        otherwise = "`ragen envs` lists them, and path/to/file.py:Class names your own"
        raise RagenError(f"unknown environment {name!r}{nearest(name, known, otherwise)}")
    reference = ENVS[name].entry if name in ENVS else name
    kind = "environment (subclass of ragen.Env)"
    cls: type[Env] = load_object(reference, GROUP, kind=kind, accepts=_is_env_class).object
    if missing := sorted(cls.__abstractmethods__):
        raise RagenError(f"environment {name} lacks {', '.join(missing)}")
    if cls.waits not in get_args(Waits):
        expected = ", ".join(map(repr, get_args(Waits)))
        raise RagenError(f"environment {name}: waits = {cls.waits!r}: expected one of {expected}")
    return cls


def modules_of(name: str) -> list[str]:
    """The modules of RAGEN or of a library that an environment needs; none for a user's own.

    Of a library, those that this process has loaded: some load their parts when they are used.
    """
    if library := library_of(name):
        return [each for each in sorted(sys.modules) if f"{each}.".startswith(f"{library.module}.")]
    return [ENVS[name].entry.partition(":")[0]] if name in ENVS else []


def parameter_names(name: str) -> list[str]:
    """The names of an environment's parameters; raises `RagenError` if it does not exist."""
    names, _ = build_env(partial(_parameters, env_class(name)), name)
    return names


def _parameters(cls: type[Env]) -> tuple[list[str], bool]:
    """The names of a class's parameters; true if it takes any other keyword, too."""
    signature = inspect.signature(cls).parameters.values()
    names = [p.name for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return names, any(p.kind == p.VAR_KEYWORD for p in signature)


def _is_env_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Env) and value is not Env


def _check_params(name: str, cls: type[Env], params: Mapping[str, Any]) -> None:
    known, takes_any = _parameters(cls)
    # Only if needed, because an annotation may name what is imported for type checkers only.
    hints = get_type_hints(cls.__init__, include_extras=True) if params else {}
    for key, value in params.items():
        if key not in known and not takes_any:
            has = f"it has {', '.join(known)}" if known else "it has none"
            hint = f"{has}{nearest(key, known)}"
            raise RagenError(f"environment {name} has no parameter {key!r}; {hint}")
        try:
            adapter = TypeAdapter(hints.get(key, Any))
        except PydanticSchemaGenerationError:
            continue  # a type that only the class itself can check
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise RagenError(
                f"environment {name}: {key} = {value!r} does not fit: "
                f"{error.errors()[0]['msg'].lower()}"
            ) from error
