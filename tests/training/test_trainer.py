"""Whole training runs: what they record, and that the same run twice gives the same results.

`test_resume` has what happens to runs that stop.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from ragen.algorithms.batch import Batch
from ragen.core.errors import RagenError
from ragen.core.types import Role
from ragen.diagnostics.guard import Alarm
from ragen.engines.local import LocalEngine
from ragen.storage import checkpoint, recorder
from ragen.storage.database import DATABASE
from ragen.storage.reader import read_events
from ragen.storage.recorder import Recorder
from ragen.training import recovery, running
from ragen.training.collection import needs_scores
from ragen.training.trainer import Result, resume, train
from tests.diagnostics.test_guard_run import scripted
from tests.tolerance import LOGPROB
from tests.training.runs import (
    SMALL,
    NotedWatcher,
    assert_same_results,
    make_config,
    recorded_results,
    rows,
    tensors,
    uninterrupted,
)

STEP = {"steps": 1, "rollout__group_size": 2, "eval__episodes": 0, "checkpoint__every": 0}
"""A step of four episodes, and nothing else."""


def test_a_run_that_fails_to_start_closes_its_engine_and_recorder(
    tmp_path: Path, own_bandit_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def close(engine: LocalEngine) -> None:
        closed.append("engine")

    def full(recorder: Recorder, attempt: int, step: int) -> None:
        raise RagenError("no space left")

    monkeypatch.setattr(LocalEngine, "close", close)
    (tmp_path / "file").write_text("")
    with pytest.raises(RagenError, match="cannot make the run folder"):
        train(make_config(), out=tmp_path / "file" / "run")
    assert closed == ["engine"]
    monkeypatch.setattr(Recorder, "forget_after", full)
    with pytest.raises(RagenError, match="no space left"):
        resume(own_bandit_run, overrides={"steps": 4})
    assert closed == ["engine"] * 2
    Recorder.open(own_bandit_run).close()  # the database is no longer locked


# What a run records.


def test_contents_of_run_folder_and_database(bandit_run: Path) -> None:
    run = bandit_run
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.toml", DATABASE]
    # 3 steps of 2 × 4 training episodes; 4 levels after each, and greedy before and after.
    assert rows(run, "SELECT phase, step, count(*) FROM episodes GROUP BY 1, 2 ORDER BY 1, 2") == [
        *(("eval", step, 4) for step in range(4)),
        ("eval greedy", 0, 4),
        ("eval greedy", 3, 4),
        *(("train", step, 8) for step in (1, 2, 3)),
    ]
    levels = "SELECT DISTINCT level_seed FROM episodes WHERE phase = 'train' ORDER BY 1"
    assert [seed for (seed,) in rows(run, levels)] == list(range(10_000, 10_006))
    assert rows(run, "SELECT min(policy_version), max(policy_version) FROM turns") == [(0, 3)]
    names = {name for (name,) in rows(run, "SELECT DISTINCT name FROM metrics")}
    assert {"reward/mean", "gradient/policy_norm", "update/lr", "time/step_s"} <= names
    assert {"progress/updates", "mismatch/max_abs", "entropy/mean"} <= names
    phases = ("generate", "env", "rollout", "score", "update", "publish", "record", "save")
    assert {*(f"time/{phase}_s" for phase in phases), "time/tokens_per_s"} <= names
    assert {"ema/reward/mean", "ema/entropy/mean"} <= names
    assert not {"ema/time/step_s", "ema/progress/updates"} & names
    parts = "name IN ('time/generate_s', 'time/env_s')"
    for seconds, split in rows(
        run,
        f"SELECT sum(value * (name = 'time/rollout_s')), sum(value * ({parts})) FROM metrics"
        " WHERE step > 0 GROUP BY step",
    ):
        assert split == pytest.approx(seconds)
    assert not rows(run, "SELECT name FROM metrics WHERE value IS NULL")
    worst = rows(run, "SELECT max(value) FROM metrics WHERE name = 'mismatch/max_abs'")
    assert worst[0][0] < LOGPROB
    state = json.loads((checkpoint.newest(run) / "state.json").read_text())
    assert state["loop"]["step"] == 3 and state["loop"]["episodes"] == 24
    assert state["engine"]["version"] == 3
    assert {p.name for p in checkpoint.folders(run)} == {f"step-{step}" for step in range(4)}
    first, *_, last = (tensors(folder) for folder in checkpoint.folders(run))
    weights = [name for name in first if name.startswith("model.")]
    assert weights and any(first[name] != last[name] for name in weights)


def test_a_result_has_the_evaluations_and_baselines(own_bandit_run: Path) -> None:
    result = resume(own_bandit_run)
    assert isinstance(result, Result) and result.run == own_bandit_run and result.env == "bandit"
    assert result.evaluations.keys() == {"before", "after", "before_greedy", "after_greedy"}
    greedy = [result.evaluations[name] for name in ("before_greedy", "after_greedy")]
    assert [each.temperature for each in greedy] == [0, 0]
    assert (result.before.random, result.before.optimal, result.before.episodes) == (0.5, 1.0, 4)


def test_best_checkpoint_is_kept_when_a_step_without_checkpoint_does_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 does best but has no checkpoint; step 2 does best of those that have one."""
    evaluate, success = running.evaluate_envs, iter([0.1, 0.2, 0.6, 0.9, 0.3])

    async def scripted(*args: Any, **more: Any) -> Any:
        evaluation, groups = await evaluate(*args, **more)
        sampled = evaluation.temperature == 1.0
        return replace(evaluation, success=next(success, 0.0) if sampled else 0.0), groups

    monkeypatch.setattr(running, "evaluate_envs", scripted)
    more = {"steps": 4, "eval__episodes": 1, "checkpoint__every": 2, "checkpoint__keep": 1}
    train(make_config(**SMALL | more, rollout__num_groups=1), tmp_path / "run")
    names = [p.name for p in checkpoint.folders(tmp_path / "run")]
    assert names == ["step-2", "step-4"]


