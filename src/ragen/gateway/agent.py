"""The agent of a run: its processes or programs outside, and the server that they call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragen.envs.adapters.agent import OUTSIDE
from ragen.gateway.agents import Agents, Outcome
from ragen.gateway.outside import Outside
from ragen.gateway.server import Gateway
from ragen.gateway.session import Session


class Agent:
    """An agent that works on many tasks at once, each with a key of its own.

    The arguments are those of `Agents`, and where programs fetch their tasks if the target is
    `OUTSIDE`. Nothing is started before the first task, or before `invite`.
    """

    def __init__(
        self, target: str, python: str, processes: int, address: str, sees_secrets: bool
    ) -> None:
        self._address = address
        self._processes = (
            None if target == OUTSIDE else Agents(target, python, processes, sees_secrets)
        )
        self._gateway: Gateway | None = None

    @property
    def is_outside(self) -> bool:
        """True if programs from outside fetch the tasks."""
        return self._processes is None

    def invite(self) -> str:
        """Begin to listen for programs outside; returns what the user has to tell them, if so.

        Raises:
            RagenError: `Outside` cannot be made.
        """
        gateway = self._server() if self.is_outside else None
        return gateway.invitation if isinstance(gateway, Outside) else ""

    async def work(self, task: Mapping[str, Any], session: Session, timeout_s: float) -> Outcome:
        """Let the agent work on a task; its calls are answered in `session`, up to its end.

        Raises:
            RagenError: The agent cannot be loaded.
        """
        gateway = self._server()
        with gateway.session(session) as key:
            if isinstance(gateway, Outside):
                return await gateway.offer(task, key, timeout_s)
            assert self._processes is not None
            return await self._processes.run(task, gateway.base_url, key, timeout_s)

    def close(self) -> None:
        """End the agent's processes and the server."""
        if self._processes is not None:
            self._processes.close()
        if self._gateway is not None:
            self._gateway.close()

    def _server(self) -> Gateway:
        if self._gateway is None:
            self._gateway = Outside(self._address) if self.is_outside else Gateway()
        return self._gateway
