"""The answers of the viewer's API about a small run, question by question."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from viewer_run import THOUGHTS, agent_episode, log_step, make_agent_run, make_engine_run, make_run

from ragen.algorithms.samples import to_samples
from ragen.config.reading import dump, merge
from ragen.core.types import Group
from ragen.reports.facts import read_facts
from ragen.storage.branches import FILE
from ragen.storage.database import CONFIG, DATABASE, is_claimed
from ragen.storage.recorder import Recorder
from ragen.storage.schema import SCHEMA_VERSION
from ragen.viewer.branching import Branching
from ragen.viewer.reading import NotFound, Question, Runs, Unanswered, Unreadable
from ragen.viewer.server import ROUTES, Json
from tests.cli.test_cli import evaluation


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "lake")
    make_run(folder / "study" / "arms" / "half", finish=False)
    return folder


def ask(root: Path, path: str, /, **query: Any) -> dict[str, Any]:
    """The answer of the API, decoded from JSON, in which every number is finite or null."""
    question = Question(Runs(root), {name: str(value) for name, value in query.items()})
    answer = ROUTES[f"/api/{path}"](question)
    decoded: dict[str, Any] = json.loads(Json(answer).body, parse_constant=pytest.fail)
    return decoded


def run_of(root: Path, name: str) -> dict[str, Any]:
    (summary,) = (run for run in ask(root, "runs")["runs"] if run["run"] == name)
    return summary


# All runs


def test_the_list_of_runs_has_state_progress_and_success(root: Path) -> None:
    lake = run_of(root, "lake")
    assert (lake["state"], lake["step"], lake["steps"], lake["attempts"]) == ("finished", 6, 6, 2)
    assert (lake["env"], lake["recipe"], lake["seed"]) == ("frozen-lake", "frozen-lake", 7)
    assert lake["success"] == {"value": 0.9, "low": 0.8, "high": 1.0, "step": 6, "how": "T=1"}
    assert lake["before"]["value"] == 0.5 and (lake["random"], lake["optimal"]) == (0.5, 1.0)
    assert lake["spark"] == [0.6, 0.7, 0.9, 0.9, 0.9, 0.9]  # Without steps that were rolled back.
    assert (lake["alarms"], lake["last_event"]["kind"]) == (1, "guard")
    assert lake["num_episodes"] == 8 * 4 + 3 * 4
    assert run_of(root, "study/arms/half")["state"] == "interrupted"


def test_the_folder_of_the_viewer_may_be_a_run(root: Path) -> None:
    (run,) = ask(root / "lake", "runs")["runs"]
    assert (run["run"], run["name"]) == (".", "lake")
    assert ask(root / "lake", "run", run=".")["step"] == 6


def test_a_run_is_running_while_a_process_writes_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Recorder.create(tmp_path / "a", dump(merge("bandit"))) as recorder:
        assert run_of(tmp_path, "a")["state"] == "running"
        assert is_claimed(tmp_path / "a"), "reading took the claim of the run"
        log_step(recorder, 1, 0.5)
        recorder.commit()
        assert (run_of(tmp_path, "a")["step"], run_of(tmp_path, "a")["state"]) == (1, "running")
        recorder.event(1, "guard", "stopped: reward_drop", {"action": "stop"})
    assert run_of(tmp_path, "a")["state"] == "stopped"


def test_every_question_is_answered_for_a_run_without_steps(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Recorder.create(tmp_path / "a", dump(merge("bandit"))).close()
    for path in ROUTES:
        if path not in ("/api/runs", "/api/compare"):
            query = {"run": "a", "names": "x", "episode": 1, "step": 1, "attempt": 0, "group": 0}
            try:
                ask(
                    tmp_path,
                    path.removeprefix("/api/"),
                    **query,
                    phase="eval",
                    level_seed=1,
                    path=1,
                )
            except NotFound as absent:
                assert str(absent).startswith(("there is no", "no cross-scores"))
    assert run_of(tmp_path, "a")["step"] == 0


# Unreadable runs


def test_an_unreadable_run_reports_its_problem_in_one_line(root: Path, tmp_path: Path) -> None:
    for name in ("schema", "junk", "half", "config", "deep", "good"):
        make_run(tmp_path / name)
    with sqlite3.connect(tmp_path / "schema" / DATABASE) as connection:
        connection.execute("PRAGMA user_version = 99")
    (tmp_path / "junk" / DATABASE).write_bytes(b"no database" * 999)
    (tmp_path / "half" / DATABASE).write_bytes((tmp_path / "half" / DATABASE).read_bytes()[:9000])
    (tmp_path / "config" / CONFIG).write_text("steps = ", encoding="utf-8")
    (tmp_path / "deep" / CONFIG).write_text(f"x = {'[' * 50_000}", encoding="utf-8")
    runs = {run["name"]: run for run in ask(tmp_path, "runs")["runs"]}
    assert runs["good"]["state"] == "finished"
    for name, message in {
        "deep": "config.toml is damaged",
        "schema": f"run.sqlite has schema 99, this RAGEN reads {SCHEMA_VERSION}; "
        "use the version that wrote it",
        "junk": "run.sqlite cannot be read: file is not a database",
        "half": "run.sqlite cannot be read: database disk image is malformed",
        "config": "config.toml is damaged",
    }.items():
        assert runs[name]["state"] == "unreadable"
        assert runs[name]["problem"].startswith(message) and "\n" not in runs[name]["problem"]
        with pytest.raises(Unreadable, match=r"run\.sqlite|config\.toml"):
            ask(tmp_path, "run", run=name)


def test_invalid_values_in_one_run_do_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    changes = (
        "UPDATE evaluations SET record = '[]'",
        """UPDATE evaluations SET record = '{"temperature": "hot"}'""",
        "UPDATE metrics SET value = 'high' WHERE name = 'success/mean'",
        "UPDATE metrics SET value = x'00' WHERE name = 'progress/updates'",
        "UPDATE events SET text = x'ff', kind = 'guard'",
    )
    for number, change in enumerate(changes):
        make_run(tmp_path / f"odd-{number}")
        with sqlite3.connect(tmp_path / f"odd-{number}" / DATABASE) as connection:
            connection.execute(change)
    runs = {run["run"]: run for run in ask(tmp_path, "runs")["runs"]}
    assert len(runs) == 6 and runs["good"]["state"] == "finished"
    for run in runs.values():
        assert run["state"] in ("finished", "unreadable")
        assert (run["state"] == "unreadable") == (run["problem"] is not None)


def test_a_step_far_from_the_others_takes_no_time(tmp_path: Path) -> None:
    make_run(tmp_path / "far")
    with sqlite3.connect(tmp_path / "far" / DATABASE) as connection:
        connection.execute("UPDATE metrics SET step = 1 << 60 WHERE attempt = 1 AND step = 6")
    assert run_of(tmp_path, "far")["step"] == 1 << 60


def test_a_deleted_run_is_not_found(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    ask(tmp_path, "run", run="a")
    (tmp_path / "a" / DATABASE).unlink()
    with pytest.raises(NotFound, match="there is no run 'a' here"):
        ask(tmp_path, "run", run="a")
    assert ask(tmp_path, "runs")["runs"] == []


def test_a_damaged_array_is_reported(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with sqlite3.connect(tmp_path / "a" / DATABASE) as connection:
        connection.execute(
            "UPDATE turns SET prompt_ids = x'00', drawing = '{' WHERE id / 65536 = 1"
        )
    with pytest.raises(Unreadable, match="prompt_ids cannot be unpacked"):
        ask(tmp_path, "tokens", run="a", episode=1)
    with pytest.raises(Unreadable, match="is not JSON"):
        ask(tmp_path, "episode", run="a", episode=1)
    with sqlite3.connect(tmp_path / "a" / DATABASE) as connection:
        connection.execute("UPDATE turns SET drawing = ?", ("[" * 100_000,))
    with pytest.raises(Unreadable, match="is not JSON"):
        ask(tmp_path, "episode", run="a", episode=1)


def test_reading_leaves_the_folder_unchanged(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with sqlite3.connect(tmp_path / "a" / DATABASE) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # As in a copy of an open run.
    connection.close()
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    stamp = (tmp_path / "a" / DATABASE).stat().st_mtime_ns
    ask(tmp_path, "run", run="a")
    ask(tmp_path, "episodes", run="a", q="box")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before
    assert (tmp_path / "a" / DATABASE).stat().st_mtime_ns == stamp


def test_a_run_that_is_closed_during_reads_leaves_no_log_file(tmp_path: Path) -> None:
    """Only the writer merges the write-ahead log, and it has to wait for readers."""
    (tmp_path / "a").mkdir()
    recorder = Recorder.create(tmp_path / "a", dump(merge("bandit")))
    log_step(recorder, 1, 0.5)
    recorder.commit()
    done = threading.Event()

    def read_repeatedly() -> None:
        while not done.wait(0.01):  # Two readers without a pause would block the writer.
            ask(tmp_path, "episodes", run="a")

    readers = [threading.Thread(target=read_repeatedly) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        log_step(recorder, 2, 0.5)
        recorder.close()
        log_is_gone = not (tmp_path / "a" / f"{DATABASE}-wal").exists()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert log_is_gone and ask(tmp_path, "runs")["runs"][0]["step"] == 2


# One run


def test_a_run_has_config_events_evaluations_and_metric_names(root: Path) -> None:
    run = ask(root, "run", run="lake")
    assert run["config"]["env.name"] == "frozen-lake" and run["config"]["steps"] == 6
    changes = {each["key"]: each for each in run["differences"]}
    assert set(changes) == {"steps", "seed"}
    assert changes["seed"] == {"key": "seed", "value": 7, "base": 0, "source": "recipe frozen-lake"}
    assert [event["kind"] for event in run["events"]] == ["alarm", "guard"]
    assert run["events"][0]["data"] == {"detector": "grad_spike"}
    assert [each["step"] for each in run["evaluations"]] == [0, 6]  # Step 4 was rolled back.
    assert run["evaluations"][0]["success"] == {"value": 0.5, "low": 0.4, "high": 0.6}
    assert run["labels"]["success/mean"] == "success" and "time/step_s" in run["names"]
    # Updates of all attempts; two evaluations that were not rolled back.
    assert run["phases"] == {"update": 8.0, "evaluations": 1.0}
    (exact,) = run["exactness"]
    assert exact["name"] == "mismatch/max_abs" and exact["last"] == exact["largest"] == 6e-6
    assert run["episode_steps"] == [0, 1, 2, 3, 4, 5, 6]


def test_the_metrics_of_an_engine_are_among_the_signals_and_its_losses_among_the_events(
    root: Path, tmp_path: Path
) -> None:
    make_engine_run(tmp_path / "ray")
    run = ask(tmp_path, "run", run="ray")
    assert {"engine/queue", "engine/learner_idle_fraction"} <= run["labels"].keys()
    lost = [event["step"] for event in run["events"] if event["data"]["what"] == "lost"]
    assert lost == [5, 20]
    assert not any(name.startswith("engine/") for name in ask(root, "run", run="lake")["labels"])


def test_differences_are_relative_to_the_recipe_or_the_preset(tmp_path: Path) -> None:
    configs = {
        "of-mine": merge("bandit").model_copy(update={"recipe": "of-mine"}),
        "ppo": merge("bandit", {"algorithm": "starpo/ppo"}),
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        Recorder.create(tmp_path / name, dump(config)).close()
    differences = ask(tmp_path, "run", run="of-mine")["differences"]
    assert {each["source"] for each in differences} == {"preset starpo-s/grpo"}
    (change,) = ask(tmp_path, "run", run="ppo")["differences"]
    assert [change[key] for key in ("key", "value", "base")] == [
        *("algorithm", "starpo/ppo", "starpo-s/grpo")
    ]
    with (tmp_path / "ppo" / CONFIG).open("a") as file:
        file.write("\n[of_another_version]\nkey = 1\n")
    run = ask(tmp_path, "run", run="ppo")
    assert run["differences"] is None and run["config"]["of_another_version.key"] == 1


def test_metrics_have_every_axis_and_the_values_that_were_rolled_back(root: Path) -> None:
    answer = ask(root, "metrics", run="lake", names="success/mean,nothing")
    assert answer["axes"] == {
        "step": [1, 2, 3, 4, 5, 6],
        "updates": [2, 4, 6, 8, 10, 12],
        "episodes": [4, 8, 12, 16, 20, 24],
        "tokens": [10, 20, 30, 40, 50, 60],
        "seconds": [4, 8, 12, 16, 20, 24],
    }
    curve = answer["names"]["success/mean"]
    assert (curve["at"], curve["values"]) == ([0, 1, 2, 3, 4, 5], [0.6, 0.7, 0.9, 0.9, 0.9, 0.9])
    assert curve["left"] == [{"attempt": 0, "steps": [2, 3, 4], "values": [0.7, 0.8, 0.9]}]
    assert answer["names"]["nothing"] == {"at": [], "values": [], "left": []}
    reported = read_facts(root / "lake").curve("success/mean")
    assert curve["values"] == list(reported.standing.values())
    assert [dict(zip(left["steps"], left["values"], strict=True)) for left in curve["left"]] == [
        dict(left) for left in reported.rolled_back
    ]


# Episodes


def test_an_episode_has_its_turns_and_neighbours(root: Path) -> None:
    answer = ask(root, "episode", run="lake", episode=1)
    first, second = answer["turns"]
    assert (first["thought"], first["drawing"]) == (THOUGHTS[0], ["P_", "_G"])
    assert (first["actions_asked"], first["actions_executed"]) == (["Up"], ["Up"])
    assert (second["reward"], second["penalty"], second["drawing"]) == (1.0, -0.1, None)
    assert (first["valid"], second["valid"]) == (True, False)
    assert answer["final_observation"] == "_*" and answer["final_drawing"] is None
    assert (answer["previous"], answer["next"]) == (None, 2)
    assert answer["has_tokens"]
    with pytest.raises(NotFound, match="there is no episode 999"):
        ask(root, "episode", run="lake", episode=999)


def test_a_group_has_its_episodes_score_and_filter_rule(root: Path) -> None:
    answer = ask(root, "group", run="lake", attempt=1, step=5, phase="train", group=0)
    assert (answer["kept"], answer["group_score"], answer["level_seed"]) == (True, 0.5, 10010)
    assert (answer["rule"], answer["score_name"]) == ("all", "reward_std")
    assert (answer["include_zero"], answer["num_played"]) == (True, 2)
    assert math.isclose(answer["reward_std"], math.sqrt(0.5))
    assert [each["member"] for each in answer["episodes"]] == [0, 1]
    assert (answer["previous"], answer["next"]) == (None, 1)
    assert answer["still_counts"]
    with pytest.raises(NotFound):
        ask(root, "group", run="lake", attempt=1, step=5, phase="train", group=7)


def test_a_group_has_the_settings_that_its_step_was_played_with(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    with sqlite3.connect(folder / DATABASE) as connection:
        data = json.dumps({"to": 2, "attempt": 1, "changes": {"filter.value": 0.125}})
        connection.execute("UPDATE events SET data = ? WHERE kind = 'guard'", (data,))
        settings_event = (
            "INSERT INTO events (attempt, step, time, kind, text, data)"
            " VALUES (1, 4, 0, 'settings', 'changed', ?)"
        )
        changes = {"filter.rule": ["all", "top_k"], "filter.value": [0.125, 0.5]}
        connection.execute(settings_event, (json.dumps({"changes": changes}),))
        (text,) = connection.execute("SELECT text FROM settings").fetchone()
        new = text.replace('rule = "all"', 'rule = "top_k"').replace("value = 0.25", "value = 0.5")
        assert new != text
        connection.execute("INSERT INTO settings (text) VALUES (?)", (new,))
        (folder / "config.toml").write_text(new)
    found = []
    for attempt, step in ((0, 3), (1, 4), (1, 5)):
        place = {"attempt": attempt, "step": step, "phase": "train", "group": 0}
        answer = ask(tmp_path, "group", run="a", **place)
        found.append((answer["rule"], answer["value"]))
    assert found == [("all", 0.25), ("all", 0.125), ("top_k", 0.5)]


def test_episodes_that_were_rolled_back_are_marked(root: Path) -> None:
    episodes = ask(root, "episodes", run="lake", limit=200)["episodes"]
    rolled_back = {(each["attempt"], each["step"]) for each in episodes if not each["still_counts"]}
    assert rolled_back == {(0, 3), (0, 4)}
    assert {(1, 3), (1, 4)} <= {(each["attempt"], each["step"]) for each in episodes}
    number = next(each["id"] for each in episodes if not each["still_counts"])
    assert ask(root, "episode", run="lake", episode=number)["still_counts"] is False
    assert not ask(root, "group", run="lake", attempt=0, step=3, phase="train", group=0)[
        "still_counts"
    ]


def test_levels_list_the_steps_at_which_they_were_evaluated(root: Path) -> None:
    levels = ask(root, "levels", run="lake")["levels"]
    assert [(each["level_seed"], each["steps"]) for each in levels] == [
        (123, [0, 6]),
        (124, [0, 6]),
    ]
    episodes = ask(root, "level", run="lake", phase="eval", level_seed=124)["episodes"]
    assert [each["step"] for each in episodes] == [0, 0, 6, 6]  # Step 4 was rolled back.


def test_tokens_of_a_recorded_sample_are_those_that_were_trained(root: Path) -> None:
    listed = ask(root, "episodes", run="lake", phase="train", step_from=6, group=0)
    answer = ask(root, "tokens", run="lake", episode=listed["episodes"][0]["id"])
    (sample,) = answer["samples"]
    assert (answer["source"], sample["ids"], sample["mask"]) == (
        "trained",
        [1, 2, 7, 8],
        [0, 0, 1, 1],
    )
    assert sample["texts"] == ["<1>", "<2>", "<7>", "<8>"] and sample["turn"] == [-1, -1, 0, 0]
    assert sample["advantage"] == [None, None, 1.0, None]  # Null outside the mask and for NaN.
    assert sample["value"] is None


def test_tokens_without_a_recorded_sample_are_joined_from_the_turns(root: Path) -> None:
    answer = ask(root, "tokens", run="lake", episode=1)
    (sample,) = answer["samples"]
    assert (answer["source"], sample["ids"]) == ("turns", [1, 2, 7, 8, 3, 9])
    assert sample["mask"] == [0, 0, 1, 1, 0, 1] and sample["turn"] == [-1, -1, 0, 0, -1, 1]
    assert sample["sampled_logprob"] == [None, None, -0.5, -0.5, None, -0.5]
    assert sample["advantage"] is None


def test_a_prompt_that_does_not_extend_the_last_turn_starts_a_sequence(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with sqlite3.connect(tmp_path / "a" / DATABASE) as connection:
        connection.execute("UPDATE turns SET prompt_joins = 0")
    samples = ask(tmp_path, "tokens", run="a", episode=1)["samples"]
    assert [sample["ids"] for sample in samples] == [[1, 2, 7, 8], [3, 9]]


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of an agent, ``a``."""
    return make_agent_run(tmp_path_factory.mktemp("agents") / "a").parent


