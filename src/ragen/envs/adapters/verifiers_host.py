"""The process that runs verifiers, by an interpreter that has it: it has nothing of RAGEN.

``python verifiers_host.py TARGET SETTINGS`` writes the tasks of a taskset as a line of JSON. As an
agent (`ragen.gateway.agent_host`), the module plays such a task, and is a plugin of verifiers: the
harness `CHAT` holds the conversation in this process. The library's own chat harness starts a
program for each message.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, redirect_stdout
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import islice
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
# This folder is searched first, and has modules with the names of libraries.
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]

OLDER = "load_environment is of verifiers 0.3: docs/agents.md plays it as an agent"

try:
    installed = version("verifiers")
except PackageNotFoundError:
    installed = "none"
if not installed.startswith("0.4."):
    sys.exit(
        f"needs verifiers 0.4, here is {installed}: pip install 'ragen-rl[verifiers]'; {OLDER}"
    )

import httpx  # noqa: E402
import verifiers.v1 as vf  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from verifiers.v1.dialects.chat import message_to_wire  # noqa: E402
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # noqa: E402

__all__ = ["ChatHarness"]

CHAT = "ragen_chat"
"""The name of the harness, by which verifiers imports this module."""
sys.modules[CHAT] = sys.modules[__name__]

KEY: ContextVar[str] = ContextVar("KEY")
"""The gateway's key of the episode that this coroutine plays."""
TRIES = 4
"""Times that a call is made which a server could not answer."""
HELD_OUT = 5
"""Every fifth task is for evaluation only, if there are no settings for it."""
MOST_TASKS = 1000
"""Tasks that are taken from a taskset without an end."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """A chat with the tools of the task, up to a reply that calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: vf.HarnessConfig) -> None:
        super().__init__(config)
        # One for all episodes, and without certificates, which take long to load.
        self._client = httpx.AsyncClient(timeout=None, verify=False)

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Hold the conversation from the task's prompt on."""
        system, prompt = self.resolve_prompt(data)
        asked = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        messages = [{"role": "system", "content": system}] if system else []
        messages += [message_to_wire(each) for each in asked]
        limits = {"timeout": self.config.tool_timeout}
        urls = {name: {"url": url, **limits} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}", "X-Api-Key": KEY.get()}
        async with AsyncExitStack() as stack:
            tools, names, servers = await connect_mcp({"mcpServers": urls}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                reply = await self._ask(f"{endpoint}/chat/completions", body, headers)
                messages.append(reply)
                if not reply.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in reply["tool_calls"]:
                    name = call["function"]["name"]
                    arguments = read_arguments(call["function"]["arguments"])
                    if name not in names:
                        content = f"error: there is no tool {name!r}"
                    elif arguments is None:
                        content = "error: the arguments are no JSON object"
                    else:
                        content = await call_mcp(servers, names, name, arguments)
                    result = {"role": "tool", "tool_call_id": call["id"], "content": content}
                    messages.append(result)

    async def _ask(
        self, url: str, body: Mapping[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        """The reply to a conversation; the library leaves it to its harness to ask again."""
        for number in range(TRIES):
            headers["X-Stainless-Retry-Count"] = str(number)
            answer = await self._client.post(url, json=body, headers=headers)
            if not answer.is_server_error:  # such as a connection that was closed meanwhile
                break
            await asyncio.sleep(0.2 * 2**number)
        if answer.is_error:
            raise RuntimeError(f"status {answer.status_code}: {answer.text}")
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message


def read_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call, ``None`` if they are no JSON object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


async def main(task: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """The ``reward`` of a task, or the ``failure`` of an environment that could not give one.

    Raises:
        RuntimeError: The gateway has refused a call, for a reason that it knows itself.
    """
    import_taskset(task["target"])
    async with AsyncExitStack() as stack:
        config = vf.resolve_env_config(task["env"])
        headers = {}
        if all(each.id == CHAT for each in config.agent_harnesses().values()):
            KEY.set(api_key)
            env, _ = await asyncio.shield(serve(config.model_dump_json()))
        else:
            # The key goes with the client, which the server keeps up to its end.
            headers = {"X-Api-Key": api_key}
            env = vf.load_environment(config)
            await stack.enter_async_context(env.serving())
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="", headers=headers)
        kind = env.taskset.task_type()
        data = kind.data_type().model_validate(task["task"])
        episode = await env.run_episode(
            kind(data, env.config.taskset.task), vf.ModelContext(model="policy", client=client)
        )
    errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
    for error in errors:
        if error.type == "ProviderError":
            raise RuntimeError(error.message)
    if not episode.ok:
        return {"failure": errors[-1].message if errors else "the episode is not complete"}
    if len(episode.traces) != 1:
        return {"failure": f"the task was played {len(episode.traces)} times in one episode"}
    return {"reward": episode.traces[0].reward}


@cache
def import_taskset(target: str) -> ModuleType:
    """The module of a taskset; the folder of a file is searched, also for servers of its tools."""
    if not target.endswith(".py"):
        found: ModuleType = vf.import_taskset(target)
        return found
    folder, file = os.path.split(os.path.abspath(target))
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.getenv("PYTHONPATH"))))
    return importlib.import_module(file.removesuffix(".py"))


