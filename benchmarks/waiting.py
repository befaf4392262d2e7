"""How long a rollout takes in which every step of the environment waits, in each form of waiting.

    python benchmarks/waiting.py [FORM …] [--episodes 128] [--delay 0.1] [--tail]

Each episode has three steps of `--delay` seconds. The ideal is the longest chain of waits and the
generation, which is the time of the same rollout without waits, in the run's loop. A reply is
sampled by the embedded model of Bandit and then replaced by the one that plays on. The first
rollout starts workers, sessions and servers; the table has its seconds and the median of three
more, over the ideal. With `--tail` one step in fifty takes 3 s. The forms agent and verifiers wait
after each of their calls. The forms openenv, verifiers and mcp need the extras of these names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragen.envs.contract import Env, Info, Options, State
from ragen.envs.worlds.frozen_lake import FrozenLake

TURNS = 3
REPEATS = 3
GROUP = 8
HERE = Path(__file__)
FORMS = ("asynchronous", "blocking", "isolated", "agent", "openenv", "verifiers", "mcp")
Step = tuple[str, float, bool, bool, Info]


class Plain(Env):
    """Waits `TURNS` times, in the run's loop unless `env.isolate` is set."""

    goal, rules, actions = "Wait", "Wait.", ("on",)
    max_turns = max_actions = TURNS
    actions_per_turn = 1

    def __init__(self, delay: float = 0.0, tail: bool = False) -> None:
        self._delay, self._tail = delay, tail
        self._number = self._seed = 0

    def _wait(self) -> float:
        late = self._tail and (self._seed * TURNS + self._number) % 50 == 0
        return 3.0 if late else self._delay

    def _next(self) -> Step:
        self._number += 1
        over = self._number == TURNS
        return f"{self._number}", 1.0, over, False, {"success": over, "effective": True}

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        self._number, self._seed = 0, (options or {}).get("noise_seed", 0)
        return "0", {}

    def step(self, action: str) -> Any:
        time.sleep(self._wait())
        return self._next()

    def get_state(self) -> State:
        return {"number": self._number}

    def set_state(self, state: State) -> None:
        self._number = state["number"]

    def state_key(self) -> str:
        return str(self._number)


class Blocking(Plain):
    waits = "workers"


class Asynchronous(Plain):
    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._wait())
        return self._next()


class Lake(FrozenLake):
    """For whole runs: a step waits 0.1 s, and one in fifty 3 s."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        self._number = 7 * (options or {}).get("noise_seed", 0)
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Step:
        self._number += 1
        await asyncio.sleep(0.1 if self._number % 50 else 3.0)
        return super().step(action)


async def agent(task: Any, base_url: str, api_key: str) -> float:
    def ask(messages: list[Any]) -> Any:
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]

    messages = [{"role": "user", "content": "Bandit"}]
    for _ in range(TURNS):
        messages += [await asyncio.to_thread(ask, messages), {"role": "user", "content": "on"}]
        await asyncio.sleep(task["delay"])
    return 1.0


def __getattr__(name: str) -> type[Env]:
    """`Tools`, made when it is asked for: each worker imports this file."""
    if name != "Tools":
        raise AttributeError(name)
    from ragen.envs.adapters.mcp import McpEnv, McpServer

    class Tools(McpEnv):
        """Its tool, of an MCP server, waits."""

        goal = rules = "Wait."
        max_turns = max_actions = TURNS
        actions_per_turn = 1

        def __init__(self, url: str) -> None:
            self.servers = (McpServer(url),)

        def begin(self, level_seed: int, noise_seed: int) -> str:
            return "0"

        def answer(self, text: str) -> Step:
            return "over", 1.0, True, False, {"success": True, "effective": True}

    return Tools


def mcp_server(port: int, delay: float) -> None:
    from mcp.server.fastmcp import FastMCP

    server = FastMCP("waiting", port=port, log_level="ERROR")

    @server.tool()
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(delay)
        return "waited"

    server.run("streamable-http")


@contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    """A server's process, from when it answers."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
            yield
        finally:
            server.terminate()


