"""Branches of recorded episodes: processes of ``ragen branch``, one at a time.

The viewer itself loads no model. A finished request is read from ``branches.sqlite``. A failed one
is kept here with the last line that its process wrote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ragen.core.errors import RagenError
from ragen.core.statistics import wilson
from ragen.settings.saved import run_config
from ragen.storage.branches import FILE, MOST, Request, has_branches
from ragen.storage.checkpoint import folders, step_of
from ragen.viewer.episode_page import detail
from ragen.viewer.reading import Answer, NotFound, Unanswered, reading

LONGEST_S = 3600.0
"""Time limit of a process in seconds."""

PATIENCE_S = 5.0
"""Seconds that a process may take to end before it is killed."""


class Wanted(BaseModel, strict=True):
    """The body of a request for branches.

    By default the newest checkpoint plays, at the run's temperature. The process refuses a turn or
    a checkpoint that does not exist.
    """

    episode: int = Field(ge=1, lt=2**31)
    turn: int = Field(ge=0)
    n: int = Field(ge=1, le=MOST)
    checkpoint: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=100)


@dataclass(slots=True, eq=False)
class Job:
    """A request that is played or failed; a finished one is in the database."""

    folder: Path
    request: Request
    process: subprocess.Popen[bytes]
    time: float = field(default_factory=time.time)
    problem: str | None = None

    @property
    def is_playing(self) -> bool:
        """True until the branches are stored, after which the process ends, or it failed."""
        stored = _finished(self.folder, self.request.episode)
        return self.problem is None and all(each["id"] != self.request.id for each in stored)

    def answer(self) -> Answer:
        """The job as the API returns it."""
        state = "running" if self.problem is None else "failed"
        about = {"id": self.request.id, **asdict(self.request), "time": self.time, "state": state}
        return about | {"problem": self.problem, "episodes": []}


def command_of(folder: Path, request: Request) -> list[str]:
    """The command line: numbers, and a folder that begins with a slash or a drive."""
    names = ("turn", "n", "checkpoint", "temperature", "seed")
    options = (f"--{name}={getattr(request, name)!r}" for name in names)
    what = "branch", str(folder), str(request.episode)
    return [sys.executable, "-m", "ragen", *what, *options, "--json"]


class Branching:
    """Answers about branches, and the last request, which is played or failed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._job: Job | None = None

    def branches(self, folder: Path, episode: int) -> Answer:
        """The branches of an episode, and a ``reason`` (or ``None``) why no more can be played."""
        job = self._job  # first: one that finishes in between is then in both, not in neither
        jobs = _finished(folder, episode)
        place = folder.resolve(), episode
        if job is not None and (job.folder, job.request.episode) == place:
            is_stored = any(each["id"] == job.request.id for each in jobs)
            jobs += [] if is_stored else [job.answer()]
        return {
            "reason": _obstacle(folder, episode),
            # The steps whose weights can play; 0 is the model that the run began with.
            "checkpoints": sorted({0, *(step_of(path) for path in folders(folder))}),
            "jobs": jobs,
        }

    def start(self, folder: Path, request: Mapping[str, Any]) -> str:
        """Play a request (`Wanted`); returns its id, under which `branches` lists it."""
        try:
            wanted = Wanted.model_validate(request)
        except ValidationError as error:
            first = error.errors()[0]
            raise Unanswered(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        with self._lock:
            known = self.branches(folder, wanted.episode)
            if known["reason"] is not None:
                raise Unanswered(known["reason"])
            if self._job is not None and self._job.is_playing:
                raise Unanswered("other branches are played now: wait until they end, or cancel")
            given = wanted.model_dump()
            if wanted.checkpoint is None:
                given["checkpoint"] = known["checkpoints"][-1]
            if wanted.temperature is None:
                given["temperature"] = run_config(folder).rollout.temperature
            # Without a seed of its own, the same request again would give the same branches.
            same = ("episode", "turn", "checkpoint")
            seeds = [job["seed"] for job in known["jobs"] if all(job[k] == given[k] for k in same)]
            asked = Request(**given, seed=max(seeds, default=-1) + 1)
            try:
                process = subprocess.Popen(
                    command_of(folder.resolve(), asked),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # so that its own processes end with it
                )
            except OSError as error:
                raise Unanswered(f"the process could not be started: {error}") from None
            self._job = job = Job(folder.resolve(), asked, process)
        threading.Thread(target=self._wait, args=(job,), daemon=True).start()
        return asked.id

    def cancel(self, folder: Path, request: Mapping[str, Any]) -> None:
        """End a request that is played, by its ``id``; stored branches stay."""
        with self._lock:
            job = self._job
            wanted = folder.resolve(), request.get("id")
            if job is None or job.problem is not None or (job.folder, job.request.id) != wanted:
                raise NotFound("this request is not played any more")
            self.stop()

    def stop(self) -> None:
        """End the process that runs."""
        with self._lock:
            job, self._job = self._job, None
        if job is not None:
            _end(job.process)

    def _wait(self, job: Job) -> None:
        """Wait for a request's process, and keep its problem if it failed."""
        output, late = b"", False
        try:
            _, output = job.process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            late = True
        code = _end(job.process)
        lines = reversed(output.decode(errors="replace").split("\n"))
        last = next(filter(str.strip, lines), f"it ended with code {code}")
        with self._lock:
            if late:
                job.problem = f"it took longer than {LONGEST_S:g} s, and was ended"
            elif code < 0:
                job.problem = f"it was ended by signal {-code}; perhaps the memory is too small"
            elif code:
                job.problem = last.removeprefix("ragen: ")
            elif self._job is job:
                self._job = None  # from now on it is read from the database


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a process and those that it started; returns its exit code."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(process.pid, number)
        else:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    return process.wait()


def _obstacle(folder: Path, episode: int) -> str | None:
    """The reason why an episode cannot be branched; ``None`` if it can."""
    with reading(folder) as run:
        if not run.value("SELECT 1 FROM episodes WHERE id = ?", episode):
            raise NotFound(f"there is no episode {episode} in this run")
        if any(called for (called,) in run.turns("link IS NOT NULL", episode)):
            return "the state of an agent is not kept, so its episodes have no branches"
        if not any(kept for (kept,) in run.turns("snapshot IS NOT NULL", episode)):
            return "the episode ended before its first turn, or its snapshots are not kept"
    try:
        run_config(folder)
    except RagenError as error:
        return str(error)
    return None


def _finished(folder: Path, episode: int) -> list[Answer]:
    if not has_branches(folder):
        return []
    found = []
    with reading(folder, FILE) as branches:
        for job in branches.rows("SELECT * FROM branches WHERE episode = ? ORDER BY time", episode):
            query = 'SELECT id FROM episodes WHERE "group" = ? ORDER BY member'
            ids = branches.rows(query, job["number"])
            episodes = [detail(branches, number) for (number,) in ids]
            num_solved = sum(each["success"] for each in episodes)
            rate = asdict(wilson(num_solved, len(episodes))) if episodes else None
            about = {**dict(job), "exact": bool(job["exact"]), "state": "done"}
            found.append(about | {"num_solved": num_solved, "success": rate, "episodes": episodes})
    return found
