"""Studies: the rule for verdicts, and grids whose runs are done once despite interruptions."""

from __future__ import annotations

import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import dump, recipes, resolve
from ragen.core.errors import RagenError
from ragen.core.metrics import total
from ragen.core.statistics import mean_difference, mean_interval
from ragen.core.stopping import StopRequested
from ragen.storage.recorder import Recorder
from ragen.studies import runner
from ragen.studies.measures import MEASURES, RunFacts, measure_of, noise_of, read_run
from ragen.studies.results import VERDICT_WORDS, conclude
from ragen.studies.study import (
    Decision,
    Prediction,
    Study,
    decide,
    load_study,
    study_names,
    verdict,
)
from tests.cli.test_cli import evaluation

TINY: dict[str, Any] = {
    "name": "tiny",
    "number": "finding 0",
    "title": "A study for tests",
    "claim": "More is more.",
    "published": "Nothing.",
    "limits": "Everything.",
    "predictions": [
        {"measure": "final", "arm": "filtered", "above": "all"},
        {"measure": "before", "arm": "all", "above": 0.2, "by": 0.0},
    ],
    "arms": {"all": {"filter.rule": "all"}, "filtered": {"filter.value": 0.5}},
    "laptop": {
        "recipes": ["bandit"],
        "settings": {
            "steps": 2,
            "rollout.num_groups": 4,
            "eval.episodes": 64,
            "eval.every": 1,
        },
    },
    "paper": {"recipes": ["bandit"]},
}


@pytest.fixture
def tiny() -> Study:
    return Study(**TINY)


# The rule for verdicts.


def verdict_for(*bounds: tuple[float, float], by: float = 0.0) -> str:
    prediction = Prediction(measure="final", arm="a", above=0.0, by=by)
    return verdict([Decision("x", prediction, (a + b) / 2, a, b) for a, b in bounds])


@pytest.mark.parametrize(
    ("bounds", "by", "expected"),
    [
        ([(0.1, 0.3)], 0.0, "supports"),
        ([(0.1, 0.3)], 0.2, "cannot decide"),
        ([(0.1, 0.3)], 0.4, "contradicts"),
        ([(-0.1, 0.3)], 0.0, "cannot decide"),
        ([(0.1, 0.3), (0.1, 0.3), (-0.1, 0.3)], 0.0, "supports"),
        ([(0.1, 0.3), (-0.1, 0.3)], 0.0, "cannot decide"),  # no majority
        ([(0.1, 0.3), (0.1, 0.3), (-0.3, -0.1)], 0.0, "cannot decide"),
        ([(-0.1, 0.3), (-0.1, 0.3), (-0.3, -0.1)], 0.0, "contradicts"),
    ],
)
def test_verdict_follows_from_the_intervals(
    bounds: list[tuple[float, float]], by: float, expected: str
) -> None:
    assert verdict_for(*bounds, by=by) == expected


def test_decisions_are_intervals_over_seeds(tiny: Study) -> None:
    cells = {("bandit", "all"): [0.4, 0.5, 0.6], ("bandit", "filtered"): [0.8, 0.9, math.nan]}
    higher, above = decide(tiny, "laptop", {"final": cells, "before": cells})
    expected = mean_difference([0.8, 0.9], [0.4, 0.5, 0.6])
    assert (higher.excess, higher.low, higher.high) == (expected.value, expected.low, expected.high)
    assert above.excess == pytest.approx(0.3) and above.outcome == "supported"
    assert above.low == pytest.approx(mean_interval([0.4, 0.5, 0.6]).low - 0.2)


def test_seeds_that_agree_within_the_noise_of_their_evaluations_are_undecided(tiny: Study) -> None:
    cells = {("bandit", "all"): [255 / 256] * 3, ("bandit", "filtered"): [1.0] * 3}
    numbers = {"final": cells, "before": cells}
    noises = {
        name: {
            place: [noise_of(name, RunFacts({0: value}, {}, episodes=256)) for value in each]
            for place, each in values.items()
        }
        for name, values in numbers.items()
    }
    assert decide(tiny, "laptop", numbers)[0].outcome == "supported"
    assert decide(tiny, "laptop", numbers, noises)[0].outcome == "undecided"


