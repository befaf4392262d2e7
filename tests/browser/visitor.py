"""A visitor of the viewer for the tests, and the run that the viewer shows."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

WIDE, PHONE = (1280, 720), (390, 844)

LAKE: dict[str, Any] = {
    "threads": 1,
    "steps": 4,
    "rollout.num_groups": 8,
    "rollout.group_size": 4,
    "update.minibatch_episodes": 16,
    "eval.episodes": 8,
    "eval.every": 2,
    "record.tokens_every": 1,
    "diagnose.information_every": 1,
    "diagnose.gradients_every": 2,
}
"""The settings of the trained run."""


def ragen(*arguments: object) -> subprocess.Popen[str]:
    """Start a `ragen` command in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "ragen", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def succeed(process: subprocess.Popen[str]) -> str:
    """Wait for a process to succeed and return its output."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


class Visitor:
    """A user at a page of the viewer.

    `complaints` lists what must never happen: a console error or warning (such as a violation of
    the content security policy), an exception, a dialog, a request to any other address.
    """

    def __init__(self, context: Any, address: str) -> None:
        self.address = address
        self.complaints: list[str] = []
        self.context = context
        self.page = context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("dialog", self._on_dialog)
        self.page.on("request", self._on_request)

    def visit(self, route: str = "#/") -> Any:
        """Load a page anew, as a link in a mail does, and wait until it is ready."""
        self.page.goto("about:blank")
        self.page.goto(self.address + "/" + route)
        self.wait()
        return self.page

    def wait(self) -> None:
        """Wait until the page is rendered."""
        self.page.wait_for_selector("body[data-ready='1']")

    def api(self, path: str) -> Any:
        """The answer of the viewer's API."""
        answer = self.context.request.get(self.address + path)
        assert answer.ok, f"{answer.status} {answer.text()}"
        return answer.json()

    def close(self) -> None:
        """Close the page; complaints fail the test."""
        self.page.close()
        assert not self.complaints, "\n".join(self.complaints)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text}")

    def _on_dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:", "about:")):
            self.complaints.append(f"request: {request.url}")
