"""What if: branches of a run's episodes, played by ``ragen branch`` in processes of their own.

The viewer itself loads no model. It checks what is asked, puts it in line (`ragen.viewer.line`) and
reads what the processes leave in `branches.sqlite`.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.reading import read_config
from ragen.core.errors import RagenError
from ragen.envs.registry import registered_envs
from ragen.models.names import is_available_offline
from ragen.storage.branches import FILE, MOST, Request, has_branches
from ragen.storage.checkpoint import folders, step_of
from ragen.storage.database import CONFIG
from ragen.viewer.line import Job, Line
from ragen.viewer.played import detail, episode_row
from ragen.viewer.reading import Answer, NotFound, Unanswered, reading

HOTTEST = 100.0
"""Temperature from which on all tokens are equally likely anyway."""

LARGEST = 2**31
"""Numbers in a request stay below it."""


def branches_of(folder: Path, episode: int) -> Answer:
    """What was branched from an episode, what is being branched, and whether more is possible.

    Args:
        folder: The run's folder.
        episode: The episode's id.

    Raises:
        Unanswered: There is no such episode, or a database cannot be read.
    """
    live = _LINE.of(folder, episode)  # asked first: what ends in between is in both
    done = _done(folder, episode)
    known = {job["id"] for job in done}
    return {
        **possible(folder, episode),
        "checkpoints": _checkpoints(folder),
        "jobs": [*done, *(job.answer() for job in live if job.request.id not in known)],
    }


def possible(folder: Path, episode: int) -> Answer:
    """Whether an episode can be branched, as far as that is known without a model: or why not.

    Raises:
        Unanswered: There is no such episode, or the run cannot be read.
    """
    reason = _hindrance(folder, _turns(folder, episode))
    return {"possible": reason is None, "reason": reason}


def start_branch(folder: Path, request: Mapping[str, Any]) -> str:
    """Put a request in line; returns the id under which `branches_of` tells of it.

    Args:
        folder: The run's folder.
        request: ``episode``, ``turn``, ``n``, and ``checkpoint`` and ``temperature``, which may be
            missing or ``None``: the newest, and the run's.

    Raises:
        Unanswered: A value is missing or out of its range, it is not possible, or too many wait.
    """
    episode = _whole(request, "episode", 1, LARGEST)
    turns = _turns(folder, episode)
    reason = _hindrance(folder, turns)
    if reason is not None:
        raise Unanswered(reason)
    turn, n = _whole(request, "turn", 0, turns - 1), _whole(request, "n", 1, MOST)
    checkpoint, known = request.get("checkpoint"), _checkpoints(folder)
    if checkpoint is None:
        checkpoint = known[-1]
    elif _whole(request, "checkpoint", 0, LARGEST) not in known:
        raise Unanswered(f"checkpoint = {checkpoint}: the run keeps those of {_listed(known)}")
    temperature = request.get("temperature")
    if temperature is None:
        temperature = read_config(folder / CONFIG).rollout.temperature
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise Unanswered("temperature: expected a number")
    if not 0 <= temperature <= HOTTEST or math.isnan(temperature):
        raise Unanswered(f"temperature = {temperature}: expected a number from 0 to {HOTTEST:g}")
    asked = (episode, turn, checkpoint)
    with _ASKING:
        jobs = branches_of(folder, episode)["jobs"]
        before = [job["seed"] for job in jobs if _asked(job) == asked]
        seed = max(before, default=-1) + 1  # asked again, it is to show others
        job = Job(folder.resolve(), Request(*asked, n, float(temperature), seed))
        _LINE.put(job)
    return job.request.id


def stop_all() -> None:
    """End all processes and forget who waits: the server ends."""
    _LINE.stop()


def _asked(job: Answer) -> tuple[Any, ...]:
    return tuple(job[name] for name in ("episode", "turn", "checkpoint"))


def _whole(request: Mapping[str, Any], name: str, least: int, most: int) -> int:
    number = request.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise Unanswered(f"{name}: expected a whole number from {least} to {most}")
    return number


def _turns(folder: Path, episode: int) -> int:
    """How many turns an episode has that can be gone back to.

    Raises:
        NotFound: There is no such episode.
        Unanswered: The run cannot be read.
    """
    with reading(folder) as connection:
        if not connection.execute("SELECT 1 FROM episodes WHERE id = ?", (episode,)).fetchone():
            raise NotFound(f"there is no episode {episode} in this run")
        (turns,) = connection.execute(
            "SELECT count(snapshot) FROM turns WHERE episode_id = ?", (episode,)
        ).fetchone()
    return int(turns)


def _hindrance(folder: Path, turns: int) -> str | None:
    """Why an episode with so many turns cannot be branched."""
    try:
        config = read_config(folder / CONFIG)
    except RagenError as error:
        return str(error)
    env, model = config.env.name, config.model.path
    if turns == 0:
        return (
            "the episode ended before its first turn, or no snapshots of its environment are kept"
        )
    if not _env_is_there(env):
        return f"the environment {env!r} is not installed here"
    if not folders(folder) and not _model_is_there(model):
        return f"the run has no checkpoint, and its model {model!r} is not on this machine"
    if config.lora.rank and not _model_is_there(model):
        return f"the model {model!r} below the run's adapter is not on this machine"
    if config.rollout.sampler == "vllm" and find_spec("vllm") is None:
        return "the run samples with vLLM, which is not installed here"
    return None


def _env_is_there(name: str) -> bool:
    """Whether an environment can be found; its code is not run."""
    return Path(name.rpartition(":")[0]).is_file() if ":" in name else name in registered_envs()


def _model_is_there(path: str) -> bool:
    """Whether a model is on this machine; the network is not asked."""
    return path == "base" or is_available_offline(path)


def _checkpoints(folder: Path) -> list[int]:
    """The steps whose weights can play, 0 among them while the first model is there."""
    steps = {step_of(path) for path in folders(folder)}
    try:
        config: Config | None = read_config(folder / CONFIG)
    except RagenError:
        config = None
    begun = config is not None and _model_is_there(config.model.path)
    return sorted({*steps, 0} if begun else steps)


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _done(folder: Path, episode: int) -> list[Answer]:
    """What was branched already, with all episodes."""
    if not has_branches(folder):
        return []
    with reading(folder, FILE) as connection:
        jobs = connection.execute(
            "SELECT * FROM branches WHERE episode = ? ORDER BY time", (episode,)
        ).fetchall()
        of_job = 'SELECT id FROM episodes WHERE "group" = ? ORDER BY member'
        return [
            {
                **{name: job[name] for name in job.keys() if name != "number"},  # noqa: SIM118
                "exact": bool(job["exact"]),
                "state": "done",
                "problem": None,
                "episodes": [
                    detail(connection, episode_row(connection, id_))
                    for (id_,) in connection.execute(of_job, (job["number"],)).fetchall()
                ],
            }
            for job in jobs
        ]


_LINE = Line()
_ASKING = threading.Lock()
atexit.register(stop_all)
