"""The agent of a run: its processes, and the server that they call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ragen.gateway.agents import Agents, Outcome
from ragen.gateway.server import Gateway
from ragen.gateway.session import Session


class Agent:
    """An agent that works on many tasks at once, each with a key of its own.

    The arguments are those of `Agents`. Nothing is started before the first task.
    """

    def __init__(self, target: str, python: str = "", processes: int = 0) -> None:
        self._processes = Agents(target, python, processes)
        self._gateway: Gateway | None = None

    async def work(self, task: Mapping[str, Any], session: Session, timeout_s: float) -> Outcome:
        """Let the agent work on a task; its calls are answered in `session`, up to its end.

        An agent that goes on although its calls are refused is ended.

        Raises:
            RagenError: The agent cannot be loaded.
        """
        if self._gateway is None:
            self._gateway = Gateway()
        given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def give_up(why: str) -> None:
            if not given_up.done():
                given_up.set_result(why)

        with self._gateway.session(session, give_up) as key:
            url = self._gateway.base_url
            return await self._processes.run(task, url, key, timeout_s, given_up)

    def close(self) -> None:
        """End the agent's processes and the server."""
        self._processes.close()
        if self._gateway is not None:
            self._gateway.close()
