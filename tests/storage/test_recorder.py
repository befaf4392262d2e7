"""The recorder: transactions of a step, attempts, searchable thoughts, arrays, and refusals."""

import math
import os
import shutil
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen.core.errors import RagenError
from ragen.core.metrics import largest, mean, total
from ragen.core.types import Episode, Group
from ragen.storage.database import (
    DATABASE,
    connect,
    connect_to_read,
    new_run_folder,
    open_database,
    read,
)
from ragen.storage.reader import read_evaluations, read_events, read_metrics, standing
from ragen.storage.recorder import Recorder, append_event
from ragen.storage.schema import SAMPLE_ARRAYS, SCHEMA_VERSION, decompress
from ragen.storage.stored_episodes import write_episodes
from tests import records
from tests.limits import largest_file, needs_posix


def episode(
    group: int, member: int, num_turns: int = 2, thought: str | None = "go right"
) -> Episode:
    """Each turn has the reward 0.5 and the penalty −0.1."""
    turns = tuple(
        replace(
            records.turn(0.5, penalty=-0.1, thought=thought, executed=1, state=f"k{k}"),
            actions_asked=("Up", "Right"),
            snapshot={"grid": ["P_"]},
        )
        for k in range(num_turns)
    )
    return replace(records.episode(*turns, stop="solved"), group=group, member=member)


def groups(num_groups: int = 2, members: int = 2) -> list[Group]:
    return [Group(tuple(episode(g, m) for m in range(members))) for g in range(num_groups)]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.create(new_run_folder(tmp_path, "bandit"), "seed = 0\n")


