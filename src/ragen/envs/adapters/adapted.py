"""The common parts of the environments of other libraries: names, seeds, snapshots and infos.

A snapshot is the two seeds and the actions since `reset`. `set_state` plays the actions again and
compares the results with the earlier ones. So a snapshot is exact for every library that follows
its seeds, whatever its objects hold, and an environment that does not repeat itself is refused.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from ragen.config.extensions import LIBRARIES
from ragen.core.errors import RagenError
from ragen.core.pictures import Picture
from ragen.envs.contract import Env, Info, Options, State, fresh_seed


class Played(NamedTuple):
    """The result of an action, as `Env.step` returns it, with `success` in place of the info."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool


class Replayed(Env):
    """An environment that plays its actions again; a subclass defines only `begin` and `play`.

    If it `shows_pictures`, both put those of their observation into `_seen`.
    """

    shows_pictures: bool = False
    _seeds: tuple[int, int]
    _seen: tuple[Picture, ...] = ()

    @abstractmethod
    def begin(self, level_seed: int, noise_seed: int) -> str:
        """Begin a level and return its observation."""

    @abstractmethod
    def play(self, action: str) -> Played:
        """Carry out an action, which is one of `actions` unless they are ``None``."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        level = fresh_seed() if seed is None else seed
        self._seeds = level, (options or {}).get("noise_seed", level)
        self._taken: list[str] = []
        self._record = hashlib.blake2b(digest_size=16)
        self._shown = self.begin(*self._seeds)
        self._note(self._shown)
        return self._shown, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self.actions is not None:
            self.action_index(action)
        before = self.state_key()
        observation, reward, terminated, truncated, success = self.play(action)
        self._taken.append(action)
        self._shown = observation
        self._note(observation, reward, terminated, truncated)
        info = {"success": success, "effective": self.state_key() != before}
        return observation, reward, terminated, truncated, info

    def get_state(self) -> State:
        level, noise = self._seeds
        record = self._record.hexdigest()
        return {"level": level, "noise": noise, "actions": list(self._taken), "record": record}

    def set_state(self, state: State) -> None:
        self.reset(seed=state["level"], options={"noise_seed": state["noise"]})
        for action in state["actions"]:
            self.step(action)
        if self._record.hexdigest() != state["record"]:
            raise RagenError(
                f"{self.name} does not repeat itself: the same seeds and actions led elsewhere, so "
                "its episodes cannot be branched"
            )

    def state_key(self) -> str:
        return " ".join((self._shown, *self._hashes()))

    def pictures(self) -> Sequence[Any]:
        return [each.pixels for each in self._seen]

    def _hashes(self) -> list[str]:
        return [each.hash for each in self._seen]

    def _note(self, *values: Any) -> None:
        self._record.update(json.dumps((*values, *self._hashes())).encode())


class Adapted(Replayed):
    """An environment of another library, whose name is ``LIBRARY:TARGET``.

    A library's adapter defines `find`, `begin` and `play`. It sets `goal` and `_rules`, and
    `_actions` if actions have names.
    """

    target: ClassVar[str]
    """The library's own name of the environment."""
    versions: ClassVar[tuple[str, ...]] = ()
    """The packages that play it, with their versions. They are a part of what identifies its code,
    and a library may add other parts."""

    _rules: str
    _actions: tuple[str, ...] | None = None

    @classmethod
    def named(cls, name: str) -> type[Adapted]:
        """The class of one environment of the library, by its full name."""
        return _named(cls, name)

    @classmethod
    @abstractmethod
    def find(cls, target: str) -> tuple[str, ...]:
        """The `versions` of a target; raises `RagenError` if the library does not have it."""

    @property
    def rules(self) -> str:
        return self._rules

    @property
    def actions(self) -> tuple[str, ...] | None:
        return self._actions


@cache
def _named(adapter: type[Adapted], name: str) -> type[Adapted]:
    library, _, target = name.partition(":")
    module = LIBRARIES[library].module
    if find_spec(module) is None:
        raise missing(name, module, library)
    about = {"name": name, "target": target, "versions": adapter.find(target)}
    return type(adapter.__name__, (adapter,), {**about, "__module__": adapter.__module__})


def version_of(module: str) -> str:
    """The package that a module belongs to, and its version."""
    root = module.partition(".")[0]
    try:
        return f"{root} {version(root)}"
    except PackageNotFoundError:
        names = packages_distributions().get(root, ())
        return ", ".join(f"{each} {version(each)}" for each in names) or root


def missing(name: str, package: str, extra: str) -> RagenError:
    """The error for `name` if the package that it needs is not installed."""
    return RagenError(f"{name} needs {package}: pip install 'ragen-rl[{extra}]'")
