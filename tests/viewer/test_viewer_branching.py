"""Branches that the viewer starts: separate processes, at most two at a time, without a shell."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ragen.config.reading import resolve
from ragen.core.errors import RagenError
from ragen.core.statistics import wilson
from ragen.storage.branches import FILE
from ragen.storage.database import DATABASE
from ragen.training.trainer import train
from ragen.viewer import job_queue
from ragen.viewer.branching import Branching
from tests.bandit_model import settings
from tests.records import edit_settings

REQUEST: dict[str, Any] = {"episode": 1, "turn": 0, "n": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = resolve("bandit", settings(steps=2, checkpoint__keep=9))
    return train(config, tmp_path_factory.mktemp("runs") / "bandit").run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "bandit"))


@pytest.fixture
def branching() -> Iterator[Branching]:
    branching = Branching()
    yield branching
    branching.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def states(branching: Branching, run: Path) -> list[str]:
    return [job["state"] for job in branching.branches(run, 1)["jobs"]]


def replace_command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the command of a job by a few lines of Python."""
    monkeypatch.setattr(
        job_queue.Job,
        "arguments",
        lambda job: [sys.executable, "-c", code, str(job.folder), str(job.request.seed)],
    )


def test_a_branch_is_played_and_read(run: Path, branching: Branching) -> None:
    before = branching.branches(run, 1)
    assert before == {"possible": True, "reason": None, "checkpoints": [0, 1, 2], "jobs": []}
    key = branching.start(run, {**REQUEST, "checkpoint": 1, "temperature": 0.5, "run": "bandit"})
    (job,) = branching.branches(run, 1)["jobs"]
    assert (job["id"], job["state"], job["episodes"]) == (key, "running", [])
    wait_until(lambda: states(branching, run) == ["done"])
    (job,) = branching.branches(run, 1)["jobs"]
    assert {**REQUEST, "id": key, "checkpoint": 1, "temperature": 0.5}.items() <= job.items()
    assert (job["exact"], job["problem"], job["seed"]) == (True, None, 0)
    assert job["num_solved"] == sum(each["success"] for each in job["episodes"])
    assert job["success"] == asdict(wilson(job["num_solved"], 3))
    assert [each["member"] for each in job["episodes"]] == [0, 1, 2]
    assert all(each["turns"][0]["observation"] for each in job["episodes"])
    assert branching.branches(run, 2)["jobs"] == []


def test_an_empty_database_has_no_branches_and_a_damaged_one_is_refused(
    run: Path, branching: Branching
) -> None:
    (run / FILE).touch()
    assert branching.branches(run, 1)["jobs"] == []
    (run / FILE).write_bytes(b"no database" * 99)
    with pytest.raises(RagenError, match=f"{FILE} cannot be read"):
        branching.branches(run, 1)


def test_a_branch_defaults_to_the_last_checkpoint_and_the_temperature_of_the_run(
    run: Path, branching: Branching
) -> None:
    branching.start(run, {**REQUEST, "checkpoint": None, "temperature": None})
    branching.start(run, REQUEST)
    jobs = branching.branches(run, 1)["jobs"]
    assert [(job["checkpoint"], job["temperature"]) for job in jobs] == [(2, 1.0)] * 2
    assert [job["seed"] for job in jobs] == [0, 1]  # A repeated request gets another seed.


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('ragen: no')", "no"),
        ("import sys; sys.exit('Traceback\\nfirst\\nKeyError: 1\\n\\n')", "KeyError: 1"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("import sys; sys.stderr.write('x' * 10**6 + chr(10) + 'the end'); sys.exit(1)", "the end"),
    ],
)
def test_a_failed_branch_reports_the_last_line_of_its_process(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    replace_command(monkeypatch, code)
    branching.start(run, REQUEST)
    wait_until(lambda: states(branching, run) == ["failed"])
    (job,) = branching.branches(run, 1)["jobs"]
    assert message in job["problem"] and not job["problem"].startswith("ragen")
    assert not (run / FILE).exists()


def test_simultaneous_branches_get_distinct_seeds(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_command(monkeypatch, "import time; time.sleep(60)")
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda _: branching.start(run, REQUEST), range(8)))
    assert {job["seed"] for job in branching.branches(run, 1)["jobs"]} == set(range(8))