def test_evaluation_and_recording_can_be_switched_off(tmp_path: Path) -> None:
    off = {"record__episodes_every": 0, "record__tokens_every": 0}
    result = train(make_config(**STEP | off), tmp_path / "run")
    assert result.evaluations == {}
    with pytest.raises(RagenError, match=r"was not evaluated: set eval\.episodes above 0"):
        _ = result.after
    assert rows(tmp_path / "run", "SELECT count(*) FROM episodes") == [(0,)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM samples") == [(0,)]
    assert [p.name for p in checkpoint.folders(tmp_path / "run")] == ["step-0", "step-1"]


def test_a_checkpoint_waits_until_its_steps_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, write_state = tmp_path / "run", Recorder._write, running.write_state
    steps: list[int] = []

    def slow(recorder: Recorder, step: Any) -> None:
        time.sleep(0.1)
        write(recorder, step)

    def watched(folder: Path, state: dict[str, Any]) -> None:
        if step := state["loop"]["step"]:
            metrics = rows(run, f"SELECT count(*) > 20 FROM metrics WHERE step = {step}")
            episodes = rows(run, f"SELECT count(*) FROM episodes WHERE step = {step}")
            assert (metrics, episodes) == ([(1,)], [(4,)])
            steps.append(step)
        write_state(folder, state)

    monkeypatch.setattr(Recorder, "_write", slow)
    monkeypatch.setattr(running, "write_state", watched)
    train(make_config(**STEP | {"steps": 2, "checkpoint__every": 1}), run)
    assert steps == [1, 2]


class InTurn(Executor):
    """Does what is submitted at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


def test_training_twice_gives_identical_rows_also_if_a_run_writes_them_in_its_steps(
    tmp_path: Path, bandit_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of every table, and in their order; usually a thread writes them.

    The second run has an alarm whose response is log.
    """
    monkeypatch.setattr(recorder, "ThreadPoolExecutor", InTurn)
    monkeypatch.setattr(recovery, "raise_alarms", scripted((0, 2)))
    seen, config = NotedWatcher(), make_config(eval__every=1, checkpoint__keep=9)
    result = train(config, tmp_path / "run", watcher=seen)
    alarm = Alarm("grad_spike", 2, 1, 9.0, 1.0)
    assert result.alarms == (alarm,) and seen.alarms == [str(alarm)]
    (event,) = read_events(tmp_path / "run")
    assert (event["kind"], event["text"], event["data"]["baseline"]) == ("alarm", str(alarm), 1.0)
    for table in ("episodes", "turns", "samples", "cross_scores", "tokens", "settings"):
        query = f"SELECT * FROM {table}"
        assert rows(tmp_path / "run", query) == rows(bandit_run, query)
    assert_same_results(tmp_path / "run", recorded_results(bandit_run))


# Equal and different runs.


def test_the_seed_changes_the_weights_and_not_the_levels_of_evaluations(
    tmp_path: Path, bandit_run: Path
) -> None:
    train(make_config(seed=1, steps=1), tmp_path / "run")
    own, other = (tensors(run / "checkpoints" / "step-1") for run in (tmp_path / "run", bandit_run))
    assert own.keys() == other.keys() and own != other
    query = "SELECT level_seed FROM episodes WHERE phase = 'eval' AND step = 0 ORDER BY id"
    assert len(rows(bandit_run, query)) == 4
    assert rows(tmp_path / "run", query) == rows(bandit_run, query)


@pytest.mark.slow
def test_isolated_environments_repeat_and_give_the_same_tokens(tmp_path: Path) -> None:
    """Answers come in another order in each run. Logprobs differ from a plain run by rounding."""
    for name in ("one", "other"):
        train(make_config(**STEP, env__isolate=True), tmp_path / name)
    isolated = recorded_results(tmp_path / "one")
    assert_same_results(tmp_path / "other", isolated)
    plain, ids = uninterrupted(make_config(**STEP)), slice(0, 3)
    assert [row[ids] for row in isolated["turns"]] == [row[ids] for row in plain["turns"]]


# Algorithms.


def test_an_estimator_of_turns_trains(tmp_path: Path) -> None:
    config = make_config(
        algorithm="starpo/ppo",
        advantage__name="bi_level_gae",
        reward__placement="turn",
        loss__kl=0.0,
        **STEP | {"rollout__group_size": 4},
    )
    train(config, tmp_path / "run")
    assert (checkpoint.newest(tmp_path / "run") / "critic.safetensors").exists()
    query = "SELECT value FROM metrics WHERE name = 'gradient/policy_norm'"
    assert rows(tmp_path / "run", query)[0][0] > 0


def test_a_loss_of_whole_episodes_trains(tmp_path: Path) -> None:
    clip = {"loss__name": "gspo", "loss__clip_low": 3e-4, "loss__clip_high": 4e-4}
    more = clip | {"update__epochs": 2, "rollout__group_size": 4}
    train(make_config(**STEP | more), tmp_path / "run")
    found = dict(rows(tmp_path / "run", "SELECT name, value FROM metrics"))
    assert found["importance/mean"] == 1, "one set of weights, float32"
    assert found["ratio/max"] > 1 and found["kl/old"] > 0, "the second epoch is off-policy"
    assert found["gradient/policy_norm"] > 0 and found["update/skipped_policy"] == 0


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"update__epochs": 2}, True),
        ({"update__minibatch_episodes": 4}, True),
        ({"loss__kl": 0.1}, True),
    ],
)
def test_old_logprobs_are_needed_by_a_second_update_or_a_kl_term(
    changes: dict[str, Any], needed: bool
) -> None:
    config = make_config(**{"loss__kl": 0.0, "update__minibatch_episodes": 8} | changes)
    assert needs_scores(config.loss.kl, config.update, num_episodes=8) == needed


