"""The queue of requests for branches: each runs as a process of ``ragen branch``, one at a time.

A finished request is in ``branches.sqlite``. A failed one is kept here with the last line that its
process wrote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from ragen.storage.branches import Request
from ragen.viewer.reading import Answer, NotFound, Unanswered

MOST_WAITING = 16
"""Maximum number of requests that wait or run; a user would not send more by hand."""

LONGEST_S = 3600.0
"""Time limit of a process in seconds. Otherwise, one that hangs would hold up the others."""

PATIENCE_S = 5.0
"""Seconds that a process may take to end before it is killed."""

TAIL = 4096
"""Bytes of a process's last output that are kept; the last line is its problem."""


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
            *(sys.executable, "-m", "ragen", "branch", str(self.folder), str(request.episode)),
            *("--turn", str(request.turn), "--n", str(request.n)),
            *("--checkpoint", str(request.checkpoint), "--temperature", repr(request.temperature)),
            *("--seed", str(request.seed), "--json"),
        ]

    def answer(self) -> Answer:
        """The job as the API returns it."""
        return {
            "id": self.request.id,
            **asdict(self.request),
            "time": self.time,
            "exact": None,
            "state": "running" if self.problem is None else "failed",
            "problem": self.problem,
            "num_solved": None,
            "success": None,
            "episodes": [],
        }


class JobQueue:
    """Requests in order: the first one runs, the others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._thread = ThreadPoolExecutor(1, "branches")

    def of_episode(self, folder: Path, episode: int) -> list[Job]:
        """The jobs of an episode that are not finished."""
        home = folder.resolve()
        with self._lock:
            return [j for j in self._jobs if (j.folder, j.request.episode) == (home, episode)]

    def put(self, job: Job) -> None:
        """Add a job."""
        with self._lock:
            if sum(each.problem is None for each in self._jobs) >= MOST_WAITING:
                raise Unanswered("many branches wait already; cancel some, or wait until they end")
            self._jobs.append(job)
        self._thread.submit(self._work, job)

    def cancel(self, folder: Path, request: str) -> None:
        """Drop the jobs of a request by its id, and end their processes."""
        home = folder.resolve()
        with self._lock:
            jobs = [j for j in self._jobs if (j.folder, j.request.id) == (home, request)]
        if not any(job.problem is None for job in jobs):
            raise NotFound("this request does not wait or run any more")
        self._drop(jobs)

    def stop(self) -> None:
        """End the processes and drop the jobs that wait."""
        self._drop(self._jobs)

    def _drop(self, jobs: list[Job]) -> None:
        with self._lock:
            self._jobs = [job for job in self._jobs if job not in jobs]
            running = [job.process for job in jobs if job.process is not None]
        for process in running:
            _signal(process, signal.SIGTERM)
        for process in running:
            _end(process)

    def _work(self, job: Job) -> None:
        with TemporaryFile() as output:
            with self._lock:
                if job not in self._jobs:  # it was dropped
                    return
                try:
                    job.process = subprocess.Popen(
                        job.arguments(),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=output,
                        start_new_session=True,  # so that its own processes end with it
                    )
                except OSError as error:
                    job.problem = f"the process could not be started: {error}"
                    return
            problem = None
            try:
                job.process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                problem = f"it took longer than {LONGEST_S:g} s, and was ended"
                _signal(job.process, signal.SIGTERM)
            code = _end(job.process)
            output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL))
            last = output.read().decode(errors="replace")
        with self._lock:
            if code == 0 and job in self._jobs:
                self._jobs.remove(job)  # from now on it is read from the database
            if code:
                job.problem = problem or _problem(last, code)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that was told to end, and kill the rest of its session."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_S)
    _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
    return process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and those that it started."""
    if os.name != "posix":
        process.terminate()
        return
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, number)


def _problem(output: str, code: int) -> str:
    """Why a process failed: the last line that it wrote."""
    lines = [line for line in output.splitlines() if line.strip()]
    if code < 0:
        return f"the process was ended by signal {-code}; perhaps the memory is too small"
    return lines[-1].removeprefix("ragen: ") if lines else f"the process ended with code {code}"
