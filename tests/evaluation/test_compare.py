"""Comparison of two arms: scripted outcomes with values by hand, players, and a trained model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import dump, merge
from ragen.core.errors import RagenError
from ragen.core.statistics import mcnemar, smallest_detectable
from ragen.core.tables import markdown
from ragen.envs.contract import Baselines
from ragen.evaluation.compare import (
    FEW_SEEDS,
    SUITES,
    Comparison,
    compare,
    compare_in_envs,
    refuse_absent_targets,
)
from ragen.evaluation.outcomes import Outcome
from ragen.evaluation.results import Evaluation, summarize
from ragen.evaluation.tables import closing_sections, comparison_table
from ragen.settings.target import shared_settings
from ragen.storage.database import CONFIG
from tests.faulty import FaultyServer, chat_reply

ROGUE = f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue"


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


def scripted(solved: Mapping[str, Sequence[Sequence[bool]]]) -> Any:
    """A `measure` with scripted results: per target, the success of each sample of each level."""

    def measure(target: str, overrides: Mapping[str, Any]) -> tuple[Evaluation, list[Outcome]]:
        env = overrides.get("env", "bandit")
        outcomes = [
            Outcome(env, 123 + level, sample, success, 0.0, *(1,) * 7, stop_reason="failed")
            for level, samples in enumerate(solved[target])
            for sample, success in enumerate(samples)
        ]
        baselines = Baselines(0.25, 0.75, 0.0, 0.0)
        return summarize(outcomes, baselines, target, 1.0, 0.0), outcomes

    return measure


def compared(a: list[str], b: list[str], solved: Mapping[str, Any]) -> Comparison:
    """The comparison of two arms in the environment of the first."""
    return next(compare_in_envs(a, b, {"": {}}, {}, scripted(solved)))


def levels(won: int, lost: int) -> list[list[bool]]:
    return [[True]] * won + [[False]] * lost


def test_comparison_equals_values_computed_by_hand() -> None:
    """100 levels: both solve 40, only the first solves 20, only the second solves 4."""
    solved = {
        "random": levels(60, 40),
        "solver": [*levels(40, 20), *levels(4, 36)],
    }
    comparison = compared(["random"], ["solver"], solved)
    assert (comparison.env, comparison.won, comparison.lost) == ("bandit", 20, 4)
    assert comparison.difference.value == pytest.approx(0.16)
    # With two added levels: centre 16/102 = .15686; variance (26 − 102·.15686²)/101 = .23258, of
    # the mean .0022802, its root .047751; t(.975; 101) = 1.98373, so ± .094726.
    assert comparison.difference.low == pytest.approx(0.06214, abs=1e-4)
    assert comparison.difference.high == pytest.approx(0.25159, abs=1e-4)
    assert comparison.p_value == mcnemar([1] * 20 + [-1] * 4)
    assert comparison.detectable == smallest_detectable(comparison.difference)
    assert comparison.verdict == "random is better than solver: +16.0 points [+6.2, +25.2]."
    swapped = compared(["solver"], ["random"], solved)
    assert swapped.verdict == "solver is worse than random: -16.0 points [-25.2, -6.2]."
    json.dumps(comparison.record())


def test_verdict_states_the_smallest_detectable_difference() -> None:
    solved = {"random": levels(33, 31), "solver": levels(31, 33)}
    comparison = compared(["random"], ["solver"], solved)
    assert comparison.verdict == (
        "No difference is shown: +3.1 points [-3.0, +9.1]. This sample is too small to show "
        "a difference of less than 8.7 points reliably."
    )
    page = markdown([comparison_table(comparison)])
    assert "| random play | 25.0% |" in page and "| optimal play | 75.0% |" in page
    assert "random did better on 2, solver on 0; McNemar's p = 0.5." in page


def test_several_samples_are_paired_by_level() -> None:
    solved = {"random": [[True, True], [True, False]], "solver": [[True, False], [False, True]]}
    comparison = compared(["random"], ["solver"], solved)
    assert (comparison.difference.value, comparison.won, comparison.lost) == (0.25, 1, 0)
    assert comparison.p_value == mcnemar([1, 0]) == 1.0
    assert "Of 2 levels, 2 episodes each:" in markdown([comparison_table(comparison)])


def run_folders(tmp_path: Path, names: str) -> list[str]:
    """Run folders with a config of the same recipe and nothing else."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text(dump(merge("bandit")), encoding="utf-8")
    return [str(tmp_path / name) for name in names]


