"""An environment: what it must offer, how it is found by name, and a checker to run on yours.

An environment is a `gymnasium.Env` in text. `docs/environments.md` shows one in full, in one file.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, get_type_hints
from unicodedata import category

import gymnasium
import numpy as np
from pydantic import TypeAdapter, ValidationError

from ragen.core.errors import RagenError
from ragen.envs.boundary import EnvError, boundary

MAKE_S = 60.0
"""Seconds that an environment may take to be made, or its file to be loaded."""

Item = TypeVar("Item")
Info: TypeAlias = dict[str, Any]
"""What an environment tells besides: ``success`` and ``effective`` after every step."""
State: TypeAlias = dict[str, Any]
"""A snapshot that survives ``json.loads(json.dumps(state))``."""


@dataclass(frozen=True, slots=True)
class Baselines:
    """How well random and optimal play do on one level, or on the mean of several.

    `random` and `optimal` are probabilities of success, the other two expected returns. The optimal
    player is the one most likely to succeed; `optimal` and `optimal_return` are ``None`` where no
    solver is known. `draws` is the number of random episodes behind `random`, ``None`` where it
    is exact.

    Example:
        >>> Baselines(0.5, 1.0, 0.2, 0.25).optimal
        1.0
    """

    random: float
    optimal: float | None
    random_return: float
    optimal_return: float | None
    draws: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a thought says of the environment: facts, and the actions that it plans.

    Of the facts `stated`, `true` hold in the environment's state. `plan` is ``None`` where there
    is none.

    Example:
        >>> Reading(stated=3, true=2, plan=("Right", "Down")).plan
        ('Right', 'Down')
    """

    stated: int
    true: int
    plan: tuple[str, ...] | None


class Env(gymnasium.Env[str, str], ABC):
    """Base of all environments: strings in, strings out, and all randomness from two seeds.

    The level (what is shown and what is hidden) follows from `seed` alone, random events while
    playing from ``options["noise_seed"]`` alone, so that a group can share the one and not the
    other. An environment gives `rules`, `goal` and `actions`, the five abstract methods, `solve`
    and
    `baselines` if it knows the answer, and `picture` if it has a board. Read `rules` and `actions`
    after `reset`: they may depend on the level.
    """

    name: str
    """How the environment is registered; `make` sets it."""
    goal: str
    """The environment in a few words, all that the compact prompt says of it."""

    @property
    @abstractmethod
    def rules(self) -> str:
        """What the player has to know: aim, events, legend of the symbols. Plain text."""

    @property
    @abstractmethod
    def actions(self) -> tuple[str, ...] | None:
        """The names `step` takes, or ``None`` where it takes any text."""

    @abstractmethod
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        """Begin a level.

        Args:
            seed: The level. ``None`` draws a fresh one.
            options: ``{"noise_seed": n}`` decides the random events; without it they follow
                from `seed`.

        Returns:
            The observation and an info.
        """

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Carry out one action.

        Returns:
            Observation, reward, terminated, truncated, and an info in which ``success`` says
            whether the environment was solved by this step and ``effective`` whether the observable
            state changed.

        Raises:
            ValueError: `action` is none of `actions`.
        """

    @abstractmethod
    def get_state(self) -> State:
        """An exact snapshot, generators included, of JSON values only."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Go back to a snapshot of this or of another instance with the same parameters."""

    @abstractmethod
    def state_key(self) -> str:
        """The observable state in words: equal keys look equal. No generators, no counters."""

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str] | None:
        """The optimal player's actions for this turn, at least one; ``None`` where unknown.

        The optimal player has the highest chance to succeed within the budgets. It chooses a turn's
        actions before it sees what they do, as an agent must, and observes between turns.
        """
        return None

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines | None:
        """Exact baselines from the present state, or ``None`` to have them sampled."""
        return None

    def read_thought(self, thought: str) -> Reading | None:
        """What a thought says of the present state, for environments that can read it.

        Returns:
            ``None`` where the thought cannot be read with certainty: it is then not measured.
        """
        return None

    def picture(self) -> list[str] | None:
        """The present state drawn as a board, for people to look at; ``None`` draws nothing.

        Rows of one length, a character a cell, whatever symbols the observation is written in. The
        viewer draws ``#`` wall, ``_`` floor, ``P`` player, ``X`` box, ``O`` target, ``√`` box on
        target, ``S`` player on target, ``H`` hole, ``G`` goal, ``@`` player in a hole and ``*``
        player on the goal as such, and any other character as itself in a plain cell.
        """
        return None

    @property
    def draws(self) -> bool:
        """Whether this environment has a `picture` of its own."""
        return type(self).picture is not Env.picture

    @property
    def reads_thoughts(self) -> bool:
        """Whether this environment has a `read_thought` of its own."""
        return type(self).read_thought is not Env.read_thought

    def action_index(self, action: str) -> int:
        """Position of `action` in `actions`.

        Raises:
            ValueError: It is none of them.
        """
        names = self.actions or ()
        if action not in names:
            raise ValueError(f"{self.name} knows no action {action!r}; it knows {', '.join(names)}")
        return names.index(action)


