"""A run goes on with the settings that it began with, whatever happened to its files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ragen
from ragen.cli.main import main
from ragen.config.keys import keys
from ragen.config.reading import dump, merge, read_config
from ragen.core.errors import RagenError
from ragen.diagnostics.guard import GuardState
from ragen.settings.saved import run_config
from ragen.settings.target import EPISODE_KEYS, is_measured
from ragen.storage import checkpoint
from ragen.storage.database import CONFIG, DATABASE
from ragen.storage.reader import read_events
from ragen.storage.recorder import Recorder
from ragen.training.trainer import resume, train
from tests.diagnostics.test_guard_run import Plan, alarms_at
from tests.shared import own
from tests.training.runs import (
    assert_same_results,
    make_config,
    recorded_results,
)

__all__ = ["alarms_at"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(bandit_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run for commands that refuse to change it."""
    return own(bandit_run, tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def expected(bandit_run: Path) -> dict[str, Any]:
    """The results of the uninterrupted run."""
    return recorded_results(bandit_run)


def changed_text(edit: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda path: path.write_text(edit(path.read_text("utf-8")), "utf-8")


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut in a line": changed_text(lambda text: text[: text.index("minibatch_episodes") + 5]),
    "empty": lambda path: path.write_text(""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no text": lambda path: path.write_bytes(b"\xff\xfe" * 50),
    "a flipped bit in a key": changed_text(lambda text: text.replace("\nsteps", "\nstaps")),
    "missing": Path.unlink,
    "a folder": replaced_by(Path.mkdir),
    "a pipe": replaced_by(lambda path: os.mkfifo(path)),
    "a dangling link": replaced_by(lambda path: path.symlink_to("nowhere")),
}


def test_a_damaged_config_is_refused_until_it_is_restored(
    own_bandit_run: Path, expected: dict[str, Any], capsys: Capture
) -> None:
    """The advice is followed to the letter; a killed writer has left a part of a file."""
    run, path = own_bandit_run, own_bandit_run / CONFIG
    shutil.rmtree(checkpoint.newest(run))  # it was killed before it had saved its last step
    (run / f".99.{CONFIG}").write_text("half")
    data, own_settings = path.read_bytes(), run_config(run)
    for damage in DAMAGES.values():
        damage(path)
        assert main(["resume", str(run)]) == 2
        error = capsys.readouterr().err
        assert CONFIG in error and error.count("\n") == 1
        if os.path.lexists(path) and not path.is_file():
            assert "move it away" in error
            path.rename(run / "away") if path.exists() else path.unlink()
            shutil.rmtree(run / "away") if (run / "away").is_dir() else None
        command = re.search(r"sqlite3 .*$", error)
        assert command is not None
        subprocess.run(command[0], shell=True, check=True)
        assert path.read_bytes().rstrip() == data.rstrip() and run_config(run) == own_settings
    resume(run)
    assert_same_results(run, expected)


def test_a_config_that_is_cut_anywhere_is_never_taken_for_the_run_s_settings(
    finished: Path,
) -> None:
    path, own_settings = finished / CONFIG, run_config(finished)
    data = path.read_bytes()
    for length in range(0, len(data), 47):
        path.write_bytes(data[:length])
        try:
            assert run_config(finished) == own_settings
        except RagenError as error:
            assert "sqlite3" in str(error)
    path.write_bytes(data)


def test_an_edited_config_is_refused_until_the_change_is_given(
    own_bandit_run: Path, capsys: Capture
) -> None:
    """The advice is followed to the letter."""
    run = own_bandit_run
    changed_text(lambda text: text.replace("\nsteps = 3\n", "\nsteps = 4\n"))(run / CONFIG)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert "steps = 4, not 3" in error and error.count("\n") == 1 and "delete" not in error
    assert "to keep the run's: sqlite3 " in error
    assert main(["eval", str(run), "--episodes", "2"]) == 2
    assert "steps = 4, not 3" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    advice = re.search(r"to change them: (ragen [^)]*)\)", error)
    assert advice is not None
    assert main([*shlex.split(advice[1])[1:], "--quiet"]) == 0
    assert checkpoint.newest(run).name == "step-4" and read_config(run / CONFIG).steps == 4
    changes = [event["data"] for event in read_events(run, "settings")]
    assert changes == [{"changes": {"steps": [3, 4]}}]
    assert main(["resume", str(run), "--quiet"]) == 0


def test_an_entry_that_is_removed_from_a_config_is_named(tmp_path: Path) -> None:
    Recorder.create(tmp_path, dump(merge("bandit", {"env.params.slip": 0.25}))).close()
    changed_text(lambda text: text.replace("slip = 0.25\n", ""))(tmp_path / CONFIG)
    with pytest.raises(RagenError, match=r"params\.slip = unset, not 0\.25; to keep"):
        run_config(tmp_path)


def test_a_setting_changed_on_purpose_holds_from_here_on(own_bandit_run: Path) -> None:
    """Also after a kill before the next checkpoint, whose state has the old hash."""
    run = own_bandit_run
    result = ragen.resume(run, overrides={"steps": 4, "update": {"lr": 0.25}})
    assert result.run == run and run_config(run).update.lr == 0.25
    (event,) = read_events(run, "settings")
    assert re.fullmatch(
        r"changed steps from 3 to 4, update\.lr from [\d.e-]+ to 0\.25", event["text"]
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
    finished: Path, capsys: Capture, key: str, value: str, words: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert main(["resume", str(finished), f"--{key}", value]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_every_key_of_an_evaluation_s_episodes_is_fixed_for_a_run() -> None:
    """A key is free only if it says how a run is trained, or what the machine may use."""
    measured = {key for key in keys() if is_measured(key)}
    free = {
        *("env.timeout_s", "env.isolate", "model.gradient_checkpointing", "eval.every"),
    }
    episode = {key for key in keys() if key.startswith((*EPISODE_KEYS, "eval."))}
    assert episode - measured == free and measured <= episode


def test_a_finished_run_takes_no_change_without_more_steps(finished: Path, capsys: Capture) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    for options in (["--update.lr", "0.25"], ["--steps", "1"], ["--rollout.sampler", "vllm"]):
        assert main(["resume", str(finished), *options]) == 2
        assert "nothing is left to train after step 3" in capsys.readouterr().err
        assert {path: path.stat().st_mtime_ns for path in before} == before


def test_advice_about_a_run_without_a_checkpoint_leads_on(
    own_bandit_run: Path, capsys: Capture
) -> None:
    run = own_bandit_run
    assert main(["train", "bandit", "--out", str(run)]) == 2
    assert "continue that run: ragen resume" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    for command in (["resume", str(run)], ["train", "bandit", "--out", str(run)]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "another --out" in error and "ragen resume" not in error
        assert "delete" not in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_change_of_the_user_wins_over_an_earlier_one_of_the_guard(
    tmp_path: Path, alarms_at: Plan
) -> None:
    alarms_at((0, 2))
    config = make_config(steps=2, eval__episodes=0)
    config = config.model_copy(
        update={"guard": config.guard.model_copy(update={"responses": {"grad_spike": "rollback"}})}
    )
    train(config, tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    state = GuardState(**checkpoint.read_state(newest)["guard"])
    lowered = state.changes["update.lr"]
    assert lowered == pytest.approx(config.update.lr / 3)
    resume(tmp_path / "run", overrides={"steps": 3, "update.lr": config.update.lr})
    newest = checkpoint.newest(tmp_path / "run")
    state = GuardState(**checkpoint.read_state(newest)["guard"])
    assert newest.name == "step-3" and "update.lr" not in state.changes
    (event,) = read_events(tmp_path / "run", "settings")
    assert event["data"]["changes"] == {"steps": [2, 3], "update.lr": [lowered, config.update.lr]}


def test_a_change_is_completed_if_a_kill_came_between_file_and_database(
    own_bandit_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"steps": 4}

    def killed(recorder: Recorder, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recorder, "keep_settings", killed)
        resume(own_bandit_run, overrides=changes)
    with pytest.raises(RagenError, match=r"steps = 4, not 3 \(to change them: ragen resume"):
        resume(own_bandit_run)
    resume(own_bandit_run, overrides=changes)
    assert run_config(own_bandit_run).steps == 4
    assert len(read_events(own_bandit_run, "settings")) == 1


def test_a_run_without_its_database_can_be_trained_further(
    own_bandit_run: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The advice is followed to the letter, with the name of a recipe."""
    database, errors = own_bandit_run / DATABASE, []
    database.unlink()
    for make, remove in (
        (lambda path: None, lambda path: None),
        (os.mkfifo, os.unlink),
        (os.mkdir, os.rmdir),
    ):
        make(database)
        assert main(["resume", str(own_bandit_run)]) == 2
        errors.append(capsys.readouterr().err)
        assert errors[-1].count("\n") == 1 and "delete" not in errors[-1]
        remove(database)
    command = shlex.split(errors[0].partition("further: ragen ")[2].replace("RECIPE", "bandit"))
    few = ["--steps", "0", "--eval.episodes", "0", "--loss.kl", "0", "--quiet"]
    few += ["--prompt.style", "compact"]
    assert main([*command, *few, "--out", str(tmp_path / "further")]) == 0
    for error in errors[1:]:
        assert error.partition("further: ")[2] == errors[0].partition("further: ")[2]
