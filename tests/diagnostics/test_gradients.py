"""Gradient norms by reward std, moving averages, and measurements of a run."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from records import group
from safetensors.torch import load_file
from torch import Tensor

from ragen.algorithms.batch import Batch
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.config.sections import DiagnoseConfig
from ragen.core.metrics import largest, last, mean, total, values
from ragen.diagnostics import detectors
from ragen.diagnostics.collapse import REGIMES
from ragen.diagnostics.information import measure
from ragen.diagnostics.step_metrics import averaged, gradients_by_std, smooth, std_buckets
from ragen.learning.learner import Learner
from ragen.learning.optimizers import optimizer_tensors
from ragen.storage import checkpoint
from ragen.storage.database import DATABASE, read
from ragen.storage.schema import decompress
from ragen.training.running import is_due
from ragen.training.trainer import resume, train
from tests.learning.test_learner import batch, equal, learner, model, weights
from tests.shared import once, own
from tests.tolerance import GRADIENT, LOGPROB, rounding


def norms(one: Learner, part: Batch, buckets: list[int]) -> dict[str, float]:
    return values(one.gradient_norms(part, torch.tensor(buckets)))


# Gradients by reward std.


def by_autograd(part: Batch, rows: list[int]) -> dict[str, float]:
    """Norms of the three terms, from a transformers forward and one backward per term."""
    found = {}
    assert part.advantages_BT is not None and part.reference_logprobs_BT is not None
    for term in ("task", "entropy", "kl"):
        plain = model()
        loss = torch.zeros(())
        for row in rows:
            ids = part.token_ids_BT[row, : int(part.lengths_B[row])]
            log_p = plain(ids[None]).logits[0].log_softmax(-1)
            for at in part.mask_BT[row].nonzero()[:, 0].tolist():
                logprob = log_p[at - 1, ids[at]]
                loss = (
                    loss
                    + {
                        "task": -part.advantages_BT[row, at] * logprob,  # the ratio is 1
                        "entropy": (log_p[at - 1].exp() * log_p[at - 1]).sum(),
                        "kl": (part.reference_logprobs_BT[row, at] - logprob) ** 2 / 2,
                    }[term]
                )
        loss.backward()
        squares = [p.grad.square().sum() for p in plain.parameters() if p.grad is not None]
        found[term] = float(torch.stack(squares).sum().sqrt())
    return found


@pytest.mark.parametrize("microbatch_tokens", [10_000, 20])
def test_gradient_norms_equal_those_of_autograd(microbatch_tokens: int) -> None:
    one = learner(microbatch_tokens=microbatch_tokens)
    part = batch(one)
    found = norms(one, part, [0, 3, 3, 0])
    for bucket, rows in ((0, [0, 3]), (3, [1, 2])):
        num_tokens = int(part.mask_BT[rows].sum())
        for term, norm in by_autograd(part, rows).items():
            per_token, per_sample = (found[f"{bucket}/{term}_per_{x}"] for x in ("token", "sample"))
            off = rounding(GRADIENT)
            assert per_token == pytest.approx(norm / num_tokens, rel=off)
            assert per_sample == pytest.approx(norm / 2, rel=off)
    assert len(found) == 2 * 3 * 2


def test_without_a_reference_there_is_no_kl() -> None:
    one = learner()
    found = norms(one, replace(batch(one), reference_logprobs_BT=None), [0] * 4)
    assert not [name for name in found if "kl" in name]


def state(one: Learner) -> dict[str, Tensor]:
    """Weights, optimiser states and the ambient generator."""
    found = weights(one) | {"generator": torch.get_rng_state()}
    for name, optimizer in one.named_optimizers().items():
        tensors = optimizer_tensors(optimizer)
        found |= {f"{name}.{key}": tensor.clone() for key, tensor in tensors.items()}
    return found


def test_measuring_changes_no_state() -> None:
    one = learner(critic=True)
    part = batch(one)
    one.update(part, 0)  # gives the optimisers a state
    before = state(one)
    norms(one, part, [0, 1, 0, 1])
    one.cross_scores([[1, 2, 3]], [[4, 5]])
    assert len(before) > len(weights(one)) and equal(state(one), before)
    assert all(p.grad is None for p in one.model.parameters())


def test_std_buckets_are_quartiles() -> None:
    # Edges of 0…7: 1.75, 3.5, 5.25.
    assert std_buckets([0, 1, 2, 3, 4, 5, 6, 7]) == [0, 0, 1, 1, 2, 2, 3, 3]
    # Edges 0, 0, ¾: all flat groups share one bucket.
    assert std_buckets([0.0, 0.0, 0.0, 3.0]) == [0, 0, 0, 3]
    assert std_buckets([1.0]) == [0]


def test_rows_get_the_bucket_of_their_group() -> None:
    """Two groups of std 0 and 1/√2: rows of the first in bucket 0, of the second in 3."""
    one = learner()
    part = replace(batch(one), group_B=torch.tensor([0, 0, 1, 1]))
    buckets: list[list[int]] = []

    class Engine:
        async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Any:
            buckets.append(bucket_B.tolist())
            return one.gradient_norms(batch, bucket_B)

    groups = [group(1.0, 1.0), group(0.0, 1.0)]
    engine: Any = Engine()
    found = values(asyncio.run(gradients_by_std(engine, part, groups)))
    assert buckets == [[0, 0, 3, 3]]
    assert found["gradient_by_std/0/reward_std"] == 0
    assert found["gradient_by_std/3/reward_std"] == pytest.approx(0.5**0.5)
    assert found["gradient_by_std/3/groups"] == 1
    assert found["gradient_by_std/3/task_per_token"] > 0


# Moving averages.


def test_moving_averages_equal_values_computed_by_hand() -> None:
    # 1, then 1 + .1 (2 − 1) = 1.1, then 1.1 + .1 (0 − 1.1) = .99.
    averages: dict[str, float] = {}
    for x, expected in ((1.0, 1.0), (2.0, 1.1), (0.0, 0.99)):
        step = {"reward/mean": mean(x, 8)}
        averages = smooth(averages, step)
        assert values(averaged(averages, step)) == {"ema/reward/mean": pytest.approx(expected)}


def test_a_missing_metric_keeps_its_average() -> None:
    before = {"critic/explained_variance": 0.5, "reward/mean": 1.0}
    step = {"reward/mean": mean(float("nan")), "time/step_s": total(1), "a": last(1)}
    step |= {"b": largest(2)}
    assert smooth(before, step) == before
    assert values(averaged(before, step)) == {"ema/reward/mean": 1.0}


# In a run.


def make_config(**more: Any) -> Config:
    """Two steps of PPO with a KL penalty on the bandit, with the embedded model."""
    return merge(
        "bandit",
        {
            "algorithm": "starpo/ppo",
            "steps": 2,
            "threads": 1,
            "rollout.num_groups": 2,
            "rollout.group_size": 4,
            "rollout.slots": 8,
            "eval.episodes": 2,
            "record.tokens_every": 1,
            "checkpoint.every": 1,
        }
        | more,
    )


MEASURED = {"diagnose.information_every": 1, "diagnose.gradients_every": 1}
UNMEASURED = {"diagnose.information_every": 0, "diagnose.gradients_every": 0}


def metrics(run: Path) -> dict[tuple[int, str], float]:
    connection = sqlite3.connect(run / DATABASE)
    try:
        found = connection.execute("SELECT step, name, value FROM metrics").fetchall()
    finally:
        connection.close()
    return {(step, name): value for step, name, value in found if not name.startswith("time/")}


EPISODES = "SELECT id FROM episodes WHERE phase = 'train' AND step = ?"


def diagnostic_keys(found: dict[tuple[int, str], float]) -> set[tuple[int, str]]:
    starts = ("information/", "gradient_by_std/")
    return {key for key in found if key[1].removeprefix("ema/").startswith(starts)}


@pytest.fixture(scope="module")
def measured_run() -> Path:
    """A finished run that is measured in each step. Read only."""
    return once("measured-run", lambda folder: train(make_config(**MEASURED), folder))


def test_a_run_logs_every_metric_that_detectors_read(measured_run: Path) -> None:
    """The detector of a metric that is never logged would never fire."""
    names = "REWARD_STD SUCCESS ENTROPY GRADIENT VALID DEGENERATE KEPT MI PROMPTS"
    read = {getattr(detectors, name) for name in names.split()} | set(detectors.SKIPPED)
    assert read <= {name for _, name in metrics(measured_run)}


def test_measuring_changes_no_result_of_a_run(measured_run: Path, tmp_path: Path) -> None:
    train(make_config(**UNMEASURED), tmp_path / "unmeasured")
    without, measured = metrics(tmp_path / "unmeasured"), metrics(measured_run)
    diagnostic = diagnostic_keys(measured)
    assert diagnostic and not diagnostic_keys(without)
    assert {key: value for key, value in measured.items() if key not in diagnostic} == without
    files = sorted(path.name for path in checkpoint.newest(measured_run).glob("*.safetensors"))
    assert len(files) == 4  # policy, critic, and their optimisers
    for name in files:
        one, other = (
            load_file(checkpoint.newest(run) / name)
            for run in (measured_run, tmp_path / "unmeasured")
        )
        assert equal(one, other), name


def test_metrics_of_thoughts_and_gradients_in_a_run(measured_run: Path) -> None:
    found = metrics(measured_run)
    for step in (1, 2):
        for sampling in ("first", "any"):
            measures = {
                name.rpartition("/")[2]: value
                for (at, name), value in found.items()
                if at == step and name.startswith(f"information/{sampling}/")
            }
            assert measures["thoughts"] + measures["left_out"] == 8
            assert 1 <= measures["prompts"] <= 2  # bandit: one turn, so X is the level's prompt
            assert measures["mi"] <= measures["prompt_entropy"] + 1e-6
            assert measures["regime"] in range(len(REGIMES))
            assert measures["mi"] == pytest.approx(
                measures["entropy"] - measures["conditional_entropy"]
            )
        groups = [found.get((step, f"gradient_by_std/{b}/groups"), 0) for b in range(4)]
        assert sum(groups) == 2
        assert found[step, "gradient_by_std/0/entropy_per_token"] > 0
    # In the first step the policy equals its reference, where the KL's gradient is zero.
    assert found[1, "gradient_by_std/0/kl_per_token"] == pytest.approx(0, abs=LOGPROB)
    assert (2, "ema/information/first/mi_zscore") in found
    assert (2, "ema/information/first/prompts") not in found


def test_cross_scores_are_stored(measured_run: Path) -> None:
    """Metrics can be computed from the stored scores of one-word thoughts."""
    found, rows = metrics(measured_run), read(measured_run, "SELECT * FROM cross_scores")
    assert {(step, path) for _, step, path, *_ in rows} == {
        (step, sampling) for step in (1, 2) for sampling in ("first", "any")
    }
    for _, step, path, blob, owners, num_thoughts, num_prompts, thoughts, prompts in rows:
        scores = decompress("scores", blob).reshape(num_thoughts, num_prompts).copy()
        own = decompress("own", owners).tolist()
        measures = measure(torch.from_numpy(scores), own, [1] * num_thoughts)
        name = f"information/{path}"
        assert measures.mi == pytest.approx(found[step, f"{name}/mi"], abs=LOGPROB)
        assert measures.regime == REGIMES[int(found[step, f"{name}/regime"])]
        query = f"SELECT observation, thought FROM turns WHERE episode_id IN ({EPISODES})"
        pairs = read(measured_run, query, (step,))
        shown = [json.loads(prompts)[prompt] for prompt in own]
        assert set(zip(shown, json.loads(thoughts), strict=True)) <= set(pairs)
        assert num_thoughts == found[step, f"{name}/thoughts"]


@pytest.mark.slow
def test_a_resumed_run_stores_the_same_rows(measured_run: Path, tmp_path: Path) -> None:
    """The last checkpoint is lost, so the last step is deleted and repeated."""
    run = own(measured_run, tmp_path)
    tables = ("episodes", "turns", "tokens", "samples", "cross_scores", "evaluations")
    expected = {name: read(run, f"SELECT * FROM {name}") for name in tables}
    shutil.rmtree(checkpoint.newest(run))
    resume(run)
    for name in tables[:-1]:
        assert read(run, f"SELECT * FROM {name}") == expected[name], name
    assert len(read(run, "SELECT * FROM evaluations")) == len(expected["evaluations"])
    assert metrics(run) == metrics(measured_run)


def test_information_is_measured_every_fifth_step_from_the_first() -> None:
    every = DiagnoseConfig().information_every
    assert [step + 1 for step in range(11) if is_due(step, every)] == [1, 6, 11]
