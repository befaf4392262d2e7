"""The conformance checker, which tests whether an environment keeps the contract."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ragen.core.errors import RagenError
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs import answers
from ragen.envs.contract import Env, pick
from ragen.envs.registry import CLOSE_S, close_env
from ragen.envs.tools import write_call

Result = tuple[Any, ...]
"""The results of a step, with the state key, the pictures and the drawing after it."""
Played = tuple[str, Result]
"""An action and the result of its step."""


def check(env: Env, *, levels: int = 5, steps: int = 20) -> None:
    """Check an environment against the contract; run this on environments of your own.

    On each of `levels` levels, the same random actions, at most `steps`, are played twice, in two
    copies that take turns, and from a snapshot; the results must agree. An environment of free text
    (``actions`` is ``None``) receives short words, which it must accept. One with tools also
    receives random play and wrong calls. The check closes the environment, and its state afterwards
    is undefined.

    Raises:
        RagenError: The environment raises or breaks a rule. The message names the rule.
    """
    name = type(env).__name__
    try:
        with boundary("check"):
            name = getattr(env, "name", name)
            for attribute in ("name", "goal", "rules"):
                answers.text(getattr(env, attribute, None), "the environment", attribute)
            for attribute in ("max_turns", "actions_per_turn", "max_actions"):
                budget = getattr(env, attribute, None)
                _require(type(budget) is int and budget >= 1, f"{attribute} must be an int ≥ 1")
            _require(
                not answers.tools(env.tools) or env.actions is None,
                "an environment with tools has actions = None",
            )
            for level in range(levels):
                _check_level(env, level, steps)
            _check_unknown_action(env)
            env.close()
    except UserCodeError as failure:
        close_env(env, CLOSE_S)
        if failure.__cause__ is None:
            raise RagenError(f"{name}: {failure}") from None
        if isinstance(failure.__cause__, RagenError):
            raise RagenError(f"{name}: {failure.__cause__}") from None
        raise RagenError(f"{name} raised while it was checked: {failure.reason}") from failure


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise RagenError(rule)


@contextmanager
def _unchanged(env: Env, cause: str) -> Iterator[None]:
    """Require that the body leaves the environment as it is."""
    before = _snapshot(env)
    yield
    _require(_snapshot(env) == before, f"{cause} must not change the environment")


def _check_level(env: Env, level: int, steps: int) -> None:
    first = _play_level(env, level, 1, steps)
    again = _play_level(env, level, 1, steps)
    _require(first == again, "the same seeds must give the same episode")
    _require(
        first[0] == _play_level(env, level, 2, steps)[0],
        "the level must follow from the seed alone, not from noise_seed (observation and state_key "
        "after reset differ)",
    )
    _check_twins(env, level, first[1])
    _check_snapshot(env, level, steps)
    _check_advice(env, level)


def _play_level(env: Env, level: int, noise_seed: int, steps: int) -> tuple[Result, list[Played]]:
    """The start of a level, and random actions that do not depend on the noise seed."""
    observation, info = env.reset(seed=level, options={"noise_seed": noise_seed})
    answers.text(observation, "reset", "observation")
    answers.info(info, "reset")
    start = observation, _key(env), env.actions, _pictures(env, observation), _drawing(env)
    return start, _play(env, _chooser(level), steps)


def _chooser(level: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([2, level]))


def _play(env: Env, chooser: np.random.Generator, steps: int) -> list[Played]:
    played: list[Played] = []
    while len(played) < steps and not (played and _ended(played[-1])):
        action = _choose(env, chooser)
        played.append((action, _step(env, action)))
    return played


def _ended(played: Played) -> bool:
    _, (_, _, terminated, truncated, *_) = played
    return bool(terminated or truncated)


def _choose(env: Env, chooser: np.random.Generator) -> str:
    names = env.actions
    if names is None:
        wrong = [write_call(each["function"]["name"], wrong=1) for each in env.tools]
        played = env.random_action(chooser) if env.tools else None
        more = [] if played is None else [played] * 5
        return pick(chooser, ("", "1", "yes", "look", "a b c", *wrong, *more))
    texts = isinstance(names, tuple) and all(isinstance(n, str) and n for n in names)
    _require(bool(texts and names), "actions must be a tuple of names, or None for free text")
    distinct = len({n.strip().lower() for n in names}) == len(names)
    _require(distinct, "action names must differ by more than case and spaces")
    plain = not any(mark in n for n in names for mark in ("||", "<", "\n"))
    _require(plain, "action names must not contain '||', '<' or line breaks")
    return pick(chooser, names)


def _step(env: Env, action: str) -> Result:
    before = _key(env)
    result = env.step(action)
    whole = isinstance(result, tuple) and len(result) == 5
    _require(whole, "step must return (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = result
    answers.text(observation, "step", "observation")
    reward = answers.reward(reward)
    terminated = answers.flag(terminated, "step", "terminated")
    truncated = answers.flag(truncated, "step", "truncated")
    info = answers.info(info, "step")
    for flag in ("success", "effective"):
        _require(flag in info, f"step must put a bool info[{flag!r}] into its info")
    _require(
        terminated or not info["success"],
        "info['success'] may be true only in the step that terminates the episode",
    )
    after = _key(env)
    known = after == before or info["effective"]
    _require(known, "info['effective'] must be true where state_key changed")
    looks = after, _pictures(env, observation), _drawing(env)
    return observation, reward, terminated, truncated, info, *looks


def _pictures(env: Env, observation: str) -> Any:
    """The pictures, one for each place in the observation; looking at them must change nothing."""
    if not env.shows_pictures:
        return None
    with _unchanged(env, "pictures"):
        found = answers.pictures(env.pictures())
    _require(found == answers.pictures(env.pictures()), "pictures must not change by looking")
    answers.with_places(observation, found, "the environment")
    return found


def _drawing(env: Env) -> Any:
    """The drawing, which must be valid; drawing it must change nothing."""
    if not env.draws:
        return None
    with _unchanged(env, "drawing"):
        return answers.drawing(env.drawing())


def _key(env: Env) -> str:
    """The state key, which must be a text; computing it must change nothing."""
    with _unchanged(env, "state_key"):
        key = env.state_key()
    _require(isinstance(key, str), "state_key must return a text")
    _require(key == env.state_key(), "state_key must not change the environment")
    return key


def _snapshot(env: Env) -> str:
    try:
        return json.dumps(env.get_state(), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RagenError(f"get_state must return JSON values only: {error}") from error


def _check_twins(env: Env, level: int, played: list[Played]) -> None:
    """Two copies that take turns must not affect each other: a training step has hundreds."""
    try:
        twin = copy.deepcopy(env)
    except TypeError:
        return  # it holds something that cannot be copied, such as a connection
    for each in (env, twin):
        each.reset(seed=level, options={"noise_seed": 1})
    for action, expected in played:
        _require(
            _step(env, action) == expected == _step(twin, action),
            "two instances must not share anything that changes (a class attribute? a global?)",
        )


def _check_advice(env: Env, level: int) -> None:
    """The optional methods must give possible answers and change nothing."""
    env.reset(seed=level, options={"noise_seed": 1})
    with _unchanged(env, "solve and baselines"):
        plan, known = env.solve(3, 4, 2), env.baselines(3, 2, 4)
    if plan is not None:
        legal = all(action in (env.actions or plan) for action in plan)
        _require(1 <= len(plan) <= 2 and legal, "solve must return 1 to 2 legal actions of 2")
    answers.baselines(known)
    with _unchanged(env, "read_thought"):
        for text in ("", "no such thing", "P a0 : a0 a1 _"):
            answers.reading(env.read_thought(text))
    if env.actions is not None:
        return
    with _unchanged(env, "random_action"):
        first, again = (env.random_action(_chooser(level)) for _ in range(2))
    _require(first == again, "random_action must follow from its generator and the state alone")
    if first is not None:
        answers.text(first, "random_action", "an action")
        _step(env, first)


def _check_snapshot(env: Env, level: int, steps: int) -> None:
    """A snapshot must be exact: restored after another level, it must give the same results."""
    env.reset(seed=level, options={"noise_seed": level})
    chooser = _chooser(level)
    begun = _play(env, chooser, int(chooser.integers(3)))
    if begun and _ended(begun[-1]):
        return
    saved, actions, seen = _snapshot(env), env.actions, answers.pictures(env.pictures())
    rest = _play(env, chooser, steps)
    env.reset(seed=level + 1, options={"noise_seed": level + 1})
    env.set_state(json.loads(saved))
    _require(_snapshot(env) == saved, "get_state after set_state must give the same snapshot")
    _require(env.actions == actions, "set_state must bring the level's actions back")
    same = answers.pictures(env.pictures()) == seen
    _require(same, "set_state must bring the pictures back: pictures differ after it")
    _require(
        all(_step(env, action) == result for action, result in rest),
        "set_state must restore everything: after it the same actions went another way",
    )


def _check_unknown_action(env: Env) -> None:
    env.reset(seed=0, options={"noise_seed": 0})
    if env.actions is None:
        return
    before = _snapshot(env)
    try:
        env.step("no such action")
    except ValueError:
        _require(_snapshot(env) == before, "an unknown action must not change the environment")
    else:
        raise RagenError("step must raise ValueError for an unknown action")