def test_calls_of_an_agent_have_their_origin_and_those_that_do_not_train_are_apart(
    agents: Path, root: Path
) -> None:
    answer, whole = ask(agents, "episode", run="a", episode=1), agent_episode()
    for found, turns in ((answer["turns"], whole.turns), (answer["others"], whole.others)):
        calls = [turn.call for turn in turns if turn.call]
        assert [(each["parent"], each["link"], each["role"]) for each in found] == [
            (call.parent, call.link, call.role) for call in calls
        ]
    assert [each["turn"] for each in answer["others"]] == [5, 6, 7, 8]
    (first, second) = ask(agents, "group", run="a", attempt=0, step=1, phase="train", group=0)[
        "episodes"
    ]
    assert first["turns"] == answer["turns"] and len(second["turns"]) == 2
    played = ask(root, "episode", run="lake", episode=1)
    assert played["others"] == [] and {turn["link"] for turn in played["turns"]} == {None}


def test_tokens_of_a_forking_agent_are_those_of_its_samples_and_of_the_calls_beside_them(
    agents: Path, tmp_path: Path
) -> None:
    joined = to_samples([Group((agent_episode(),))])[0]
    samples = ask(agents, "tokens", run="a", episode=1)["samples"]
    assert [sample["ids"] for sample in samples] == [
        *(list(sample.token_ids) for sample in joined),
        [11, 12, 13, 14],
        [1, 2, 7, 3, 8, 5, 15],  # The budget's fixed text has no tokens.
    ]
    assert [sample["turn"] for sample in samples[: len(joined)]] == [
        list(sample.turn_index) for sample in joined
    ]
    assert [sum(sample["mask"]) for sample in samples] == [4, 2, 1, 2, 1]
    # Beside the optimiser's samples, only the calls that it did not train on are added.
    shutil.copytree(agents / "a", tmp_path / "a")
    with Recorder.open(tmp_path / "a") as recorder:
        rows = [
            {"group": 0, "member": 0}
            | {name: getattr(sample, name) for name in ("token_ids", "loss_mask", "turn_index")}
            | {"sampled_logprobs": sample.sampled_logprobs}
            for sample in joined
        ]
        recorder.samples(1, rows)
    answer = ask(tmp_path, "tokens", run="a", episode=1)
    assert answer["source"] == "trained"
    assert [each["ids"] for each in answer["samples"]] == [each["ids"] for each in samples]
    assert [sum(sample["mask"]) for sample in answer["samples"]] == [4, 2, 1, 0, 0]
    assert answer["samples"][3]["turn"] == [-1, 5, -1, 6]