@cache
def serve(config: str) -> asyncio.Task[tuple[vf.Env, AbstractAsyncContextManager[None]]]:
    """The environment of a configuration with its servers, which live as long as the process."""

    async def start() -> tuple[vf.Env, AbstractAsyncContextManager[None]]:
        env = vf.load_environment(vf.resolve_env_config(json.loads(config)))
        servers = env.serving()
        await servers.__aenter__()
        return env, servers

    return asyncio.ensure_future(start())


def tasks_of(
    target: str,
    taskset: Mapping[str, Any],
    test: Mapping[str, Any] | None,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """The tasks for training and for evaluation, the agent's limit of turns, and the packages."""
    module = import_taskset(target)
    if hasattr(module, "load_environment"):
        sys.exit(OLDER)
    name = module.__name__
    training, max_turns = read_tasks(target, {**config, "taskset": {**taskset, "id": name}})
    if test is None:
        evaluation = training[::HELD_OUT]
        training = [task for index, task in enumerate(training) if index % HELD_OUT]
    else:
        settings = {**config, "taskset": {**taskset, **test, "id": name}}
        evaluation, _ = read_tasks(target, settings)
    if not training or not evaluation:
        sys.exit("too few tasks: some are for evaluation only")
    packages = packages_distributions().get(name.partition(".")[0], [])
    source = ", ".join(f"{each} {version(each)}" for each in sorted({"verifiers", *packages}))
    told = {"training": training, "evaluation": evaluation}
    return {**told, "max_turns": max_turns, "source": source}


def read_tasks(target: str, settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int | None]:
    """The tasks of an environment, each with what is needed to play it, and its limit of turns."""
    resolved = vf.resolve_env_config(settings)
    agents = list(resolved.agent_harnesses())
    if len(agents) != 1:
        sys.exit(f"it has the agents {', '.join(agents)}; RAGEN plays environments of one")
    (role,), name = agents, settings["taskset"]["id"]
    agent, own = getattr(resolved, role), {"runtime": {"type": "subprocess"}}
    if agent.harness is None and vf.default_harness_id(name) != name:
        own["harness"] = {"id": CHAT}
    settings = {**settings, role: {**own, **settings.get(role, {})}}
    tasks = vf.load_environment(vf.resolve_env_config(settings)).taskset
    return [
        {"target": target, "env": settings, "task": task.data.model_dump(mode="json")}
        for task in islice(tasks, None if tasks.bounded else MOST_TASKS)
    ], agent.max_turns


if __name__ == "__main__":
    try:
        with redirect_stdout(sys.stderr):
            told = tasks_of(sys.argv[1], *json.loads(sys.argv[2]))
    except ValidationError as error:
        fault = error.errors()[0]
        sys.exit(f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].lower()}")
    sys.stdout.write(json.dumps(told))