def rows(recorder: Recorder, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(recorder.folder / DATABASE)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def count(recorder: Recorder, table: str) -> int:
    (number,) = rows(recorder, f"SELECT count(*) FROM {table}")[0]
    assert isinstance(number, int)
    return number


def test_metrics_of_a_step_combine_by_their_own_rule(recorder: Recorder) -> None:
    recorder.log(3, {"loss": mean(1.0, 2), "tokens": total(5), "norm": largest(2.0)})
    recorder.log(3, {"loss": mean(4.0, 1), "tokens": total(7), "norm": largest(1.0)})
    recorder.log(3, {"nothing": mean(math.nan)})
    recorder.close()
    # loss: (1 · 2 + 4 · 1) ÷ 3 = 2; tokens: 5 + 7; norm: the larger; no number: NULL.
    assert rows(recorder, "SELECT step, name, value FROM metrics ORDER BY name") == [
        (3, "loss", 2.0),
        (3, "norm", 2.0),
        (3, "nothing", None),
        (3, "tokens", 12.0),
    ]


def test_a_step_is_written_in_one_transaction(recorder: Recorder) -> None:
    recorder.log(0, {"loss": mean(1.0)})
    recorder.episodes(0, groups())
    assert count(recorder, "metrics") == count(recorder, "episodes") == 0
    recorder.commit()
    assert (count(recorder, "metrics"), count(recorder, "episodes")) == (1, 4)
    recorder.log(1, {"loss": mean(2.0)})
    recorder.log(2, {"loss": mean(3.0)})  # The first row of the next step writes the one before.
    assert count(recorder, "metrics") == 2
    recorder.discard()
    recorder.close()
    assert count(recorder, "metrics") == 2


def test_an_interrupted_step_is_dropped_and_its_events_are_kept(recorder: Recorder) -> None:
    with pytest.raises(KeyboardInterrupt), recorder:
        recorder.log(0, {"loss": mean(1.0)})
        recorder.commit()
        recorder.log(1, {"loss": mean(1.0)})
        recorder.event(1, "interrupt", "Ctrl-C", {"signal": 2})
        raise KeyboardInterrupt
    assert rows(recorder, "SELECT step FROM metrics") == [(0,)]
    assert rows(recorder, "SELECT step, kind, data FROM events") == [
        (1, "interrupt", '{"signal":2}')
    ]


def test_episodes_and_turns_are_written_as_rows(recorder: Recorder) -> None:
    recorder.episodes(4, groups(), kept=[False, True])
    recorder.close()
    episode_rows = rows(
        recorder, 'SELECT "group", member, kept, reward, penalty, num_turns FROM episodes'
    )
    # Two turns of reward .5 and penalty −.1.
    assert episode_rows == [(g, m, g, 1.0, -0.2, 2) for g in range(2) for m in range(2)]
    assert rows(
        recorder,
        'SELECT e."group", member, turn, actions_asked, t.num_tokens, state_key, snapshot '
        "FROM turns t JOIN episodes e ON e.id = t.episode_id WHERE state_key = 'k1'",
    )[2] == (1, 0, 1, '["Up","Right"]', 2, "k1", '{"grid":["P_"]}')


def test_thoughts_can_be_searched_until_their_turns_are_deleted(recorder: Recorder) -> None:
    search = "SELECT count(*) FROM thoughts_fts WHERE thoughts_fts MATCH 'right'"
    for step in range(3):
        recorder.episodes(step, groups())
    recorder.commit()
    assert rows(recorder, search) == [(24,)]  # 3 steps × 4 episodes × 2 turns
    recorder.forget_after(0, 0)
    assert rows(recorder, search) == [(8,)]
    recorder.episodes(1, [Group((episode(0, 0, thought="turn left"),))])
    recorder.episodes(1, [Group((episode(0, 1, thought=None),))])
    recorder.close()
    assert rows(recorder, search) == [(8,)]
    check = sqlite3.connect(recorder.folder / DATABASE)
    check.execute("INSERT INTO thoughts_fts (thoughts_fts) VALUES ('integrity-check')")
    check.close()


def test_forget_after_deletes_later_steps_of_the_attempt(recorder: Recorder) -> None:
    for attempt in range(2):
        recorder.attempt = attempt
        for step in range(4):
            recorder.log(step, {"loss": mean(step)})
            recorder.episodes(step, groups(1, 1))
            recorder.samples(step, [{"group": 0, "member": 0, "token_ids": [1]}])
            recorder.evaluation(step, {"env": "bandit", "success": 0.5})
            recorder.event(step, "note", "seen")
    recorder.close()
    with Recorder.open(recorder.folder, 1) as resumed:
        resumed.forget_after(1, 2)
        resumed.log(3, {"loss": mean(9.0)})
    for table in ("episodes", "samples", "evaluations"):
        assert count(recorder, table) == 4 + 3
    assert count(recorder, "turns") == 2 * 7
    assert count(recorder, "events") == 8
    assert rows(recorder, "SELECT value FROM metrics WHERE attempt = 1") == [(0,), (1,), (2,), (9,)]


def test_an_attempt_replaces_earlier_attempts_from_its_first_step_on(recorder: Recorder) -> None:
    for attempt, steps in ((0, range(1, 7)), (1, range(5, 7)), (2, range(3, 5))):
        recorder.attempt = attempt
        for step in steps:
            recorder.log(step, {"loss": mean(10 * attempt + step), "reward": mean(0)})
    recorder.commit()
    # Steps 3 and 4 are those of the last attempt; 5 and 6 belong to attempts that it replaces.
    expected = {1: 1.0, 2: 2.0, 3: 23.0, 4: 24.0}
    assert read_metrics(recorder.folder)["loss"] == expected
    assert list(read_metrics(recorder.folder)) == ["loss", "reward"]
    stands = standing(recorder.folder)
    assert [stands(0, 2), stands(0, 3), stands(1, 5), stands(2, 9)] == [True, False, False, True]


def test_events_are_read_in_order_with_their_data(recorder: Recorder) -> None:
    recorder.event(3, "alarm", "loud", {"value": 1.5})
    append_event(recorder.folder, 1, 4, "alarm", "from another thread", {})
    recorder.event(4, "resume", "on")
    alarms = [(e["attempt"], e["step"], e["data"]) for e in read_events(recorder.folder, "alarm")]
    assert alarms == [(0, 3, {"value": 1.5}), (1, 4, {})]
    assert [e["text"] for e in read_events(recorder.folder)][-1] == "on"


def test_events_cannot_be_deleted(recorder: Recorder) -> None:
    recorder.event(0, "alarm", "reward std fell")
    recorder.close()
    connection = sqlite3.connect(recorder.folder / DATABASE)
    with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        connection.execute("DELETE FROM events")
    connection.close()


def test_sample_arrays_are_read_as_written(recorder: Recorder) -> None:
    length = 7
    arrays = {name: np.arange(length).astype(kind) for name, kind in SAMPLE_ARRAYS.items()}
    del arrays["values"]
    recorder.samples(0, [{"group": 1, "member": 2, **arrays}])
    recorder.close()
    columns = ", ".join(f'"{name}"' for name in SAMPLE_ARRAYS)
    (row,) = rows(recorder, f'SELECT "group", member, num_tokens, {columns} FROM samples')
    assert row[:3] == (1, 2, length)
    for name, blob in zip(SAMPLE_ARRAYS, row[3:], strict=True):
        if name == "values":
            assert blob is None
        else:
            assert isinstance(blob, bytes)
            np.testing.assert_array_equal(decompress(name, blob), arrays[name])


def test_database_is_wal_while_open_and_one_plain_file_after(recorder: Recorder) -> None:
    recorder.log(0, {"loss": mean(1.0)})
    recorder.commit()
    assert rows(recorder, "PRAGMA journal_mode") == [("wal",)]
    recorder.close()
    assert rows(recorder, "PRAGMA journal_mode") == [("delete",)]
    assert rows(recorder, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert sorted(os.listdir(recorder.folder)) == ["config.toml", "run.sqlite"]


def test_a_full_disk_is_one_line_and_drops_the_whole_step(recorder: Recorder) -> None:
    recorder.log(0, {"loss": mean(1.0)})
    recorder.commit()
    (pages,) = recorder._connection.execute("PRAGMA page_count").fetchone()
    recorder._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    recorder.log(1, {"loss": mean(1.0)})
    recorder.episodes(1, groups(16, 16))
    with pytest.raises(RagenError, match=r"cannot use .*run.sqlite: .*full; free space") as error:
        recorder.commit()
    assert "\n" not in str(error.value)
    recorder.close()
    assert rows(recorder, "SELECT step FROM metrics") == [(0,)]
    assert count(recorder, "episodes") == 0


# Writing beside the run.


def test_one_step_at_a_time_is_written_later_and_readers_see_it_whole(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        inside.set()
        assert go_on.wait(10)
        write_episodes(*arguments)

    monkeypatch.setattr("ragen.storage.recorder.write_episodes", slow)
    for step in (1, 2):
        recorder.log(step, {"loss": mean(step)})
        recorder.episodes(step, groups())
        if step == 1:
            recorder.commit_later()
            assert inside.wait(10)
            assert count(recorder, "metrics") == 0  # in the middle of its transaction
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(recorder.commit_later)
        time.sleep(0.05)
        assert not second.done()  # it waits for the first, so that memory is bounded
        go_on.set()
        second.result()
    recorder.event(2, "alarm", "entropy fell")  # after what was committed
    assert (count(recorder, "metrics"), count(recorder, "episodes")) == (2, 8)
    recorder.close()


def test_a_write_that_failed_later_is_raised_once_and_ends_the_writing(recorder: Recorder) -> None:
    recorder._connection.execute("PRAGMA query_only = ON")
    recorder.log(1, {"loss": mean(1.0)})
    recorder.commit_later()
    recorder._writer.submit(recorder._connection.execute, "PRAGMA query_only = OFF").result()
    recorder.log(2, {"loss": mean(2.0)})
    with pytest.raises(RagenError, match=r"^cannot use .*readonly"), recorder:
        recorder.commit_later()
    assert count(recorder, "metrics") == 0


def test_a_run_is_never_overwritten(recorder: Recorder) -> None:
    recorder.close()
    with pytest.raises(RagenError, match="holds a run already"):
        Recorder.create(recorder.folder, "seed = 1")
    assert (recorder.folder / "config.toml").read_text() == "seed = 0\n"


def test_a_folder_without_a_valid_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RagenError, match="is not a run folder"):
        Recorder.open(tmp_path)
    with pytest.raises(RagenError, match="is not a run folder"):
        read_evaluations(tmp_path)
    (tmp_path / DATABASE).write_bytes(b"not a database at all" * 100)
    with pytest.raises(RagenError, match="cannot be read"):
        Recorder.open(tmp_path)
    with pytest.raises(RagenError, match="cannot be read"):
        read_evaluations(tmp_path)
    assert (tmp_path / DATABASE).read_bytes() == b"not a database at all" * 100


def test_another_schema_is_refused(recorder: Recorder) -> None:
    recorder._connection.execute("PRAGMA user_version = 99")
    recorder.close()
    with pytest.raises(RagenError, match="has schema 99"):
        Recorder.open(recorder.folder)


@needs_posix
def test_a_second_recorder_is_refused_until_the_first_is_closed(recorder: Recorder) -> None:
    with pytest.raises(RagenError, match="being written by another process"):
        Recorder.open(recorder.folder)
    recorder.close()
    Recorder.open(recorder.folder).close()


def test_run_folders_are_numbered_after_the_last_one(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    assert new_run_folder(root, "bandit").name == "bandit-1"
    (root / "bandit-7").mkdir()
    (root / "bandit-large-9").mkdir()
    assert new_run_folder(root, "bandit").name == "bandit-8"


def test_a_file_system_without_shared_memory_gets_the_older_journal(tmp_path: Path) -> None:
    """Here the index of the log, of 32 KiB, may not grow; the database stays below the limit.

    A log that was left behind is in the database afterwards.
    """
    file = tmp_path / "small.sqlite"
    with closing(connect(file)) as connection:
        connection.execute("CREATE TABLE told (number)")
        connection.execute("INSERT INTO told VALUES (1)")
        killed = shutil.copytree(tmp_path, tmp_path / "killed") / file.name
    (killed.with_name(f"{file.name}-shm")).unlink()
    small = largest_file(20_000)
    with small, closing(connect(killed)) as connection, closing(connect(killed)) as other:
        connection.execute("INSERT INTO told VALUES (2)")
        other.execute("INSERT INTO told VALUES (3)")
        with closing(connect_to_read(killed)) as reader:
            found = reader.execute("SELECT * FROM told").fetchall()
        assert found == [(1,), (2,), (3,)]
        assert connection.execute("PRAGMA journal_mode").fetchall() == [("delete",)]
    assert os.listdir(killed.parent) == [file.name]


def test_a_database_that_another_process_writes_is_one_line(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So says a file system without locks, too."""
    recorder.close()
    monkeypatch.setattr("ragen.storage.database.WRITERS_S", 0.01)
    with closing(sqlite3.connect(recorder.folder / DATABASE, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RagenError, match=r"^cannot use .*is locked; .*--out$"):
            open_database(recorder.folder)


def test_a_database_whose_writer_was_killed_as_it_closed_is_read_again(tmp_path: Path) -> None:
    """Its journal has to be rolled back, which a read-only connection cannot do."""
    Recorder.create(tmp_path, "seed = 0").close()
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = 1")  # writes pages before the commit
        connection.execute("BEGIN IMMEDIATE")
        row = "INSERT INTO settings (text) VALUES (hex(randomblob(5000)))"
        for _ in range(50):
            connection.execute(row)
        killed = shutil.copytree(tmp_path, tmp_path / "killed")
    assert (killed / f"{DATABASE}-journal").stat().st_size
    assert read(killed, "SELECT text FROM settings") == [("seed = 0",)]
    assert [path.name for path in killed.iterdir() if "journal" in path.name] == []