def test_an_agents_episode_says_why_it_has_no_branches(agents: Path) -> None:
    reason = Branching().branches(agents / "a", 1)["reason"]
    assert reason == "the state of an agent is not kept, so its episodes have no branches"


# Two runs


def test_two_runs_are_compared_level_by_level(root: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    with sqlite3.connect(tmp_path / "b" / DATABASE) as connection:
        connection.execute("UPDATE episodes SET success = 1 WHERE phase = 'eval'")
    (comparison,) = ask(tmp_path, "compare", run="a", other="b")["comparisons"]
    assert (comparison["env"], comparison["how"], comparison["levels"]) == ("frozen-lake", "T=1", 2)
    assert (comparison["a"]["value"], comparison["b"]["value"]) == (0.25, 1.0)
    assert comparison["difference"]["value"] == 0.75 and comparison["mcnemar_p"] == 0.5
    assert "level by level" in comparison["note"]


def test_evaluations_that_were_rolled_back_are_not_compared(tmp_path: Path) -> None:
    """Attempt 1 continues from step 2, so the last evaluation, at step 4, does not count."""
    for name in ("a", "b"):
        make_run(tmp_path / name, finish=False)
    with sqlite3.connect(tmp_path / "a" / DATABASE) as connection:
        connection.execute("UPDATE episodes SET success = step = 4 WHERE phase = 'eval'")
    (comparison,) = ask(tmp_path, "compare", run="a", other="b")["comparisons"]
    assert comparison["a"]["value"] == 0.0 and "level by level" in comparison["note"]


def test_evaluations_at_other_temperatures_are_not_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    config = (tmp_path / "b" / CONFIG).read_text()
    before, _, after = config.partition("[eval]")
    assert "\ntemperature = 1.0" in after
    after = after.replace("\ntemperature = 1.0", "\ntemperature = 0.5", 1)
    (tmp_path / "b" / CONFIG).write_text(f"{before}[eval]{after}")
    with sqlite3.connect(tmp_path / "b" / DATABASE) as connection:
        connection.execute("DELETE FROM evaluations")
    assert ask(tmp_path, "compare", run="a", other="b")["comparisons"] == []


def test_different_environments_are_compared_by_their_rates(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    shorter = merge("frozen-lake", {"env.max_turns": 3})
    with Recorder.create(tmp_path / "b", dump(shorter)) as recorder:
        recorder.evaluation(0, evaluation(0.7).record() | {"env": "frozen-lake"})
    (comparison,) = ask(tmp_path, "compare", run="a", other="b")["comparisons"]
    assert comparison["difference"]["value"] == pytest.approx(-0.2)
    assert comparison["mcnemar_p"] is None
    assert comparison["note"] == "two rates, not level by level: the tasks differ in env.max_turns"


# Mistakes


def test_an_invalid_question_is_refused(root: Path) -> None:
    for path, query, message in (
        ("run", {}, "the parameter 'run' is missing"),
        ("metrics", {}, "the parameter 'names' is missing"),
        ("episode", {"episode": "x"}, "episode = 'x': expected a whole number"),
        ("episode", {"episode": 10**30}, "at most 64 bits"),
        ("episodes", {"sort": "id; DROP"}, "sort by step, reward"),
        ("episodes", {"reward_min": "nan"}, "expected a number"),
        ("episodes", {"limit": "many"}, "expected a whole number"),
    ):
        with pytest.raises(Unanswered, match=message):
            ask(root, path, **query if path == "run" else {"run": "lake", **query})


def test_runs_outside_the_folder_are_not_found(tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere")
    runs = tmp_path / "runs"
    make_run(runs / "lake")
    (runs / "study").mkdir()
    (runs / "out").symlink_to(tmp_path / "elsewhere")
    (runs / "ring").symlink_to(runs / "ring")
    (runs / "linked-file").mkdir()
    for file in (CONFIG, DATABASE):
        (runs / "linked-file" / file).symlink_to(tmp_path / "elsewhere" / file)
    make_run(runs / "linked-branches")
    (runs / "linked-branches" / FILE).symlink_to(tmp_path / "elsewhere" / DATABASE)
    for name in (
        *("..", "../runs", "lake/..", "lake/../lake", "/etc", "", "a\0b", "lake\\x", "./lake"),
        str(runs / "lake"),  # a second name of a run
        *("lake/", "out", "x" * 5000, "study", "C:/x", "linked-file", "linked-branches", "ring"),
    ):
        with pytest.raises(NotFound, match="there is no run"):
            ask(runs, "run", run=name)
    assert [run["run"] for run in ask(runs, "runs")["runs"]] == ["lake"]
