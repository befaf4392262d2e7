"""Studies: measures, decisions, and grids whose runs are done once despite interruptions."""

from __future__ import annotations

import csv
import math
import os
import pickle
import re
import runpy
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import dump, merge, recipes
from ragen.core.errors import GuardStop, MismatchError, NotFiniteError, RagenError
from ragen.core.metrics import total
from ragen.core.stopping import StopRequested
from ragen.storage.checkpoint import Damaged
from ragen.storage.recorder import Recorder
from ragen.studies import runner
from ragen.studies.measures import MEASURES, RunFacts, measure_of, read_run
from ragen.studies.overview import write_overview
from ragen.studies.results import VERDICT_WORDS, read_findings
from ragen.studies.study import (
    FIRST_SEED,
    Contrast,
    Need,
    Place,
    Scale,
    Study,
    cells_of,
    decide,
    env_of,
    load_study,
    study_names,
)
from tests.bandit_model import settings as bandit_settings
from tests.cli.test_cli import evaluation

SCALES: tuple[Scale, ...] = ("laptop", "paper")
BANDIT: dict[str, Any] = {
    "laptop": "bandit",
    "paper": "bandit",
    "effect": 0.2,
    "source": "A test.",
    "predicted": "holds",
}
TINY: dict[str, Any] = {
    "name": "tiny",
    "number": "finding 0",
    "title": "A study for tests",
    "claim": "More is more.",
    "limits": "Everything.",
    "seeds": 7,
    "contrast": {"measure": "final", "arm": "filtered", "above": "all"},
    "arms": {"all": {"filter.rule": "all"}, "filtered": {"filter.value": 0.5}},
    "environments": {"bandit": BANDIT},
}


@pytest.fixture
def tiny() -> Study:
    return Study(**TINY)


def small(**more: Any) -> dict[str, Any]:
    """`TINY` with settings that make a run of half a second."""
    settings = bandit_settings(steps=1, rollout__num_groups=4)
    return TINY | {"laptop": settings} | more


# Decisions: from values by environment and arm to outcomes.


def finals(ones: list[float], others: list[float]) -> dict[str, Any]:
    values = {("bandit", "filtered"): ones, ("bandit", "all"): others}
    return dict.fromkeys(("final", "collapsed", "mean:clip/fraction"), values)


def test_a_decision_is_about_the_median_difference_of_a_pair(tiny: Study) -> None:
    """Six pairs of one seed, the seventh without a number: all six are needed at 5 %."""
    ones, others = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, math.nan], [0.4] * 6 + [0.0]
    (found,) = decide(tiny, finals(ones, others))
    assert (found.pairs, found.outcome) == (6, "holds")
    bounds = (found.interval.value, found.interval.low, found.interval.high)
    assert bounds == pytest.approx((0.35, 0.1, 0.6))


def test_more_environments_ask_for_more_seeds(tiny: Study) -> None:
    """Six seeds are enough for 5 %, not for 2.5 %; what is untestable does not count."""
    numbers = finals([0.9] * 6, [0.4] * 6)
    final = numbers["final"]
    final |= {("lake", arm): final["bandit", arm] for arm in tiny.arms}
    for untestable, expected in ((True, "holds"), (False, "undecided")):
        places = {"bandit": Place(**BANDIT), "lake": Place(**BANDIT, untestable=untestable)}
        first, second = decide(tiny.model_copy(update={"environments": places}), numbers)
        assert (first.outcome, first.enough) == (expected, None if untestable else 7)
        assert second.outcome == ("untestable" if untestable else expected)


def test_shares_of_runs_are_compared_by_their_counts(tiny: Study) -> None:
    contrast = Contrast(measure="collapsed", arm="all", above="filtered")
    study = tiny.model_copy(update={"contrast": contrast})
    (found,) = decide(study, finals([0.0] * 12, [1.0] * 9 + [0.0] * 3))
    assert found.outcome == "holds" and found.interval.value == 0.75
    assert round(found.interval.low, 3) == 0.083
    alone = contrast.model_copy(update={"above": 0.5})
    (found,) = decide(tiny.model_copy(update={"contrast": alone}), finals([0.0] * 9, [1.0] * 9))
    assert found.outcome == "holds" and found.interval.high == 0.5


