"""The report of a synthetic run: text, tables and plots."""

import io
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ragen.cli.main import main
from ragen.config.reading import dump, merge
from ragen.core.metrics import last
from ragen.core.statistics import paired_difference
from ragen.core.tables import markdown, show
from ragen.core.types import Group
from ragen.reports.facts import Facts, read_facts
from ragen.reports.plots import Curve, draw_signals, draw_success, draw_time, smoothed
from ragen.reports.report import page, write_report
from ragen.storage.database import DATABASE
from ragen.storage.reader import Attempt
from ragen.storage.recorder import Recorder
from tests.cli.test_cli import evaluation
from tests.records import episode

Capture = pytest.CaptureFixture[str]
ONLY = Attempt(0, 1, 3, math.inf)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps, rolled back to step 2, with three more steps in a second attempt."""
    config = merge("bandit", {"steps": 5, "seed": 7})
    folder = tmp_path / "bandit-7"
    folder.mkdir()
    with Recorder.create(folder, dump(config)) as recorder:
        recorder.evaluation(0, evaluation(0.5).record())
        for step in (1, 2, 3, 4):
            log(recorder, step, 0.5 + step / 10)
        recorder.evaluation(4, evaluation(0.2).record())
        recorder.event(4, "alarm", "grad_spike: 30 | usually 1")
        recorder.event(4, "rollback", "back to step 2")
        recorder.commit()
        recorder.attempt = 1
        for step in (3, 4, 5):
            log(recorder, step, 0.9)
        recorder.evaluation(5, evaluation(0.9).record())
    return folder


def log(recorder: Recorder, step: int, success: float) -> None:
    metrics = {
        "success/mean": success,
        "reward/std_in_group": 0.25,
        "mismatch/max_abs": step * 1e-6,
        "exactness/tokens_checked": 1000.0,
        "tokens/sampled": 2000.0,
        "time/rollout_s": 3.0,
        "time/update_s": 1.0,
        "time/step_s": 4.0,
    }
    recorder.log(step, {name: last(value) for name, value in metrics.items()})


def cells(facts: Facts, title: str) -> dict[str, tuple[str, ...]]:
    """A section's table as a dictionary from each row's first cell to the others."""
    (section,) = (section for section in page(facts) if section.title.startswith(title))
    return {row[0]: row[1:] for row in section.rows}


def test_facts_exclude_rolled_back_steps(run: Path) -> None:
    facts = read_facts(run)
    assert facts.steps == 5
    assert facts.metrics["success/mean"] == {1: 0.6, 2: 0.7, 3: 0.9, 4: 0.9, 5: 0.9}
    assert facts.curve("success/mean").rolled_back == ({2: 0.7, 3: 0.8, 4: 0.9},)
    assert [each.step for each in facts.evaluations] == [0, 5]  # step 4 was rolled back
    assert facts.alarms == [4]


def test_second_rollback_may_go_back_further_than_the_first(tmp_path: Path) -> None:
    with Recorder.create(tmp_path, dump(merge("bandit"))) as recorder:
        for attempt, steps in enumerate(([1, 2, 3, 4], [4, 5], [2])):
            recorder.attempt = attempt
            for step in steps:
                recorder.log(step, {"x": last(float(attempt))})
    curve = read_facts(tmp_path).curve("x")
    assert curve.standing == {1: 0.0, 2: 2.0}
    assert curve.rolled_back == ({1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}, {4: 1.0, 5: 1.0})


def test_success_is_reported_with_random_and_optimal_play(run: Path) -> None:
    facts = read_facts(run)
    assert cells(facts, "Success") == {
        "random play": ("50.0%", "", "0.200"),
        "step 0, T=1": ("50.0%", "40.0% – 60.0%", "0.200"),
        "step 5, T=1": ("90.0%", "80.0% – 100.0%", "0.200"),
        "optimal play": ("100.0%", "", "0.250"),
    }
    # Both intervals are ± 10 points, so that of their difference is ± √(10² + 10²) = 14.1.
    (section,) = (part for part in page(facts) if part.title == "Success")
    assert section.lines[1] == "T=1: 50.0% → 90.0%, +40.0 points [+25.9, +54.1]."


def test_change_within_the_interval_is_reported_as_no_change(tmp_path: Path) -> None:
    with Recorder.create(tmp_path, dump(merge("bandit"))) as recorder:
        recorder.evaluation(0, evaluation(0.5).record())
        recorder.evaluation(60, evaluation(0.6).record())
    lines = next(part for part in page(read_facts(tmp_path)) if part.title == "Success").lines
    assert lines[1].endswith(
        "+10.0 points [-4.1, +24.1]; the interval contains 0: no change is shown."
    )


def test_the_change_of_recorded_evaluations_is_paired(tmp_path: Path) -> None:
    """32 of 64 levels are solved before, the same and 16 more after: with the two levels that
    are added, s² = (18 − 16² / 66) / 65 = .217, and t · √(s² / 66) = 11.5 points around 24.2."""
    with Recorder.create(tmp_path, dump(merge("bandit"))) as recorder:
        for step, solved in ((0, 32), (60, 48)):
            recorder.evaluation(step, evaluation(solved / 64).record())
            played = (replace(episode(success=n < solved), level_seed=n) for n in range(64))
            recorder.episodes(step, [Group((each,)) for each in played], phase="eval")
    facts = read_facts(tmp_path)
    change, is_paired = facts.gain(*facts.evaluations)
    rates = [[float(level < solved) for level in range(64)] for solved in (48, 32)]
    assert is_paired and change == paired_difference(rates[:1], rates[1:])
    lines = next(part for part in page(facts) if part.title == "Success").lines
    assert lines[1] == "T=1: 50.0% → 75.0%, +25.0 points [+12.8, +35.7], level by level."


def test_signals_show_their_extremes_with_the_step(run: Path) -> None:
    found = cells(read_facts(run), "Signals")
    assert found["success"] == ("0.6", "0.6 (1)", "0.9 (3)", "0.9", "▁▃███")
    assert found["reward std"] == ("0.25", "0.25 (1)", "0.25 (1)", "0.25", "▁▁▁▁▁")


def test_gradients_by_reward_std_are_shown_only_if_measured(run: Path) -> None:
    assert "Gradients by reward std" not in [section.title for section in page(read_facts(run))]
    metrics = {
        "gradient_by_std/0/groups": {1: 4.0, 3: 12.0},
        "gradient_by_std/0/task_per_token": {1: 9.0, 3: 0.0},
        "gradient_by_std/0/task_per_sample": {1: 9.0, 3: 0.0},
        "gradient_by_std/1/groups": {1: 4.0},  # all are alike in step 3: one bucket
        "gradient_by_std/3/groups": {3: 4.0},
        "gradient_by_std/3/task_per_token": {3: 0.5},
    }
    found = Facts(Path(), merge(None), metrics, (), (), {ONLY: metrics})
    assert cells(found, "Gradients") == {"0": ("12", "0"), "3": ("4", "0.5")}


def test_the_calls_of_an_agent_are_summed_and_parameters_without_effect_are_named(
    run: Path,
) -> None:
    facts = read_facts(run)
    assert "Calls of the agent" not in [section.title for section in page(facts)]
    found = {"agent/calls": {1: 20.0, 2: 22.0}, "agent/ignored/seed": {2: 22.0}}
    facts = replace(facts, metrics={**facts.metrics, **found})
    assert cells(facts, "Calls of the agent") == {"calls": ("42",), "calls that set seed": ("22",)}


def test_exactness_counts_checks_and_keeps_the_largest_difference(run: Path) -> None:
    assert cells(read_facts(run), "Exactness") == {
        "exactness/tokens_checked": ("5,000",),  # of the five steps in effect
        "mismatch/max_abs": ("5e-06",),
    }


def test_time_counts_all_attempts(run: Path) -> None:
    # Seven steps of 3 s rollout and 1 s update, three evaluations of .5 s less the lost one: 29 s.
    facts = read_facts(run)
    assert cells(facts, "Time") == {
        "rollout": ("21.0", "72%", "3.000"),
        "update": ("7.0", "24%", "1.000"),
        "evaluations": ("1.0", "3%", ""),
    }
    (section,) = (part for part in page(facts) if part.title == "Time")
    assert section.lines == ("0:29 in total, 14,000 tokens sampled in steps, 483 tokens/s.",)


def test_phases_count_no_time_twice() -> None:
    parts = {"generate": 2.0, "env": 1.0, "rollout": 3.0, "update": 4.0, "step": 7.0}
    seconds = {f"time/{name}_s": {1: value} for name, value in parts.items()}
    history = seconds | {"time/tokens_per_s": {1: 900.0}}
    found = Facts(Path(), merge(None), history, (), (), {ONLY: history}).phases
    assert found == {"generate": 2.0, "env": 1.0, "update": 4.0}


def test_changed_settings_show_the_value_of_the_preset(run: Path) -> None:
    found = cells(read_facts(run), "Settings that differ from starpo-s/grpo")
    assert found["seed"] == ("0", "7")
    assert found["env.name"] == ("frozen-lake-still", "bandit")


def test_markdown_rows_have_as_many_cells_as_their_header(run: Path) -> None:
    text = markdown(page(read_facts(run)), ["success"])
    assert text.startswith("# Run bandit-7\n\nEnvironment bandit, model base, recipe bandit")
    assert "Finished steps: 5 in 2 attempts; budget: 5 steps." in text
    assert "| grad_spike: 30 \\| usually 1 |" in text
    assert "![Success](report-success.png)" in text
    assert "report-time.png" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert (
                len({line.replace("\\|", "").count("|") for line in block.strip().split("\n")}) == 1
            )


def test_report_fits_the_width_of_a_terminal(run: Path) -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    show(console, page(read_facts(run)))
    shown = console.export_text()
    assert all(len(line) <= 80 for line in shown.splitlines())
    for words in ("Success", "optimal play", "grad_spike: 30 | usually 1", "21.0"):
        assert words in shown


def test_run_without_finished_steps_has_a_report(tmp_path: Path) -> None:
    Recorder.create(tmp_path, dump(merge("bandit"))).close()
    path = write_report(read_facts(tmp_path), tmp_path)
    text = path.read_text(encoding="utf-8")
    for words in (
        "Finished steps: 0; budget: 60 steps.",
        "The run was not evaluated.",
        "No step is finished.",
        "None.",
    ):
        assert words in text
    assert list(tmp_path.glob("*.png")) == []


# Plots


def test_smoothed_golden() -> None:
    assert smoothed({1: 1.0, 2: 3.0, 4: 5.0, 5: 7.0}, 3) == {1: 1, 2: 2, 4: 3, 5: 5}


def test_signal_plot_shows_rolled_back_attempts_and_alarms() -> None:
    curve = Curve({1: 0.5, 2: 0.6, 3: 0.7}, ({2: 0.6, 3: 0.1},))
    figure = draw_signals({"reward std": curve, "entropy": Curve({1: 1.0})}, [3, 3])
    above, below = figure.axes
    drawn = {line.get_label(): line for line in above.lines}
    assert list(drawn["rolled back"].get_ydata()) == [0.6, 0.1]
    assert list(drawn["mean of five steps"].get_xdata()) == [1, 2, 3]
    assert list(drawn["alarm"].get_xdata()) == [3, 3]
    assert sum(line.get_label() == "alarm" for line in above.lines) == 1  # two alarms, one step
    assert [axes.get_title("left") for axes in (above, below)] == ["reward std", "entropy"]


def test_other_plots_show_baselines_and_shares(run: Path) -> None:
    facts = read_facts(run)
    figure = draw_success(facts.curve("success/mean"), Curve({}), facts.evaluations, [])
    levels = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert levels == [0.5, 1.0]
    (axes,) = draw_time({"update": 1.0, "rollout": 3.0}).axes
    assert [text.get_text() for text in axes.texts] == ["1.0 s, 25%", "3.0 s, 75%"]


def test_plots_are_written_next_to_the_report(run: Path, capsys: Capture) -> None:
    out = run.parent / "elsewhere" / "deep"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "report-signals.png",
        "report-success.png",
        "report-time.png",
        "report.md",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    assert f"with plots: {out / 'report.md'}" in capsys.readouterr().out
    assert not (run / "report.md").exists()
    (run / "report.md").write_text("older")
    assert main(["report", str(run)]) == 0
    assert (run / "report.md").read_text("utf-8") == (out / "report.md").read_text("utf-8")


# Mistakes


def test_mistakes_give_one_line_and_exit_code_2(run: Path, capsys: Capture) -> None:
    def error_line(*arguments: str) -> str:
        assert main(["report", *arguments]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("ragen: ") and output.err.count("\n") == 1
        return output.err

    assert "is not a run folder: config.toml is missing" in error_line(str(run.parent))
    taken = run.parent / "file"
    taken.touch()
    assert f"cannot write {taken}/report.md: " in error_line(str(run), "--out", str(taken))
    assert "choose another place with --out" in error_line(str(run), "--out", str(taken / "x"))
    database = (run / DATABASE).read_bytes()
    (run / DATABASE).write_bytes(b"no database" * 100)
    assert "run.sqlite cannot be read" in error_line(str(run))
    (run / DATABASE).write_bytes(database[:5000])
    assert "run.sqlite cannot be read" in error_line(str(run))
    (run / DATABASE).unlink()
    assert "is not a run folder: run.sqlite is missing" in error_line(str(run))


@pytest.mark.slow
def test_plots_need_no_backend() -> None:
    """matplotlib refuses to be imported if ``MPLBACKEND`` names what is not there."""
    script = (
        "from ragen.reports.plots import draw_time; "
        "draw_time({'rollout': 1.0}).savefig('/dev/null', format='png'); "
        "import matplotlib, os; "
        "print(matplotlib.get_backend(auto_select=False), os.environ['MPLBACKEND'])"
    )
    for backend, kept in (("of-a-notebook", "None"), ("svg", "svg")):
        environment = os.environ | {"MPLBACKEND": backend}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True
        )
        assert done.stdout.split() == [kept, backend], done.stderr
