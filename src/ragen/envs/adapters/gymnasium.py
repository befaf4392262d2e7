"""Gymnasium's environments with discrete actions: their texts, discrete values or pictures.

Gymnasium draws the level and the random events from one generator (`Env.np_random`). Here, `reset`
seeds it with the level seed and then replaces it by the generator of the noise seed.
"""

from __future__ import annotations

import inspect
import re
import warnings
from dataclasses import replace
from enum import EnumType
from typing import Any, Literal

import gymnasium
from gymnasium import spaces

from ragen.core.errors import RagenError, nearest
from ragen.core.pictures import MARK, Picture
from ragen.core.plugins import load_module
from ragen.envs.adapters import minigrid, toy_text
from ragen.envs.adapters.adapted import Adapted, Played, missing, version_of
from ragen.envs.adapters.toy_text import About
from ragen.envs.contract import generators

DOCS = ("Description", "Rewards", "Reward")
"""Sections of a docstring that become rules."""
DOCS_CHARS = 1500
"""Maximum number of characters that rules take from a docstring."""


class GymnasiumEnv(Adapted):
    """An environment that is registered with Gymnasium.

    Observation: the toy-text environments and MiniGrid in words and maps, any other as its values;
    or the picture that the environment renders (`observation="picture"`).
    Actions: the names of the toy-text environments, MiniGrid or an enumeration `actions`, else
    numbers. Reward, Ends when: as in Gymnasium. Success is an end with a positive last reward
    (`success="reward"`), or any end but a truncation (`success="end"`, the default of
    CliffWalking).

    Parameters: `success`; `observation`; `view` of MiniGrid, what the agent sees or the whole grid;
    any other keyword goes to `gymnasium.make`, such as `tile_size` of MiniGrid's pictures.

    Example:
        >>> from ragen.envs.registry import make
        >>> print(make("gymnasium:FrozenLake-v1").reset(seed=123)[0])
        PFFF
        FHFH
        FFFH
        HFFG
    """

    def __init__(
        self,
        success: Literal["reward", "end"] | None = None,
        view: Literal["agent", "whole"] = "agent",
        observation: Literal["text", "picture"] = "text",
        **params: Any,
    ) -> None:
        self.shows_pictures = observation == "picture"
        if self.shows_pictures:
            params = {"render_mode": "rgb_array", **params}
            if self.target.rpartition(":")[2].startswith(minigrid.FAMILIES):
                params = {"agent_pov": view == "agent", **params}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._env = gymnasium.make(self.target, disable_env_checker=True, **params)
        bare: Any = self._env.unwrapped
        if self.shows_pictures and bare.render_mode != "rgb_array":
            raise RagenError(
                f"{self.name} shows no pictures: they need the render mode rgb_array, and it has "
                f"{bare.render_mode}"
            )
        about = _about(self.name, bare, view, self.shows_pictures)
        self._success = success or about.success
        self._show = about.show
        self.goal, self._rules, self._actions = about.goal, about.rules, about.actions
        self.max_turns, self.actions_per_turn = about.turns, about.actions_per_turn
        limit = self._env.spec.max_episode_steps if self._env.spec else None
        most = self.max_turns * self.actions_per_turn
        self.max_actions = min(most, limit or most)

    @classmethod
    def find(cls, target: str) -> tuple[str, ...]:
        # As in `gymnasium.make`: a module before the name registers the environment.
        module, _, target = target.rpartition(":")
        code = (load_module(module)[1],) if module else ()
        if target.startswith(minigrid.FAMILIES) and not minigrid.register():
            raise missing(f"gymnasium:{target}", "minigrid", "minigrid")
        try:
            spec = gymnasium.spec(target)
        except gymnasium.error.Error as error:
            said = str(error).partition("\n")[0].rstrip(".").replace("`", "'")
            hint = "" if "'" in said else nearest(target, gymnasium.registry)
            raise RagenError(f"gymnasium:{target}: {said}{hint}") from None
        entry = spec.entry_point
        module = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
        return (*sorted({version_of("gymnasium"), version_of(module)}), *code)

    def begin(self, level_seed: int, noise_seed: int) -> str:
        observation, _ = self._env.reset(seed=level_seed)
        _, noise = generators(level_seed, {"noise_seed": noise_seed})
        self._env.unwrapped.np_random = noise
        return self._look(observation)

    def play(self, action: str) -> Played:
        index = self.action_index(action)
        observation, reward, terminated, truncated, _ = self._env.step(index)
        success = bool(terminated) and (self._success == "end" or float(reward) > 0)
        shown = self._look(observation)
        return Played(shown, float(reward), bool(terminated), bool(truncated), success)

    def _look(self, observation: Any) -> str:
        if self.shows_pictures:
            self._seen = (Picture.of(self._env.render()),)
        return self._show(observation)

    def close(self) -> None:
        self._env.close()


def _about(name: str, env: Any, view: str, sees: bool) -> About:
    space = env.action_space
    if not isinstance(space, spaces.Discrete) or space.start != 0:
        raise RagenError(f"{name} has actions {space}: RAGEN plays discrete ones from 0")
    if (found := toy_text.find(env)) and not sees:
        return found
    goal = getattr(env.spec, "id", type(env).__name__)
    if minigrid.is_one(env):
        return About(
            goal,
            minigrid.rules(_documented(env), int(space.n), view, sees),
            minigrid.ACTIONS[: int(space.n)],
            lambda observation: minigrid.show(env, observation, view, sees),
            actions_per_turn=3,
        )
    rules = _documented(env) or f"Play {goal}."
    if sees:
        plain = found or About(goal, rules, _names(env, int(space.n)), str)
        return replace(plain, rules=rules, show=lambda _: MARK)
    try:
        shown(env.observation_space, env.observation_space.sample())
    except TypeError as error:
        raise RagenError(
            f"{name} has observations in a {error}: RAGEN plays environments that show texts or "
            "discrete values; take its pictures (env.params.observation = 'picture') or wrap it in "
            "an environment of your own (docs/environments.md)"
        ) from None
    return About(
        goal,
        rules,
        _names(env, int(space.n)),
        lambda observation: shown(env.observation_space, observation),
    )


def _names(env: Any, count: int) -> tuple[str, ...]:
    listed = getattr(env, "actions", None)
    if not isinstance(listed, EnumType):
        return tuple(map(str, range(count)))
    members: dict[str, Any] = dict(listed.__members__)
    names = {member.value: name for name, member in members.items()}
    return tuple(names.get(index, str(index)) for index in range(count))


def _documented(env: Any) -> str:
    """The sections `DOCS` of a docstring, or its beginning, without markup and shortened."""
    text = inspect.cleandoc(type(env).__doc__ or "")
    pieces = re.split(r"^#+ *(.+)$", text, flags=re.MULTILINE)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    said = " ".join(sections[title] for title in DOCS if title in sections) or pieces[0]
    plain = " ".join(re.sub(r"<[^>]*>|`", "", said).split())
    if len(plain) <= DOCS_CHARS:
        return plain
    return plain[:DOCS_CHARS].rpartition(". ")[0] + "."


def shown(space: Any, value: Any) -> str:
    """An observation as text: named parts on lines of their own.

    Example:
        >>> shown(spaces.Tuple((spaces.Discrete(32), spaces.MultiBinary(2))), (13, [0, 1]))
        '13, [0, 1]'
    """
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {shown(part, value[key])}" for key, part in space.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(map(shown, space, value))
    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return str(value.tolist() if hasattr(value, "tolist") else value)
    raise TypeError(type(space).__name__)
