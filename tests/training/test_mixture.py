"""Mixtures: exact shares, each environment's own levels, budgets, metrics and evaluations."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen.algorithms.batch import EpisodeIndex
from ragen.algorithms.credit import compared_with
from ragen.config.keys import parse_value
from ragen.config.reading import changed, merge
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, last, mean
from ragen.core.seeding import TRAIN_LEVELS
from ragen.core.types import Episode, Group
from ragen.diagnostics import information
from ragen.diagnostics.step_metrics import summarize_envs
from ragen.evaluation.branch import branch
from ragen.evaluation.evaluation import evaluate_target
from ragen.evaluation.results import load_evaluations
from ragen.reports.facts import read_facts
from ragen.reports.report import page
from ragen.rollout.setup import Setup
from ragen.settings.resolve import resolve
from ragen.settings.target import config_for, envs_of
from ragen.storage.reader import read_metrics
from ragen.training.mixture import first_starts, share_out
from ragen.training.running import Result
from ragen.training.trainer import resume, train
from ragen.viewer.reading import Runs
from ragen.viewer.run_list import run_summary
from tests import shared
from tests.bandit_model import settings
from tests.training.runs import rows

MIX = {"bandit": 2, "bandit-rev": 1}


@pytest.fixture(scope="module")
def result(mixed_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Of three steps of four groups: eight of bandit, four of its reverse."""
    return resume(shared.own(mixed_run, tmp_path_factory.mktemp("runs")))


def test_shares_are_exact_over_the_steps_where_no_step_can_hold_them() -> None:
    shares, counts = {"a": 0.5, "b": 0.3, "c": 0.2}, Counter[str]()
    for _ in range(10):
        step = share_out(shares, counts, 7)
        assert step == sorted(step) and len(step) == 7
        counts.update(step)
    assert counts == {"a": 35, "b": 21, "c": 14}


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=2), st.integers(1, 9))
def test_no_environment_is_a_group_away_from_its_share(weights: list[float], size: int) -> None:
    shares, counts = dict(zip("ab", weights, strict=True)), Counter[str]()
    for step in range(1, 20):
        counts.update(share_out(shares, counts, size))
        for name, share in shares.items():
            assert abs(counts[name] - step * size * share / sum(weights)) < 1 + 1e-9


def test_each_environment_has_its_own_levels_in_order(result: Result) -> None:
    """As in a run of it alone: whatever the shares are, no level of it is left out or repeated."""
    query = "SELECT DISTINCT env, step, \"group\", level_seed FROM episodes WHERE phase = 'train'"
    played = rows(result.run, f'{query} ORDER BY step, "group"')
    levels = {name: [row[3] for row in played if row[0] == name] for name in MIX}
    assert levels["bandit"] == list(range(10000, 10008))
    assert levels["bandit-rev"] == list(range(10000, 10004))
    assert [row[0] for row in played if row[1] == 1] == ["bandit"] * 3 + ["bandit-rev"]


def test_a_pool_of_levels_is_played_in_turn_in_each_environment() -> None:
    config = merge("bandit", settings(env__mix=MIX, rollout__levels=3, rollout__num_groups=4))
    playing = cast("dict[str, Setup]", dict.fromkeys(MIX, SimpleNamespace()))
    starts = first_starts(
        playing, config.rollout, config.env.mix, 0, {"bandit": 8, "bandit-rev": 4}
    )
    assert [start.level - TRAIN_LEVELS for start in starts] == [2, 0, 1, 1]
    alone = merge("bandit", settings(rollout__levels=3, rollout__num_groups=4))
    one = cast("dict[str, Setup]", {"bandit": SimpleNamespace()})
    starts = first_starts(one, alone.rollout, {}, 1, {})
    assert [start.level - TRAIN_LEVELS for start in starts] == [1, 2, 0, 1]


