"""Episodes in the database: their tokens, each stored once, texts, measures and indexes."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from ragen.algorithms.filters import SCORES, scores_of
from ragen.core.errors import RagenError
from ragen.core.types import Episode, Group
from ragen.storage.database import DATABASE, connect_to_read, fill, read
from ragen.storage.recorder import Recorder
from ragen.storage.schema import PLAYED, decompress
from ragen.storage.stored_episodes import _turns, episode_rows, read_episode, write_episodes
from tests.records import episode, groups, turn


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    (tmp_path / "run").mkdir()
    return Recorder.create(tmp_path / "run", "", lambda token: f"<{token}>")


def database_of(played: Episode) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    fill(connection, PLAYED)
    write_episodes(connection, 0, 1, [episode_rows(played, "train")])
    return connection


# Tokens.


@given(groups())
def test_prompts_and_completions_are_read_as_written(made: list[Group]) -> None:
    for played in (e for group in made for e in group.episodes):
        rows = _turns(database_of(played), 1)
        for t, row in zip(played.turns, rows, strict=True):
            assert tuple(row["prompt_ids"]) == t.prompt.token_ids
            assert tuple(row["completion_ids"]) == t.completion.token_ids
            np.testing.assert_array_equal(
                row["logprobs"], np.array(t.completion.logprobs, np.float32)
            )
            assert (row["thought_start"], row["thought_end"]) == (t.thought_span or (None, None))


def test_a_prompt_that_extends_the_last_turn_stores_only_its_new_tokens() -> None:
    first, extending = turn(prompt=(1, 2), sampled=(7,)), turn(prompt=(1, 2, 7, 3), sampled=(8,))
    restarting = turn(prompt=(1, 2, 3), sampled=(9,))  # As when the policy drops earlier turns.
    connection = database_of(episode(first, extending, restarting))
    rows = connection.execute("SELECT prompt_joins, prompt_ids FROM turns ORDER BY turn").fetchall()
    kept = [(joins, decompress("prompt_ids", ids).tolist()) for joins, ids in rows]
    assert kept == [(0, [1, 2]), (1, [3]), (0, [1, 2, 3])]


def test_the_text_of_a_token_is_written_once(recorder: Recorder) -> None:
    requested: list[int] = []

    def text_of(token: int) -> str:
        requested.append(token)
        return "half a pair \ud83d" if token == 7 else f"<{token}>"

    recorder.close()
    with Recorder.open(recorder.folder, text_of=text_of) as recorder_with_texts:
        recorder_with_texts.episodes(1, [Group((episode(turn(prompt=(1, 2), sampled=(7,))),))])
        recorder_with_texts.episodes(2, [Group((episode(turn(prompt=(1, 3), sampled=(7,))),))])
        recorder_with_texts.samples(2, [{"group": 0, "member": 0, "token_ids": [1, 9]}])
    with Recorder.open(recorder.folder, text_of=text_of) as recorder_with_texts:
        recorder_with_texts.episodes(3, [Group((episode(turn(prompt=(1, 2, 4), sampled=())),))])
    assert requested == [1, 2, 7, 3, 9, 4]
    texts = dict(read(recorder.folder, "SELECT * FROM tokens"))
    assert texts == {7: "half a pair ?"} | {n: f"<{n}>" for n in (1, 2, 3, 4, 9)}


# Episodes.


def test_the_measures_and_final_texts_of_an_episode_are_stored() -> None:
    thoughtless = turn(sampled=(7, 8, 9))  # logprobs of −.5
    certain = replace(turn(sampled=(5,), thought="on"), drawing=("P_",))
    certain = replace(certain, completion=replace(certain.completion, logprobs=(0.0,)))
    played = replace(
        episode(thoughtless, certain), final_observation="end \ud83d", final_drawing=("_P", "√H")
    )
    connection = database_of(played)
    columns = "num_tokens, thought_tokens, entropy, final_observation, final_drawing"
    (row,) = connection.execute(f"SELECT {columns} FROM episodes").fetchall()
    # Three tokens of 0.5 nats and one of 0.
    assert row[:4] == (4, 1, 0.375, "end ?")
    assert json.loads(row[4]) == ["_P", "√H"]
    drawings = [p for (p,) in connection.execute("SELECT drawing FROM turns ORDER BY turn")]
    assert drawings == [None, '["P_"]']


@pytest.mark.parametrize("score", SCORES)
def test_each_episode_stores_the_score_of_its_group(recorder: Recorder, score: Any) -> None:
    played = [
        Group((episode(turn(0.0)), episode(turn(1.0), turn()))),
        Group((episode(turn(), stop="error"),)),
    ]
    played = [
        Group(tuple(replace(e, group=n, member=m) for m, e in enumerate(group.episodes)))
        for n, group in enumerate(played)
    ]
    recorder.episodes(1, played, [True, False], scores=scores_of(played, score))
    recorder.episodes(1, played[:1], phase="eval")
    recorder.close()
    expected = SCORES[score](played[0])
    query = "SELECT group_score FROM episodes ORDER BY id"
    scores = [value for (value,) in read(recorder.folder, query)]
    assert scores == [expected, expected, None, None, None]


# Cross-scores.


def test_cross_scores_are_read_as_written_and_deleted_with_their_step(recorder: Recorder) -> None:
    scores = np.array([[-1.5, -np.inf, -3.25], [-0.5, -2.0, -1.0]])
    for step in (1, 2):
        for path in ("first", "any"):
            recorder.cross_scores(step, path, scores, [0, 2], ["left", "\ud83d"], ["a", "b", "c"])
    recorder.commit()
    recorder.forget_after(0, 1)
    recorder.close()
    (first, second) = read(recorder.folder, "SELECT * FROM cross_scores ORDER BY path DESC")
    assert (first[:3], second[:3]) == ((0, 1, "first"), (0, 1, "any"))
    _, _, _, blob, own, num_thoughts, num_prompts, thoughts, prompts = first
    shape = (num_thoughts, num_prompts)
    np.testing.assert_array_equal(decompress("scores", blob).reshape(shape), scores)
    assert decompress("own", own).tolist() == [0, 2]
    assert (json.loads(thoughts), json.loads(prompts)) == (["left", "\ud83d"], ["a", "b", "c"])


# Reading.


@pytest.mark.parametrize("name", ["plain", "a b?mode=rwc#x%20ä'\""])
def test_reading_leaves_the_database_unchanged(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    with Recorder.create(folder, "") as recorder:
        recorder.event(0, "note", "here")
        # During a write, and over a connection that cannot write.
        assert read(folder, "SELECT text FROM events") == [("here",)]
        reader = connect_to_read(folder / "run.sqlite")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.execute("DELETE FROM metrics")
        reader.close()
    before = (folder / "run.sqlite").read_bytes()
    assert read(folder, "SELECT text FROM events") == [("here",)]
    assert (folder / "run.sqlite").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "run.sqlite"]
    with pytest.raises(sqlite3.OperationalError):
        connect_to_read(folder / "other.sqlite")
    assert not (folder / "other.sqlite").exists()


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "[", "7", b"\xff"])
def test_a_damaged_column_is_reported_in_one_line(recorder: Recorder, text: str | bytes) -> None:
    recorder.episodes(1, [Group((episode(turn()),))])
    recorder.close()
    assert read_episode(recorder.folder, 1)
    with closing(sqlite3.connect(recorder.folder / DATABASE)) as connection, connection:
        connection.execute("UPDATE turns SET actions_asked = ?", (text,))
    with pytest.raises(RagenError, match=r"cannot be read: a value of actions_asked is damaged"):
        read_episode(recorder.folder, 1)
