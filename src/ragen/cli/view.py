"""The command view."""

from __future__ import annotations

import os
import sys
import webbrowser
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from ragen.cli.command import Command, Overrides, Parser
from ragen.core.errors import RagenError

PORT = 7246
"""RAGN on a telephone keypad."""


def _view_options(parser: Parser) -> None:
    add = parser.add_argument
    folder = "folder of the runs, or one run [runs]"
    add("folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help=folder)
    add("--port", type=int, default=PORT, metavar="N", help=f"0 takes any free port [{PORT}]")
    host = "address to serve on; for other machines the printed URL has a token [127.0.0.1]"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    add("--no-browser", action="store_true", help="print the URL and open no browser")
    export = "write the run in FOLDER to one HTML file that needs no server"
    add("--export", type=Path, metavar="FILE", help=export)
    add("--episode", type=int, metavar="ID", help="export only this episode")
    add("--group", type=int, metavar="ID", help="export only the group of this episode")


def _view(options: Namespace, _: Overrides) -> int:
    if options.export is not None:
        return _export(options)
    if options.episode is not None or options.group is not None:
        raise RagenError("--episode and --group choose what is exported: name a file with --export")
    if not 0 <= options.port <= 65535:
        raise RagenError(f"--port {options.port}: expected a whole number from 0 to 65535")
    from ragen.viewer.server import serve

    def say(address: str) -> None:
        print(f"{options.folder} is served at {address} (Ctrl-C stops it)", flush=True)
        if not options.no_browser and _has_browser():
            webbrowser.open(address)

    with suppress(KeyboardInterrupt):  # the usual way to stop
        serve(options.folder, options.host, options.port, say)
    return 0


def _export(options: Namespace) -> int:
    from ragen.viewer.share import share

    file = share(options.folder, options.export, episode=options.episode, group=options.group)
    print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB); it opens in any browser")
    return 0


def _has_browser() -> bool:
    """Whether this session has a graphical browser."""
    if os.environ.get("CI") or os.environ.get("SSH_CONNECTION"):
        return False
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True


COMMANDS: dict[str, Command] = {
    "view": Command("read and compare runs in a browser, live", _view_options, _view),
}
