"""Environments of the verifiers package: its own rollouts and rewards, through the gateway.

The library plays a task as an agent does. It runs in processes of its own, also to tell its tasks
(`ragen.envs.adapters.verifiers_host`), so that its packages may be those of another interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import override

from ragen.core.errors import RagenError, last_line, printable
from ragen.envs.adapters.adapted import Played
from ragen.envs.adapters.agent import AgentEnv, not_by_hand

HOST = Path(__file__).with_name("verifiers_host.py")


class VerifiersEnv(AgentEnv):
    """The tasks of a taskset of verifiers.

    Observation:
        The task as JSON.

    Actions:
        The reward as JSON, or the failure of an environment that could not give one.

    Reward:
        The task's own.

    Ends when:
        The environment's rollout has ended.

    Parameters:
        success_at: The reward from which on a task counts as solved.
        test: Settings of the taskset for evaluation; without them, every fifth task is.
        config: Settings of the environment, such as the harness of its agent.
        max_tokens, python, processes: As of an agent.
        taskset: Any other keyword is a setting of the taskset.
    """

    sees_secrets = True  # for the judges of the environment

    def __init__(
        self,
        success_at: float = 1.0,
        test: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        max_tokens: Annotated[int, Field(ge=0)] = 0,
        python: str = "",
        processes: Annotated[int, Field(ge=0, le=256)] = 0,
        **taskset: Any,
    ) -> None:
        self.python, self.processes, self.max_tokens = python, processes, max_tokens
        self._success_at = success_at
        found = _find(self.target, python, json.dumps([taskset, test, config or {}]))
        self._training, self._evaluation = found["training"], found["evaluation"]
        self._source = found["source"]
        self.max_turns = self.max_actions = found["max_turns"] or AgentEnv.max_turns
        self.goal = f"The tasks of {self.target.rpartition('/')[2].removesuffix('.py')}"
        self._rules = "An environment of verifiers works on the task."

    @classmethod
    @override
    def program(cls) -> str:
        return f"{HOST}:main"

    @classmethod
    @override
    def find(cls, target: str) -> tuple[str, ...]:
        return super().find(f"{target}:")

    @classmethod
    @override
    def sources(cls, params: Mapping[str, Any]) -> dict[str, str]:
        _find.cache_clear()
        return {f"taskset of {cls.name}": cls(**params)._source}

    @override
    def play(self, action: str) -> Played:
        if not action.startswith("{"):
            raise not_by_hand()
        answer = json.loads(action)
        if "failure" in answer:
            raise RuntimeError(answer["failure"])
        reward = float(answer["reward"])
        return Played(f"The reward is {reward:g}.", reward, True, False, reward >= self._success_at)


@lru_cache(maxsize=16)
def _find(target: str, python: str, settings: str) -> dict[str, Any]:
    """What the host tells of a taskset; the environment is made for each episode."""
    command = [python or sys.executable, str(HOST), target, settings]
    try:
        told = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise RagenError(f"the interpreter {python} does not start: {error}") from None
    if told.returncode:
        raise RagenError(f"verifiers:{target}: {printable(last_line(told.stderr))}")
    found: dict[str, Any] = json.loads(last_line(told.stdout))
    return found
