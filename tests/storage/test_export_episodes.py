"""Export of a run's episodes to JSON lines and Parquet: one row each, the same in both."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Group, Prompt
from ragen.storage.database import DATABASE
from ragen.storage.export_episodes import COLUMNS, TURN_COLUMNS, export_episodes, export_traces
from ragen.storage.recorder import Recorder
from ragen.storage.stored_episodes import read_episode
from tests.records import episode, turn
from tests.viewer_run import agent_episode, make_agent_run

Capture = pytest.CaptureFixture[str]
DOCUMENTED = Path(__file__).parents[2] / "docs" / "episodes.md"


def new_recorder(folder: Path) -> Recorder:
    folder.mkdir()
    return Recorder.create(folder, "")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def test_export_writes_one_line_per_episode(
    bandit_run: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "all.jsonl"
    assert main(["export", str(bandit_run), "--episodes", str(out)]) == 0
    rows = read_jsonl(out)
    assert f"{len(rows)} episodes are in {out}" in capsys.readouterr().out
    with sqlite3.connect(bandit_run / DATABASE) as connection:
        ((count, reward, turns),) = connection.execute(
            "SELECT count(*), sum(reward), sum(num_turns) FROM episodes"
        )
    assert len(rows) == count
    assert sum(row["reward"] for row in rows) == pytest.approx(reward)
    assert sum(len(row["turns"]) for row in rows) == turns
    assert all(list(row) == [*COLUMNS, "turns"] for row in rows)
    assert all(list(row["turns"][0]) == list(TURN_COLUMNS) for row in rows)
    assert all(isinstance(row["kept"], bool) for row in rows)
    first, recorded = rows[0]["turns"][0], read_episode(bandit_run, 1).episode.turns[0]
    assert tuple(first["prompt_ids"]) == recorded.prompt.token_ids
    assert tuple(first["completion_ids"]) == recorded.completion.token_ids
    assert tuple(first["logprobs"]) == recorded.completion.logprobs
    assert tuple(first["actions_executed"]) == recorded.actions_executed
    assert json.loads(first["snapshot"]) == recorded.snapshot


def test_exported_prompts_hold_all_their_tokens(tmp_path: Path) -> None:
    """The database stores what a prompt adds to the turn before; a row has all of its tokens."""
    turns = (
        turn(prompt=(1, 2), sampled=(7, 8)),
        turn(prompt=(1, 2, 7, 8, 3), sampled=(9,)),
        turn(prompt=(1, 2, 7, 8, 3, 9, 4), sampled=(9,)),
        turn(prompt=(5,), sampled=(6,)),
    )
    with new_recorder(tmp_path / "run") as recorder:
        recorder.episodes(1, [Group((episode(*turns),))])
        assert export_episodes(tmp_path / "run", tmp_path / "live.jsonl") == 0
        recorder.commit()  # An open run is exported up to its last commit.
        assert export_episodes(tmp_path / "run", tmp_path / "out.jsonl") == 1
    (row,) = read_jsonl(tmp_path / "out.jsonl")
    assert [tuple(each["prompt_ids"]) for each in row["turns"]] == [
        each.prompt.token_ids for each in turns
    ]


def test_parquet_holds_the_same_rows_as_jsonl(bandit_run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    out, other = tmp_path / "all.parquet", tmp_path / "all.jsonl"
    assert main(["export", str(bandit_run), "--episodes", str(out)]) == 0
    export_episodes(bandit_run, other)
    table = parquet.read_table(out)
    assert table.column_names == [*COLUMNS, "turns"]
    assert table.to_pylist() == read_jsonl(other)
    assert str(table.schema.field("turns").type.value_type.field("prompt_ids").type) in (
        "list<element: int64>",
        "list<item: int64>",
    )


def test_memory_of_an_export_does_not_grow_with_the_run(tmp_path: Path) -> None:
    def peak_memory(num: int) -> int:
        folder = tmp_path / f"run-{num}"
        with new_recorder(folder) as recorder:
            for step in range(num):
                episodes = [episode(turn(thought="t" * 10_000)) for _ in range(10)]
                recorder.episodes(step, [Group(tuple(episodes))])
        tracemalloc.start()
        assert export_episodes(folder, tmp_path / f"{num}.jsonl") == 10 * num
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    peak_memory(1)
    assert peak_memory(20) < peak_memory(4) + 300_000  # 16 steps more hold 1.6 MB of thoughts


def test_control_characters_are_exported_and_lone_surrogates_replaced(tmp_path: Path) -> None:
    text = "\u2028 \x00 \x1b[31m </script> \U0001f600 \ud800"
    with new_recorder(tmp_path / "run") as recorder:
        recorder.episodes(1, [Group((episode(turn(thought=text, state=text)),))])
    export_episodes(tmp_path / "run", tmp_path / "out.jsonl")
    (row,) = read_jsonl(tmp_path / "out.jsonl")
    assert row["turns"][0]["thought"] == text.replace("\ud800", "?")


def test_a_trace_has_the_exact_tokens_of_the_turns_and_masks_failed_episodes(
    tmp_path: Path, capsys: Capture
) -> None:
    failed = replace(episode(turn(prompt=(1, 2), sampled=(7,))), stop_reason="error", error="x")
    agent = agent_episode()
    with new_recorder(tmp_path / "run") as recorder:
        recorder.episodes(1, [Group((agent, failed, episode()))])
    out = tmp_path / "traces"
    assert main(["export", str(tmp_path / "run"), "--trace", str(out)]) == 0
    assert f"3 episodes are in {out}" in capsys.readouterr().out
    forked, lost, empty = read_jsonl(out)
    assert [tuple(each["prompt_token_ids"]) for each in forked["turns"]] == [
        each.prompt.token_ids for each in agent.turns
    ]
    third = forked["turns"][2]
    assert (third["node_id"], third["metadata"]["parent"]) == ("1/2", 0)
    assert third["metadata"]["link"] == "JSON written anew"
    assert (third["completion_token_ids"], third["per_token_logps"]) == ([9, 9], [-0.5, -0.5])
    assert third["loss_mask"] == [0, 0, 0, 0, 1, 1]
    assert third["response"]["choices"][0]["message"]["content"] == "reply (9, 9)"
    assert forked["turns"][-1]["metadata"] == {
        **{"episode_id": 1, "episode_phase": "train", "episode_step": 1, "episode_group": 0},
        **{"episode_member": 0, "episode_reward": 1.0, "episode_stop_reason": "solved"},
        **{"turn": 4, "parent": 1, "link": "verbatim", "policy_version": 0, "reward": 1.0},
        "penalty": 0.0,
    }
    assert lost["turns"][0]["loss_mask"] == [0, 0, 0]
    assert empty == {"schema_version": 1, "turns": []}


def test_traces_are_valid_for_openenv(bandit_run: Path, tmp_path: Path) -> None:
    """Its own class refuses other fields, types and lengths, and invalid masks and logprobs."""
    training = pytest.importorskip("openenv.core.harness.training", reason="needs openenv 0.10")
    make_agent_run(tmp_path / "agent")
    for run, num_turns in ((bandit_run, None), (tmp_path / "agent", 5)):
        out = tmp_path / f"{run.name}.jsonl"
        count = export_traces(run, out)
        lines = out.read_text("utf-8").splitlines()
        traces = [training.TrainingTrace.model_validate_json(line) for line in lines]
        assert len(traces) == count > 0
        assert num_turns is None or len(traces[0].turns) == num_turns
        assert all(sum(turn.loss_mask) > 0 for trace in traces for turn in trace.turns)


def test_a_trace_of_episodes_without_token_ids_is_refused(tmp_path: Path) -> None:
    words = replace(
        turn(),
        prompt=Prompt(({"role": "user", "content": "Go"},), None, 0, 8, 1.0, 0),
        completion=Completion(None, None, "ok", "stop", 0),
    )
    with new_recorder(tmp_path / "run") as recorder:
        recorder.episodes(1, [Group((episode(words),))])
    with pytest.raises(RagenError, match="episode 1 has no token ids"):
        export_traces(tmp_path / "run", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("RUN --episodes out.csv", "out.csv: expected a name that ends in .jsonl or .parquet"),
        ("RUN --episodes there.jsonl", "there.jsonl exists already"),
        ("RUN --episodes no/such/folder.jsonl", "cannot write no/such/folder.jsonl: no such file"),
        ("nowhere --episodes out.jsonl", "nowhere is not a run folder"),
        ("RUN --episodes out.jsonl --merge", "--episodes and --trace write no policy: leave --out"),
        ("RUN --trace there.jsonl", "there.jsonl exists already"),
        ("RUN --trace out.jsonl --step 1", "--episodes and --trace write no policy: leave --out"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    bandit_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").write_text("mine")
    assert main(["export", *arguments.replace("RUN", str(bandit_run)).split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]
    assert Path("there.jsonl").read_text() == "mine"


def test_parquet_without_pyarrow_names_the_missing_extra(
    bandit_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RagenError, match=r"pip install 'ragen-rl\[parquet\]'"):
        export_episodes(bandit_run, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


def test_every_column_is_documented() -> None:
    _, of_episodes, of_turns = DOCUMENTED.read_text("utf-8").split("| column |")
    for table, columns in ((of_episodes, {*COLUMNS, "turns"}), (of_turns, set(TURN_COLUMNS))):
        first = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", " ".join(first))) == columns