def test_two_branches_run_at_once_and_the_others_wait(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing = run / "here"
    playing.mkdir()
    replace_command(
        monkeypatch,
        "import pathlib, sys, time\n"
        "me = pathlib.Path(sys.argv[1], 'here', sys.argv[2]); me.touch()\n"
        "time.sleep(0.4); me.unlink(); sys.exit('over')",
    )
    for _ in range(5):
        branching.start(run, REQUEST)
    most = 0
    while "running" in states(branching, run):
        most = max(most, len(list(playing.iterdir())))
        time.sleep(0.01)
    assert most == job_queue.AT_ONCE == 2
    assert states(branching, run) == ["failed"] * 5  # None of them wrote a branch.


def test_the_queue_of_branches_is_bounded(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_command(monkeypatch, "import time; time.sleep(60)")
    for number in range(job_queue.AT_ONCE + job_queue.MOST_WAITING):
        branching.start(run, REQUEST, str(number // 2))
    with pytest.raises(RagenError, match="wait already"):
        branching.start(run, REQUEST)


def test_stop_ends_processes_and_drops_waiting_branches(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_command(
        monkeypatch,
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], f'pid-{os.getpid()}').touch(); time.sleep(60)",
    )
    for _ in range(4):
        branching.start(run, REQUEST)
    wait_until(lambda: len(list(run.glob("pid-*"))) == 2)
    branching.stop()
    assert branching.branches(run, 1)["jobs"] == []
    wait_until(lambda: not any(alive(int(path.name[4:])) for path in run.glob("pid-*")))
    time.sleep(0.2)
    assert len(list(run.glob("pid-*"))) == 2  # The waiting branches never started.


STUBBORN = (
    "import pathlib, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "pathlib.Path(sys.argv[1], f'pid-{child.pid}').touch(); time.sleep(60)"
)
"""A process that does not end when it is told to, and has one of its own."""


def test_a_cancelled_branch_ends_with_all_its_processes_and_the_next_one_starts(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "PATIENCE_S", 0.2)
    monkeypatch.setattr(job_queue, "AT_ONCE", 1)
    branching._queue = job_queue.JobQueue()
    replace_command(monkeypatch, STUBBORN)
    first, waiting, last = (branching.start(run, REQUEST) for _ in range(3))
    wait_until(lambda: len(list(run.glob("pid-*"))) == 1)
    (child,) = run.glob("pid-*")
    branching.cancel(run, {"id": waiting})
    branching.cancel(run, {"id": first})
    assert [job["id"] for job in branching.branches(run, 1)["jobs"]] == [last]
    wait_until(lambda: ended(int(child.name[4:])) and len(list(run.glob("pid-*"))) == 2)
    for key in (first, "unknown", None):
        with pytest.raises(RagenError, match="does not wait or run"):
            branching.cancel(run, {"id": key})
    with pytest.raises(RagenError, match="does not wait or run"):
        branching.cancel(run.parent, {"id": last})
    branching.stop()


@pytest.mark.slow
def test_a_cancelled_branch_leaves_the_stored_ones(run: Path, branching: Branching) -> None:
    key = branching.start(run, REQUEST)
    wait_until(lambda: states(branching, run) == ["done"])
    for seconds in (0.2, 1.0, 2.0, 3.0):  # While it starts, loads, plays or writes.
        cancelled = branching.start(run, REQUEST)
        time.sleep(seconds)
        try:
            branching.cancel(run, {"id": cancelled})
        except RagenError:
            break  # It was faster.
    jobs = branching.branches(run, 1)["jobs"]
    assert key in {job["id"] for job in jobs} and {job["state"] for job in jobs} == {"done"}
    with sqlite3.connect(run / FILE) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_branch_that_hangs_or_writes_endlessly_is_ended(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "PATIENCE_S", 0.2)
    monkeypatch.setattr(job_queue, "LONGEST_S", 0.5)
    for code in (STUBBORN, "import sys\nwhile True: sys.stderr.write('x' * 4096)"):
        replace_command(monkeypatch, code)
        branching.start(run, REQUEST)
    wait_until(lambda: states(branching, run) == ["failed"] * 2)
    problems = [job["problem"] for job in branching.branches(run, 1)["jobs"]]
    assert problems == ["it took longer than 0.5 s, and was ended"] * 2


def test_one_address_cannot_fill_the_queue(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_command(monkeypatch, "import time; time.sleep(60)")
    for _ in range(job_queue.MOST_EACH):
        branching.start(run, REQUEST, "192.0.2.1")
    with pytest.raises(RagenError, match="cancel some"):
        branching.start(run, REQUEST, "192.0.2.1")
    branching.start(run, REQUEST, "192.0.2.2")


def test_failed_branches_are_forgotten_when_they_are_many(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "MOST_FAILED", 2)
    replace_command(monkeypatch, "raise SystemExit(3)")
    for _ in range(5):
        branching.start(run, REQUEST)
        wait_until(lambda: "running" not in states(branching, run))
    assert len(states(branching, run)) == 3


def ended(pid: int) -> bool:
    """Whether a process has ended; nobody may have waited for it."""
    stat = Path(f"/proc/{pid}/stat")
    return not alive(pid) or (stat.exists() and stat.read_text().split(") ")[1][0] == "Z")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episode": 10**6}, "no episode 1000000"),
        ({"episode": "1"}, "episode: expected a whole number"),
        ({"episode": 1.0}, "episode: expected a whole number"),
        ({"episode": True}, "episode: expected a whole number"),
        ({"episode": 2**70}, "episode: expected a whole number"),
        ({"turn": 1}, "turn: expected a whole number from 0 to 0"),
        ({"turn": -1}, "turn: expected a whole number from 0 to 0"),
        ({"turn": None}, "turn: expected a whole number"),
        ({"n": 0}, "n: expected a whole number from 1 to 64"),
        ({"n": 65}, "n: expected a whole number from 1 to 64"),
        ({"checkpoint": 9}, "checkpoint = 9: the run keeps those of steps 0, 1, 2"),
        ({"checkpoint": "--help"}, "checkpoint: expected a whole number"),
        ({"temperature": -0.5}, "temperature = -0.5: expected a number from 0.001"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"temperature": "1; rm -rf"}, "temperature: expected a number"),
        ({"temperature": 10**400}, "expected a number from 0.001"),
    ],
)
def test_an_invalid_request_is_refused(
    run: Path, branching: Branching, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RagenError, match=message):
        branching.start(run, REQUEST | changes)
    assert branching.branches(run, 1)["jobs"] == []


def execute_in_database(run: Path, statement: str) -> None:
    connection = sqlite3.connect(run / DATABASE)
    connection.execute(statement)
    connection.commit()
    connection.close()


def without_model(run: Path) -> None:
    model = str(resolve("bandit", settings()).model.path)
    edit_settings(run, f'path = "{model}"', 'path = "nobody/has-this"')


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


OBSTACLES: dict[str, tuple[list[Callable[[Path], None]], str]] = {
    "neither checkpoint nor model": (
        [without_model, without_checkpoints],
        "the run has no checkpoint, and its model 'nobody/has-this' is not on this machine",
    ),
    "an adapter without its base model": (
        [without_model, lambda run: edit_settings(run, "rank = 0", "rank = 4")],
        "below the run's adapter is not on this machine",
    ),
    "an unknown environment": (
        [lambda run: edit_settings(run, 'name = "bandit"', 'name = "casino"')],
        "the environment 'casino' is not installed here",
    ),
    "an environment in a file": (
        [lambda run: edit_settings(run, 'name = "bandit"', 'name = "gone.py:Casino"')],
        "the environment 'gone.py:Casino' is not installed here",
    ),
    "no snapshots": (
        [lambda run: execute_in_database(run, "UPDATE turns SET snapshot = NULL")],
        "its snapshots are not kept",
    ),
    "no turns": (
        [lambda run: execute_in_database(run, "DELETE FROM turns")],
        "the episode ended before its first turn",
    ),
    "an invalid config": (
        [lambda run: edit_settings(run, 'name = "bandit"', "name = 3")],
        "env.name",
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_run_that_cannot_be_branched_reports_the_reason(
    run: Path, branching: Branching, name: str
) -> None:
    changes, message = OBSTACLES[name]
    for change in changes:
        change(run)
    answer = branching.branches(run, 1)
    assert answer["possible"] is False
    assert message in answer["reason"] and "\n" not in answer["reason"]
    with pytest.raises(RagenError) as error:
        branching.start(run, REQUEST)
    assert str(error.value) == answer["reason"]


def test_checkpoints_suffice_when_the_initial_model_is_missing(
    run: Path, branching: Branching
) -> None:
    without_model(run)
    shutil.rmtree(run / "checkpoints" / "step-0")
    answer = branching.branches(run, 1)
    assert (answer["possible"], answer["checkpoints"]) == (True, [1, 2])


def test_branching_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, ragen.viewer.branching\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