def test_one_seed_is_undecided(tiny: Study) -> None:
    cells = {("bandit", "all"): [0.0], ("bandit", "filtered"): [1.0]}
    outcomes = [d.outcome for d in decide(tiny, "laptop", {"final": cells, "before": cells})]
    assert outcomes == ["undecided", "undecided"]


def test_measures_without_their_data_are_nan() -> None:
    assert all(
        math.isnan(MEASURES[name](RunFacts({}, {}))) for name in MEASURES if name != "seconds"
    )
    for name in ("first:a", "last:a", "change:a", "onset:a", "onset:a - last:b"):
        assert math.isnan(measure_of(name)(RunFacts({}, {})))
    with pytest.raises(RagenError, match="there is no measure 'finale'"):
        measure_of("finale")


def test_rolled_back_results_are_ignored(tmp_path: Path) -> None:
    """Success .99 at step 4 was rolled back to step 2; the run ends at step 4 with .3."""
    base = evaluation(0.5)
    with Recorder.create(tmp_path, dump(resolve("bandit"))) as recorder:
        for attempt, steps, success in ((0, (1, 2, 3, 4), 0.99), (1, (3, 4), 0.3)):
            recorder.attempt = attempt
            for step in steps:
                recorder.log(step, {"time/step_s": total(1.0)})
            if attempt == 0:
                recorder.evaluation(2, replace(base, success=0.6).record())
            recorder.evaluation(4, replace(base, success=success).record())
            recorder.commit()
    run = read_run(tmp_path, base.temperature)
    assert run.success == {2: 0.6, 4: 0.3}
    assert (MEASURES["final"](run), MEASURES["peak"](run)) == (0.3, 0.6)
    assert run.seconds == 4.0


def test_rolled_back_evaluation_is_ignored_before_it_is_repeated(tmp_path: Path) -> None:
    """The new attempt has repeated step 3 but has not yet reached the evaluation at step 4."""
    with Recorder.create(tmp_path, dump(resolve("bandit"))) as recorder:
        recorder.log(3, {"time/step_s": total(1.0)})
        recorder.evaluation(2, replace(evaluation(0.3), success=0.3).record())
        recorder.evaluation(4, replace(evaluation(0.3), success=0.99).record())
        recorder.attempt = 1
        recorder.log(3, {"time/step_s": total(1.0)})
        recorder.commit()
    run = read_run(tmp_path, 1.0)
    assert run.success == {2: 0.3} and MEASURES["final"](run) == 0.3


# The studies that ship.


@pytest.mark.parametrize("name", study_names())
def test_every_run_of_every_study_has_a_valid_config(name: str) -> None:
    study = load_study(name)
    for scale in ("laptop", "paper"):
        for recipe in study.grid(scale).recipes:  # type: ignore[arg-type]
            for arm in study.arms:
                config = study.config(scale, recipe, arm, 3)  # type: ignore[arg-type]
                assert config.seed == 3 and recipe in recipes()


def test_unknown_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no arm 'none'"):
        Study(**TINY | {"predictions": [{"measure": "final", "arm": "none", "above": 0.5}]})


# Running.


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "runs.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_study_runs_once_and_resumes(tiny: Study, tmp_path: Path, jobs: int) -> None:
    reports: list[str] = []
    found = runner.run_study(tiny, seeds=2, out=tmp_path, jobs=jobs, report=reports.append)
    assert reports[0] == "tiny: 4 runs, 0 of them done" and len(reports) == 5
    first = rows(tmp_path)
    assert [(r["arm"], r["seed"]) for r in first] == [
        ("all", "0"),
        ("filtered", "0"),
        ("all", "1"),
        ("filtered", "1"),
    ]
    assert all(0 <= float(row["final"]) <= 1 for row in first)
    text = (tmp_path / "study.md").read_text()
    assert f"**Here the data {VERDICT_WORDS[found.verdict]}**" in text and "![" in text
    assert (tmp_path / "study.svg").stat().st_size > 1000

    # One run killed before its first checkpoint, one after its last: the study completes both.
    shutil.rmtree(tmp_path / "bandit" / "all" / "seed-0" / "checkpoints")
    shutil.rmtree(tmp_path / "bandit" / "all" / "seed-1")
    reports.clear()
    runner.run_study(tiny, seeds=2, out=tmp_path, jobs=1, report=reports.append)
    assert reports[0] == "tiny: 4 runs, 3 of them done", "a finished run needs no checkpoint"
    same = ("before", "peak", "final")
    assert [[r[k] for k in same] for r in rows(tmp_path)] == [[r[k] for k in same] for r in first]

    other = tiny.model_copy(update={"arms": tiny.arms | {"all": {"update.lr": 1.0}}})
    with pytest.raises(RagenError, match=r"made with other settings .* name another --out"):
        runner.run_study(other, seeds=2, out=tmp_path)


