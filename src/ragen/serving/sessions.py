"""One session of OpenEnv's protocol: what a message asks of an environment, and the answer.

Messages and answers are JSON objects with a ``type`` and ``data``. Beyond the protocol, RAGEN's own
client gets all that it needs to play as without a server. A reset takes a ``noise_seed`` and gives
the goal, the rules and the actions of the level. A step says whether it was a success and whether
it was truncated. The defaults of a state are the budgets of an episode, and the schema has the
environment's tools, which a step calls by the text of the call (`ragen.envs.tools`). The protocol
has no pictures: an observation's metadata has them as PNG files in base64, one for each
``<image>`` in its text.
"""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import closing
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragen.core.pictures import for_people
from ragen.envs.contract import fresh_seed
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.setup import Setup

Fields = TypeVar("Fields", bound=BaseModel)
Seed = Annotated[int, Field(ge=0, strict=True)]
Answer = dict[str, Any]

LOOKED_AT = 4
"""The number of levels that are compared to find out whether all have the same actions."""


class Reset(BaseModel):
    """The fields of a reset; others are ignored, as in OpenEnv."""

    seed: Seed | None = None
    noise_seed: Seed | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None


class Step(BaseModel):
    """An action."""

    model_config = ConfigDict(extra="forbid")
    text: str
    metadata: dict[str, Any] = {}


class Observation(BaseModel):
    """The text of the environment."""

    text: str
    metadata: dict[str, Any] = {}


class State(BaseModel):
    """The episode in progress, and the budgets that suit an episode."""

    episode_id: str | None = None
    step_count: int = 0
    seed: int | None = None
    noise_seed: int | None = None
    max_turns: int = 20
    actions_per_turn: int = 1
    max_actions: int = 20


class Refused(Exception):
    """A message that cannot be followed, and OpenEnv's word for why; the session continues."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Description(NamedTuple):
    """A server's description of an environment; each field has a path of its name.

    `schema` lists the actions if all levels have the same ones, and the tools if there are any.
    """

    metadata: Answer
    schema: Answer
    state: Answer


def describe(setup: Setup) -> Description:
    """Describe an environment from the start of some levels; raises `UserCodeError` if it fails."""
    action, observation, state = (kind.model_json_schema() for kind in (Step, Observation, State))
    found = set()
    with closing(setup.make_env()) as env:
        for level in range(LOOKED_AT):
            env.reset(level, level)
            found.add(env.actions)
        tools, sees = env.tools, env.shows_pictures
        metadata = {"name": env.env.name, "description": f"{env.goal}\n{env.rules}"}
    if len(found) == 1 and (actions := found.pop()) is not None:
        action["properties"]["text"]["enum"] = list(actions)
    began = _state(setup).model_dump()
    for name, value in began.items():
        state["properties"][name]["default"] = value
    schema: Answer = {"action": action, "observation": observation, "state": state}
    if tools:
        schema["tools"] = list(tools)
    if sees:
        schema["pictures"] = "observation.metadata.pictures"
    return Description(metadata, schema, began)


class Session:
    """An environment and its episode in progress; raises `UserCodeError` if it cannot be made."""

    def __init__(self, setup: Setup) -> None:
        self._env = setup.make_env()
        self._began = self._state = _state(setup)
        self._plays = False

    def answer(self, message: str) -> Answer | None:
        """The answer to a message; ``None`` if it ends the session.

        Raises:
            Refused: The message cannot be followed.
            UserCodeError: The environment fails, and the session ends.
        """
        try:
            asked = json.loads(message)
        except (ValueError, RecursionError):
            raise Refused("INVALID_JSON", "the message is not JSON") from None
        if not isinstance(asked, dict):
            raise Refused("INVALID_JSON", "the message is not a JSON object")
        kind, data = asked.get("type"), asked.get("data")
        if kind == "close":
            return None
        if kind == "state":
            return {"type": "state", "data": self._state.model_dump()}
        if kind == "reset":
            return self._reset(_checked(Reset, {} if data is None else data))
        if kind == "step":
            return self._step(_checked(Step, data).text)
        raise Refused("UNKNOWN_TYPE", "expected the type reset, step, state or close")

    def close(self) -> None:
        """Let the environment free its resources."""
        self._env.close()

    def _reset(self, asked: Reset) -> Answer:
        seed = fresh_seed() if asked.seed is None else asked.seed
        noise_seed = seed if asked.noise_seed is None else asked.noise_seed
        env, self._plays = self._env, True
        env.reset(seed, noise_seed)
        about = {"episode_id": asked.episode_id, "seed": seed, "noise_seed": noise_seed}
        self._state = self._began.model_copy(update=about)
        actions = None if env.actions is None else list(env.actions)
        return _shown(env, None, {"goal": env.goal, "rules": env.rules, "actions": actions})

    def _step(self, action: str) -> Answer:
        env = self._env
        if not self._plays:
            raise Refused("VALIDATION_ERROR", "no episode is in progress: reset first")
        if env.actions is not None and action not in env.actions:
            names = ", ".join(env.actions)
            raise Refused("VALIDATION_ERROR", f"no action {action[:80]!r}: there are {names}")
        reward = env.step(action)
        self._state.step_count += 1
        self._plays = not (env.terminated or env.truncated)
        success = env.terminated and env.info["success"]
        truncated = env.truncated and not env.terminated
        return _shown(env, reward, {"success": success, "truncated": truncated})


def _state(setup: Setup) -> State:
    turns, each, most = setup.turns, setup.actions_per_turn, setup.actions
    return State(max_turns=turns, actions_per_turn=each, max_actions=most)


def _shown(env: GuardedEnv, reward: float | None, metadata: Answer) -> Answer:
    """The answer to a reset or a step; OpenEnv's clients look for metadata in both places."""
    seen = {}
    if env.shows_pictures:
        seen["pictures"] = [b64encode(each.png()).decode() for each in env.pictures]
    data = {
        "observation": {"text": for_people(env.observation), "metadata": metadata | seen},
        "reward": reward,
        "done": env.terminated or env.truncated,
        "metadata": metadata,
    }
    return {"type": "observation", "data": data}


def _checked(kind: type[Fields], data: Any) -> Fields:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise Refused("VALIDATION_ERROR", f"{place}{first['msg'].lower()}") from None