def environment(form: str, delay: float, tail: bool, stack: ExitStack) -> dict[str, Any]:
    """The settings of a form's environment; `stack` ends the server that it may need."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    about = {"env.params.delay": delay, "env.params.tail": tail}
    if form == "openenv":
        command = ["ragen.cli.main", "serve", f"{HERE}:Asynchronous", "--port", str(port)]
        values = [part for key, each in about.items() for part in (f"--{key}", str(each).lower())]
        stack.enter_context(serving([sys.executable, "-m", *command, *values], port))
        return {"env.name": f"openenv:http://127.0.0.1:{port}"}
    if form == "mcp":
        command = [str(HERE), "--serve", str(port), "--delay", str(delay)]
        stack.enter_context(serving([sys.executable, *command], port))
        return {"env.name": f"{HERE}:Tools", "env.params.url": f"http://127.0.0.1:{port}/mcp"}
    if form == "agent":
        tasks = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tasks.jsonl"
        tasks.write_text("".join(f'{{"delay": {delay}, "n": {n}}}\n' for n in range(20)))
        return {"env.name": f"agent:{HERE}:agent", "env.params.tasks": str(tasks)}
    if form == "verifiers":
        taskset = HERE.parent / "tasksets" / "waiting_taskset.py"
        return {"env.name": f"verifiers:{taskset}", "env.params.delay": delay}
    kind = {"asynchronous": "Asynchronous", "blocking": "Blocking"}.get(form, "Plain")
    return {"env.name": f"{HERE}:{kind}", "env.isolate": form == "isolated"} | about


def measure(form: str, delay: float, tail: bool, episodes: int) -> tuple[float, list[float]]:
    """Seconds of the first rollout, and of `REPEATS` more."""
    from ragen.config.reading import merge
    from ragen.core.types import Completion, Prompt
    from ragen.engines.factory import load_model
    from ragen.envs.tools import write_call
    from ragen.models.names import resolve_model
    from ragen.rollout.groups import run_groups
    from ragen.rollout.setup import make_chat, make_setup
    from ragen.sampling.local_sampler import Sampler

    bandit = merge("bandit", {})
    model, tokenizer = load_model(bandit.model, resolve_model(bandit.model.path, "bandit"), "")
    chat = make_chat(bandit, tokenizer)
    sampler = Sampler(model, chat, slots=64)

    class Plays:
        """Samples a reply to a prompt of Bandit's size, and returns the one that plays on."""

        async def complete(self, prompt: Prompt) -> Completion:
            ids = tuple(range(20, 60)) if prompt.token_ids is None else prompt.token_ids
            sampled = await sampler.complete(replace(prompt, token_ids=ids, max_tokens=24))
            return replace(sampled, token_ids=None, logprobs=None, text=reply, finish_reason="stop")

    async def rollouts(setup: Any) -> list[float]:
        seconds = []
        for number in range(1 + REPEATS):
            began = time.perf_counter()
            policy = Plays() if setup.agent is None else sampler
            groups = await run_groups(
                policy, setup, range(episodes // GROUP), GROUP, (number, "train", 0), episodes
            )
            seconds.append(time.perf_counter() - began)
            errors = {each.error for group in groups for each in group.episodes if each.error}
            assert not errors, next(iter(errors))
        return seconds

    with ExitStack() as stack:
        values = environment(form, delay, tail, stack) | {"env.max_turns": TURNS}
        through_gateway = form in ("agent", "verifiers")
        values |= {"rollout.max_tokens": 24} if through_gateway else {}
        made = make_setup(merge(None, values), chat if through_gateway else None)
        setup = stack.enter_context(closing(made))
        action = write_call("wait") if setup.tools else "on"
        reply = f"t</think>{setup.write([action])}"
        first, *others = asyncio.run(rollouts(setup))
    return first, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("forms", nargs="*", default=FORMS, metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--delay", type=float, default=0.1)
    parser.add_argument("--tail", action="store_true", help="one step in fifty takes 3 s")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        mcp_server(args.serve, args.delay)
        return
    generation = statistics.median(measure("plain", 0.0, False, args.episodes)[1])
    ideal = generation + (3.0 if args.tail else TURNS * args.delay)
    print(f"ideal {ideal:.2f} s, of which generation {generation:.2f} s\n")
    print("| form | first rollout, s | a later one, s | over the ideal |\n|---|--:|--:|--:|")
    for form in args.forms:
        first, others = measure(form, args.delay, args.tail, args.episodes)
        seconds = statistics.median(others)
        print(f"| {form} | {first:.2f} | {seconds:.2f} | {seconds / ideal:.2f} |", flush=True)


if __name__ == "__main__":
    main()