def has_ended(worker: int) -> bool:
    """Whether a process ends within ten seconds; if not, it is killed."""
    for _ in range(500):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{worker}/stat")
        if stat.exists() and ") Z " in stat.read_text():  # a zombie, if no parent reaps it
            return True
        time.sleep(0.02)
    os.kill(worker, signal.SIGKILL)
    return False


def test_a_killed_study_leaves_no_process_behind() -> None:
    """A surviving worker would write into the run that the next command resumes."""
    reading, writing = os.pipe()
    study = os.fork()  # a copy of this process, which has imported everything
    if study == 0:
        try:
            pool = ProcessPoolExecutor(1, get_context("fork"), runner.end_with_parent)
            os.write(writing, str(pool.submit(os.getpid).result()).encode())
            pool.submit(time.sleep, 600)
            time.sleep(600)
        finally:
            os._exit(70)
    worker = int(os.read(reading, 20))
    for handle in (reading, writing):
        os.close(handle)
    os.kill(worker, 0)
    os.kill(study, signal.SIGKILL)
    os.waitpid(study, 0)
    assert has_ended(worker), "the worker outlived the study"


@pytest.mark.slow
def test_a_killed_study_leaves_no_spawned_process_behind(tmp_path: Path) -> None:
    """The same with the start method of studies, whose workers take seconds to import RAGEN."""
    script = tmp_path / "pool.py"
    script.write_text(
        "import os, sys, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "from ragen.studies.runner import end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, get_context('spawn'), end_with_parent)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 600)\n"
        "    time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    study = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert study.stdout is not None
    worker = int(study.stdout.readline())
    os.kill(worker, 0)
    study.kill()
    study.wait()
    study.stdout.close()
    assert has_ended(worker), "the worker outlived the study"


def test_arm_may_start_with_supervised_fine_tuning(tmp_path: Path) -> None:
    study = TINY | {
        "arms": {"base": {"steps": 0}, "taught": {"steps": 0}},
        "sft": {"taught": {"episodes": 128, "epochs": 4}},
        "predictions": [{"measure": "final", "arm": "taught", "above": "base"}],
    }
    for _ in range(2):  # the second time, every run is finished
        reports: list[str] = []
        found = runner.run_study(
            Study(**study), seeds=2, out=tmp_path, jobs=1, report=reports.append
        )
    assert reports == ["tiny: 4 runs, 4 of them done"]
    assert found.verdict == "supports"
    assert (tmp_path / "bandit" / "taught" / "seed-1-sft" / "model.safetensors").is_file()


def test_stop_request_raises_keyboard_interrupt_with_a_hint(
    tiny: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise StopRequested(2)

    monkeypatch.setattr(runner, "train", stop)
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        runner.run_study(tiny, seeds=2, out=tmp_path, jobs=1)


def test_unwritable_results_give_one_line(tiny: Study, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").mkdir()
    with pytest.raises(RagenError, match=r"cannot write .*runs\.csv: is a directory; .*--out"):
        conclude(tiny.model_copy(update={"predictions": []}), "laptop", 2, tmp_path, [])


def test_study_command_lists_previews_and_reports_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(study_names())
    assert main(["study", study_names()[0], "--dry-run"]) == 0
    assert "predicts " in capsys.readouterr().out
    assert main(["study", "filterin"]) == 2
    assert "did you mean 'filtering'?" in capsys.readouterr().err
    Path("file").write_text("")
    for options, message in (
        (["--seeds", "1"], "--seeds 1: an interval over seeds takes 2 or more"),
        (["--seeds", "0", "--dry-run"], "--seeds 0: an interval"),
        (["--jobs", "-2"], "argument --jobs: expected a whole number"),
        (["--out", "file"], "cannot write file: file exists; free space there or choose another"),
        (["--out", "file/x"], "cannot write file/x: not a directory"),
    ):
        assert main(["study", "filtering", *options]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