def test_what_the_runs_did_not_exercise_is_not_judged(tiny: Study) -> None:
    """Whether the need is the study's or one of its environment."""
    clips = Need(measure="mean:clip/fraction", arm="all", least=0.05, most=0.9)
    place = tiny.environments["bandit"].model_copy(update={"needs": [clips]})
    for update in ({"needs": [clips]}, {"environments": {"bandit": place}}):
        study = tiny.model_copy(update=update)
        assert clips.measure in study.measures
        for fraction in (0.01, 0.06, 1.0, math.nan):
            (found,) = decide(study, finals([fraction] * 7, [fraction] * 7))
            assert found.outcome == ("fails" if fraction == 0.06 else "not exercised")


def test_too_few_seeds_are_undecided(tiny: Study) -> None:
    (found,) = decide(tiny, finals([1.0] * 5, [0.0] * 5))
    assert (found.outcome, found.enough) == ("undecided", 6)
    (found,) = decide(tiny, finals([math.nan] * 5, [0.0] * 5))
    assert (found.outcome, found.pairs, found.enough) == ("undecided", 0, None)


def test_measures_without_their_data_are_nan() -> None:
    assert all(
        math.isnan(MEASURES[name](RunFacts({}, {}))) for name in MEASURES if name != "seconds"
    )
    for name in ("first:a", "last:a", "mean:a", "onset:a", "lead:a", "onset:a - last:b"):
        assert math.isnan(measure_of(name)(RunFacts({}, {})))
    with pytest.raises(RagenError, match="there is no measure 'finale'"):
        measure_of("finale")


def test_a_run_that_does_not_fall_survives_and_has_no_lead() -> None:
    metrics = {"success/mean": dict.fromkeys(range(1, 21), 0.5), "a": {1: 1.0, 2: 0.0}}
    run = RunFacts({0: 0.5, 20: 0.6}, metrics)
    assert MEASURES["survived"](run) == 1.0 and math.isnan(measure_of("lead:a")(run))
    metrics["success/mean"] |= dict.fromkeys(range(8, 21), 0.0)
    assert MEASURES["survived"](run) == 9 / 20  # the mean of steps 6 to 10 is the first below .25


def test_rolled_back_results_are_ignored(tmp_path: Path) -> None:
    """Success .99 at step 4 was rolled back to step 2; the run ends at step 4 with .3."""
    base = evaluation(0.5)
    with Recorder.create(tmp_path, dump(merge("bandit"))) as recorder:
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


def test_a_mixture_is_measured_in_the_environment_of_the_row(tmp_path: Path) -> None:
    parts = (replace(evaluation(0.3), env="lake"), replace(evaluation(0.9), env="box", random=0.1))
    whole = replace(evaluation(0.6), env="lake+box", parts=parts)
    with Recorder.create(tmp_path, dump(merge("bandit"))) as recorder:
        recorder.evaluation(0, whole.record())
        recorder.commit()
    run = read_run(tmp_path, 1.0, env=env_of("box, PPO"))
    assert (run.success, run.random) == ({0: 0.9}, 0.1)
    assert read_run(tmp_path, 1.0, env="lake").success == {0: 0.3}


# The studies that ship.


@pytest.mark.parametrize("name", study_names())
def test_every_study_has_valid_configs_and_the_seeds_to_decide(name: str) -> None:
    """With fewer seeds, no interval has two bounds."""
    study = load_study(name)
    for environment, place in study.environments.items():
        seeds = place.seeds or study.seeds
        assert place.untestable or (seeds >= 10 and 2 * 0.5**seeds <= study.error)
        assert {place.laptop, place.paper} <= set(recipes())
        assert place.untestable == (place.predicted == "untestable")
        for arm in study.arms:
            mixes = [study.config(s, environment, arm, FIRST_SEED).env.mix for s in SCALES]
            assert all(not mix or env_of(environment) in mix for mix in mixes)


