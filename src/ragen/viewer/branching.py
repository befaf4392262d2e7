"""Branches of recorded episodes, played by ``ragen branch`` in their own processes.

The viewer itself loads no model. It checks a request, queues it (`ragen.viewer.job_queue`) and
reads what the processes write into ``branches.sqlite``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragen.config.extensions import library_of
from ragen.config.rules import TEMPERATURES
from ragen.core.errors import RagenError
from ragen.core.statistics import wilson
from ragen.envs.registry import registered_envs
from ragen.models.names import is_available_offline
from ragen.rollout.setup import by_env
from ragen.storage.branches import FILE, MOST, Request, has_branches
from ragen.storage.checkpoint import folders, step_of
from ragen.storage.settings import run_config
from ragen.viewer.episode_page import detail
from ragen.viewer.job_queue import Job, JobQueue
from ragen.viewer.reading import Answer, NotFound, Unanswered, reading

MAX_NUMBER = 2**31
"""Upper limit of the numbers in a request."""


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
        """Queue a request; returns its id, under which `branches` lists it.

        Args:
            folder: The run's folder.
            request: ``episode``, ``turn`` and ``n``. ``checkpoint`` and ``temperature`` may be
                missing or ``None``: then the newest checkpoint and the run's temperature.
        """
        episode = _whole_number(request, "episode", 1, MAX_NUMBER)
        turns = _num_turns(folder, episode)
        reason = _obstacle(folder, turns)
        if reason is not None:
            raise Unanswered(reason)
        turn = _whole_number(request, "turn", 0, turns - 1)
        n = _whole_number(request, "n", 1, MOST)
        checkpoint = _checkpoint(folder, request)
        temperature = _temperature(folder, request.get("temperature"))
        with self._adding:
            source = {"episode": episode, "turn": turn, "checkpoint": checkpoint}
            jobs = self.branches(folder, episode)["jobs"]
            seeds = [job["seed"] for job in jobs if source.items() <= job.items()]
            seed = max(seeds, default=-1) + 1  # the same request again gives other branches
            wanted = Request(**source, n=n, temperature=temperature, seed=seed)
            job = Job(folder.resolve(), wanted)
            self._queue.put(job)
        return job.request.id

    def cancel(self, folder: Path, request: Mapping[str, Any]) -> None:
        """End a request that waits or runs, by its ``id``; stored branches stay."""
        self._queue.cancel(folder, str(request.get("id")))

    def stop(self) -> None:
        """End all processes and empty the queue."""
        self._queue.stop()


def _checkpoint(folder: Path, request: Mapping[str, Any]) -> int:
    """The step of a request's checkpoint; the newest, if it names none."""
    known = _checkpoints(folder)
    if request.get("checkpoint") is None:
        return known[-1]
    step = _whole_number(request, "checkpoint", 0, MAX_NUMBER)
    if step not in known:
        steps = ", ".join(map(str, known)) or "none"
        raise Unanswered(f"checkpoint = {step}: the run keeps those of steps {steps}")
    return step


def _temperature(folder: Path, value: Any) -> float:
    """A request's temperature; the run's, if it gives none."""
    if value is None:
        value = run_config(folder).rollout.temperature
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unanswered("temperature: expected a number")
    low, high = TEMPERATURES
    if value != 0 and not low <= value <= high:
        raise Unanswered(f"temperature = {value}: expected a number from {low:g} to {high:g}, or 0")
    return float(value)


def _whole_number(request: Mapping[str, Any], name: str, least: int, most: int) -> int:
    number = request.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise Unanswered(f"{name}: expected a whole number from {least} to {most}")
    return number


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
        config = run_config(folder)
    except RagenError as error:
        return str(error)
    model = config.model.path
    if turns == 0:
        return "the episode ended before its first turn, or its snapshots are not kept"
    if env := next((name for name in by_env(config) if not _env_is_there(name)), None):
        return f"the environment {env!r} is not installed here"
    if not folders(folder) and not _model_is_there(model):
        return f"the run has no checkpoint, and its model {model!r} is not on this machine"
    if config.lora.rank and not _model_is_there(model):
        return f"the model {model!r} below the run's adapter is not on this machine"
    if config.rollout.sampler == "vllm" and find_spec("vllm") is None:
        return "the run samples with vLLM, which is not installed here"
    return None


def _env_is_there(name: str) -> bool:
    """True if an environment can be found; its code does not run."""
    if library := library_of(name):
        return find_spec(library.module) is not None
    return Path(name.rpartition(":")[0]).is_file() if ":" in name else name in registered_envs()


def _model_is_there(path: str) -> bool:
    """True if a model is on this machine; the network is not asked."""
    return path == "base" or is_available_offline(path)


def _checkpoints(folder: Path) -> list[int]:
    """The steps whose weights can play; 0 is the initial model, if it is still there."""
    steps = {step_of(path) for path in folders(folder)}
    with suppress(RagenError):
        if _model_is_there(run_config(folder).model.path):
            steps.add(0)
    return sorted(steps)


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
