"""The base of an engine's processes: they report where their threads stand, and their address."""

from __future__ import annotations

import socket
import sys
import threading
import traceback


class Host:
    """A process of an engine."""

    def stacks(self) -> str:
        """The Python stacks of all other threads; they change while the process works."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )


def own_address() -> str:
    """This machine's address in its network, or the loopback address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host
