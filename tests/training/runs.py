"""What tests of whole runs share: configs, results to compare, and processes that are stopped."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.stopping import StopRequested
from ragen.storage import checkpoint
from ragen.storage.database import DATABASE
from ragen.training.progress import Watcher
from ragen.training.trainer import resume, train
from tests.bandit_model import settings
from tests.shared import once

GAE = {"algorithm": "starpo/ppo", "loss__kl": 0.01, "update__epochs": 2, "update__lr_end": 0.1}
"""PPO with a critic and a KL reference: it saves and restores all that GRPO does, and more."""
SMALL: dict[str, Any] = {
    "steps": 2,
    "rollout__group_size": 2,
    "rollout__slots": 3,
    "eval__episodes": 2,
    "eval__every": 1,
}
"""Two steps of four episodes, each evaluated."""


def make_config(**more: Any) -> Config:
    return merge("bandit", settings(**more))


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(run / DATABASE)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def tensors(folder: Path) -> dict[str, bytes]:
    """All tensors of a checkpoint, to the bit."""
    return {
        f"{path.name}:{name}": tensor.flatten().view(torch.uint8).numpy().tobytes()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def recorded_results(run: Path) -> dict[str, Any]:
    """All results of a run except for durations and events."""
    newest = checkpoint.newest(run)
    state = json.loads((newest / checkpoint.STATE).read_text())
    del state["loop"]["seconds"], state[checkpoint.SEAL]

    def without_run(record: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in record.items() if k not in ("seconds", "target")}
        return kept | {"parts": [without_run(part) for part in record["parts"]]}

    in_order = "SELECT record FROM evaluations ORDER BY step, record ->> 'temperature'"
    evaluations = [without_run(json.loads(record)) for (record,) in rows(run, in_order)]
    return {
        "step": newest.name,
        "state": state,
        "metrics": rows(
            run,
            "SELECT attempt, step, name, value FROM metrics WHERE name NOT LIKE 'time/%'"
            " ORDER BY 1, 2, 3",
        ),
        "episodes": rows(
            run,
            'SELECT step, phase, "group", member, level_seed, noise_seed, reward, success,'
            " num_turns, num_tokens, thought_tokens, entropy, group_score, final_observation"
            " FROM episodes ORDER BY step, phase, level_seed, member, noise_seed, reward",
        ),
        "replies": rows(
            run, "SELECT count(*), sum(length(reply)), sum(reward), sum(num_tokens) FROM turns"
        ),
        "turns": rows(
            run,
            "SELECT prompt_ids, prompt_joins, completion_ids, logprobs, thought_start FROM turns"
            " ORDER BY prompt_ids, completion_ids, logprobs",
        ),
        "tokens": rows(run, "SELECT * FROM tokens"),
        "thoughts": rows(run, "SELECT count(*) FROM thoughts_fts"),
        "samples": rows(
            run,
            'SELECT step, "group", member, token_ids, sampled_logprobs, advantages, "values",'
            " returns FROM samples ORDER BY id",
        ),
        "evaluations": evaluations,
        "tensors": tensors(newest),
    }


def assert_same_results(run: Path, expected: dict[str, Any]) -> None:
    actual = recorded_results(run)
    for part, value in expected.items():
        assert actual[part] == value, part


def uninterrupted_run(config: Config) -> Path:
    """A run that nothing stops, trained once for all tests with this config. Read only."""
    name = sha256(config.model_dump_json().encode()).hexdigest()[:16]
    return once(f"uninterrupted-{name}", lambda folder: train(config, folder))


@cache
def _results_of(run: Path) -> dict[str, Any]:
    return recorded_results(run)


def uninterrupted(config: Config) -> dict[str, Any]:
    """The results of `uninterrupted_run`."""
    return _results_of(uninterrupted_run(config))


class SendSignal(Watcher):
    """Sends this process a signal when an event happens for the n-th time."""

    def __init__(self, event: str, at: int, number: int) -> None:
        self.event, self.left, self.number = event, at, number

    def _happens(self, event: str) -> None:
        self.left -= event == self.event
        if self.left == 0 and event == self.event:
            signal.raise_signal(self.number)

    def episode(self, episode: Any) -> None:
        self._happens("episode")

    def step(self, step: int, metrics: Any) -> None:
        self._happens("step")

    def evaluated(self, step: int, evaluation: Any) -> None:
        self._happens("evaluated")


class NotedWatcher(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.alarms: list[str] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def alarm(self, step: int, text: str) -> None:
        self.alarms.append(text)


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a fork of this process; returns its id. It exits as `ragen` would."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        work()
        code = 0
    except StopRequested as stop:
        code = 128 + stop.signal_number
    except RagenError:
        code = 2
    except KeyboardInterrupt:
        code = 99
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train_and_kill(
    config: Config, run: Path, place: tuple[Any, str], number: int, after: str = "step-1"
) -> None:
    """Train, or resume, in a process that is killed at the `number`-th call of a function.

    Calls count from when the checkpoint `after` is there.
    """
    owner, name = place
    before, left = getattr(owner, name), number

    def killing(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= (run / "checkpoints" / after).exists()
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*arguments, **named)

    def work() -> None:
        setattr(owner, name, killing)
        resume(run) if run.exists() else train(config, run)

    assert exit_code(fork(work)) == -signal.SIGKILL
