"""A run goes on with the settings that it began with, whatever happened to its files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import ragen
from ragen.cli.main import main
from ragen.config.keys import keys
from ragen.config.reading import dump, read_config, resolve
from ragen.core.errors import RagenError
from ragen.core.stopping import StopRequested
from ragen.diagnostics.guard import GuardState
from ragen.evaluation.targets import EPISODE_KEYS, is_measured
from ragen.storage import checkpoint
from ragen.storage.database import CONFIG, DATABASE
from ragen.storage.reader import read_events
from ragen.storage.recorder import Recorder
from ragen.storage.settings import find_settings, run_config
from ragen.training.trainer import resume, train
from tests.diagnostics.test_guard_run import Plan, alarms_at
from tests.training.test_trainer import (
    NotedWatcher,
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
)

__all__ = ["alarms_at"]

Capture = pytest.CaptureFixture[str]
STEPS = {"steps": 2, "eval__every": 0, "eval__episodes": 4, "checkpoint__every": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that was stopped after its first step, and the results of the uninterrupted one."""
    folder = tmp_path_factory.mktemp("sealed")
    train(make_config(**STEPS), folder / "whole")
    with pytest.raises(StopRequested):
        watcher = SendSignal("step", 1, signal.SIGINT)
        train(make_config(**STEPS), folder / "run", watcher=watcher)
    assert [path.name for path in checkpoint.folders(folder / "run")] == ["step-0", "step-1"]
    return folder / "run", recorded_results(folder / "whole")


