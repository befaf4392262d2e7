"""Branches that the viewer asks for: processes of their own, two at a time, and never a shell."""

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

ASKED: dict[str, Any] = {"episode": 1, "turn": 0, "n": 3}


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


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def states(branching: Branching, run: Path) -> list[str]:
    return [job["state"] for job in branching.branches(run, 1)["jobs"]]


def pretend(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let a few lines of Python stand for the command."""
    monkeypatch.setattr(
        job_queue.Job,
        "arguments",
        lambda job: [sys.executable, "-c", code, str(job.folder), str(job.request.seed)],
    )


def test_a_branch_runs_and_is_read(run: Path, branching: Branching) -> None:
    before = branching.branches(run, 1)
    assert before == {"possible": True, "reason": None, "checkpoints": [0, 1, 2], "jobs": []}
    key = branching.start(run, {**ASKED, "checkpoint": 1, "temperature": 0.5, "run": "bandit"})
    (job,) = branching.branches(run, 1)["jobs"]
    assert (job["id"], job["state"], job["episodes"]) == (key, "running", [])
    until(lambda: states(branching, run) == ["done"])
    (job,) = branching.branches(run, 1)["jobs"]
    assert {**ASKED, "id": key, "checkpoint": 1, "temperature": 0.5}.items() <= job.items()
    assert (job["exact"], job["problem"], job["seed"]) == (True, None, 0)
    assert job["num_solved"] == sum(each["success"] for each in job["episodes"])
    assert job["success"] == asdict(wilson(job["num_solved"], 3))
    assert [each["member"] for each in job["episodes"]] == [0, 1, 2]
    assert all(each["turns"][0]["observation"] for each in job["episodes"])
    assert branching.branches(run, 2)["jobs"] == []


def test_a_database_that_is_just_being_made_holds_nothing(run: Path, branching: Branching) -> None:
    (run / FILE).touch()
    assert branching.branches(run, 1)["jobs"] == []
    (run / FILE).write_bytes(b"no database" * 99)
    with pytest.raises(RagenError, match=f"{FILE} cannot be read"):
        branching.branches(run, 1)


def test_what_is_not_said_is_the_newest_weights_and_the_runs_temperature(
    run: Path, branching: Branching
) -> None:
    branching.start(run, {**ASKED, "checkpoint": None, "temperature": None})
    branching.start(run, ASKED)
    jobs = branching.branches(run, 1)["jobs"]
    assert [(job["checkpoint"], job["temperature"]) for job in jobs] == [(2, 1.0)] * 2
    assert [job["seed"] for job in jobs] == [0, 1]  # asked again, it shows others


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('ragen: no')", "no"),
        ("import sys; sys.exit('Traceback\\nfirst\\nKeyError: 1\\n\\n')", "KeyError: 1"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("import sys; sys.stderr.write('x' * 10**6 + chr(10) + 'the end'); sys.exit(1)", "the end"),
    ],
)
def test_its_last_line_is_the_problem(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    pretend(monkeypatch, code)
    branching.start(run, ASKED)
    until(lambda: states(branching, run) == ["failed"])
    (job,) = branching.branches(run, 1)["jobs"]
    assert words in job["problem"] and not job["problem"].startswith("ragen")
    assert not (run / FILE).exists()


def test_who_asks_at_the_same_time_sees_others(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "import time; time.sleep(60)")
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda _: branching.start(run, ASKED), range(8)))
    assert {job["seed"] for job in branching.branches(run, 1)["jobs"]} == set(range(8))


def test_two_play_and_the_others_wait(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run / "here"
    here.mkdir()
    pretend(
        monkeypatch,
        "import pathlib, sys, time\n"
        "me = pathlib.Path(sys.argv[1], 'here', sys.argv[2]); me.touch()\n"
        "time.sleep(0.4); me.unlink(); sys.exit('over')",
    )
    for _ in range(5):
        branching.start(run, ASKED)
    most = 0
    while "running" in states(branching, run):
        most = max(most, len(list(here.iterdir())))
        time.sleep(0.01)
    assert most == job_queue.AT_ONCE == 2
    assert states(branching, run) == ["failed"] * 5  # none of them left what it was started for


def test_the_line_has_an_end(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "import time; time.sleep(60)")
    for _ in range(job_queue.AT_ONCE + job_queue.MOST_WAITING):
        branching.start(run, ASKED)
    with pytest.raises(RagenError, match="wait already"):
        branching.start(run, ASKED)


def test_processes_end_with_the_server(
    run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(
        monkeypatch,
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], f'pid-{os.getpid()}').touch(); time.sleep(60)",
    )
    for _ in range(4):
        branching.start(run, ASKED)
    until(lambda: len(list(run.glob("pid-*"))) == 2)
    branching.stop()
    assert branching.branches(run, 1)["jobs"] == []
    until(lambda: not any(alive(int(path.name[4:])) for path in run.glob("pid-*")))
    time.sleep(0.2)
    assert len(list(run.glob("pid-*"))) == 2  # and those that waited never began


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("asked", "words"),
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
        ({"temperature": -0.5}, "temperature = -0.5: expected a number from 0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"temperature": "1; rm -rf"}, "temperature: expected a number"),
        ({"temperature": 10**400}, "expected a number from 0"),
    ],
)
def test_a_request_is_checked(
    run: Path, branching: Branching, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(RagenError, match=words):
        branching.start(run, ASKED | asked)
    assert branching.branches(run, 1)["jobs"] == []


def written(run: Path, old: str, new: str) -> None:
    text = (run / "config.toml").read_text()
    assert text.count(old) == 1
    (run / "config.toml").write_text(text.replace(old, new))


def changed(run: Path, statement: str) -> None:
    connection = sqlite3.connect(run / DATABASE)
    connection.execute(statement)
    connection.commit()
    connection.close()


def without_model(run: Path) -> None:
    model = str(resolve("bandit", settings()).model.path)
    written(run, f'path = "{model}"', 'path = "nobody/has-this"')


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


HINDRANCES: dict[str, tuple[list[Callable[[Path], None]], str]] = {
    "no weights at all": (
        [without_model, without_checkpoints],
        "the run has no checkpoint, and its model 'nobody/has-this' is not on this machine",
    ),
    "an adapter without its base": (
        [without_model, lambda run: written(run, "rank = 0", "rank = 4")],
        "below the run's adapter is not on this machine",
    ),
    "another's environment": (
        [lambda run: written(run, 'name = "bandit"', 'name = "casino"')],
        "the environment 'casino' is not installed here",
    ),
    "an environment in a file": (
        [lambda run: written(run, 'name = "bandit"', 'name = "gone.py:Casino"')],
        "the environment 'gone.py:Casino' is not installed here",
    ),
    "no snapshots": (
        [lambda run: changed(run, "UPDATE turns SET snapshot = NULL")],
        "its snapshots are not kept",
    ),
    "no turns": (
        [lambda run: changed(run, "DELETE FROM turns")],
        "the episode ended before its first turn",
    ),
    "another config": (
        [lambda run: written(run, 'name = "bandit"', "name = 3")],
        "env.name",
    ),
}


@pytest.mark.parametrize("name", HINDRANCES)
def test_what_is_not_possible_says_why(run: Path, branching: Branching, name: str) -> None:
    changes, words = HINDRANCES[name]
    for change in changes:
        change(run)
    found = branching.branches(run, 1)
    assert found["possible"] is False and words in found["reason"] and "\n" not in found["reason"]
    with pytest.raises(RagenError) as refused:
        branching.start(run, ASKED)
    assert str(refused.value) == found["reason"]


def test_checkpoints_are_enough_without_the_first_model(run: Path, branching: Branching) -> None:
    without_model(run)
    shutil.rmtree(run / "checkpoints" / "step-0")
    found = branching.branches(run, 1)
    assert (found["possible"], found["checkpoints"]) == (True, [1, 2])


def test_only_loading_is_left_to_the_process() -> None:
    code = (
        "import sys, ragen.viewer.branching\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
