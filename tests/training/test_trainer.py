"""Whole training runs: what they record, and that stopping and resuming changes no result."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sqlite3
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ragen.algorithms.advantages import ADVANTAGES
from ragen.algorithms.batch import Batch
from ragen.algorithms.estimator import needs_values
from ragen.cli.main import main
from ragen.config.config import Config
from ragen.config.keys import nest
from ragen.config.reading import read_config, resolve
from ragen.core import files
from ragen.core.errors import RagenError
from ragen.core.stopping import SIGNALS, StopRequested
from ragen.core.types import Role
from ragen.engines import saving
from ragen.engines.learner import Learner
from ragen.engines.local import LocalEngine
from ragen.engines.sampler import Sampler
from ragen.storage import checkpoint, recorder
from ragen.storage.database import DATABASE
from ragen.storage.recorder import Recorder
from ragen.training import running
from ragen.training.progress import Watcher
from ragen.training.trainer import Result, examine, resume, train
from tests.bandit_model import settings
from tests.tolerance import LOGPROB

GAE = {"algorithm": "starpo/ppo", "loss__kl": 0.01, "update__epochs": 2, "update__lr_end": 0.1}
EASIER = {"curriculum__stages": [{"safe_reward": 0.5}]}
MIXTURE = {"env__mix": {"bandit": 0.5, "bandit-rev": 0.5}, "rollout__num_groups": 3}
DAPO = {"algorithm": "dapo", "rollout__refill": 2}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gae": GAE,
    "shared": GAE | {"model__critic": "shared"},
    "dapo": DAPO,
    "updates": {"budget": "updates", "filter__rule": "all", "update__lr_end": 0.1, "steps": 5},
    "bfloat16": {"model__dtype": "bfloat16"},
    "bfloat16 gae": GAE | {"model__dtype": "bfloat16"},
    "mixture": MIXTURE,
    "curriculum": EASIER | {"curriculum__success": 0.01, "steps": 7},
}
GRPO_AND_GAE = pytest.mark.parametrize("more", [{}, GAE], ids=["grpo", "gae"])
# One run suffices: with a critic, a run saves and restores everything that it does without one.
GAE_AND_SLOW_GRPO = pytest.mark.parametrize(
    "more", [pytest.param({}, id="grpo", marks=pytest.mark.slow), pytest.param(GAE, id="gae")]
)


def make_config(**more: Any) -> Config:
    return resolve("bandit", settings(**more))


def test_a_run_that_fails_to_start_closes_its_engine_and_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def close(engine: LocalEngine) -> None:
        closed.append("engine")

    monkeypatch.setattr(LocalEngine, "close", close)
    (tmp_path / "file").write_text("")
    with pytest.raises(RagenError, match="cannot make the run folder"):
        train(make_config(), out=tmp_path / "file" / "run")
    assert closed == ["engine"]
    train(make_config(steps=1), out=tmp_path / "run")
    assert closed == ["engine"] * 2
    closed.clear()

    def full(recorder: Recorder, attempt: int, step: int) -> None:
        raise RagenError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "forget_after", full)
        with pytest.raises(RagenError, match="no space left"):
            resume(tmp_path / "run", overrides={"steps": 2})
    assert closed == ["engine"]
    Recorder.open(tmp_path / "run").close()  # the database is no longer locked


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(run / DATABASE)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def recorded_results(run: Path) -> dict[str, Any]:
    """All results of a run except for durations and events."""
    newest = checkpoint.newest(run)
    state = json.loads((newest / checkpoint.STATE).read_text())
    del state["loop"]["seconds"], state[checkpoint.SEAL]

    def without_run(record: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in record.items() if k not in ("seconds", "target")}
        return kept | {"parts": [without_run(part) for part in record["parts"]]}

    evaluations = [
        without_run(json.loads(record))
        for (record,) in rows(run, "SELECT record FROM evaluations ORDER BY step, temperature")
    ]
    return {
        "step": newest.name,
        "state": state,
        "metrics": rows(
            run,
            "SELECT attempt, step, name, value FROM metrics WHERE name NOT LIKE 'time/%'"
            " ORDER BY 1, 2, 3",
        ),
        "episodes": rows(
            run,
            'SELECT step, phase, "group", member, level_seed, noise_seed, reward, success,'
            " num_turns, num_tokens, thought_tokens, entropy, group_score, final_observation"
            " FROM episodes ORDER BY step, phase, level_seed, member, noise_seed, reward",
        ),
        "replies": rows(
            run, "SELECT count(*), sum(length(reply)), sum(reward), sum(num_tokens) FROM turns"
        ),
        "turns": rows(
            run,
            "SELECT prompt_ids, prompt_joins, completion_ids, logprobs, thought_start FROM turns"
            " ORDER BY prompt_ids, completion_ids, logprobs",
        ),
        "tokens": rows(run, "SELECT * FROM tokens"),
        "thoughts": rows(run, "SELECT count(*) FROM thoughts_fts"),
        "samples": rows(
            run,
            'SELECT step, "group", member, token_ids, sampled_logprobs, advantages, "values",'
            " returns FROM samples ORDER BY id",
        ),
        "evaluations": evaluations,
        "tensors": {
            f"{path.name}:{name}": tensor.flatten().view(torch.uint8).numpy().tobytes()
            for path in sorted(newest.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        },
    }


def assert_same_results(run: Path, expected: dict[str, Any]) -> None:
    actual = recorded_results(run)
    for part, value in expected.items():
        assert actual[part] == value, part


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a fork of this process; returns its id. It exits as `ragen` would."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        work()
        code = 0
    except StopRequested as stop:
        code = 128 + stop.signal_number
    except RagenError:
        code = 2
    except KeyboardInterrupt:
        code = 99
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class SendSignal(Watcher):
    """Sends this process a signal when an event happens for the n-th time."""

    def __init__(self, event: str, at: int, number: int) -> None:
        self.event, self.left, self.number = event, at, number

    def _happens(self, event: str) -> None:
        self.left -= event == self.event
        if self.left == 0 and event == self.event:
            os.kill(os.getpid(), self.number)

    def episode(self, episode: Any) -> None:
        self._happens("episode")

    def step(self, step: int, metrics: Any) -> None:
        self._happens("step")

    def evaluated(self, step: int, evaluation: Any) -> None:
        self._happens("evaluated")


YEARS = 10 * 365 * 86_400.0


def test_a_clock_that_jumps_changes_no_result_and_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ten years, forwards and back, from one look to the next; then it runs backwards."""
    train(make_config(), tmp_path / "whole")
    expected = recorded_results(tmp_path / "whole")
    real, looks = time.time, [0]

    def jumps() -> float:
        looks[0] += 1
        return real() + (YEARS, -YEARS)[looks[0] % 2] - 100.0 * looks[0]

    monkeypatch.setattr(time, "time", jumps)
    with pytest.raises(StopRequested):
        train(make_config(), tmp_path / "run", watcher=SendSignal("step", 2, signal.SIGINT))
    result = resume(tmp_path / "run")
    assert looks[0] > 4
    assert_same_results(tmp_path / "run", expected)
    times = "SELECT value FROM metrics WHERE name GLOB 'time/*_s' AND name != 'time/tokens_per_s'"
    durations = [seconds for (seconds,) in rows(tmp_path / "run", times)]
    durations += [each.seconds for each in (result, *result.evaluations.values())]
    assert len(durations) > 20 and all(0 <= seconds < 60 for seconds in durations)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert main(["eval", str(tmp_path / "run"), "--episodes", "2"]) == 0


