"""Branches of recorded episodes, played by ``ragen branch`` in their own processes.

The viewer itself loads no model. It checks a request, queues it (`ragen.viewer.job_queue`) and
reads what the processes write into ``branches.sqlite``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ragen.core.errors import RagenError
from ragen.core.statistics import wilson
from ragen.evaluation.outcomes import check_sampling
from ragen.settings.saved import run_config
from ragen.storage.branches import FILE, MOST, Request, has_branches
from ragen.storage.checkpoint import folders, step_of
from ragen.viewer.episode_page import detail
from ragen.viewer.job_queue import Job, JobQueue
from ragen.viewer.reading import Answer, NotFound, Unanswered, reading


class Wanted(BaseModel, strict=True):
    """The body of a request for branches.

    Without a checkpoint the newest one plays, and without a temperature that of the run.
    """

    episode: int = Field(ge=1, lt=2**31)
    turn: int = Field(ge=0)
    n: int = Field(ge=1, le=MOST)
    checkpoint: int | None = None
    temperature: float | None = None


class Branching:
    """Answers about branches, and the queue of those that are being played.

    The server owns one; `stop` ends its processes.
    """

    def __init__(self) -> None:
        self._queue = JobQueue()
        self._adding = threading.Lock()

    def branches(self, folder: Path, episode: int) -> Answer:
        """An episode's branches, finished and under way, and whether more can be played."""
        # The queue is read first: a job that finishes in between is then in both, not in neither.
        queued = self._queue.of_episode(folder, episode)
        finished = _finished(folder, episode)
        known = {job["id"] for job in finished}
        reason = _obstacle(folder, _num_turns(folder, episode))
        return {
            "possible": reason is None,
            "reason": reason,
            "checkpoints": _checkpoints(folder),
            "jobs": [*finished, *(job.answer() for job in queued if job.request.id not in known)],
        }

    def start(self, folder: Path, request: Mapping[str, Any]) -> str:
        """Queue a request (`Wanted`); returns its id, under which `branches` lists it."""
        try:
            wanted = Wanted.model_validate(request)
        except ValidationError as error:
            first = error.errors()[0]
            raise Unanswered(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        turns, known = _num_turns(folder, wanted.episode), _checkpoints(folder)
        if (reason := _obstacle(folder, turns)) is not None:
            raise Unanswered(reason)
        if wanted.turn >= turns:
            raise Unanswered(f"turn = {wanted.turn}: expected 0 to {turns - 1}")
        checkpoint = known[-1] if wanted.checkpoint is None else wanted.checkpoint
        if checkpoint not in known:
            steps = ", ".join(map(str, known))
            raise Unanswered(f"checkpoint = {checkpoint}: the run keeps those of steps {steps}")
        of_run, temperature = run_config(folder).rollout, wanted.temperature
        temperature = of_run.temperature if temperature is None else temperature
        check_sampling(0, temperature, of_run.sampler)
        with self._adding:
            source = {"episode": wanted.episode, "turn": wanted.turn, "checkpoint": checkpoint}
            jobs = self.branches(folder, wanted.episode)["jobs"]
            seeds = [job["seed"] for job in jobs if source.items() <= job.items()]
            seed = max(seeds, default=-1) + 1  # the same request again gives other branches
            asked = Request(**source, n=wanted.n, temperature=temperature, seed=seed)
            self._queue.put(Job(folder.resolve(), asked))
        return asked.id

    def cancel(self, folder: Path, request: Mapping[str, Any]) -> None:
        """End a request that waits or runs, by its ``id``; stored branches stay."""
        self._queue.cancel(folder, str(request.get("id")))

    def stop(self) -> None:
        """End all processes and empty the queue."""
        self._queue.stop()


def _num_turns(folder: Path, episode: int) -> int:
    """The number of turns of an episode that have a snapshot to start from."""
    with reading(folder) as run:
        if not run.value("SELECT 1 FROM episodes WHERE id = ?", episode):
            raise NotFound(f"there is no episode {episode} in this run")
        query = "SELECT count(snapshot) FROM turns WHERE episode_id = ?"
        return int(run.value(query, episode))


def _obstacle(folder: Path, turns: int) -> str | None:
    """Why an episode with this number of turns cannot be branched; ``None`` if it can."""
    try:
        run_config(folder)
    except RagenError as error:
        return str(error)
    if turns == 0:
        return "the episode ended before its first turn, or its snapshots are not kept"
    return None


def _checkpoints(folder: Path) -> list[int]:
    """The steps whose weights can play; 0 is the model that the run began with."""
    return sorted({0, *(step_of(path) for path in folders(folder))})


def _finished(folder: Path, episode: int) -> list[Answer]:
    """The finished requests of an episode, with all their branches and the success rate."""
    if not has_branches(folder):
        return []
    found = []
    with reading(folder, FILE) as branches:
        for job in branches.rows("SELECT * FROM branches WHERE episode = ? ORDER BY time", episode):
            query = 'SELECT id FROM episodes WHERE "group" = ? ORDER BY member'
            ids = branches.rows(query, job["number"])
            episodes = [detail(branches, number) for (number,) in ids]
            num_solved = sum(each["success"] for each in episodes)
            about: Answer = {
                **dict(job),
                "exact": bool(job["exact"]),
                "state": "done",
                "problem": None,
                "num_solved": num_solved,
                "success": asdict(wilson(num_solved, len(episodes))) if episodes else None,
                "episodes": episodes,
            }
            del about["number"]
            found.append(about)
    return found
