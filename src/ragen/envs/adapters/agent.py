"""An existing agent as an environment: the tasks that it gets, and the reward of its answers.

The name is ``agent:TARGET``: ``agent:my_agent.py:main``, ``agent:my_package.module:main``, or a
command such as ``agent:node agent.js``; or ``agent:outside``, for programs that fetch their tasks
(`ragen.gateway.outside`). The agent itself plays the episode, through the gateway
(`ragen.rollout.agent`); this environment only says which task it gets and what its answer earns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from typing_extensions import override

from ragen.core.errors import RagenError
from ragen.core.files import file_errors, parse_json, read_text
from ragen.core.plugins import hash_bytes, hash_code, load_object
from ragen.core.seeding import EVAL_LEVELS, TRAIN_LEVELS
from ragen.envs.adapters.adapted import Adapted, Played

HELD_OUT = 5
"""Every fifth task is for evaluation only, if there is no file of tasks for it."""
OUTSIDE = "outside"
"""The target of an agent that is no function or command of ours: programs fetch its tasks."""
SUCCESS = 1.0
"""The reward from which on a task counts as solved, unless the agent or the verifier says so."""
MOST_BYTES = 2**28
"""Greatest size of a file of tasks."""

Task = Mapping[str, Any]
"""A line of the file of tasks: what the agent gets, and what its verifier needs."""


class AgentEnv(Adapted):
    """The tasks of an agent.

    Observation:
        The task as JSON.

    Actions:
        What the agent returned, as JSON: a reward, ``{"reward": …, "success": …}``, or an answer
        for the verifier.

    Reward:
        What the agent returned, or what the verifier gives for its answer.

    Ends when:
        The agent has returned.

    Parameters:
        tasks: A file with a task in each line, a JSON object.
        test_tasks: A second file, for evaluation only; without it, every fifth task is.
        verifier: A function ``verify(task, answer)``, as ``file.py:verify``, that returns a number,
            a bool, or ``{"reward": …, "success": …}``.
        max_tokens: Tokens that may be sampled for a task before it gets no further reply, beside
            the limits of each reply and of the number of calls; 0 is no limit.
        python: The interpreter of the agent, if its packages are not in ours.
        processes: Processes in which the agent plays; 0 is one for each core.
        address: Where programs outside fetch their tasks [127.0.0.1:8000].
    """

    goal = "The tasks of an agent"
    max_turns = 16
    actions_per_turn = 1
    max_actions = 16
    prompt_style = "paper"
    sees_secrets = False
    """True if the agent's processes get all variables, also those that look like keys."""

    def __init__(
        self,
        tasks: str,
        test_tasks: str = "",
        verifier: str = "",
        max_tokens: Annotated[int, Field(ge=0)] = 0,
        python: str = "",
        processes: Annotated[int, Field(ge=0, le=256)] = 0,
        address: str = "",
    ) -> None:
        if self.target == OUTSIDE and (python or processes):
            raise RagenError("an agent outside is started by others: leave python and processes")
        if self.target != OUTSIDE and address:
            raise RagenError("address is for an agent outside: leave it, or name --agent outside")
        self.python, self.processes, self.max_tokens = python, processes, max_tokens
        self._training, self._evaluation = split_tasks(tasks, test_tasks)
        self._verify: Callable[[Task, Any], Any] | None = None
        if verifier:
            self._verify = load_object(verifier, kind="verifier", accepts=callable).object
        self._rules = "An agent of its own works on the task."

    @classmethod
    def program(cls) -> str:
        """The function or the command that works on the tasks (`ragen.gateway.agents.Agents`)."""
        return cls.target

    @classmethod
    @override
    def find(cls, target: str) -> tuple[str, ...]:
        """The hash of the agent's file, if it has one."""
        file = target.rpartition(":")[0]
        if not file.endswith(".py"):
            return ()
        with file_errors("read", file, "name the file of the agent"):
            return (hash_code(Path(file), Path(file).read_bytes()),)

    @classmethod
    def sources(cls, params: Mapping[str, Any]) -> dict[str, str]:
        """The hashes of the files that the parameters name; the tasks are read anew from here on.

        Raises:
            RagenError: A file cannot be read.
        """
        split_tasks.cache_clear()
        found = {}
        for path in filter(None, (params.get("tasks"), params.get("test_tasks"))):
            found[path] = hash_bytes(read_text(Path(path), MOST_BYTES).encode())
        if verifier := params.get("verifier"):
            found[verifier] = load_object(verifier, kind="verifier", accepts=callable).source
        return found

    @override
    def begin(self, level_seed: int, noise_seed: int) -> str:
        if level_seed < TRAIN_LEVELS:
            self._task = self._evaluation[(level_seed - EVAL_LEVELS) % len(self._evaluation)]
        else:
            self._task = self._training[(level_seed - TRAIN_LEVELS) % len(self._training)]
        return json.dumps(self._task, ensure_ascii=False)

    @override
    def play(self, action: str) -> Played:
        try:
            answer = parse_json(action)
        except ValueError:
            raise not_by_hand() from None
        verdict = read_verdict(answer)
        if self._verify is not None and not (isinstance(answer, dict) and "reward" in answer):
            said = answer.get("answer", answer) if isinstance(answer, dict) else answer
            verdict = read_verdict(self._verify(self._task, said))
        if verdict is None:
            raise RagenError(
                "the agent returned no reward and there is no verifier: return a number, a bool or "
                '{"reward": …}, or name a verifier (env.params.verifier)'
            )
        shown = f"The reward is {verdict.reward:g}."
        return Played(shown, verdict.reward, True, False, verdict.success)


