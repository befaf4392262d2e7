"""An MCP server by the official library, over stdio or streamable HTTP, for the tests.

python mcp_tools.py [PORT]
"""

import itertools
import os
import sys
import time

import uvicorn

try:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp.exceptions import ToolError

server = MCPServer("shop", log_level="ERROR")
asked = itertools.count(1)


@server.tool()
def price(fruit: str) -> int:
    """The price of one kilo of a fruit in cents."""
    prices = {"apples": 250, "pears": 310}
    if fruit not in prices:
        raise ToolError(f"there are {' and '.join(prices)}")
    return prices[fruit]


@server.tool()
def count() -> int:
    """How often this server was asked."""
    return next(asked)


@server.tool()
def process() -> int:
    """The server's process."""
    return os.getpid()


@server.tool()
def sleep(seconds: float) -> str:
    """Take a while."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
    else:
        server.run("stdio")
