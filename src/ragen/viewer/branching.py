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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ragen.core.errors import RagenError
from ragen.core.statistics import wilson
from ragen.settings.saved import run_config
from ragen.storage.branches import FILE, MOST, Request, has_branches
from ragen.storage.checkpoint import folders, step_of
from ragen.viewer.episode_page import detail
from ragen.viewer.reading import Answer, NotFound, Unanswered, reading

MOST_WAITING = 16
"""Maximum number of requests that wait or run; a user would not send more by hand."""

LONGEST_S = 3600.0
"""Time limit of a process in seconds. Otherwise, one that hangs would hold up the others."""

PATIENCE_S = 5.0
"""Seconds that a process may take to end before it is killed."""

TAIL = 4096
"""Bytes of a process's last output that are kept; the last line is its problem."""


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
    """A request that waits, runs or failed; a finished one is in the database."""

    folder: Path
    request: Request
    time: float = field(default_factory=time.time)
    problem: str | None = None
    process: subprocess.Popen[bytes] | None = None

    def arguments(self) -> list[str]:
        """The command line: numbers, and a folder that begins with a slash or a drive."""
        request = self.request
        return [
            sys.executable,
            "-m",
            "ragen",
            "branch",
            str(self.folder),
            str(request.episode),
            "--turn",
            str(request.turn),
            "--n",
            str(request.n),
            "--checkpoint",
            str(request.checkpoint),
            "--temperature",
            repr(request.temperature),
            "--seed",
            str(request.seed),
            "--json",
        ]

    def answer(self) -> Answer:
        """The job as the API returns it."""
        state = "running" if self.problem is None else "failed"
        about = {"id": self.request.id, **asdict(self.request), "time": self.time, "state": state}
        return about | {"problem": self.problem, "episodes": []}


class Branching:
    """Answers about branches, and the requests in order: the first one runs, the others wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._jobs: list[Job] = []
        self._thread = ThreadPoolExecutor(1, "branches")

    def branches(self, folder: Path, episode: int) -> Answer:
        """The branches of an episode, and a ``reason`` (or ``None``) why no more can be played."""
        # The queue is read first: a job that finishes in between is then in both, not in neither.
        with self._lock:
            place = folder.resolve(), episode
            queued = [job for job in self._jobs if (job.folder, job.request.episode) == place]
        finished = _finished(folder, episode)
        known = {job["id"] for job in finished}
        return {
            "reason": _obstacle(folder, episode),
            # The steps whose weights can play; 0 is the model that the run began with.
            "checkpoints": sorted({0, *(step_of(path) for path in folders(folder))}),
            "jobs": [*finished, *(job.answer() for job in queued if job.request.id not in known)],
        }

    def start(self, folder: Path, request: Mapping[str, Any]) -> str:
        """Queue a request (`Wanted`); returns its id, under which `branches` lists it."""
        try:
            wanted = Wanted.model_validate(request)
        except ValidationError as error:
            first = error.errors()[0]
            raise Unanswered(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        with self._lock:
            known = self.branches(folder, wanted.episode)
            if known["reason"] is not None:
                raise Unanswered(known["reason"])
            if sum(job.problem is None for job in self._jobs) >= MOST_WAITING:
                raise Unanswered("many branches wait already; cancel some, or wait until they end")
            given = wanted.model_dump()
            if wanted.checkpoint is None:
                given["checkpoint"] = known["checkpoints"][-1]
            if wanted.temperature is None:
                given["temperature"] = run_config(folder).rollout.temperature
            # Without a seed of its own, the same request again would give the same branches.
            same = ("episode", "turn", "checkpoint")
            seeds = [job["seed"] for job in known["jobs"] if all(job[k] == given[k] for k in same)]
            job = Job(folder.resolve(), Request(**given, seed=max(seeds, default=-1) + 1))
            self._jobs.append(job)
        self._thread.submit(self._work, job)
        return job.request.id

    def cancel(self, folder: Path, request: Mapping[str, Any]) -> None:
        """End a request that waits or runs, by its ``id``; stored branches stay."""
        wanted = folder.resolve(), request.get("id")
        with self._lock:
            jobs = [job for job in self._jobs if (job.folder, job.request.id) == wanted]
        if not any(job.problem is None for job in jobs):
            raise NotFound("this request does not wait or run any more")
        self._drop(jobs)

    def stop(self) -> None:
        """End the process that runs, and drop the requests that wait."""
        self._drop(self._jobs)

    def _drop(self, jobs: list[Job]) -> None:
        with self._lock:
            self._jobs = [job for job in self._jobs if job not in jobs]
            running = [job.process for job in jobs if job.process is not None]
        for process in running:
            _end(process)

    def _work(self, job: Job) -> None:
        with TemporaryFile() as output:
            with self._lock:
                if job not in self._jobs:  # it was dropped
                    return
                try:
                    job.process = process = subprocess.Popen(
                        job.arguments(),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=output,
                        start_new_session=True,  # so that its own processes end with it
                    )
                except OSError as error:
                    job.problem = f"the process could not be started: {error}"
                    return
            with suppress(subprocess.TimeoutExpired):
                process.wait(LONGEST_S)
            late = process.poll() is None
            code = _end(process)
            output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL))
            lines = output.read().decode(errors="replace").split("\n")
        with self._lock:
            job.process = None
            if code == 0 and job in self._jobs:
                self._jobs.remove(job)  # from now on it is read from the database
            elif late:
                job.problem = f"it took longer than {LONGEST_S:g} s, and was ended"
            elif code < 0:
                job.problem = f"it was ended by signal {-code}; perhaps the memory is too small"
            elif code:
                last = next(filter(str.strip, reversed(lines)), f"it ended with code {code}")
                job.problem = last.removeprefix("ragen: ")


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