# What a run records.


def test_contents_of_run_folder_and_database(tmp_path: Path) -> None:
    result = train(make_config(), tmp_path / "run")
    run = tmp_path / "run"
    assert isinstance(result, Result) and result.run == run and result.env == "bandit"
    greedy = [result.evaluations[name] for name in ("before_greedy", "after_greedy")]
    assert [each.temperature for each in greedy] == [0, 0]
    assert (result.before.random, result.before.optimal, result.before.episodes) == (0.5, 1.0, 4)

    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.toml", DATABASE]
    # 3 steps of 2 × 4 training episodes; 4 levels, sampled and greedy, before and after.
    assert rows(run, "SELECT phase, step, count(*) FROM episodes GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("eval", 0, 4),
        ("eval", 3, 4),
        ("eval greedy", 0, 4),
        ("eval greedy", 3, 4),
        ("train", 1, 8),
        ("train", 2, 8),
        ("train", 3, 8),
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
    # Every step is saved; the two newest and the best are kept.
    best = state["loop"]["best_step"]
    assert {p.name for p in checkpoint.folders(run)} == {"step-2", "step-3", f"step-{best}"}


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
    config = make_config(steps=5, eval__every=1, checkpoint__every=2, checkpoint__keep=1)
    train(config, tmp_path / "run")
    names = [p.name for p in checkpoint.folders(tmp_path / "run")]
    assert names == ["step-2", "step-4", "step-5"]


def test_training_changes_the_weights(tmp_path: Path) -> None:
    config = make_config()
    before = load_file(Path(config.model.path) / "model.safetensors")
    train(config, tmp_path / "run")
    after = load_file(checkpoint.newest(tmp_path / "run") / "model.safetensors")
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_advantage_estimator_trains(tmp_path: Path, name: str) -> None:
    config = make_config(
        algorithm="starpo/ppo",
        steps=1,
        advantage__name=name,
        reward__placement="turn" if name == "bi_level_gae" else "episode",
        loss__kl=0.0,
        eval__episodes=0,
        checkpoint__every=0,
    )
    train(config, tmp_path / "run")
    critic = checkpoint.newest(tmp_path / "run") / "critic.safetensors"
    assert critic.exists() == needs_values(ADVANTAGES[name])
    query = "SELECT value FROM metrics WHERE name = 'gradient/policy_norm'"
    assert rows(tmp_path / "run", query)[0][0] > 0


def test_filters_read_raw_rewards_however_they_are_normalised(tmp_path: Path) -> None:
    config = make_config(
        algorithm="starpo-s/ppo",
        rollout__num_groups=4,
        filter__value=0.5,
        reward__normalise="mean_std",
        eval__episodes=0,
        checkpoint__every=0,
    )
    train(config, tmp_path / "run")
    spread: dict[int, list[tuple[bool, float]]] = {}
    episodes = rows(
        tmp_path / "run", 'SELECT step, "group", kept, reward FROM episodes ORDER BY 1, 2'
    )
    for (step, _, kept), members in groupby(episodes, key=lambda row: row[:3]):
        std = statistics.stdev(reward for *_, reward in members)
        spread.setdefault(step, []).append((bool(kept), std))
    assert list(spread) == [1, 2, 3]
    for groups in spread.values():
        assert min(std for kept, std in groups if kept) >= max(
            std for kept, std in groups if not kept
        )
    assert len({std for groups in spread.values() for _, std in groups}) > 2, (
        "the filter had a choice"
    )


@GRPO_AND_GAE
def test_training_twice_gives_identical_results(tmp_path: Path, more: dict[str, Any]) -> None:
    for name in ("a", "b"):
        train(make_config(**more), tmp_path / name)
    assert_same_results(tmp_path / "b", recorded_results(tmp_path / "a"))
    query = "SELECT count(*) FROM metrics WHERE name = 'kl/reference' AND value > -1e-6"
    assert rows(tmp_path / "a", query) == [(3 if more else 0,)], (
        "one in every step of a run with a reference"
    )
    train(make_config(seed=1, **more), tmp_path / "c")
    assert (
        recorded_results(tmp_path / "c")["tensors"] != recorded_results(tmp_path / "a")["tensors"]
    )


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({"model__dtype": "float32"}, []),
        ({}, []),
        ({"update__epochs": 2}, ["policy"] * 2),
        ({"update__minibatch_episodes": 1}, ["policy"] * 2),
        ({"loss__kl": 0.1}, ["policy", "reference"] * 2),
        ({"record__tokens_every": 1}, ["policy"] * 4),  # before and after each update
        ({"record__tokens_every": 2}, ["policy"] * 2),
    ],
)
def test_old_logprobs_are_computed_before_the_update_only_where_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], roles: list[str]
) -> None:
    """In bfloat16, if a second update or a KL term compares them, or if they are recorded."""
    scored_roles, score = [], LocalEngine.score

    async def watched(engine: LocalEngine, batch: Batch, role: Role) -> Batch:
        scored_roles.append(role)
        return await score(engine, batch, role)

    monkeypatch.setattr(LocalEngine, "score", watched)
    usual = {"model__dtype": "bfloat16", "record__tokens_every": 0, "loss__kl": 0.0}
    once = {"update__epochs": 1, "update__minibatch_episodes": 1000}
    train(make_config(steps=2, eval__episodes=0, **usual | once | changes), tmp_path / "run")
    assert scored_roles == roles


