"""The conformance checker: whether an environment keeps the contract."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from ragen.core.boundary import UserCodeError, boundary
from ragen.core.errors import RagenError
from ragen.envs.contract import Env, Reading, is_picture, pick


def check(env: Env, *, levels: int = 5, steps: int = 20) -> None:
    """Check an environment against the contract; run it on your own.

    Random actions are played on some levels, played again, played in two copies in turn, and played
    from snapshots; the results are compared. An environment of free text (``actions`` is ``None``)
    receives short words, which it must accept. The environment's state afterwards is undefined.
    `steps` is the greatest number of actions on each of `levels` levels.

    Raises:
        RagenError: The environment raises, or breaks a rule, which the message names.

    Example:
        >>> from ragen.envs.registry import make
        >>> check(make("bandit"))
    """
    try:
        with boundary("check"):
            _check_texts(env)
            for level in range(levels):
                _check_level(env, level, steps)
            _check_unknown_action(env)
            _check_reading(env)
    except UserCodeError as failure:
        if isinstance(failure.__cause__, RagenError):
            raise failure.__cause__ from None
        raise RagenError(f"{_name(env)} raised while it was checked: {failure.reason}") from failure


def _name(env: Env) -> str:
    return getattr(env, "name", type(env).__name__)


def _require(env: Env, holds: bool, rule: str) -> None:
    if not holds:
        raise RagenError(f"{_name(env)}: {rule}")


def _check_texts(env: Env) -> None:
    for attribute in ("name", "goal", "rules"):
        text = getattr(env, attribute, None)
        _require(env, isinstance(text, str) and text != "", f"{attribute} must be a text")


def _check_level(env: Env, level: int, steps: int) -> None:
    """The same seeds give the same episode, and the level does not depend on the noise seed."""
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


def _chooser(level: int) -> np.random.Generator:
    """The generator of a level's random actions."""
    return np.random.Generator(np.random.PCG64([2, level]))


def _play(env: Env, level: int, noise_seed: int, steps: int) -> list[tuple[Any, ...]]:
    """All results of an episode of random actions, which follow from the level."""
    observation, info = env.reset(seed=level, options={"noise_seed": noise_seed})
    _require(env, isinstance(observation, str), "reset must return its observation as a text")
    _require(env, isinstance(info, dict), "reset must return (observation, info), info a dict")
    history: list[tuple[Any, ...]] = [(observation, _key(env), env.actions, _picture(env))]
    chooser = _chooser(level)
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
    """One step with checked results; returns them with the state key and the picture."""
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
    """The picture, if it is a valid one and drawing it changes nothing."""
    if not env.draws:
        return None
    state, picture = _json(env), env.picture()
    rule = "picture must return None or a list of rows: texts of one length, printable characters"
    _require(env, is_picture(picture), rule)
    _require(env, state == _json(env), "picture must not change the environment")
    return picture


def _key(env: Env) -> str:
    """The state key, if it is a text and computing it changes nothing."""
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
    """Two copies played in turn do not disturb each other: a training step has hundreds of them."""
    try:
        twin = copy.deepcopy(env)
    except TypeError:
        return  # it holds something that cannot be copied, such as a connection
    alone = _play(env, level, 1, steps)
    env.reset(seed=level, options={"noise_seed": 1})
    twin.reset(seed=level, options={"noise_seed": 1})
    chooser = _chooser(level)
    for expected in alone[1:]:
        action = _choose(env, chooser)
        _require(
            env,
            _step(env, action) == expected == _step(twin, action),
            "two instances must not share anything that changes (a class attribute? a global?)",
        )


def _check_baselines(env: Env, level: int) -> None:
    """`solve` and `baselines` give possible answers and change nothing."""
    env.reset(seed=level, options={"noise_seed": 1})
    before = _json(env)
    plan, known = env.solve(3, 4, 2), env.baselines(3, 2, 4)
    _require(env, _json(env) == before, "solve and baselines must not change the environment")
    if plan is not None:
        legal = all(action in (env.actions or plan) for action in plan)
        _require(env, 1 <= len(plan) <= 2 and legal, "solve must return 1 to 2 legal actions of 2")
    if known is not None:
        optimal = known.random if known.optimal is None else known.optimal
        holds = all(0 <= chance <= 1 + 1e-9 for chance in (known.random, optimal))
        _require(env, holds, "baselines must give chances from 0 to 1")
        holds = known.random <= optimal + 1e-9
        _require(env, holds, "baselines: random play cannot beat optimal play")


def _check_snapshot(env: Env, level: int, steps: int) -> None:
    """Leave an episode, play another level, restore the snapshot: the rest must be the same."""
    env.reset(seed=level, options={"noise_seed": level})
    chooser = _chooser(level)
    for _ in range(int(chooser.integers(3))):
        if _step(env, _choose(env, chooser))[2]:
            return
    saved, actions = _json(env), env.actions
    script: list[str] = []
    first: list[tuple[Any, ...]] = []
    for _ in range(steps):
        script.append(_choose(env, chooser))
        first.append(_step(env, script[-1]))
        if first[-1][2] or first[-1][3]:
            break
    env.reset(seed=level + 1, options={"noise_seed": level + 1})
    env.set_state(json.loads(saved))
    _require(env, _json(env) == saved, "get_state after set_state must give the same snapshot")
    _require(env, env.actions == actions, "set_state must bring the level's actions back")
    _require(
        env,
        all(_step(env, action) == result for action, result in zip(script, first, strict=True)),
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
