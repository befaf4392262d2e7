"""The queue of requests for branches: each runs as a process of ``ragen branch``, a few at a time.

A finished request is in ``branches.sqlite``. A failed one is kept here with the last line that its
process wrote.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ragen.storage.branches import Request
from ragen.viewer.reading import Answer, Unanswered

AT_ONCE = 2
"""Processes that run at the same time; each holds a model."""

MOST_WAITING = 16
"""Requests that may wait; more come from somebody who keeps the button pressed."""

PATIENCE_S = 5.0
"""How long a process may take to end before it is killed."""


@dataclass(slots=True, eq=False)
class Job:
    """A request that waits, runs or failed; a finished one is in the database."""

    folder: Path
    request: Request
    time: float = field(default_factory=time.time)
    problem: str | None = None
    process: subprocess.Popen[str] | None = None

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
    """Requests in order: some run, the others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._slots = threading.Semaphore(AT_ONCE)

    def of_episode(self, folder: Path, episode: int) -> list[Job]:
        """The jobs of an episode that are not finished."""
        home = folder.resolve()
        with self._lock:
            return [j for j in self._jobs if (j.folder, j.request.episode) == (home, episode)]

    def put(self, job: Job) -> None:
        """Add a job; it starts when a slot is free.

        Raises:
            Unanswered: Too many wait already.
        """
        with self._lock:
            if sum(each.problem is None for each in self._jobs) >= AT_ONCE + MOST_WAITING:
                raise Unanswered("many branches wait already; wait until some of them end")
            self._jobs.append(job)
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def stop(self) -> None:
        """End the processes and drop the jobs that wait."""
        with self._lock:
            jobs, self._jobs = self._jobs, []
            running = [job.process for job in jobs if job.process is not None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _work(self, job: Job) -> None:
        with self._slots:
            with self._lock:
                if job not in self._jobs:  # it was dropped
                    return
                try:
                    job.process = subprocess.Popen(
                        job.arguments(),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        text=True,
                        errors="replace",
                    )
                except OSError as error:
                    job.problem = f"the process could not be started: {error}"
                    return
            _, output = job.process.communicate()
            code = job.process.returncode
        with self._lock:
            if code == 0 and job in self._jobs:
                self._jobs.remove(job)  # from now on it is read from the database
            job.problem = _problem(output, code) if code else None


def _problem(output: str, code: int) -> str:
    """Why a process failed: the last line that it wrote."""
    lines = [line for line in output.splitlines() if line.strip()]
    if code < 0:
        return f"the process was ended by signal {-code}; perhaps the memory is too small"
    return lines[-1].removeprefix("ragen: ") if lines else f"the process ended with code {code}"
