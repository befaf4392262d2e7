"""Every benchmark starts; what some of them find, in small."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def test_every_script_prints_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in this process, where torch is already loaded."""
    assert len(SCRIPTS) >= 10
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.syspath_prepend(str(FOLDER))
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [str(script), "--help"])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(script), run_name="__main__")
        assert not stopped.value.code
        assert capsys.readouterr().out.startswith(f"usage: {script.name}")


def test_growth_finds_the_cost_of_a_pair_and_draws_what_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import growth

    def point(tokens: float) -> dict[str, float]:
        """One whose update takes 1 s, 1 s a token and half a second a pair."""
        phases = {"rollout_s": tokens, "score_s": tokens, "update_s": 1 + 2.5 * tokens**2 + tokens}
        stored = {"record_s": 1.0, "record_bytes": 8.0, "episodes": 2, "save_s": 1.0}
        return phases | stored | {"at": tokens, "tokens": tokens, "pairs": 5 * tokens**2}

    points = [point(tokens) for tokens in (1, 2, 4, 8)]
    pair, rest = growth.without_attention(points, "update")
    assert pair == pytest.approx(0.5)
    assert rest == pytest.approx([2, 1.5, 1.25, 1.125])  # 1 + 1 / tokens
    assert growth.without_attention(points, "score")[0] == pytest.approx(0, abs=1e-9)
    found = dict.fromkeys(growth.AXES, points)
    lines = list(growth.table(found))
    assert lines[2].startswith("| 1 turns | 1 | 1e+06 (1e+06) |") and len(lines) == 2 + 4 * 4
    (legend,) = growth.draw(found).legends
    assert [text.get_text() for text in legend.get_texts()][::2] == list(growth.PHASES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would run the benchmark")
def test_gpu_benchmark_without_a_gpu_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in this process, where torch is already loaded."""
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    runpy.run_path(str(FOLDER / "gpu.py"), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in line and "--tiny" in line


@pytest.mark.slow
def test_a_training_step_does_what_the_committed_counts_say() -> None:
    """Calls, operators, bytes and forwards of a step: what a slower step would do more of."""
    done = subprocess.run(
        [sys.executable, "counts.py", "--check", "counts.json"],
        capture_output=True,
        text=True,
        cwd=FOLDER,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_rule_of_studies_gives_few_false_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run in ten collapses, Student's t says what is not true in a third of studies."""
    monkeypatch.syspath_prepend(FOLDER)
    import verdicts

    shapes = ("σ = .02", "1 in 10 collapses", "3 in 10 of both")
    for shape in shapes:  # of 1,000 studies, 3 standard errors of 5 % are 2.1 %
        assert verdicts.worst_false("sign test: median", shape, 10, 0.05, 1000) < 0.07
    assert verdicts.worst_false("Student: mean", "1 in 10 collapses", 10, 0.05, 1000) > 0.25
    assert verdicts.share_chances(12, 0.5, 0.5, 0.05)[1] < 0.05
    head, first, *_ = verdicts.power_table((10, 24), 200, 0.05)
    assert head.startswith("| claim |") and first.startswith("| D = 0.08 | σ = .02 | D | holds |")


@pytest.mark.parametrize("name", ["gymnasium:Blackjack-v1", "gymnasium:MiniGrid-Empty-5x5-v0"])
def test_floors_of_foreign_environments_are_those_of_the_bare_library(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed seeds, so the intervals of this test do not vary from run to run."""
    monkeypatch.syspath_prepend(FOLDER)
    import floors

    if "MiniGrid" in name:
        pytest.importorskip("minigrid", reason="needs the extra minigrid")
    levels = range(123, 139)
    ours, theirs = floors.compared(name, levels, 8)
    assert floors.agrees(ours.success, theirs.success)
    assert ours.reward.low <= theirs.reward.high and theirs.reward.low <= ours.reward.high
    assert floors.row(name, ours, theirs).startswith(f"| {name} | {ours.success.value:.1%} (")
