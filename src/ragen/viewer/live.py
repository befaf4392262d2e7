"""News of a run for the pages that show it: a step, an alarm, the end, a restart.

A run is watched through the time stamps of its files, and read only after a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from ragen.core.errors import RagenError
from ragen.storage.database import is_claimed
from ragen.viewer.reading import Answer, RunReader, Runs, reading, signature
from ragen.viewer.run_page import events

Event = tuple[str, Answer]

LOOK_S = 0.5
"""Seconds between two checks; a page then shows a step well within two seconds."""

HEARTBEAT_S = 10.0
"""Seconds without news after which a comment is sent, which reveals closed connections."""

ALARM_KINDS = ("alarm", "guard", "engine")
"""Kinds of events that are sent as ``alarm``."""


class _Progress(NamedTuple):
    """The last written step, and the ids of the last evaluation and the last event."""

    attempt: int = 0
    step: int = 0
    evaluation: int = 0
    event: int = 0


def run_news(folder: Path) -> Iterator[list[Event]]:
    """News of one run at each look: steps, evaluations, alarms, the start and end of its process.

    Each look gives what happened since the last one; the first look gives nothing.
    """
    written, stamps, progress = is_claimed(folder), signature(folder), _Progress()
    with contextlib.suppress(RagenError), reading(folder) as run:
        progress = _progress(run)
    found = list[Event]()
    while True:
        yield found
        found = []
        before, written = written, is_claimed(folder)  # first: what came before the end is seen
        if (now := signature(folder)) != stamps:
            stamps = now
            changed = max((stamp[2] for stamp in stamps[:2] if stamp), default=0) / 1e9
            with contextlib.suppress(RagenError), reading(folder) as run:
                found, progress = _since(progress, run, changed)
        if written != before:  # ``begin`` comes before other news, ``end`` after them
            found = [("begin", {}), *found] if written else [*found, ("end", {})]


def _since(before: _Progress, run: RunReader, changed: float) -> tuple[list[Event], _Progress]:
    """News since an earlier progress, and the present one."""
    now = _progress(run)
    later = events(run, before.event)
    found: list[Event] = [("alarm", event) for event in later if event["kind"] in ALARM_KINDS]
    # An evaluation ends after its step was written: it is news of the same step.
    if now[:3] != before[:3]:
        found.append(("step", {"attempt": now.attempt, "step": now.step, "time": changed}))
    return found, now


def _progress(run: RunReader) -> _Progress:
    last = run.rows("SELECT attempt, step FROM metrics ORDER BY attempt DESC, step DESC LIMIT 1")
    attempt, step = last[0] if last else (0, 0)
    evaluation, event = (
        run.value(f"SELECT max(id) FROM {table}") or 0 for table in ("evaluations", "events")
    )
    return _Progress(attempt, step, evaluation, event)


def folder_news(runs: Runs) -> Iterator[list[Event]]:
    """An event each time that a run was added, changed or removed since the last look."""
    found, before = list[Event](), _stamps(runs)
    while True:
        yield found
        now = _stamps(runs)
        found, before = [("runs", {})] if now != before else [], now


def _stamps(runs: Runs) -> dict[str, object]:
    folders = {run: runs.root / run for run in runs.ids()}
    return {run: (signature(each), is_claimed(each)) for run, each in folders.items()}


async def stream(looks: Iterator[list[Event]], ended: threading.Event) -> AsyncIterator[bytes]:
    """The news of each look as server-sent events, until the server ends or the page closes."""
    yield b": here\n\n"
    quiet = 0.0
    while not ended.is_set():
        found = await run_in_threadpool(next, looks)
        for name, said in found:
            yield f"event: {name}\ndata: {json.dumps(said)}\n\n".encode()
        quiet = 0.0 if found else quiet + LOOK_S
        if quiet >= HEARTBEAT_S:
            yield b": still here\n\n"
            quiet = 0.0
        await asyncio.sleep(LOOK_S)
