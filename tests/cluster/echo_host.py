"""What runs in the children of tests: calls that answer, wait, fail or end the process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from typing_extensions import override

from ragen.cluster.child import Host
from ragen.core.errors import MismatchError


class ChildHost(Host):
    """Answers calls; closed, it removes the file that `keep` made."""

    def __init__(self) -> None:
        self._given_up = 0
        self._kept = ""

    async def echo(self, value: Any) -> Any:
        return value

    async def count(self, most: int) -> str:
        for number in range(most):
            self.tell(number)
        return "counted"

    async def wait(self) -> None:
        self.tell("begun")
        try:
            await asyncio.sleep(60)
        finally:
            self._given_up += 1

    async def given_up(self) -> int:
        return self._given_up

    async def refuse(self) -> None:
        raise MismatchError(7, -1.0, -2.0, 0.5)

    async def break_down(self) -> None:
        raise KeyError("a bug")

    async def die(self, how: str) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(5)

    async def read_and_print(self) -> str:
        os.write(1, b"this would break the messages\n")
        return input() if os.read(0, 1) else "nothing to read"

    async def keep(self, path: str) -> int:
        open(path, "w").close()
        self._kept = path
        return os.getpid()

    @override
    def close(self) -> None:
        if self._kept:
            os.unlink(self._kept)
