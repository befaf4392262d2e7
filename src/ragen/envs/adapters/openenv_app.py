"""Serve an application of OpenEnv on this machine, until the process that started this one ends.

    python -m ragen.envs.adapters.openenv_app package.module:app

The first line of standard output is the port.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn


def main(target: str) -> None:
    """Serve the application of ``package.module:app`` or ``path/to/file.py:app``."""
    port = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what code in C or another process prints is for the log, which is read
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    path, _, name = target.rpartition(":")
    if path.endswith(".py"):
        sys.path.insert(0, str(Path(path).resolve().parent))
        target = f"{Path(path).stem}:{name}"
    config = uvicorn.Config(
        target, log_level="warning", ws_ping_timeout=None, timeout_graceful_shutdown=1
    )
    config.load()  # if there is no such application, this prints the reason and ends the process
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], file=port, flush=True)
        uvicorn.Server(config).run(sockets=[listening])


def _end_with_standard_input() -> None:
    """End this process when the other one closes the pipe, or is killed."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