def not_by_hand() -> RagenError:
    """The refusal of an action that comes from a person or a checker, and not from an agent."""
    return RagenError("an agent plays it, with a model: name a run, as in --player RUN")


class Verdict(NamedTuple):
    """The reward of an episode, and whether it counts as a success."""

    reward: float
    success: bool


def read_verdict(value: Any) -> Verdict | None:
    """The verdict in what an agent or a verifier returned, ``None`` if there is none.

    Example:
        >>> read_verdict(True), read_verdict({"reward": 0.5, "success": True}), read_verdict("42")
        (Verdict(reward=1.0, success=True), Verdict(reward=0.5, success=True), None)
    """
    match value:
        case bool() | int() | float():
            return Verdict(float(value), float(value) >= SUCCESS)
        case {"reward": bool() | int() | float() as reward, **rest}:
            success = rest.get("success", float(reward) >= SUCCESS)
            return Verdict(float(reward), bool(success))
    return None


@lru_cache(maxsize=16)
def split_tasks(tasks: str, test_tasks: str) -> tuple[Sequence[Task], Sequence[Task]]:
    """The tasks for training and those for evaluation; the environment is made for each episode."""
    given = read_tasks(tasks)
    evaluation = read_tasks(test_tasks) if test_tasks else given[::HELD_OUT]
    held_out = {json.dumps(task) for task in evaluation}
    training = [task for task in given if json.dumps(task) not in held_out]
    if not training:
        raise RagenError(f"{tasks}: all tasks are for evaluation; give more, or test_tasks")
    return training, evaluation


def read_tasks(path: str) -> list[Task]:
    """The tasks of a file, one JSON object a line; empty lines are left out.

    Raises:
        RagenError: The file cannot be read, a line is no JSON object, or there is none.
    """
    tasks: list[Task] = []
    # `splitlines` would also split at characters that JSON allows inside a string.
    for number, line in enumerate(read_text(Path(path), MOST_BYTES).split("\n"), 1):
        if not line.strip():
            continue
        try:
            task = parse_json(line)
        except ValueError:
            task = None
        if not isinstance(task, dict):
            raise RagenError(f"{path}, line {number}: a task is a JSON object")
        tasks.append(task)
    if not tasks:
        raise RagenError(f"{path} has no task")
    return tasks