def test_the_pages_of_the_docs_follow_from_the_tables_of_runs() -> None:
    """And each effect with its interval in the report stands on the page of a study."""
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "study_pages.py"))
    for path, text in script["texts"]():
        assert path.read_text("utf-8") == text, "run python scripts/study_pages.py"
    table = (root / "docs" / "studies" / "index.md").read_text("utf-8")
    assert [name for name in study_names() if load_study(name).claim not in table] == []
    pages = "\n".join(each.read_text("utf-8") for each in root.glob("docs/studies/*/study.md"))
    report = " ".join((root / "docs" / "report.md").read_text("utf-8").replace("−", "-").split())
    effects = re.findall(r"-?[\d.]+ \[-?[\d.]+, -?[\d.]+\]", report)
    assert len(effects) >= 12
    assert [each for each in effects if each not in pages] == []


def test_an_environment_may_have_fewer_seeds_and_each_seed_a_base(tmp_path: Path) -> None:
    fewer = BANDIT | {"seeds": 3, "settings": {"model.path": "models/{seed}"}}
    study = Study(**TINY | {"environments": {"bandit": BANDIT, "bandit, less": fewer}})
    cells = cells_of(study, "laptop", 7, tmp_path)
    assert Counter(cell.environment for cell in cells) == {"bandit": 14, "bandit, less": 6}
    paths = {cell.config.model.path for cell in cells if cell.environment != "bandit"}
    assert paths == {"models/1000", "models/1001", "models/1002"}


def test_unknown_names_are_refused() -> None:
    for changes, message in (
        ({"contrast": {"measure": "final", "arm": "none", "above": 0.5}}, "there is no arm 'none'"),
        ({"describe": ["finale"]}, "there is no measure 'finale'"),
        ({"describe": ["final - transfer:x"]}, r"no evaluation 'x' \(only none\)"),
    ):
        with pytest.raises(ValueError, match=message):
            Study(**TINY | changes)


# Running.


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "runs.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_study_runs_once_and_resumes(tmp_path: Path, jobs: int) -> None:
    """One environment is decided, and the other one never run; two of the runs are killed."""
    both = {"bandit": BANDIT, "bandit, twice": BANDIT | {"settings": {"update.epochs": 2}}}
    contrast = {"measure": "final", "arm": "all", "above": 0.5}
    study = Study(**small(environments=both, arms={"all": {}}, contrast=contrast))
    reports: list[str] = []

    def run(**options: Any) -> Any:
        reports.clear()
        return runner.run_study(study, seeds=2, out=tmp_path, report=reports.append, **options)

    found = run(jobs=jobs, only="bandit, twice")
    assert reports[0] == "tiny: 2 runs, 0 of them done" and len(reports) == 3
    assert [each.outcome for each in found.decisions] == ["not run", "undecided"]
    first = rows(tmp_path)
    assert [row["seed"] for row in first] == ["1000", "1001"]
    assert all(0 <= float(row["final"]) <= 1 for row in first)
    text = (tmp_path / "study.md").read_text()
    assert f"**{VERDICT_WORDS[found.verdict]}.**" in text and "**not run**" in text
    assert "2 training seeds an arm, where 7 were planned" in text and "![" in text
    assert (tmp_path / "study.svg").stat().st_size > 1000

    # One run killed before its first checkpoint, one after its last: the study completes both.
    shutil.rmtree(tmp_path / "bandit-twice" / "all" / "seed-1000" / "checkpoints")
    shutil.rmtree(tmp_path / "bandit-twice" / "all" / "seed-1001")
    found = run(jobs=1, only="bandit, twice")
    assert reports[0] == "tiny: 2 runs, 1 of them done", "a finished run needs no checkpoint"
    same = ("before", "peak", "final")
    again = [[row[k] for k in same] for row in rows(tmp_path)]
    assert again == [[row[k] for k in same] for row in first]
    read = read_findings(study, "laptop", tmp_path)
    assert (read.seeds, read.sentence) == (2, found.sentence)

    with pytest.raises(RagenError, match="tiny has no environment 'sokoban'; it has bandit, ban"):
        run(only="sokoban")
    study = study.model_copy(update={"arms": study.arms | {"all": {"update.lr": 1.0}}})
    with pytest.raises(RagenError, match=r"made with other settings .* name another --out"):
        run()


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
    for _ in range(500):
        stat = Path(f"/proc/{worker}/stat")
        if not stat.exists() or ") Z " in stat.read_text():  # a zombie, if no parent reaps it
            return
        time.sleep(0.02)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived the study")


