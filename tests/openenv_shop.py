"""An application of OpenEnv's own library whose tools are those of an MCP server: a small shop."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Action, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Shop(MCPEnvironment):
    """Pay what the fruit costs."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self.kilos, self.paid = 1, -1

        @server.tool
        def price(fruit: str) -> int:
            """The price of a kilo of a fruit."""
            return {"apples": 3, "plums": 5}[fruit]

        @server.tool
        def pay(euros: int) -> str:
            """Pay, which ends the episode."""
            self.paid = euros
            return f"You pay {euros}."

        super().__init__(server)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        self.kilos, self.paid = 1 + (seed or 0) % 3, -1
        return Observation(metadata={"goal": f"Pay for {self.kilos} kg of plums."})

    async def step_async(self, action: Action, **_: Any) -> Observation:
        found = await super().step_async(action)
        if isinstance(action, CallToolAction):
            found.done, found.reward = self.paid >= 0, float(self.paid == 5 * self.kilos)
        return found

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=16)
