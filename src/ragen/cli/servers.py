"""The commands that serve until Ctrl-C: view shows runs, serve offers an environment."""

from __future__ import annotations

import os
import ssl
import sys
import webbrowser
from argparse import Namespace
from contextlib import closing, suppress
from pathlib import Path

from ragen.cli.command import Command, Overrides, Parser, complain, program, whole
from ragen.core.errors import RagenError

PORT = 7246
"""RAGN on a telephone keypad."""
OPENENV_PORT = 8000


def _listening_options(parser: Parser, port: int, token: str) -> None:
    take = parser.take
    take("--port", "N", "0 takes any free port", whole(0, 65535), port)
    take("--host", "ADDRESS", f"address to serve on; {token}", default="127.0.0.1")
    take("--tls-cert", "FILE", "serve https with this certificate (PEM)", Path)
    take("--tls-key", "FILE", "the certificate's key, unless the certificate's file has it", Path)


def _tls(options: Namespace) -> ssl.SSLContext | None:
    from ragen.web.server import tls_of

    if options.tls_key is not None and options.tls_cert is None:
        raise RagenError("--tls-key belongs to a certificate: name it with --tls-cert")
    return None if options.tls_cert is None else tls_of(options.tls_cert, options.tls_key)


def _view_options(parser: Parser) -> None:
    take = parser.take
    take("folder", "FOLDER", "folder of the runs, or one run", Path, Path("runs"), nargs="?")
    _listening_options(parser, PORT, "for other machines the printed URL has a token")
    parser.flag("--no-browser", "print the URL and open no browser")
    take("--export", "FILE", "write the run in FOLDER to one HTML file that needs no server", Path)
    take("--episode", "ID", "export only this episode", whole(0))
    take("--group", "ID", "export only the group of this episode", whole(0))


def _view(options: Namespace, _: Overrides) -> int:
    if options.export is not None:
        from ragen.viewer.share import share

        file = share(options.folder, options.export, episode=options.episode, group=options.group)
        print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB); it opens in any browser")
        return 0
    if options.episode is not None or options.group is not None:
        raise RagenError("--episode and --group choose what is exported: name a file with --export")
    from ragen.viewer.server import serve

    tls = _tls(options)

    def say(address: str) -> None:
        print(f"{options.folder} is served at {address} (Ctrl-C stops it)", flush=True)
        if not options.no_browser and _has_browser():
            webbrowser.open(address)

    with suppress(KeyboardInterrupt):  # the usual way to stop
        serve(options.folder, options.host, options.port, say, tls)
    return 0


def _serve_options(parser: Parser) -> None:
    parser.take("env", "ENV", "an environment (ragen envs), file.py:Class or LIBRARY:NAME")
    token = "other machines need the token: OPENENV_TOKEN, or a new one, which is printed"
    _listening_options(parser, OPENENV_PORT, token)
    parser.take("--sessions", "N", "sessions at the same time", whole(1, 10_000), 256)
    parser.epilog = (
        "Keys of the section env may be set, such as --env.params.NAME. With --env.isolate true,\n"
        "an environment that hangs holds up no other session."
    )


def _serve(options: Namespace, overrides: Overrides) -> int:
    from ragen.rollout.setup import make_setup
    from ragen.serving.openenv import serve
    from ragen.settings.environment import with_budgets

    others = [key for key in overrides if not key.startswith("env.") or key == "env.name"]
    if others:
        raise RagenError(f"--{others[0]} has no effect on a server; leave it out")
    tls = _tls(options)
    config = with_budgets({**overrides, "env.name": options.env})

    def say(url: str, token: str | None) -> None:
        print(f"{options.env} is served at {url} (Ctrl-C stops it)")
        secret = "" if token is None else f"OPENENV_TOKEN={token} "
        print(f"play it:  {secret}{program()} play openenv:{url.rstrip('/')}", flush=True)

    with closing(make_setup(config, None)) as setup, suppress(KeyboardInterrupt):
        serve(setup, options.host, options.port, options.sessions, say, complain, tls)
    return 0


def _has_browser() -> bool:
    """True if this session has a graphical browser."""
    remote = os.environ.get("CI") or os.environ.get("SSH_CONNECTION")
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return not remote and (bool(display) or not sys.platform.startswith("linux"))


COMMANDS: dict[str, Command] = {
    "view": Command("read and compare runs in a browser, live", _view_options, _view),
    "serve": Command(
        "offer an environment to others, in OpenEnv's protocol", _serve_options, _serve, True
    ),
}
