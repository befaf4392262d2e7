"""A server of an environment, in a thread of this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ragen.envs.registry import env_factory
from ragen.rollout.setup import Setup
from ragen.serving.connections import Server, listen
from ragen.serving.openenv import EnvServer
from ragen.serving.sessions import describe

TOKEN = "a-token-of-the-tests"


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def in_thread(
    name: str, most: int = 8, token: str | None = None, **params: Any
) -> Iterator[tuple[str, EnvServer]]:
    """The URL of a server and the server, whose environments have no time limit."""
    build = env_factory(name, **params)
    env = build()
    setup = Setup(name, build, env.max_turns, env.actions_per_turn, env.max_actions)
    with listen("127.0.0.1", 0) as listening:
        served = EnvServer(setup, describe(setup), most, listening, token, lambda line: None)
        server = Server(served.app, web_sockets=True)
        thread = threading.Thread(target=server.serve_on, args=(listening,))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", served
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def printed_by(*arguments: str, **environ: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command that `ragen serve` prints, and its process."""
    command = [sys.executable, "-m", "ragen", "serve", *arguments, "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | environ, **pipes) as process:  # type: ignore[call-overload]
        try:
            first, second = process.stdout.readline(), process.stdout.readline()
            assert " is served at http" in first, first + process.stderr.read()
            yield second.removeprefix("play it: ").strip(), process
        finally:
            process.kill()


@contextmanager
def as_process(*arguments: str, **environ: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL that `ragen serve` prints, and its process."""
    with printed_by(*arguments, **environ) as (command, process):
        yield command.split(" play openenv:")[1], process


class Talk:
    """A client that sends and shows messages as they are."""

    def __init__(self, url: str, **headers: str) -> None:
        from websockets.sync.client import connect

        address = f"ws{url.removeprefix('http')}/ws"
        self.socket = connect(address, additional_headers=headers).__enter__()

    def ask(self, kind: str, **data: Any) -> dict[str, Any]:
        """The data of an answer."""
        self.socket.send(json.dumps({"type": kind, "data": data}))
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The data of what the server sends."""
        answer = json.loads(self.socket.recv(timeout=20))
        data: dict[str, Any] = answer["data"]
        assert (answer["type"] == "error") == ("code" in data)
        return data

    def is_over(self) -> bool:
        """Whether the server ends the session."""
        from websockets.exceptions import ConnectionClosed

        try:
            self.socket.recv(timeout=5)
        except ConnectionClosed:
            return True
        return False