LOSSES = {
    "gspo": {"loss__clip_low": 3e-4, "loss__clip_high": 4e-4},
    "cispo": {"loss__clip_low": 1.0},
    "ppo_clip": {"loss__aggregation": "constant"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains(tmp_path: Path, name: str) -> None:
    more = {"loss__name": name, "update__epochs": 2, "eval__episodes": 0} | LOSSES[name]
    train(make_config(steps=1, **more), tmp_path / "run")
    found = dict(rows(tmp_path / "run", "SELECT name, value FROM metrics"))
    assert found["importance/mean"] == 1, "one set of weights, float32"
    assert found["ratio/max"] > 1 and found["kl/old"] > 0, "the second epoch is off-policy"
    assert found["gradient/policy_norm"] > 0 and found["update/skipped_policy"] == 0
    assert ("clip/dual_fraction" in found) == (name == "ppo_clip")


def test_constant_aggregation_divides_by_the_maximum_episode_length(tmp_path: Path) -> None:
    """8 episodes of one turn of at most 10 tokens: Σ ÷ 80 instead of Σ ÷ tokens sampled."""
    norms = []
    for aggregation in ("token_mean", "constant"):
        more = {"filter__rule": "all", "update__minibatch_episodes": 8, "loss__entropy": 0.0}
        config = make_config(steps=1, eval__episodes=0, loss__aggregation=aggregation, **more)
        train(config, tmp_path / aggregation)
        found = dict(rows(tmp_path / aggregation, "SELECT name, value FROM metrics"))
        norms.append(found["gradient/policy_norm"])
    assert norms[0] > 0
    assert norms[1] / norms[0] == pytest.approx(found["tokens/sampled"] / 80, rel=1e-4)


def test_update_budget_is_spent_exactly(tmp_path: Path) -> None:
    """Five updates, at most two a step: 2, 2 and 1; the learning rate decays over all five."""
    result = train(make_config(**KINDS["updates"], eval__every=2), tmp_path / "run")
    run = tmp_path / "run"
    state = json.loads((checkpoint.newest(run) / "state.json").read_text())["loop"]
    assert (state["step"], state["updates"]) == (3, 5)
    query = "SELECT value FROM metrics WHERE name = '{}' ORDER BY step"
    assert rows(run, query.format("update/count")) == [(2,), (2,), (1,)]
    rates = [rate for (rate,) in rows(run, query.format("update/lr"))]
    # Each step's last update, number 1, 3 or 4 of 0–4; decay from 1 to .1: 1 − .9 · number / 5.
    assert rates == pytest.approx([1e-3 * (1 - 0.9 * at / 5) for at in (1, 3, 4)])
    assert result.evaluations.keys() == {"before", "after", "before_greedy", "after_greedy"}
    evaluated = rows(run, "SELECT step FROM evaluations WHERE temperature = 1 ORDER BY id")
    assert evaluated == [(0,), (2,), (3,)]


FLAT = {"safe_reward": 0.0, "risky_probability": 1e-12}
"""Bandit parameters under which every action has the same reward."""


def test_refill_replaces_groups_without_spread_on_new_levels(tmp_path: Path) -> None:
    """Five steps of 2 groups and 2 refills of 2 groups, all without any reward spread."""
    config = make_config(steps=20, eval__episodes=0, **DAPO, **{"env.params": FLAT})
    with pytest.raises(RagenError, match="no group had any spread of reward for 5 steps"):
        train(config, tmp_path / "run")
    run = tmp_path / "run"
    query = "SELECT value FROM metrics WHERE name = 'rollout/refilled_groups' ORDER BY step"
    assert rows(run, query) == [(4,)] * 5
    played = rows(run, 'SELECT step, "group", level_seed, count(*) FROM episodes GROUP BY 1, 2, 3')
    assert [(step, group, members) for step, group, _, members in played] == [
        (step, group, 4) for step in range(1, 6) for group in range(6)
    ]
    assert len({level for _, _, level, _ in played}) == len(played), "no level is repeated"
    assert len(rows(run, "SELECT DISTINCT noise_seed FROM episodes")) == 5 * 6 * 4
    first = [level for _, group, level, _ in played if group < 2]
    assert first == list(range(10_000, 10_010)), "the levels of a run without refills"
    assert rows(run, "SELECT max(value) FROM metrics WHERE name = 'progress/episodes'") == [(120,)]


def test_refill_keeps_only_groups_with_spread_and_at_most_num_groups(tmp_path: Path) -> None:
    train(make_config(**DAPO, eval__episodes=0), tmp_path / "run")
    query = """SELECT step, "group", kept, max(reward) > min(reward) FROM episodes GROUP BY 1, 2"""
    groups = rows(tmp_path / "run", query)
    assert all(kept == spread for _, _, kept, spread in groups)
    for step in range(1, 4):
        kept_flags = [kept for at, _, kept, _ in groups if at == step]
        assert sum(kept_flags) <= 2 <= len(kept_flags) <= 6
        assert sum(kept_flags) == 2 or len(kept_flags) > 2, "missing groups were refilled"


def test_evaluation_levels_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        train(make_config(seed=seed, steps=0), tmp_path / str(seed))
    query = "SELECT level_seed FROM episodes WHERE phase = 'eval' ORDER BY id"
    assert rows(tmp_path / "0", query) == rows(tmp_path / "1", query)


def test_evaluation_and_recording_can_be_switched_off(tmp_path: Path) -> None:
    more = {"eval__episodes": 0, "record__episodes_every": 0, "record__tokens_every": 0}
    result = train(make_config(checkpoint__every=0, **more), tmp_path / "run")
    assert result.evaluations == {}
    with pytest.raises(RagenError, match=r"was not evaluated: set eval\.episodes above 0"):
        _ = result.after
    assert rows(tmp_path / "run", "SELECT count(*) FROM episodes") == [(0,)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM samples") == [(0,)]
    assert [p.name for p in checkpoint.folders(tmp_path / "run")] == ["step-0", "step-3"]


def test_train_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def notebook() -> Result:
        return train(make_config(steps=1), tmp_path / "run")

    assert asyncio.run(notebook()).after is not None


def test_isolated_environments_give_identical_results(tmp_path: Path) -> None:
    train(make_config(steps=1), tmp_path / "a")
    train(make_config(steps=1, env__isolate=True), tmp_path / "b")
    one, other = (recorded_results(tmp_path / name) for name in "ab")
    for results in (one, other):
        del results["state"][checkpoint.SETTINGS_HASH]
    assert one == other


# Resume.


MOMENTS = {  # event, its occurrence, number of finished steps by then
    "first evaluation": ("evaluated", 1, 0),
    "first rollout": ("episode", 2, 0),
    "second rollout": ("episode", 10, 1),
    "third rollout": ("episode", 20, 2),
    "before an evaluation": ("step", 2, 2),
    "evaluation between": ("evaluated", 3, 2),
    "after the last step": ("step", 3, 3),
    "last evaluation": ("evaluated", 4, 3),
    "after the advance": ("step", 6, 6),
}
EVERY = [moment for moment, (_, _, steps) in MOMENTS.items() if steps <= 3]
CASES: list[Any] = [(moment, signal.SIGINT, "gae") for moment in EVERY]
CASES += [pytest.param(moment, signal.SIGINT, "grpo", marks=pytest.mark.slow) for moment in EVERY]
CASES += [("second rollout", signal.SIGTERM, "grpo"), ("last evaluation", signal.SIGTERM, "grpo")]
CASES += [("third rollout", signal.SIGHUP, "grpo"), ("second rollout", signal.SIGXCPU, "grpo")]
CASES += [
    ("second rollout", signal.SIGINT, "shared"),
    ("before an evaluation", signal.SIGINT, "dapo"),
]
CASES += [
    ("third rollout", signal.SIGINT, "updates"),
    ("last evaluation", signal.SIGINT, "updates"),
    ("second rollout", signal.SIGINT, "bfloat16"),
    ("third rollout", signal.SIGINT, "bfloat16 gae"),
    ("third rollout", signal.SIGINT, "curriculum"),
    ("after the advance", signal.SIGINT, "curriculum"),
    ("before an evaluation", signal.SIGINT, "mixture"),
]


@pytest.mark.parametrize(("moment", "number", "kind"), CASES)
def test_resume_after_a_stop_equals_the_uninterrupted_run(
    tmp_path: Path, moment: str, number: int, kind: str
) -> None:
    event, at, steps = MOMENTS[moment]
    config = make_config(eval__every=2, rollout__slots=2, **KINDS[kind])
    run = tmp_path / "run"
    handlers = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(StopRequested, match=f"after {steps} steps; resume with: ragen resume"):
        train(config, run, watcher=SendSignal(event, at, number))
    assert [signal.getsignal(each) for each in SIGNALS] == handlers
    assert checkpoint.newest(run).name == f"step-{steps}"
    assert not list(run.glob(f"{DATABASE}-*")), "the database is a plain file again"
    result = resume(run)
    assert result.after is not None
    assert_same_results(run, uninterrupted(config, tmp_path))
    ((kind, data),) = rows(run, "SELECT kind, data FROM events WHERE kind != 'curriculum'")
    assert (kind, json.loads(data)) == ("resume", {"checkpoint": f"step-{steps}"})


def test_a_step_whose_episodes_all_fail_stops_the_run_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server of an environment is gone; once it is back, the run goes on."""

    class Unplugs(Watcher):
        def step(self, step: int, metrics: dict[str, float]) -> None:
            monkeypatch.setattr("ragen.envs.bandit.Bandit.step", lambda env, action: 1 / 0)

    config = make_config(eval__every=2, rollout__slots=2)
    run = tmp_path / "my run"
    said = (
        "every episode: ZeroDivisionError.*; stopped after 1 steps; "
        f"resume with: ragen resume {re.escape(shlex.quote(str(run)))}$"
    )
    with monkeypatch.context() as monkeypatch, pytest.raises(RagenError, match=said):
        train(config, run, watcher=Unplugs())
    assert checkpoint.newest(run).name == "step-1"
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


_UNINTERRUPTED: dict[str, dict[str, Any]] = {}


def uninterrupted(config: Config, tmp_path: Path) -> dict[str, Any]:
    key = config.model_dump_json()
    if key not in _UNINTERRUPTED:
        train(config, tmp_path / "uninterrupted")
        _UNINTERRUPTED[key] = recorded_results(tmp_path / "uninterrupted")
    return _UNINTERRUPTED[key]


def kill_and_resume(
    tmp_path: Path, config: Config, seconds: float, chooser: random.Random, most: int
) -> int:
    """Kill and resume a run at random moments until it finishes; returns the number of kills."""
    run, kills = tmp_path / "run", 0
    while True:
        try:
            checkpoint.newest(run)
            work: Callable[[], object] = lambda: resume(run)  # noqa: E731
        except RagenError:  # killed before its first checkpoint: start again
            shutil.rmtree(run, ignore_errors=True)
            work = lambda: train(config, run)  # noqa: E731
        pid = fork(work)
        if kills < most:
            time.sleep(chooser.uniform(0.02, seconds))
            os.kill(pid, signal.SIGKILL)
        if exit_code(pid) == 0:
            return kills
        kills += 1


@GAE_AND_SLOW_GRPO
def test_resume_after_a_kill_equals_the_uninterrupted_run(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    config = make_config(eval__every=2, **more)
    start = time.monotonic()
    train(config, tmp_path / "timed")
    seconds = time.monotonic() - start
    kills = kill_and_resume(tmp_path, config, seconds, random.Random(1), most=6)
    assert kills > 0
    assert_same_results(tmp_path / "run", uninterrupted(config, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@GRPO_AND_GAE
def test_resume_after_many_kills_equals_the_uninterrupted_run(
    tmp_path: Path, more: dict[str, Any], seed: int
) -> None:
    config = make_config(eval__every=2, steps=5, checkpoint__every=2, **more)
    kill_and_resume(tmp_path, config, 1.5, random.Random(seed), most=20)
    assert_same_results(tmp_path / "run", uninterrupted(config, tmp_path))


def train_and_kill(
    config: Config, run: Path, place: tuple[Any, str], number: int, after: str = "step-1"
) -> None:
    """Train in a process that is killed at the `number`-th call of a function after a step."""
    owner, name = place
    before, left = getattr(owner, name), number

    def killing(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= (run / "checkpoints" / after).exists()
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*arguments, **named)

    def work() -> None:
        setattr(owner, name, killing)
        train(config, run)

    assert exit_code(fork(work)) == -signal.SIGKILL


# A call in each phase, and its occurrence after step 1.
PHASES: dict[str, tuple[tuple[Any, str], int]] = {
    "rollout": ((Sampler, "_draw"), 5),
    "update": ((Learner, "_apply"), 2),  # after the first epoch, or after the policy's update
    "inside an optimiser": ((torch.optim.AdamW, "step"), 2),
    "before a commit": ((Recorder, "_write"), 1),
    "inside a commit": ((recorder, "write_tokens"), 1),
    "after a commit": ((Watcher, "step"), 1),
    "evaluation": ((running, "evaluate_envs"), 1),
}


@GAE_AND_SLOW_GRPO
@pytest.mark.parametrize("phase", PHASES)
def test_resume_after_a_kill_in_each_phase(
    tmp_path: Path, phase: str, more: dict[str, Any]
) -> None:
    config, run = make_config(eval__every=2, **more | {"update__epochs": 2}), tmp_path / "run"
    place, number = PHASES[phase]
    train_and_kill(config, run, place, number)
    assert checkpoint.newest(run).name == "step-1"
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


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
            assert (metrics, episodes) == ([(1,)], [({1: 8, 2: 12, 3: 16}[step],)])
            steps.append(step)
        write_state(folder, state)

    monkeypatch.setattr(Recorder, "_write", slow)
    monkeypatch.setattr(running, "write_state", watched)
    train(make_config(eval__every=2), run)
    assert steps == [1, 2, 3]
    monkeypatch.undo()
    assert_same_results(run, uninterrupted(make_config(eval__every=2), tmp_path))


class InTurn(Executor):
    """Does what is submitted at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


def test_a_run_that_writes_beside_its_steps_has_the_rows_of_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of every table, and in their order; only times differ."""
    config = make_config(eval__every=2, record__tokens_every=1)
    train(config, tmp_path / "beside")
    monkeypatch.setattr(recorder, "ThreadPoolExecutor", InTurn)
    train(config, tmp_path / "waits")
    for table in ("episodes", "turns", "samples", "cross_scores", "tokens", "settings"):
        query = f"SELECT * FROM {table}"
        assert rows(tmp_path / "beside", query) == rows(tmp_path / "waits", query)
    for name in ("beside", "waits"):
        assert_same_results(tmp_path / name, recorded_results(tmp_path / "beside"))


@GAE_AND_SLOW_GRPO
@pytest.mark.parametrize("number", [1, 2], ids=["sampled", "greedy"])
def test_resume_after_a_kill_in_the_first_evaluation(
    tmp_path: Path, number: int, more: dict[str, Any]
) -> None:
    config, run = make_config(**more), tmp_path / "run"
    train_and_kill(config, run, PHASES["evaluation"][0], number, after="step-0")
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


@GAE_AND_SLOW_GRPO
@pytest.mark.parametrize("moment", ["write_state", "save_model", "flush", "rename", "drop_old"])
def test_resume_after_a_kill_while_writing_a_checkpoint(
    tmp_path: Path, moment: str, more: dict[str, Any]
) -> None:
    config, run = make_config(**more), tmp_path / "run"
    owners = {"write_state": running, "save_model": saving, "flush": files, "rename": Path}
    train_and_kill(config, run, (owners.get(moment, checkpoint), moment), 1)
    for folder in checkpoint.folders(run):  # every remaining one is intact
        checkpoint.verified_state(folder)
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))
    assert not list((run / "checkpoints").glob(".*"))


def test_resume_of_a_finished_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(make_config(), tmp_path / "run")
    before = recorded_results(tmp_path / "run")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    watcher = NotedWatcher()
    with monkeypatch.context() as patch:
        patch.setattr("ragen.training.trainer.make_engine", None)  # no model is loaded
        again = resume(tmp_path / "run", watcher)
    assert (again.before, again.after) == (first.before, first.after)
    (note,) = watcher.notes
    assert note.startswith("the run is finished at step 3; to train its model further: ragen train")
    assert_same_results(tmp_path / "run", before)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert not rows(tmp_path / "run", "SELECT * FROM events")


def test_a_second_signal_interrupts_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, while the last step is saved, exits; older checkpoints stay intact."""
    run, before = tmp_path / "run", running.write_state

    def interrupted_write(folder: Path, state: dict[str, Any]) -> None:
        if state["loop"]["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        before(folder, state)

    config = make_config(checkpoint__every=0)
    monkeypatch.setattr(running, "write_state", interrupted_write)
    with pytest.raises(KeyboardInterrupt):
        train(config, run, watcher=SendSignal("step", 2, signal.SIGINT))
    monkeypatch.undo()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-0"]
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


# Runs that cannot be resumed or started: one line of error.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(make_config(steps=1, **{"algorithm": "starpo/ppo"}), run)
    return run


class NotedWatcher(Watcher):
    def __init__(self) -> None:
        self.alarms: list[str] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def alarm(self, step: int, text: str) -> None:
        self.alarms.append(text)


def assert_resumes_from_step_0(run: Path, finished: Path, name: str) -> None:
    """The damage is reported, only the damaged checkpoint is lost, and no result changes."""
    watcher = NotedWatcher()
    resume(run, watcher)
    assert_same_results(run, recorded_results(finished))
    (line,) = watcher.alarms
    aside = run / "checkpoints" / "damaged-step-1"
    assert line.startswith(f"resuming from step-0: in {aside}, {name} is damaged (")
    assert "\n" not in line and aside.is_dir()
    assert rows(run, "SELECT kind, text FROM events WHERE kind != 'resume'") == [
        ("damaged checkpoint", line)
    ]
    ((data,),) = rows(run, "SELECT data FROM events WHERE kind = 'damaged checkpoint'")
    assert json.loads(data) == {
        "checkpoint": "step-0",
        "damaged": "step-1",
        "set_aside": "damaged-step-1",
        "reason": line.partition(f"{aside}, ")[2],
    }
    assert [path.name for path in checkpoint.folders(run)] == ["step-0", "step-1"]
    resume(run, watcher)
    assert len(watcher.alarms) == 1, "a checkpoint that was set aside is not read again"


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def one_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),  # what a file system may leave after a power cut
    "half": half,
    "one bit": one_bit,
    "other": lambda data: b'{"loop": {}}',
    "no object": lambda data: b"[]",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["state.json", "model.safetensors", "critic.safetensors", "optimizer-0.safetensors"]
)
def test_resume_sets_a_damaged_checkpoint_aside(
    tmp_path: Path, finished: Path, name: str, damage: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    path = checkpoint.newest(run) / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert_resumes_from_step_0(run, finished, name)


@pytest.mark.parametrize(
    "name", ["state.json", "config.json", "tokenizer.json", "model.safetensors"]
)
def test_resume_sets_a_checkpoint_with_a_missing_file_aside(
    tmp_path: Path, finished: Path, name: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (checkpoint.newest(run) / name).unlink()
    assert_resumes_from_step_0(run, finished, name)


def test_resume_without_an_intact_checkpoint_is_refused(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "checkpoints" / "step-1" / "model.safetensors").unlink()
    (run / "checkpoints" / "step-0" / "state.json").write_text("{")
    before = sorted(run.rglob("*"))
    with pytest.raises(RagenError) as caught:
        resume(run)
    assert str(caught.value).startswith(
        f"no checkpoint of {run} is intact (step-1: model.safetensors is damaged (it is missing); "
        "step-0: state.json is damaged ("
    )
    assert "\n" not in str(caught.value) and sorted(run.rglob("*")) == before


def test_a_checkpoint_of_another_version_is_refused_in_one_line(
    tmp_path: Path, finished: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    newest = checkpoint.newest(run)
    state = checkpoint.read_state(newest)
    state["loop"]["later"] = 0
    checkpoint.replace_state(newest, state)
    for command in (resume, examine):
        with pytest.raises(RagenError, match=r"another version of RAGEN .*; use that version"):
            command(run)


def test_resume_with_a_damaged_database_is_refused(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / DATABASE).write_bytes(b"no database at all" * 100)
    with pytest.raises(RagenError, match="cannot be read"):
        resume(run)


def test_resume_without_a_run_or_checkpoint_is_refused(tmp_path: Path, finished: Path) -> None:
    with pytest.raises(RagenError, match="nowhere"):
        resume(tmp_path / "nowhere")
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RagenError, match="no checkpoint"):
        resume(run)


def test_resume_with_a_changed_reference_is_refused(tmp_path: Path) -> None:
    model = shutil.copytree(make_config().model.path, tmp_path / "model")
    config = make_config(
        steps=1, loss__kl=0.01, model__path=str(model), **{"algorithm": "starpo/ppo"}
    )
    train(config, tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    shutil.copy(newest / "model.safetensors", model / "model.safetensors")
    with pytest.raises(RagenError, match="reference is lost"):
        resume(tmp_path / "run", overrides={"steps": 2})


def test_a_kl_term_that_comes_later_needs_the_model_that_the_run_began_with(
    tmp_path: Path,
) -> None:
    model = shutil.copytree(make_config().model.path, tmp_path / "model")
    before = (model / "model.safetensors").read_bytes()
    train(make_config(steps=1, model__path=str(model)), tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    shutil.copy(newest / "model.safetensors", model / "model.safetensors")
    resume(tmp_path / "run", overrides={"steps": 2})  # without KL it does not matter
    with pytest.raises(RagenError, match="reference is lost"):
        resume(tmp_path / "run", overrides={"steps": 3, "loss.kl": 0.01})
    (model / "model.safetensors").write_bytes(before)
    resume(tmp_path / "run", overrides={"steps": 3, "loss.kl": 0.01})


def test_train_refuses_an_existing_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(RagenError, match="exists already"):
        train(make_config(), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_train_reports_a_run_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RagenError, match="cannot make the run folder"):
        train(make_config(), tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_resume_of_a_read_only_run_is_refused(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for path in (run, *run.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with pytest.raises(RagenError):
            resume(run)
    finally:
        for path in (run, *run.rglob("*")):
            path.chmod(0o700)


@pytest.mark.parametrize("size", [20_000, 60_000, 200_000])
def test_a_full_disk_leaves_saved_checkpoints_intact(tmp_path: Path, size: int) -> None:
    """No file may grow beyond `size`: the database, a tensor file or the WAL meets the limit."""
    run = tmp_path / "run"
    config = make_config()
    train(make_config(steps=1), run)
    before = sorted(checkpoint.folders(run))

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        resume(run, overrides={"steps": 3})

    assert exit_code(fork(work)) == 2
    for folder in before:
        load_file(folder / "model.safetensors")
        load_file(folder / "optimizer-0.safetensors")
        checkpoint.read_state(folder)
    assert not list((run / "checkpoints").glob(".*"))
    resume(run, overrides={"steps": 3})
    actual, expected = recorded_results(run), uninterrupted(config, tmp_path)
    # This run was also evaluated after its first step; everything else is equal.
    last_metrics = [row for row in actual["metrics"] if row[1] == 3]
    assert last_metrics == [row for row in expected["metrics"] if row[1] == 3]
    assert actual["tensors"] == expected["tensors"]


def test_a_run_without_reward_spread_stops(tmp_path: Path) -> None:
    """Equal rewards for every action: no group has any spread for five steps."""
    config = make_config(
        steps=20,
        filter__include_zero=False,
        eval__episodes=0,
        checkpoint__every=0,
        **{"env.params": FLAT},
    )
    with pytest.raises(RagenError, match="no group had any spread of reward for 5 steps"):
        train(config, tmp_path / "run")
    assert checkpoint.newest(tmp_path / "run").name == "step-5"
    assert not rows(tmp_path / "run", "SELECT * FROM metrics WHERE name = 'update/count'")


def test_a_config_built_in_python_applies_its_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Config(algorithm="dapo")` trains by DAPO, and the saved config holds its values."""
    values = settings(steps=0, eval__episodes=0, algorithm="dapo")
    chosen = {key: values[key] for key in ("model.path", "steps", "eval.episodes")}
    train(
        Config.model_validate(nest({"algorithm": "dapo", "env.name": "bandit", **chosen})),
        tmp_path / "run",
    )
    saved = read_config(tmp_path / "run" / "config.toml")
    assert (saved.advantage.name, saved.loss.clip_high, saved.rollout.refill) == ("grpo", 0.28, 3)