def test_runs_with_different_seeds_form_an_arm(tmp_path: Path) -> None:
    a, b, c, d = run_folders(tmp_path, "abcd")
    solved = {a: levels(40, 24), b: levels(48, 16), c: levels(56, 8), d: levels(20, 44)}
    comparison = compared([a, b, c], [d, "random"], solved | {"random": levels(24, 40)})
    assert (
        comparison.a.success.value == pytest.approx(0.75) and comparison.b.success.value == 22 / 64
    )
    assert comparison.a.name == f"{a} (3 seeds)" and comparison.p_value is None
    assert comparison.difference.value == pytest.approx(0.75 - 22 / 64)
    page = markdown([comparison_table(comparison), *closing_sections([comparison])])
    assert f"{a} (3 seeds): 62.5%, 75.0%, 87.5%." in page
    assert "2 training seeds are few" in page and FEW_SEEDS == 5
    checkpoint = f"{a}/checkpoints/step-4"
    for again in (f"{a}/", os.path.relpath(a), checkpoint):
        with pytest.raises(RagenError, match="named twice"):
            refuse_absent_targets([a, again], [b], None)
    with pytest.raises(RagenError, match=rf"^{a} is named twice \({checkpoint}, .*-2\), but"):
        refuse_absent_targets([checkpoint, f"{a}/checkpoints/step-2"], [b], None)


def test_success_is_aggregated_over_several_environments(tmp_path: Path) -> None:
    """Success .5 and .75 is .5 and 1 on the scale from random (.25) to optimal play (.75)."""
    a, b = run_folders(tmp_path, "ab")
    solved = {a: levels(32, 32), b: levels(48, 16), "random": levels(16, 48)}
    envs = {name: {"env": name} for name in ("bandit", "bandit-rev")}
    comparisons = list(compare_in_envs([a, b], ["random"], envs, {}, scripted(solved)))
    assert [each.env for each in comparisons] == list(envs)
    (last,) = closing_sections(comparisons)
    assert [row[:2] for row in last.rows] == [(f"{a} (2 seeds), 2 environments", "0.75")]
    assert "in 10% of such suites of 2, at least one misses the truth" in " ".join(last.lines)


def measured_targets(
    targets: list[str], envs: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Any]]:
    """The targets and settings that `compare_in_envs` measures."""
    calls = []

    def measure(target: str, overrides: Mapping[str, Any]) -> tuple[Evaluation, list[Outcome]]:
        calls.append((target, overrides))
        return scripted({target: levels(1, 1)})(target, {})

    list(compare_in_envs(targets[:1], targets[1:], envs, {}, measure))
    return calls


def test_all_targets_play_with_the_parameters_and_budgets_of_the_run(tmp_path: Path) -> None:
    """The run's parameters and budgets hold for all; observations stay those of each target."""
    values = {
        "env.params": {"observation": "coord", "p_frozen": 0.9},
        "env.max_turns": 3,
        "env.max_actions": 6,
    }
    (tmp_path / CONFIG).write_text(dump(merge("frozen-lake-still", values)), encoding="utf-8")
    (_, first), (_, other) = measured_targets([str(tmp_path), "random"], {"": {}})
    assert first == {}
    assert other["env.name"] == "frozen-lake-still" and other["env.max_turns"] == 3
    assert other["env.params.p_frozen"] == 0.9 and "env.params.observation" not in other
    assert measured_targets(["random", str(tmp_path)], {"": {}})[0] == ("random", other), (
        "in either order"
    )
    # The named recipe, not only its environment, sets the prompts of targets without a run.
    (tmp_path / CONFIG).write_text(dump(merge("sokoban", {"env.max_turns": 3})), encoding="utf-8")
    model = measured_targets([str(tmp_path), "model"], {"": {"env": "paper/sokoban"}})[1][1]
    assert model["env"] == "paper/sokoban" and model["env.max_turns"] == 3


