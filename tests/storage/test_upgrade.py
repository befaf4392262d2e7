"""Runs of the previous version: reading them and upgrading their databases."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ragen.config.reading import parse_config, read_config
from ragen.core.errors import RagenError
from ragen.storage import database
from ragen.storage.database import DATABASE, claim, open_database, read
from ragen.storage.reader import read_evaluations, read_events, read_metrics
from ragen.storage.schema import SCHEMA
from ragen.storage.stored_episodes import read_episode
from tests.old_run import make_old_run


def version_of(run: Path) -> int:
    with closing(sqlite3.connect(run / DATABASE)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def columns(connection: sqlite3.Connection) -> dict[str, set[tuple[object, ...]]]:
    """Name, type and constraints of the columns of every table, and the columns of every index."""
    tables = {}
    names = "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'thoughts_fts%'"
    for kind, name in connection.execute(names).fetchall():
        info = "index_info" if kind == "index" else "table_info"
        tables[name] = {row[1:] for row in connection.execute(f"PRAGMA {info}('{name}')")}
    return tables


def test_a_database_of_schema_3_is_upgraded_when_it_is_read(tmp_path: Path) -> None:
    run = make_old_run(tmp_path / "run")
    assert version_of(run) == 3
    assert read_metrics(run)["reward/mean"] == {1: 0.25}
    assert version_of(run) == 6
    (evaluation,) = read_evaluations(run)
    assert (evaluation["env"], evaluation["optimal"], evaluation["step"]) == ("bandit", 1.0, 1)
    assert "world" not in evaluation and "best" not in evaluation
    ((settings,),) = read(run, "SELECT settings FROM evaluations")
    assert settings == '{"version": 4, "seed": 0, "env.name": "bandit", "env.max_turns": 1}'
    assert read_episode(run, 1).episode.env == "bandit"
    assert read_events(run, "alarm")[0]["data"]["detector"] == "grad_spike"
    assert read_events(run, "guard")[0]["data"] == {"action": "stop"}
    assert {path.name for path in run.iterdir()} == {"config.toml", DATABASE}


def test_an_upgraded_database_has_the_columns_and_indexes_of_the_present_schema(
    tmp_path: Path,
) -> None:
    run = make_old_run(tmp_path / "run")
    with (
        closing(open_database(run)) as upgraded,
        closing(sqlite3.connect(":memory:")) as fresh,
    ):
        fresh.executescript(SCHEMA)
        actual, expected = columns(upgraded), columns(fresh)
    del actual["episodes"], expected["episodes"]  # A dropped column shifts the positions.
    # Column positions in the index over episodes shift with it, too.
    for name in ("episodes_by_step", "episodes_for_lists"):
        assert {row[-1] for row in actual.pop(name)} == {row[-1] for row in expected.pop(name)}
    assert actual == expected


def test_a_database_of_schema_5_gets_the_results_of_tools(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.executescript(SCHEMA)
        expected = columns(connection)
        connection.executescript("ALTER TABLE turns DROP COLUMN results; PRAGMA user_version = 5")
    with closing(open_database(tmp_path)) as upgraded:
        assert columns(upgraded) == expected
    assert version_of(tmp_path) == 6


def test_an_old_database_is_not_upgraded_while_a_process_writes_it(tmp_path: Path) -> None:
    run = make_old_run(tmp_path / "run")
    handle = claim(run)
    assert handle is not None
    with pytest.raises(RagenError, match="is being written by an earlier version"):
        read_metrics(run)
    os.close(handle)
    assert version_of(run) == 3
    assert read_metrics(run)


def test_an_old_database_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readonly(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    run = make_old_run(tmp_path / "run")
    monkeypatch.setattr(database, "upgrade", readonly)
    with pytest.raises(RagenError, match=r"has schema 3 and cannot be brought to 6: .* writable"):
        read_metrics(run)


def test_a_failed_upgrade_leaves_the_database_unchanged(tmp_path: Path) -> None:
    run = make_old_run(tmp_path / "run")
    with closing(sqlite3.connect(run / DATABASE)) as connection, connection:
        connection.execute("UPDATE evaluations SET record = '{'")
    with pytest.raises(RagenError, match="is damaged and cannot be upgraded"):
        read_metrics(run)
    assert version_of(run) == 3
    with closing(sqlite3.connect(run / DATABASE)) as connection:
        assert connection.execute("SELECT world FROM episodes").fetchall() == [("bandit",)]


@pytest.mark.parametrize("version", [2, 7])
def test_any_other_schema_is_refused(tmp_path: Path, version: int) -> None:
    run = make_old_run(tmp_path / "run")
    with closing(sqlite3.connect(run / DATABASE)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(RagenError, match=f"has schema {version}, this RAGEN reads 6"):
        open_database(run)


def test_an_old_config_is_read_under_the_present_names(tmp_path: Path) -> None:
    config = read_config(make_old_run(tmp_path / "run") / "config.toml")
    assert (config.env.name, config.env.max_turns, config.env.max_actions) == ("bandit", 1, 1)
    assert (config.rollout.num_groups, config.rollout.group_size) == (16, 8)
    text = (tmp_path / "run" / "config.toml").read_text("utf-8")
    assert config == parse_config(text, "config.toml", to_resume=True)


def test_a_run_with_a_removed_setting_can_be_read_but_not_resumed(tmp_path: Path) -> None:
    file = make_old_run(tmp_path / "run") / "config.toml"
    text = file.read_text("utf-8")
    file.write_text(text.replace("weight_decay = 0.01", "weight_decay = 0.1"), "utf-8")
    assert file.read_text("utf-8") != text
    assert read_config(file).env.name == "bandit"
    with pytest.raises(RagenError, match=r"weight_decay = 0\.1 in .* was removed: .* version"):
        parse_config(file.read_text("utf-8"), "config.toml", to_resume=True)