def test_a_run_whose_process_is_killed_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "end_with_parent", os.getpid)  # imports nothing in the process
    monkeypatch.setattr(runner, "make_run", os._exit)
    exit_codes: Any = [9, 9]
    with pytest.raises(RagenError, match=r"killed.* same command continues .* fewer --jobs"):
        list(runner.make_runs(exit_codes, 2))


def test_an_error_of_another_process_keeps_its_line() -> None:
    for error in (
        NotFiniteError("the loss"),
        MismatchError(1, -0.1, -0.2, 0.01),
        Damaged(Path("state.json"), "no JSON"),
        GuardStop("stopped"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.slow
def test_an_arm_may_be_fine_tuned_first_and_evaluated_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(
        **small(
            arms={"taught": {"steps": 0}},
            sft={"taught": {"episodes": 16, "epochs": 4, "lr": 3e-2}},
            transfer={"reversed": {"env.params.reverse": True}},
            contrast={"measure": "final", "arm": "taught", "above": 0.5},
            describe=["final - transfer:reversed"],
        )
    )
    first = runner.run_study(study, seeds=2, out=tmp_path, jobs=1)
    names = ("final", "final - transfer:reversed")
    found = {name: first.numbers[name]["bandit", "taught"] for name in names}
    assert found == {"final": [1.0, 1.0], "final - transfer:reversed": [1.0, 1.0]}
    assert (tmp_path / "bandit" / "taught" / "seed-1001-sft" / "model.safetensors").is_file()

    monkeypatch.setattr("ragen.evaluation.evaluation.play_episodes", None)  # nothing is left
    reports: list[str] = []
    again = runner.run_study(study, seeds=2, out=tmp_path, jobs=1, report=reports.append)
    assert reports == ["tiny: 2 runs, 2 of them done"] and again.numbers == first.numbers
    write_overview([again], tmp_path)
    index = (tmp_path / "index.md").read_text()
    assert "- **tiny.** The claim is undecided on bandit." in index
    assert "0 of 1 judged claims by environment are decided." in index
    assert "- tiny, bandit, after 2 seeds: undecided; about" in index
    assert (tmp_path / "studies.svg").stat().st_size > 1000


def test_stop_request_raises_keyboard_interrupt_with_a_hint(
    tiny: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise StopRequested(2)

    monkeypatch.setattr(runner, "train", stop)
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        runner.run_study(tiny, seeds=2, out=tmp_path, jobs=1)


def test_the_study_command_lists_previews_and_reports_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(study_names())
    assert main(["study", "guard", "--dry-run", "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "predicts " in shown and shown.count("claim: ") == 1
    for options, number in ((["--only", "sokoban"], 6), ([], 30)):
        assert main(["study", "filtering", "--dry-run", "--seeds", "2", *options]) == 0
        assert f"\n{number} runs\n" in capsys.readouterr().out
    Path("file").write_text("")
    for options, message in (
        (["--all", "--only", "bandit"], "--all takes every study and environment: leave the name"),
        (["filtering", "--all"], "--all takes every study and environment: leave the name"),
        (["filterin"], "did you mean 'filtering'?"),
        (["guard", "--seeds", "1"], "--seeds 1: an interval over seeds takes 2 or more"),
        (["guard", "--seeds", "0", "--dry-run"], "--seeds 0: an interval"),
        (["guard", "--jobs", "-2"], "argument --jobs: expected a whole number"),
        (["guard", "--out", "file"], "cannot write file: file exists; free space there or choose"),
        (["guard", "--out", "file/x"], "cannot write file/x: not a directory"),
    ):
        assert main(["study", *options]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