@pytest.fixture
def run(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return shutil.copytree(runs[0], tmp_path / "run")


@pytest.fixture
def expected(runs: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return runs[1]


def written(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def changed_text(edit: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda path: path.write_text(edit(path.read_text("utf-8")), "utf-8")


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut at [update]": changed_text(lambda text: text[: text.index("[update]")]),
    "cut at [reward]": changed_text(lambda text: text[: text.index("[reward]")]),
    "cut in a line": changed_text(lambda text: text[: text.index("minibatch_episodes") + 5]),
    "empty": written(""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no text": lambda path: path.write_bytes(b"\xff\xfe" * 50),
    "a flipped bit in a key": changed_text(lambda text: text.replace("\nsteps", "\nstaps")),
    "missing": Path.unlink,
    "a folder": replaced_by(Path.mkdir),
    "a pipe": replaced_by(os.mkfifo),
    "a dangling link": replaced_by(lambda path: path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_writes_a_damaged_config_again(
    run: Path, expected: dict[str, Any], damage: str
) -> None:
    original = (run / CONFIG).read_bytes()
    DAMAGES[damage](run / CONFIG)
    with pytest.raises(RagenError, match=r"to write it again: ragen resume|is not a run folder"):
        run_config(run)
    watcher = NotedWatcher()
    resume(run, watcher)
    assert_same_results(run, expected)
    assert (run / CONFIG).read_bytes() == original and run_config(run) == make_config(**STEPS)
    (line,) = watcher.alarms
    assert CONFIG in line and "written again" in line and "\n" not in line
    assert os.path.lexists(run / f"damaged-{CONFIG}") == (damage != "missing")
    assert [event["kind"] for event in read_events(run)] == ["damaged config", "resume"]


def test_a_config_cut_anywhere_is_never_taken_for_the_run_s_settings(run: Path) -> None:
    data = (run / CONFIG).read_bytes()
    found = find_settings(run, None, {})
    assert found.config == make_config(**STEPS) and not found.damage
    for length in range(0, len(data), 7):
        (run / CONFIG).write_bytes(data[:length])
        settings = find_settings(run, None, {})
        assert settings.config == found.config and settings.text.encode() == data
        assert settings.damage or read_config(run / CONFIG) == found.config


def test_a_config_with_one_flipped_bit_is_never_taken_for_the_run_s_settings(run: Path) -> None:
    """Each flip is harmless, damage, or an edit that is refused by its key."""
    data = (run / CONFIG).read_bytes()
    own = find_settings(run, None, {}).config
    outcomes = set()
    for place in range(3, len(data), 11):
        flipped = bytes([data[place] ^ (1 << place % 7)])
        (run / CONFIG).write_bytes(data[:place] + flipped + data[place + 1 :])
        try:
            settings = find_settings(run, None, {})
        except RagenError as error:
            assert re.search(r"has other values than the run: [\w.]+ = ", str(error)), error
            outcomes.add("edit")
            continue
        assert settings.config == own
        outcomes.add("damage" if settings.damage else "harmless")
    assert {"edit", "damage"} <= outcomes


def test_an_edited_config_is_refused_until_the_change_is_given(run: Path, capsys: Capture) -> None:
    """The advice is followed to the letter."""
    edit = changed_text(lambda text: text.replace("\nsteps = 2\n", "\nsteps = 3\n"))
    edit(run / CONFIG)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert "steps = 3, not 2" in error and error.count("\n") == 1 and "delete" not in error
    assert main(["eval", str(run), "--episodes", "2"]) == 2
    assert "steps = 3, not 2" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    advice = re.search(r"to change them: (ragen [^)]*)\)", error)
    assert advice is not None
    assert main([*shlex.split(advice[1])[1:], "--quiet"]) == 0
    assert checkpoint.newest(run).name == "step-3" and read_config(run / CONFIG).steps == 3
    changes = [event["data"] for event in read_events(run, "settings")]
    assert changes == [{"changes": {"steps": [2, 3]}}]
    assert main(["resume", str(run), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("values", "line", "said"),
    [
        ({"env.params.slip": 0.25}, "slip = 0.25\n", r"params\.slip = unset, not 0\.25; to keep"),
        ({"guard.responses.mi_drop": "off"}, 'mi_drop = "off"\n', 'unset, not "off"; to keep'),
    ],
)
def test_an_entry_that_is_removed_from_a_config_is_named(
    values: dict[str, Any], line: str, said: str, tmp_path: Path
) -> None:
    Recorder.create(tmp_path, dump(resolve("bandit", values))).close()
    changed_text(lambda text: text.replace(line, ""))(tmp_path / CONFIG)
    with pytest.raises(RagenError, match=said):
        run_config(tmp_path)


def test_an_edited_config_that_is_moved_away_is_written_again(
    run: Path, expected: dict[str, Any]
) -> None:
    changed_text(lambda text: re.sub(r"\nlr = .*", "\nlr = 0.25", text))(run / CONFIG)
    with pytest.raises(RagenError, match="keep the run's, move the file away and resume"):
        resume(run)
    (run / CONFIG).rename(run / "edited.toml")
    resume(run)
    assert_same_results(run, expected)


def test_a_setting_changed_on_purpose_holds_from_here_on(run: Path) -> None:
    """Also after a kill before the next checkpoint, whose state has the old hash."""
    result = ragen.resume(run, overrides={"steps": 3, "update": {"lr": 0.25}})
    assert result.run == run and run_config(run).update.lr == 0.25
    (event,) = read_events(run, "settings")
    assert re.fullmatch(
        r"changed steps from 2 to 3, update\.lr from [\d.e-]+ to 0\.25", event["text"]
    )
    newest = checkpoint.newest(run)
    shutil.rmtree(newest)
    resume(run)
    assert checkpoint.newest(run) == newest and len(read_events(run, "settings")) == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", "5", "seed cannot change when a run is resumed"),
        ("model", "base", "model.path cannot change when a run is resumed"),
        ("lora.rank", "4", "lora.rank cannot change"),
        ("env", "sokoban", "env.name cannot change"),
        ("algorithm", "dapo", "algorithm cannot change"),
        ("threads", "2", "threads cannot change"),
        ("advantage.name", "gae", "critic"),
        ("advantage.gae_lambda", "0.5", "advantage.gae_lambda has no effect"),
        ("env.max_turns", "9", "env.max_turns decides what an evaluation of the run measures"),
        ("prompt.style", "paper", "prompt.style decides what"),
        ("rollout.max_tokens", "30", "rollout.max_tokens decides what"),
        ("eval.episodes", "8", "eval.episodes decides what"),
        ("eval.temperature", "0.5", "eval.temperature decides what"),
        ("steps", "-3", "steps = -3: expected a whole number"),
        ("steps", "many", 'steps = "many": expected a whole number'),
    ],
)
def test_a_setting_that_cannot_change_is_refused(
    run: Path, capsys: Capture, key: str, value: str, words: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["resume", str(run), f"--{key}", value]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_every_key_of_an_evaluation_s_episodes_is_fixed_for_a_run() -> None:
    """A key is free only if it says how a run is trained, or what the machine may use."""
    measured = {key for key in keys() if is_measured(key)}
    free = {
        *("env.timeout_s", "env.max_chars", "env.isolate", "env.memory_gb"),
        *("model.gradient_checkpointing", "eval.every", "eval.background"),
    }
    episode = {key for key in keys() if key.startswith((*EPISODE_KEYS, "eval."))}
    assert episode - measured == free and measured <= episode


def test_a_finished_run_takes_no_change_without_more_steps(run: Path, capsys: Capture) -> None:
    resume(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for options in (["--update.lr", "0.25"], ["--steps", "1"], ["--rollout.sampler", "vllm"]):
        assert main(["resume", str(run), *options]) == 2
        assert "nothing is left to train after step 2" in capsys.readouterr().err
        assert {path: path.stat().st_mtime_ns for path in before} == before
    resume(run, overrides={"steps": 3, "update.lr": 0.25})
    assert checkpoint.newest(run).name == "step-3" and run_config(run).update.lr == 0.25


def test_advice_about_a_run_without_a_checkpoint_leads_on(run: Path, capsys: Capture) -> None:
    assert main(["train", "bandit", "--out", str(run)]) == 2
    assert "continue that run: ragen resume" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    for command in (["resume", str(run)], ["train", "bandit", "--out", str(run)]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "another --out" in error and "ragen resume" not in error
        assert "delete" not in error and error.count("\n") == 1


def test_resume_removes_the_temporary_files_of_a_killed_writer(run: Path) -> None:
    left = [run / f".99.{CONFIG}", *(path / ".99.state.json" for path in checkpoint.folders(run))]
    for path in left:
        path.write_text("half")
    (run / ".99.report.md").write_text("another process may be writing it")
    resume(run)
    assert not any(path.exists() for path in left) and (run / ".99.report.md").exists()


def test_a_change_of_the_user_wins_over_an_earlier_one_of_the_guard(
    tmp_path: Path, alarms_at: Plan
) -> None:
    alarms_at((0, 2))
    config = make_config(steps=3, eval__episodes=0, checkpoint__every=1)
    config = config.model_copy(
        update={"guard": config.guard.model_copy(update={"responses": {"grad_spike": "rollback"}})}
    )
    train(config, tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    state = GuardState(**checkpoint.read_state(newest)["guard"])
    lowered = state.changes["update.lr"]
    assert lowered == pytest.approx(config.update.lr / 3)
    resume(tmp_path / "run", overrides={"steps": 4, "update.lr": config.update.lr})
    newest = checkpoint.newest(tmp_path / "run")
    state = GuardState(**checkpoint.read_state(newest)["guard"])
    assert newest.name == "step-4" and "update.lr" not in state.changes
    (event,) = read_events(tmp_path / "run", "settings")
    assert event["data"]["changes"] == {"steps": [3, 4], "update.lr": [lowered, config.update.lr]}


def forget_settings(run: Path) -> None:
    """Make the run one of a version that kept no copy of the settings."""
    with closing(sqlite3.connect(run / DATABASE)) as connection, connection:
        connection.execute("DROP TABLE settings")
    for folder in checkpoint.folders(run):
        state = checkpoint.read_state(folder)
        del state[checkpoint.SETTINGS_HASH]
        checkpoint.replace_state(folder, state)


def test_a_run_without_a_copy_of_its_settings_is_resumed_and_gets_one(
    run: Path, expected: dict[str, Any]
) -> None:
    forget_settings(run)
    assert run_config(run) == make_config(**STEPS)
    watcher = NotedWatcher()
    resume(run, watcher)
    assert_same_results(run, expected)
    (note,) = watcher.notes
    assert "is taken as it is: an earlier version" in note and "\n" not in note
    (run / CONFIG).unlink()
    watcher = NotedWatcher()
    resume(run, watcher)
    assert run_config(run) == make_config(**STEPS) and len(watcher.alarms) == 1


def test_a_damaged_copy_of_the_settings_is_written_again_from_the_file(
    run: Path, expected: dict[str, Any]
) -> None:
    """The hash in the checkpoint's state decides which of the two is good."""
    with closing(sqlite3.connect(run / DATABASE)) as connection, connection:
        connection.execute("UPDATE settings SET text = replace(text, 'steps = 2', 'steps = 9')")
    text = (run / CONFIG).read_text("utf-8")
    (run / CONFIG).write_text(text.replace("steps = 2", "steps = 8"), "utf-8")
    with pytest.raises(RagenError, match=r"neither .* has the settings .* --model"):
        resume(run)
    (run / CONFIG).write_text(text, "utf-8")
    resume(run)
    assert_same_results(run, expected)
    assert run_config(run).steps == 2


PLACES = ("state.json", "model.safetensors", "config.json", "optimizer-0.safetensors")


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_resume_sets_a_checkpoint_aside_in_which_a_file_is_none(
    run: Path, expected: dict[str, Any], name: str, make: Callable[[Path], object]
) -> None:
    path = checkpoint.newest(run) / name
    path.unlink()
    make(path)
    resume(run)
    assert_same_results(run, expected)
    assert (run / "checkpoints" / "damaged-step-1").is_dir()


def test_a_deeply_nested_state_is_a_damaged_checkpoint(run: Path, expected: dict[str, Any]) -> None:
    (checkpoint.newest(run) / "state.json").write_text("[" * 100_000 + "]" * 100_000)
    resume(run)
    assert_same_results(run, expected)


@pytest.mark.parametrize("make", [None, Path.mkdir, os.mkfifo], ids=["none", "folder", "pipe"])
def test_a_run_without_its_database_can_be_trained_further(
    run: Path, tmp_path: Path, capsys: Capture, make: Callable[[Path], object] | None
) -> None:
    """The advice is followed to the letter, with the name of a recipe."""
    (run / DATABASE).unlink()
    if make is not None:
        make(run / DATABASE)
    assert main(["resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "delete" not in error
    command = shlex.split(error.partition("further: ragen ")[2].replace("RECIPE", "bandit"))
    few = ["--steps", "0", "--eval.episodes", "0", "--loss.kl", "0", "--quiet"]
    few += ["--prompt.style", "compact"]
    assert main([*command, *few, "--out", str(tmp_path / "further")]) == 0