def is_picture(value: Any) -> bool:
    """Whether a value is what `Env.picture` may return.

    Example:
        >>> is_picture(None), is_picture(["P_", "_G"]), is_picture(["P_", "G"]), is_picture([])
        (True, True, False, False)
    """
    if value is None:
        return True
    if not isinstance(value, list) or not all(isinstance(row, str) for row in value):
        return False
    cells = "".join(value)
    alone = cells.isprintable() and not any(category(cell)[0] == "M" for cell in cells)
    return cells != "" and alone and len({len(row) for row in value}) == 1


def generators(
    seed: int | None, options: Mapping[str, Any] | None
) -> tuple[np.random.Generator, np.random.Generator]:
    """The generators of a level and of the random events in it, independent of each other.

    Example:
        >>> a, _ = generators(123, {"noise_seed": 1})
        >>> b, _ = generators(123, {"noise_seed": 2})
        >>> a.random() == b.random()
        True
    """
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    noise_seed = (options or {}).get("noise_seed", seed)
    return (
        np.random.Generator(np.random.PCG64([0, seed])),
        np.random.Generator(np.random.PCG64([1, noise_seed])),
    )


def pick(generator: np.random.Generator, items: Sequence[Item]) -> Item:
    """One of `items`, uniformly.

    It draws by `random` only, the one stream that NumPy keeps the same over its versions.
    """
    return items[int(generator.random() * len(items))]


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered environment: its class, the parameters of this name, and a description.

    Example:
        >>> Registered("ragen.envs.frozen_lake:FrozenLake", {"success_probability": 1.0}).params
        {'success_probability': 1.0}
    """

    entry: str
    params: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


ENVS: dict[str, Registered] = {
    "bandit": Registered(
        "ragen.envs.bandit:Bandit",
        {},
        "Two named arms, one pull: tell from the names which pays more.",
    ),
    "bandit-rev": Registered(
        "ragen.envs.bandit:Bandit",
        {"reverse": True},
        "Bandit with the meanings swapped: the name that sounds safe is the risky arm.",
    ),
    "frozen-lake": Registered(
        "ragen.envs.frozen_lake:FrozenLake",
        {},
        "Cross slippery ice: a third of the moves go as meant.",
    ),
    "frozen-lake-still": Registered(
        "ragen.envs.frozen_lake:FrozenLake",
        {"success_probability": 1.0},
        "FrozenLake without slipping: a shortest path around the holes.",
    ),
    "sokoban": Registered(
        "ragen.envs.sokoban:Sokoban", {}, "Push one box onto its target; a wrong push may be final."
    ),
    "sokoban-large": Registered(
        "ragen.envs.sokoban:Sokoban",
        {"rows": 8, "cols": 8, "boxes": 2, "search_depth": 10},
        "Sokoban on 8×8 cells with two boxes.",
    ),
    "sokoban-new-symbols": Registered(
        "ragen.envs.sokoban:Sokoban",
        {"symbols": "new"},
        "Sokoban drawn with other symbols: does the skill carry over?",
    ),
}
"""Worlds that come with RAGEN; `envs` adds those of installed packages."""


def envs() -> dict[str, Registered]:
    """All environments with a name: RAGEN's, and the ``ragen.envs`` entry points of packages."""
    others = {
        point.name: Registered(point.value, {}, f"from {point.dist.name}" if point.dist else "")
        for point in entry_points(group="ragen.envs")
    }
    return others | ENVS


def make(name: str, **params: Any) -> Env:
    """Build an environment.

    Args:
        name: A name from `envs`, or ``path/to/file.py:Class``.
        **params: Parameters of the environment's class; they go before those the name stands for.

    Raises:
        RagenError: No such environment, file, class or parameter, or a value that does not fit.

    Example:
        >>> env = make("frozen-lake", size=5)
        >>> env.reset(seed=123)[0].count("G")
        1
    """
    return construct(maker(name, **params), name)