def test_a_model_compared_with_a_run_gets_the_prompt_settings_of_the_run(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(dump(merge("paper/sokoban")), encoding="utf-8")
    targets = [str(tmp_path), "Qwen/Some-Model", "base", "random"]
    shared = shared_settings(targets, {})
    model = shared["Qwen/Some-Model"]
    assert (model["prompt.style"], model["rollout.max_tokens"]) == ("paper", 400)
    for other in ("base", "random"):
        assert "prompt.style" not in shared[other] and shared[other]["env.max_turns"] == 5
    served = shared_settings(targets, {}, is_served=True)["Qwen/Some-Model"]
    assert "prompt.style" not in served, "an endpoint keeps the prompt settings of endpoints"


def test_runs_in_different_environments_are_refused_unless_env_is_given(tmp_path: Path) -> None:
    for name in ("bandit", "sokoban"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text(dump(merge(name)), encoding="utf-8")
    runs = [str(tmp_path / name) for name in ("bandit", "sokoban")]
    with pytest.raises(RagenError, match=r"env\.name is 'bandit' and 'sokoban'; choose one with"):
        measured_targets(runs, {"": {}})
    assert len(measured_targets(runs, {"": {"env": "bandit-rev"}})) == 2


def test_base_is_the_initial_model_of_the_run(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(dump(merge("sokoban")), encoding="utf-8")
    names = [
        Path(target).name
        for target, _ in measured_targets([str(tmp_path), "base"], SUITES["sokoban"])
        if target != str(tmp_path)
    ]
    assert names == ["sokoban"] * 4, "also on Frozen Lake, which has its own embedded model"


def test_the_solver_beats_random_play_and_random_play_equals_itself() -> None:
    def play(a: str, b: str) -> Comparison:
        return compare(a, b, {"env": "bandit"}, episodes=64)

    better = play("solver", "random")
    assert better.difference.low > 0.2 and better.lost == 0 and better.p_value is not None
    assert better.p_value < 1e-6
    same = play("random", "random")
    assert (same.won, same.lost, same.difference.value, same.p_value) == (0, 0, 0.0, 1.0)
    assert same.detectable > 0.05, "64 levels without a difference are no proof of equality"


def test_compare_command_writes_markdown_and_json(
    own_bandit_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    line = f"compare solver random --episodes 4 --env bandit,bandit-rev --markdown {page}"
    assert main(line.split()) == 0
    shown, written = capsys.readouterr().out, page.read_text("utf-8")
    for env in ("bandit", "bandit-rev"):
        assert f"# {env}\n" in written and f"\n{env}\n" in shown
    assert written.count("random play") == 2 and "Limits" in shown
    line = f"compare {own_bandit_run} random --episodes 4 --samples 2 --json"
    assert main(line.split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["env"] == "bandit" and record["a"]["evaluations"][0]["samples"] == 2
    assert set(record) >= {"verdict", "difference", "p_value", "detectable", "won", "lost"}


def test_an_endpoint_is_asked_only_for_models_that_are_not_local(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only targets that are not found locally are asked at the endpoint."""
    with FaultyServer(lambda number, body: chat_reply()) as server:
        command = ["compare", "some/model", "random", "--env", ROGUE, "--episodes", "2"]
        command += ["--env.max_turns", "1"]
        assert main([*command, "--base-url", server.url, "--json"]) == 0
    assert {body["model"] for body in server.requests} == {"some/model"}
    record = json.loads(capsys.readouterr().out)
    assert record["a"]["success"]["value"] == 1.0 and record["won"] > record["lost"] == 0


def test_wrong_options_and_missing_targets_are_refused_in_one_line_before_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, message in (
        ("solver --suite lake", "there is no suite 'lake': expected bandit or sokoban"),
        ("solver --suite bandit --env bandit", "leave --env out"),
        ("solver --env sokoban,bandti", "did you mean 'bandit'"),
        ("solver --rpm 3", "add --base-url URL"),
        ("solver --episodes 0", "--episodes: expected a whole number from 1"),
        ("solver --markdown no/such/page.md", "there is no such folder"),
        (f"no-such-run --env {ROGUE}", "there is no model or run 'no-such-run'"),
        (f"solver, --env {ROGUE}", "separated by commas: A1,A2,A3"),
        (f"solver,human --env {ROGUE}", "a person plays with `ragen play ENV`"),
        (f"base --env {ROGUE}", "no embedded model"),
        (f". --env {ROGUE}", "config.json"),
    ):
        assert main(["compare", "random", *options.split()]) == 2
        shown = capsys.readouterr()
        assert message in shown.err and shown.err.count("\n") == 1 and not shown.out
        assert not list(tmp_path.iterdir()), "nothing was played"
