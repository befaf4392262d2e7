"""Pictures in a run's database: written once, read back, exported as files."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from ragen.algorithms.samples import to_samples
from ragen.core.errors import RagenError
from ragen.core.pictures import MARK, PLACE, Picture
from ragen.core.types import Episode, Group
from ragen.storage.branches import Request, write_branches
from ragen.storage.database import DATABASE, read
from ragen.storage.export_episodes import export_episodes, export_traces
from ragen.storage.schema import decompress
from ragen.storage.stored_episodes import read_episodes
from tests.pictured import picture_run, seeing_chat, seen_episodes


@pytest.fixture(scope="module")
def played() -> list[Episode]:
    return seen_episodes()


@pytest.fixture(scope="module")
def run(played: list[Episode], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_run(tmp_path_factory.mktemp("pictures") / "run", played)


def shown(episode: Episode) -> set[Picture]:
    return {each for turn in episode.turns for each in turn.pictures} | {*episode.final_pictures}


def test_episodes_are_read_with_their_pictures(run: Path, played: list[Episode]) -> None:
    for recorded, original in zip(read_episodes(run), played * 2, strict=True):
        episode = recorded.episode
        assert episode.final_pictures == original.final_pictures
        assert [t.pictures for t in episode.turns] == [t.pictures for t in original.turns]
        for turn, before in zip(episode.turns, original.turns, strict=True):
            assert turn.prompt.token_ids == before.prompt.token_ids
            if turn.prompt.token_ids is not None:
                assert turn.prompt.pictures == before.prompt.pictures
            assert all(
                (a.pixels == b.pixels).all()
                for a, b in zip(turn.pictures, before.pictures, strict=True)
            )


def test_each_picture_is_stored_once(run: Path, played: list[Episode]) -> None:
    hashes = {picture.hash for episode in played for picture in shown(episode)}
    rows = read(run, "SELECT hash, png FROM pictures")
    assert {hash for hash, _ in rows} == hashes and len(rows) == len(hashes)
    assert all(Picture.of_png(png).hash == hash for hash, png in rows)
    assert read(run, "SELECT min(id) >= 0 FROM tokens") == [(1,)]
    (ids,) = read(run, "SELECT token_ids FROM samples WHERE step = 1")[0]
    (sample,) = to_samples([Group((played[0],))])[0]
    assert tuple(decompress("token_ids", ids)) == sample.token_ids and min(sample.token_ids) < 0


def test_branches_have_pictures_of_their_own(run: Path, played: list[Episode]) -> None:
    write_branches(run, Request(1, 0, 0, 1, 1.0, 0), played[:1], True, seeing_chat().text_of)
    with closing(sqlite3.connect(run / "branches.sqlite")) as connection:
        (count,) = connection.execute("SELECT count(*) FROM pictures").fetchone()
    assert count == len(shown(played[0]))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_export(run: Path, played: list[Episode], tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        table = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / f"episodes{suffix}"
    assert export_episodes(run, out) == 8
    if suffix == ".parquet":
        rows = table.read_table(out).to_pylist()
    else:
        rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert PLACE not in json.dumps(rows, ensure_ascii=False)
    assert "ufdd1" not in json.dumps(rows)
    for row, episode in zip(rows, played * 2, strict=True):
        assert row["final_pictures"] == [each.hash for each in episode.final_pictures]
        for turn, original in zip(row["turns"], episode.turns, strict=True):
            assert turn["pictures"] == [each.hash for each in original.pictures]
            assert turn["observation"] == original.observation.replace(PLACE, MARK)
            if original.prompt.token_ids is not None:
                assert tuple(turn["prompt_ids"]) == original.prompt.token_ids
    files = {path.stem: path for path in (tmp_path / "pictures").iterdir()}
    assert files.keys() == {each.hash for episode in played for each in shown(episode)}
    assert all(Picture.of(Image.open(path)).hash == hash for hash, path in files.items())


def test_a_trace_has_no_place_for_pictures(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RagenError, match="episode 1 shows pictures, for which a trace has no place"
    ):
        export_traces(run, tmp_path / "traces.jsonl")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM pictures", "is missing"),
        ("UPDATE pictures SET png = x'00'", "is damaged: cannot identify"),
        ("UPDATE pictures SET png = (SELECT max(png) FROM pictures)", "is damaged: it is another"),
        ("UPDATE pictures SET png = substr(png, 1, 60)", "is damaged"),
    ],
)
def test_a_damaged_picture_is_named_in_one_line(
    run: Path, tmp_path: Path, change: str, problem: str
) -> None:
    (tmp_path / DATABASE).write_bytes((run / DATABASE).read_bytes())
    (tmp_path / "config.toml").write_text("", "utf-8")
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection, connection:
        connection.execute(change)
    with pytest.raises(RagenError, match=f"cannot be read: the picture [0-9a-f]{{32}} {problem}"):
        list(read_episodes(tmp_path))
