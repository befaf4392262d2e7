"""An MCP server by the official library, over stdio or streamable HTTP, for the tests.

python mcp_tools.py [PORT]
"""

import itertools
import os
import sys
import time

from mcp.server.fastmcp import FastMCP
from mcp.server.fastmcp.exceptions import ToolError

server = FastMCP("shop", port=int(sys.argv[1]) if sys.argv[1:] else 8000, log_level="ERROR")
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
    server.run("streamable-http" if sys.argv[1:] else "stdio")