def test_every_environment_has_its_metrics_beside_the_whole(result: Result) -> None:
    metrics = read_metrics(result.run)
    query = "SELECT env, avg(success), count(*) FROM episodes WHERE phase = 'train' AND step = {}"
    for step, success in metrics["success/mean"].items():
        found = rows(result.run, f"{query.format(step)} GROUP BY env")
        for name, own, _ in found:
            assert metrics[f"env/{name}/success"][step] == pytest.approx(own)
        assert [name for name, *_ in found] == list(MIX)
        assert success == pytest.approx(sum(own * count for _, own, count in found) / 16)
    assert {name for name in metrics if name.startswith("env/bandit-rev/")} >= {
        "env/bandit-rev/reward",
        "env/bandit-rev/reward_std",
        "env/bandit-rev/kept_fraction",
        "env/bandit-rev/valid_fraction",
    }


def test_an_environment_is_evaluated_as_in_a_run_of_it_alone(
    result: Result, tmp_path: Path
) -> None:
    before = result.before
    assert [part.env for part in before.parts] == list(MIX)
    assert before.env == result.env == "bandit+bandit-rev" and before.episodes == 8
    mean_success = sum(part.success for part in before.parts) / 2
    assert before.success == pytest.approx(mean_success)
    assert (before.random, before.optimal) == (0.5, 1.0)
    assert load_evaluations(result.run)[0].evaluation.parts == before.parts
    part = before.parts[1]
    alone = settings(steps=0, env__name=part.env, env__max_turns=5, env__max_actions=10)
    alone |= {"env.actions_per_turn": 5}
    expected = train(merge("bandit", alone), tmp_path / part.env).before
    for name in ("success", "success_low", "mean_return", "random", "optimal", "first_level"):
        assert getattr(part, name) == getattr(expected, name), name


def test_ragen_eval_takes_one_environment_of_a_mixture(result: Result) -> None:
    assert envs_of(str(result.run)) == list(MIX)
    assert envs_of("random") == []
    with pytest.raises(RagenError, match="several environments: choose with --env bandit, bandit"):
        config_for(str(result.run), {})
    config = config_for(str(result.run), {"env": "bandit-rev"})
    assert (config.env.name, config.env.mix) == ("bandit-rev", {})
    found, _ = evaluate_target(str(result.run), {"env": "bandit-rev"}, episodes=4)
    assert found.env == "bandit-rev" and found.success == result.after.parts[1].success


def test_report_and_viewer_show_each_environment_with_its_baselines(result: Result) -> None:
    sections = {section.title: section for section in page(read_facts(result.run))}
    greedy = result.evaluations["after_greedy"].parts
    for env, part in zip(MIX, greedy, strict=True):
        random, *players, optimal = sections[f"Success in {env}"].rows
        assert (random[1], optimal[1]) == ("50.0%", "100.0%")
        assert part.row(players[-1][0]) == players[-1]
    metrics = read_facts(result.run).metrics
    assert not any("/" in row[0] for row in sections["Signals"].rows)
    for env in MIX:
        shown = {row[0]: row[1] for row in sections[f"Signals in {env}"].rows}
        for label, name in {"reward": "reward", "kept groups": "kept_fraction"}.items():
            first, *_ = metrics[f"env/{env}/{name}"].values()
            assert shown[label] == f"{first:.3g}"
    runs = Runs(result.run.parent)
    parts = run_summary(runs, result.run.name)["parts"]
    for part, known in zip(parts, result.after.parts, strict=True):
        success = {"value": known.success, "low": known.success_low, "high": known.success_high}
        assert part == {"env": known.env, "success": success, "random": 0.5, "optimal": 1.0}
        assert f"; {known.env}: {known.success:.1%} [{known.success_low:.1%}, " in str(result.after)


def test_a_branch_is_played_in_the_environment_of_its_episode(result: Result) -> None:
    query = "SELECT id FROM episodes WHERE env = 'bandit-rev' AND phase = 'train'"
    ((episode,), *_) = rows(result.run, query)
    (played,) = branch(result.run, episode, 0, n=1).episodes
    assert played.env == "bandit-rev" and not played.failed