def construct(build: Callable[[], Env], name: str) -> Env:
    """A new environment, or why there is none.

    Raises:
        RagenError: The class refuses its parameters, or fails.
    """
    try:
        with boundary("being made", MAKE_S):
            return build()
    except EnvError as failure:
        if isinstance(failure.__cause__, RagenError):
            raise failure.__cause__ from None
        raise RagenError(f"environment {name} cannot be made: {failure.reason}") from failure


def maker(name: str, **params: Any) -> Callable[[], Env]:
    """What `make` calls: everything is looked up and checked here, once for many environments.

    Raises:
        RagenError: As `make`, but for what the class itself refuses.
    """
    registered = _registered(name)
    cls = _load(registered.entry)
    settings = {**registered.params, **params}
    _check_params(name, cls, settings)

    def build() -> Env:
        env = cls(**settings)
        if ":" not in name:
            env.name = name
        elif not hasattr(env, "name"):
            env.name = cls.__name__
        return env

    return build


def parameters(name: str) -> list[str]:
    """The names of what an environment's class can be told.

    Raises:
        RagenError: No such environment.

    Example:
        >>> parameters("frozen-lake")
        ['size', 'p_frozen', 'success_probability', 'observation']
    """
    return _named_parameters(_load(_registered(name).entry))


def _registered(name: str) -> Registered:
    known = envs()
    if ":" in name:
        return Registered(name)
    if name in known:
        return known[name]
    raise RagenError(
        f"unknown environment {name!r}{_nearest(name, known)}; "
        "`ragen envs` lists them, and path/to/file.py:Class names your own"
    )


