"""Branches that the viewer starts: separate processes, one at a time, without a shell."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.core.statistics import wilson
from ragen.storage.branches import FILE
from ragen.storage.database import DATABASE
from ragen.viewer import branching as module
from ragen.viewer.branching import Branching
from tests.limits import needs_posix
from tests.records import edit_settings
from tests.viewer.test_viewer_server import wait_until

REQUEST: dict[str, Any] = {"episode": 1, "turn": 0, "n": 3}


@pytest.fixture
def branching() -> Iterator[Branching]:
    branching = Branching()
    yield branching
    branching.stop()


def states(branching: Branching, run: Path) -> list[str]:
    return [job["state"] for job in branching.branches(run, 1)["jobs"]]


def replace_command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the command of a request by a few lines of Python."""
    command = [sys.executable, "-S", "-c", code]
    monkeypatch.setattr(module, "command_of", lambda folder, _: [*command, str(folder)])


def test_a_branch_is_played_and_read(
    own_bandit_run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's own command, here in this process, which has loaded torch already."""
    run, command_of = own_bandit_run, module.command_of
    before = branching.branches(run, 1)
    assert before == {"reason": None, "checkpoints": [0, 1, 2, 3], "jobs": []}
    replace_command(monkeypatch, "import time; time.sleep(60)")
    key = branching.start(run, {**REQUEST, "checkpoint": 1, "temperature": 0.5, "run": "bandit"})
    (job,) = branching.branches(run, 1)["jobs"]
    assert (job["id"], job["state"], job["episodes"]) == (key, "running", [])
    assert branching._job is not None
    command = command_of(run.resolve(), branching._job.request)
    assert command[:3] == [sys.executable, "-m", "ragen"] and main(command[3:]) == 0
    assert states(branching, run) == ["done"]
    (job,) = branching.branches(run, 1)["jobs"]
    assert {**REQUEST, "id": key, "checkpoint": 1, "temperature": 0.5}.items() <= job.items()
    assert (job["exact"], job["seed"]) == (True, 0)
    assert job["num_solved"] == sum(each["success"] for each in job["episodes"])
    assert job["success"] == asdict(wilson(job["num_solved"], 3))
    assert [each["member"] for each in job["episodes"]] == [0, 1, 2]
    assert all(each["turns"][0]["observation"] for each in job["episodes"])
    assert branching.branches(run, 2)["jobs"] == []


def test_an_empty_database_has_no_branches_and_a_damaged_one_is_refused(
    own_bandit_run: Path, branching: Branching
) -> None:
    (own_bandit_run / FILE).touch()
    assert branching.branches(own_bandit_run, 1)["jobs"] == []
    (own_bandit_run / FILE).write_bytes(b"no database" * 99)
    with pytest.raises(RagenError, match=f"{FILE} cannot be read"):
        branching.branches(own_bandit_run, 1)


def test_a_failed_branch_reports_the_last_line_of_its_process(
    bandit_run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        "import sys; sys.exit('ragen: no')": "no",
        "import sys; sys.exit('Traceback\\nfirst\\nKeyError: 1\\n\\n')": "KeyError: 1",
        "import os; os.kill(os.getpid(), 9)": "it was ended by signal 9; perhaps the "
        "memory is too small",
        "raise SystemExit(3)": "it ended with code 3",
        "import sys; sys.stderr.write('x' * 10**6 + chr(10) + 'the end'); sys.exit(1)": "the end",
    }
    for code in expected:
        replace_command(monkeypatch, code)
        branching.start(bandit_run, REQUEST)
        wait_until(lambda: states(branching, bandit_run) == ["failed"])
        (job,) = branching.branches(bandit_run, 1)["jobs"]
        assert job["problem"] == expected[code]
    assert not (bandit_run / FILE).exists()


def test_a_second_request_is_refused_while_one_is_played(
    bandit_run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_command(monkeypatch, "import time; time.sleep(60)")
    branching.start(bandit_run, REQUEST)
    with pytest.raises(RagenError, match="other branches are played now"):
        branching.start(bandit_run, REQUEST)
    (job,) = branching.branches(bandit_run, 1)["jobs"]
    # The newest checkpoint and the run's temperature by default.
    assert (job["checkpoint"], job["temperature"], job["seed"]) == (3, 1.0, 0)
    branching.stop()
    assert states(branching, bandit_run) == []


STUBBORN = (
    "import pathlib, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
    "pathlib.Path(sys.argv[1], f'pid-{child.pid}').touch(); time.sleep(60)"
)
"""A process that does not end when it is told to, and has one of its own."""


@needs_posix
def test_a_cancelled_branch_ends_with_all_its_processes_and_the_next_one_starts(
    own_bandit_run: Path, branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_bandit_run
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    replace_command(monkeypatch, STUBBORN)
    first = branching.start(run, REQUEST)
    wait_until(lambda: len(list(run.glob("pid-*"))) == 1)
    (child,) = run.glob("pid-*")
    branching.cancel(run, {"id": first})
    assert states(branching, run) == []
    wait_until(lambda: ended(int(child.name[4:])))
    last = branching.start(run, REQUEST)
    assert states(branching, run) == ["running"]
    for folder, key in ((run, "unknown"), (run, None), (run.parent, last)):
        with pytest.raises(RagenError, match="is not played any more"):
            branching.cancel(folder, {"id": key})


def ended(pid: int) -> bool:
    """Whether a process has ended; nobody may have waited for it."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().split(") ")[1][0] == "Z"


def test_an_invalid_request_is_refused(bandit_run: Path, branching: Branching) -> None:
    for changes, message in INVALID:
        with pytest.raises(RagenError, match=message):
            branching.start(bandit_run, REQUEST | changes)
    assert branching.branches(bandit_run, 1)["jobs"] == []


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"episode": 10**6}, "no episode 1000000"),
    ({"episode": True}, "episode: Input should be a valid integer"),
    ({"episode": 2**70}, "episode: Input should be less than"),
    ({"turn": -1}, "turn: Input should be greater than or equal to 0"),
    ({"n": 65}, "n: Input should be less than or equal to 64"),
    ({"checkpoint": "--help"}, "checkpoint: Input should be a valid integer"),
    ({"temperature": float("nan")}, "temperature: Input should be less than or equal to 100"),
    ({"temperature": "1; rm -rf"}, "temperature: Input should be a valid number"),
    ({"temperature": 10**400}, "temperature: "),
]


def test_a_run_that_cannot_be_branched_reports_the_reason(
    own_bandit_run: Path, branching: Branching
) -> None:
    edit_settings(own_bandit_run, 'name = "bandit"', "name = 3")
    for statement, message in (
        ("SELECT 1", "env.name"),
        ("UPDATE turns SET snapshot = NULL", "its snapshots are not kept"),
        ("DELETE FROM turns", "the episode ended before its first turn"),
    ):
        with sqlite3.connect(own_bandit_run / DATABASE) as connection:
            connection.execute(statement)
        reason = branching.branches(own_bandit_run, 1)["reason"]
        assert message in reason and "\n" not in reason
        with pytest.raises(RagenError) as error:
            branching.start(own_bandit_run, REQUEST)
        assert str(error.value) == reason