@pytest.mark.parametrize(
    ("dtype", "roles"),
    [
        ("bfloat16", ["policy", "reference", "policy"]),
        pytest.param("float32", ["reference", "policy"], marks=pytest.mark.slow),
    ],
)
def test_only_another_arithmetic_computes_old_logprobs_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, roles: list[str]
) -> None:
    """The last scores are those that are recorded after the update."""
    scored_roles, score = [], LocalEngine.score

    async def watched(engine: LocalEngine, batch: Batch, role: Role) -> Batch:
        scored_roles.append(role)
        return await score(engine, batch, role)

    monkeypatch.setattr(LocalEngine, "score", watched)
    more = {"model__dtype": dtype, "loss__kl": 0.1, "filter__rule": "all"}
    train(make_config(**STEP | more), tmp_path / "run")
    assert scored_roles == roles


def test_update_budget_is_spent_exactly(tmp_path: Path) -> None:
    """Five updates, at most two a step: 2, 2 and 1; the learning rate decays over all five."""
    budget = {"budget": "updates", "filter__rule": "all", "update__lr_end": 0.1, "steps": 5}
    budget |= {"eval__every": 2, "update__minibatch_episodes": 2}
    run = tmp_path / "run"
    train(make_config(**SMALL | budget), run)
    state = json.loads((checkpoint.newest(run) / "state.json").read_text())["loop"]
    assert (state["step"], state["updates"]) == (3, 5)
    query = "SELECT value FROM metrics WHERE name = '{}' ORDER BY step"
    assert rows(run, query.format("update/count")) == [(2,), (2,), (1,)]
    rates = [rate for (rate,) in rows(run, query.format("update/lr"))]
    # Each step's last update, number 1, 3 or 4 of 0–4; decay from 1 to .1: 1 − .9 · number / 5.
    assert rates == pytest.approx([1e-3 * (1 - 0.9 * at / 5) for at in (1, 3, 4)])
    sampled = "SELECT step FROM evaluations WHERE record ->> 'temperature' = 1 ORDER BY id"
    assert rows(run, sampled) == [(0,), (2,), (3,)]