def _named_parameters(cls: type[Env]) -> list[str]:
    signature = inspect.signature(cls).parameters.values()
    return [p.name for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _nearest(name: str, known: Any) -> str:
    close = get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def _load(entry: str) -> type[Env]:
    """The class behind ``package.module:Class`` or ``path/to/file.py:Class``."""
    where, _, class_name = entry.rpartition(":")
    try:
        with boundary("being loaded", MAKE_S):
            module = (
                _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
            )
    except EnvError as failure:
        if isinstance(failure.__cause__, RagenError):
            raise failure.__cause__ from None
        raise RagenError(f"{where} cannot be loaded: {failure.reason}") from failure
    cls = getattr(module, class_name, None)
    if not inspect.isclass(cls) or not issubclass(cls, Env):
        classes = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Env) and value is not Env
        ]
        raise RagenError(
            f"{where} has no environment (subclass of ragen.Env) named {class_name!r}"
            f"{_nearest(class_name, classes)}"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise RagenError(f"environment {entry} lacks {', '.join(missing)}")
    return cls


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RagenError(
            f"no file {path}; an environment of your own is named path/to/file.py:Class"
        )
    # One module per file and content: an edited file is read anew, another keeps its classes.
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    module_name = f"ragen_env_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before running it: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _check_params(name: str, cls: type[Env], params: Mapping[str, Any]) -> None:
    signature = inspect.signature(cls).parameters.values()
    known = _named_parameters(cls)
    open_ended = any(p.kind == p.VAR_KEYWORD for p in signature) and "__init__" in vars(cls)
    hints = get_type_hints(cls.__init__)
    for key, value in params.items():
        if key not in known and not open_ended:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise RagenError(
                f"environment {name} has no parameter {key!r}{_nearest(key, known)}; {has}"
            )
        try:
            TypeAdapter(hints.get(key, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise RagenError(
                f"environment {name}: {key} = {value!r} does not fit: "
                f"{error.errors()[0]['msg'].lower()}"
            ) from error


def check(env: Env, *, levels: int = 5, steps: int = 20) -> None:
    """Hold an environment to the contract; run it on yours.

    It plays random actions on some levels, again, in two copies at once, and from snapshots, and
    compares. For free text (``actions`` is ``None``) it sends short words, which an environment
    must bear.

    Args:
        env: The environment; it is left in some other state.
        levels: How many levels are tried.
        steps: Actions on each at most.

    Raises:
        RagenError: The environment breaks a rule, which the message names, or raises.

    Example:
        >>> check(make("bandit"))
    """
    try:
        with boundary("check"):
            _check_words(env)
            for level in range(levels):
                _check_level(env, level, steps)
            _check_unknown_action(env)
            _check_reading(env)
    except EnvError as failure:
        if isinstance(failure.__cause__, RagenError):
            raise failure.__cause__ from None
        name = getattr(env, "name", type(env).__name__)
        raise RagenError(f"{name} raised while it was checked: {failure.reason}") from failure


def _require(env: Env, holds: bool, rule: str) -> None:
    if not holds:
        raise RagenError(f"{getattr(env, 'name', type(env).__name__)}: {rule}")


def _check_words(env: Env) -> None:
    for attribute in ("name", "goal", "rules"):
        text = getattr(env, attribute, None)
        _require(env, isinstance(text, str) and text != "", f"{attribute} must be a text")


def _check_level(env: Env, level: int, steps: int) -> None:
    """Same seeds, same episode; snapshots replay it; the level ignores the noise."""
    first = _play(env, level, 1, steps)
    _require(env, first == _play(env, level, 1, steps), "the same seeds must give the same episode")
    other = _play(env, level, 2, steps)
    _require(
        env,
        first[0] == other[0],
        "the level must follow from the seed alone, not from noise_seed (observation and state_key "
        "after reset differ)",
    )
    _check_twins(env, level, steps)
    _check_snapshot(env, level, steps)
    _check_baselines(env, level)


def _play(env: Env, level: int, noise_seed: int, steps: int) -> list[tuple[Any, ...]]:
    """What an episode of random actions shows; the actions follow from the level."""
    observation, info = env.reset(seed=level, options={"noise_seed": noise_seed})
    _require(env, isinstance(observation, str), "reset must return its observation as a text")
    _require(env, isinstance(info, dict), "reset must return (observation, info), info a dict")
    history: list[tuple[Any, ...]] = [(observation, _key(env), env.actions, _picture(env))]
    chooser = np.random.Generator(np.random.PCG64([2, level]))
    for _ in range(steps):
        history.append(_step(env, _choose(env, chooser)))
        if history[-1][2] or history[-1][3]:
            break
    return history


def _choose(env: Env, chooser: np.random.Generator) -> str:
    names = env.actions
    if names is None:
        return pick(chooser, ("", "1", "yes", "look", "a b c"))
    ok = isinstance(names, tuple) and names and all(isinstance(n, str) and n for n in names)
    _require(env, bool(ok), "actions must be a tuple of names, or None for free text")
    _require(
        env,
        len({n.strip().lower() for n in names}) == len(names),
        "action names must differ by more than case and spaces",
    )
    _require(
        env,
        not any("||" in n or "<" in n or "\n" in n for n in names),
        "action names must not contain '||', '<' or line breaks",
    )
    return pick(chooser, names)


def _step(env: Env, action: str) -> tuple[Any, ...]:
    """One step with its results checked; returns them with the key."""
    before = _key(env)
    result = env.step(action)
    _require(
        env,
        isinstance(result, tuple) and len(result) == 5,
        "step must return (observation, reward, terminated, truncated, info)",
    )
    observation, reward, terminated, truncated, info = result
    _require(env, isinstance(observation, str), "step must return its observation as a text")
    _require(
        env,
        isinstance(reward, int | float) and bool(np.isfinite(reward)),
        f"rewards must be finite numbers, not {reward!r}",
    )
    _require(
        env,
        isinstance(terminated, bool) and isinstance(truncated, bool),
        "terminated and truncated must be bool",
    )
    for flag in ("success", "effective"):
        _require(
            env,
            isinstance(info, dict) and isinstance(info.get(flag), bool),
            f"step must put a bool info[{flag!r}] into its info",
        )
    _dump(env, info, "info must hold JSON values only")
    _require(
        env,
        terminated or not info["success"],
        "info['success'] may be true only in the step that terminates the episode",
    )
    after = _key(env)
    _require(
        env,
        after == before or info["effective"],
        "info['effective'] must be true where state_key changed",
    )
    return observation, reward, terminated, truncated, info, after, _picture(env)


def _picture(env: Env) -> Any:
    """The picture, after making sure that it is one and that drawing it changes nothing."""
    if not env.draws:
        return None
    state, picture = _json(env), env.picture()
    rule = "picture must return None or a list of rows: texts of one length, printable characters"
    _require(env, is_picture(picture), rule)
    _require(env, state == _json(env), "picture must not change the environment")
    return picture


def _key(env: Env) -> str:
    """The state key, after making sure that asking for it changes nothing."""
    state = _json(env)
    key = env.state_key()
    _require(env, isinstance(key, str), "state_key must return a text")
    _require(
        env,
        key == env.state_key() and state == _json(env),
        "state_key must not change the environment",
    )
    return key


def _json(env: Env) -> str:
    """The snapshot as JSON text."""
    return _dump(env, env.get_state(), "get_state must return JSON values only")


def _dump(env: Env, value: Any, rule: str) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RagenError(f"{env.name}: {rule}: {error}") from error


def _check_twins(env: Env, level: int, steps: int) -> None:
    """Two copies that play in turns must not disturb each other: a step has hundreds of them."""
    try:
        twin = copy.deepcopy(env)
    except TypeError:
        return  # holds something that cannot be copied, such as a connection
    alone = _play(env, level, 1, steps)
    env.reset(seed=level, options={"noise_seed": 1})
    twin.reset(seed=level, options={"noise_seed": 1})
    chooser = np.random.Generator(np.random.PCG64([2, level]))
    for expected in alone[1:]:
        action = _choose(env, chooser)
        _require(
            env,
            _step(env, action) == expected == _step(twin, action),
            "two instances must not share anything that changes (a class attribute? a global?)",
        )


def _check_baselines(env: Env, level: int) -> None:
    """The environment's own answer is possible, and asking for it changes nothing."""
    env.reset(seed=level, options={"noise_seed": 1})
    before = _json(env)
    plan, known = env.solve(3, 4, 2), env.baselines(3, 2, 4)
    _require(env, _json(env) == before, "solve and baselines must not change the environment")
    if plan is not None:
        legal = all(action in (env.actions or plan) for action in plan)
        _require(env, 1 <= len(plan) <= 2 and legal, "solve must return 1 to 2 legal actions of 2")
    if known is not None:
        chances = [known.random] if known.optimal is None else [known.random, known.optimal]
        holds = all(0 <= chance <= 1 + 1e-9 for chance in chances)
        _require(env, holds, "baselines must give chances from 0 to 1")
        holds = chances[0] <= chances[-1] + 1e-9
        _require(env, holds, "baselines: random play cannot beat optimal play")


def _check_snapshot(env: Env, level: int, steps: int) -> None:
    """Leave an episode, play another level, come back: the rest must be the same."""
    env.reset(seed=level, options={"noise_seed": level})
    chooser = np.random.Generator(np.random.PCG64([2, level]))
    ended = False
    for _ in range(int(chooser.integers(3))):
        ended = ended or bool(_step(env, _choose(env, chooser))[2])
        if ended:
            return
    saved, actions = _json(env), env.actions
    script: list[str] = []
    futures: list[list[tuple[Any, ...]]] = []
    for attempt in range(2):
        if attempt:
            env.reset(seed=level + 1, options={"noise_seed": level + 1})
            env.set_state(json.loads(saved))
            _require(
                env, _json(env) == saved, "get_state after set_state must give the same snapshot"
            )
            _require(env, env.actions == actions, "set_state must bring the level's actions back")
        future: list[tuple[Any, ...]] = []
        for turn in range(steps):
            if attempt == 0:
                script.append(_choose(env, chooser))
            future.append(_step(env, script[turn]))
            if future[-1][2] or future[-1][3]:
                break
        futures.append(future)
    _require(
        env,
        futures[0] == futures[1],
        "set_state must restore everything: after it the same actions went another way",
    )


def _check_reading(env: Env) -> None:
    env.reset(seed=0, options={"noise_seed": 0})
    before = _json(env)
    for thought in ("", "no such thing", "P a0 : a0 a1 _"):
        reading = env.read_thought(thought)
        if reading is not None:
            ok = isinstance(reading, Reading) and 0 <= reading.true <= reading.stated
            _require(env, ok, "read_thought must return None or a Reading, true ≤ stated")
    _require(env, _json(env) == before, "read_thought must leave the environment as it was")


def _check_unknown_action(env: Env) -> None:
    env.reset(seed=0, options={"noise_seed": 0})
    if env.actions is None:
        return
    before = _json(env)
    try:
        env.step("no such action")
    except ValueError:
        _require(
            env, _json(env) == before, "an unknown action must leave the environment as it was"
        )
        return
    raise RagenError(f"{env.name}: step must raise ValueError for an unknown action")
