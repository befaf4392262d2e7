"""News of a run for the pages that show it: a step, an alarm, the end, a restart.

A run is watched through the time stamps of its files, once for all pages, and read only after a
change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from ragen.storage.database import is_claimed
from ragen.viewer.reading import Answer, RunReader, Runs, Unreadable, reading, signature
from ragen.viewer.run_page import events

Event = tuple[str, Answer]
"""The name and the data of a server-sent event."""

LOOK_S = 0.5
"""Seconds between two checks; a page then shows a step well within two seconds."""

HEARTBEAT_S = 10.0
"""Seconds without news after which a comment is sent, which reveals closed connections."""

ALARM_KINDS = ("alarm", "guard")
"""Kinds of events that are sent as ``alarm``."""


class _Progress(NamedTuple):
    """The last written step, and the ids of the last evaluation and the last event."""

    attempt: int = 0
    step: int = 0
    evaluation: int = 0
    event: int = 0


class RunWatcher:
    """News of one run: steps, evaluations and alarms, and the end or start of its process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = is_claimed(folder)
        self._stamps = signature(folder)
        self._progress = _Progress()
        with contextlib.suppress(Unreadable), reading(folder) as run:
            self._progress = _progress(run)

    def news(self) -> list[Event]:
        """What happened since the last call."""
        written = is_claimed(self._folder)  # first, so that what was written before the end is seen
        stamps, found = signature(self._folder), list[Event]()
        if stamps != self._stamps:
            self._stamps = stamps
            found = self._since()
        before, self._written = self._written, written
        if written != before:  # ``begin`` comes before other news, ``end`` after them
            found = [("begin", {}), *found] if written else [*found, ("end", {})]
        return found

    def _since(self) -> list[Event]:
        before, found = self._progress, list[Event]()
        with contextlib.suppress(Unreadable), reading(self._folder) as run:
            self._progress = _progress(run)
            told = events(run, before.event)
            found = [("alarm", event) for event in told if event["kind"] in ALARM_KINDS]
        now = self._progress
        # An evaluation ends after its step was written: it is news of the same step.
        if (now.attempt, now.step, now.evaluation) != before[:3]:
            changed = max((stamp[2] for stamp in self._stamps[:2] if stamp), default=0)
            said = {"attempt": now.attempt, "step": now.step, "time": changed / 1e9}
            found.append(("step", said))
        return found


def _progress(run: RunReader) -> _Progress:
    query = "SELECT attempt, step FROM metrics ORDER BY attempt DESC, step DESC LIMIT 1"
    last = run.rows(query)
    attempt, step = last[0] if last else (0, 0)
    evaluation, event = (
        run.value(f"SELECT max(id) FROM {table}") or 0 for table in ("evaluations", "events")
    )
    return _Progress(attempt, step, evaluation, event)


class FolderWatcher:
    """News of all runs below a folder: one was added, changed or removed."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._before = self._all()

    def news(self) -> list[Event]:
        """Whether anything changed since the last call."""
        now = self._all()
        changed, self._before = now != self._before, now
        return [("runs", {})] if changed else []

    def _all(self) -> dict[str, object]:
        folders = {run: self._runs.root / run for run in self._runs.ids()}
        return {run: (signature(each), is_claimed(each)) for run, each in folders.items()}


class Live:
    """Streams of news, with one watcher for all pages that show the same run."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._listeners: dict[Path | None, set[asyncio.Queue[Event | None]]] = {}
        self._tasks: dict[Path | None, asyncio.Task[None]] = {}
        self.ending = False
        """Set when the server ends; streams stop at the next check."""

    async def stream(self, folder: Path | None) -> AsyncIterator[bytes]:
        """News of a run, or of all runs, until the server ends or the page closes."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._listeners.setdefault(folder, set()).add(queue)
        if folder not in self._tasks:
            self._tasks[folder] = asyncio.create_task(self._watch(folder))
        try:
            yield b": here\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if event is None:
                    return
                name, said = event
                yield f"event: {name}\ndata: {json.dumps(said)}\n\n".encode()
        finally:
            self._listeners[folder].discard(queue)

    async def _watch(self, folder: Path | None) -> None:
        """Check for news while there are listeners."""
        try:
            watched = await run_in_threadpool(
                lambda: FolderWatcher(self._runs) if folder is None else RunWatcher(folder)
            )
            while self._listeners[folder] and not self.ending:
                found = await run_in_threadpool(watched.news)
                for queue in self._listeners[folder]:
                    for event in found:
                        queue.put_nowait(event)
                await asyncio.sleep(LOOK_S)
        finally:
            del self._tasks[folder]
            for queue in self._listeners[folder]:
                queue.put_nowait(None)