def test_budgets_parameters_and_lengths_come_from_each_environment() -> None:
    config = resolve("mixed")
    own = {name: each.params for name, each in config.env.mix.items()}
    assert own == {key: {"observation": "named"} for key in ("frozen-lake", "frozen-lake-still")}
    text = "{bandit = 1, sokoban = {share = 3, max_turns = 3, params = {rows = 7}}}"
    config = resolve(None, {"env.mix": parse_value("env.mix", text)})
    bandit, sokoban = config.env.mix.values()
    assert (bandit.share, bandit.max_turns, bandit.max_actions) == (1, 1, 1)
    assert (sokoban.share, sokoban.max_turns, sokoban.max_actions) == (3, 3, 10)
    assert sokoban.params == {"observation": "named", "rows": 7}
    longest = max(resolve(name).rollout.max_tokens for name in ("bandit", "sokoban"))
    assert config.rollout.max_tokens == longest
    assert resolve("mixed", {"rollout.max_tokens": 50}).rollout.max_tokens == 50
    more = resolve("mixed", {"env.mix.bandit": 1})
    assert list(more.env.mix) == ["frozen-lake", "frozen-lake-still", "bandit"]
    alone = resolve("mixed", {"env": "sokoban"})
    assert alone.env.name == "sokoban" and not alone.env.mix
    with pytest.raises(RagenError, match=r"and env\.mix are given"):
        resolve("mixed", {"env": "sokoban", "env.mix.bandit": 1})


def episode(env: str, group: int, success: bool = True) -> Episode:
    return Episode(env, 0, 0, group, 0, (), "solved", True, False, success)


def test_rewards_are_normalised_over_the_environment() -> None:
    """Episodes 0 to 3 of environments a, b, a, b; the batch trains 0, 2 and 3."""
    episodes = [episode("ab"[number % 2], number // 2) for number in range(4)]
    index = cast(
        EpisodeIndex,
        SimpleNamespace(episode_E=torch.tensor([0, 2, 3]), group_E=torch.tensor([0, 1, 1])),
    )
    assert compared_with(episodes, index, "env").tolist() == [0, 0, 1]
    assert compared_with(episodes, index, "group").tolist() == [0, 1, 1]
    assert compared_with(episodes, index, "batch").tolist() == [0, 0, 0]


@pytest.mark.parametrize(("a", "b"), [("a", "b"), ("a.py:Maze", "b.py:Maze")])
def test_the_share_of_kept_groups_is_that_of_the_environment(a: str, b: str) -> None:
    """Files whose environments have one name stay apart."""
    groups = [Group((episode(env, n),)) for n, env in enumerate((a, a, b))]
    metrics = summarize_envs(groups, [1, 2], [a, b])
    assert metrics[f"env/{a}/kept_fraction"].value == 0.5
    assert metrics[f"env/{b}/kept_fraction"].value == 1.0


def test_information_is_measured_within_each_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(_: Any, groups: list[Group], *__: int) -> tuple[Metrics, list[Any]]:
        n = len(groups)
        return {"information/first/mi": mean(n, n), "information/first/prompts": last(n)}, [n]

    monkeypatch.setattr(information, "measure_thoughts", measured)
    groups = [Group((episode(env, n),)) for n, env in enumerate(("a", "b", "b", "b"))]
    engine = cast(Any, None)
    found, matrices = asyncio.run(information.measure_envs(engine, groups, 0, 0, ["a", "b"]))
    assert found["env/a/information/first/mi"].value == 1
    assert found["env/b/information/first/mi"].value == 3
    assert found["information/first/mi"].value == pytest.approx((1 * 1 + 3 * 3) / 4)
    assert found["information/first/prompts"].value == 1 and matrices == []
    alone = asyncio.run(information.measure_envs(engine, groups[1:], 0, 0, ["a", "b"]))
    assert "env/b/information/first/mi" in alone[0], "a step of one environment, in a mixture"
    assert asyncio.run(information.measure_envs(engine, groups[1:], 0, 0, []))[1] == [3]


def test_a_recipe_of_one_environment_gives_its_place_to_a_mixture() -> None:
    """Its budgets and parameters stay behind; an embedded model keeps its form of prompts."""
    config = resolve("bandit", {"env.mix": {"bandit": 0.5, "countdown": 0.5}})
    assert config.env.name == "bandit+countdown" and config.recipe == "bandit"
    assert config.prompt.style == "compact"
    with pytest.raises(RagenError, match=r"env\.name and env\.mix are given"):
        changed(config, {"env.name": "sokoban"})
    assert changed(config, {"seed": 1}).env == config.env