# Filters and refills.


def test_filters_read_raw_rewards_however_they_are_normalised(tmp_path: Path) -> None:
    config = make_config(
        algorithm="starpo-s/ppo",
        rollout__num_groups=6,
        filter__value=0.5,
        reward__normalise="mean_std",
        **STEP | {"rollout__group_size": 4},
    )
    train(config, tmp_path / "run")
    kept_spreads, other_spreads = list[float](), list[float]()
    episodes = rows(tmp_path / "run", 'SELECT "group", kept, reward FROM episodes ORDER BY 1')
    for (_, kept), members in groupby(episodes, key=lambda row: row[:2]):
        spread = statistics.stdev(reward for *_, reward in members)
        (kept_spreads if kept else other_spreads).append(spread)
    assert len(kept_spreads) == len(other_spreads) == 3
    assert min(kept_spreads) >= max(other_spreads)
    assert len({*kept_spreads, *other_spreads}) > 2, "the filter had a choice"


DAPO = {"algorithm": "dapo", "rollout__refill": 2}


def test_refill_replaces_groups_without_spread_on_new_levels_until_the_run_stops(
    tmp_path: Path,
) -> None:
    """Every action has one reward: five steps of 2 groups and 2 refills of 2 groups."""
    flat = {"env.params": {"safe_reward": 0.0, "risky_probability": 1e-12}, "rollout__slots": 12}
    config = make_config(**STEP | DAPO | flat | {"steps": 20})
    with pytest.raises(RagenError, match="no group had any spread of reward for 5 steps"):
        train(config, tmp_path / "run")
    run = tmp_path / "run"
    assert checkpoint.newest(run).name == "step-5"
    assert not rows(run, "SELECT * FROM metrics WHERE name = 'update/count'")
    query = "SELECT value FROM metrics WHERE name = 'rollout/refilled_groups' ORDER BY step"
    assert rows(run, query) == [(4,)] * 5
    played = rows(run, 'SELECT step, "group", level_seed, count(*) FROM episodes GROUP BY 1, 2, 3')
    assert [(step, group, members) for step, group, _, members in played] == [
        (step, group, 2) for step in range(1, 6) for group in range(6)
    ]
    assert len({level for _, _, level, _ in played}) == len(played), "no level is repeated"
    assert len(rows(run, "SELECT DISTINCT noise_seed FROM episodes")) == 5 * 6 * 2
    first = [level for _, group, level, _ in played if group < 2]
    assert first == list(range(10_000, 10_010)), "the levels of a run without refills"
    assert rows(run, "SELECT max(value) FROM metrics WHERE name = 'progress/episodes'") == [(60,)]


def test_refill_keeps_only_groups_with_spread_and_at_most_num_groups(tmp_path: Path) -> None:
    train(make_config(**STEP | DAPO | {"rollout__group_size": 4}), tmp_path / "run")
    query = 'SELECT kept, max(reward) > min(reward) FROM episodes GROUP BY "group"'
    groups = rows(tmp_path / "run", query)
    assert all(kept == spread for kept, spread in groups)
    num_kept = sum(kept for kept, _ in groups)
    assert num_kept <= 2 <= len(groups) <= 6
    assert num_kept == 2 or len(groups) > 2, "missing groups were refilled"
