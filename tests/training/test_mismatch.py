"""Sampler and learner compute one distribution under every setting of the rollout, or say so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen.algorithms.batch import Batch
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.config.sections import RolloutConfig
from ragen.core.errors import GuardStop
from ragen.core.metrics import Metrics
from ragen.diagnostics.detectors import MISMATCH, MISMATCH_BOUND, mismatch
from ragen.engines.local import LocalEngine
from ragen.learning import models
from ragen.models.loading import save_model
from ragen.sampling import local_sampler as sampler
from ragen.storage.checkpoint import newest
from ragen.storage.reader import read_events, read_metrics
from ragen.training.trainer import resume, train
from tests.bandit_model import settings as bandit_settings
from tests.pretend import PretendVllm
from tests.tiny import tiny_model, tiny_tokenizer

UNUSUAL: list[dict[str, Any]] = [
    {"num_groups": 1, "group_size": 3, "temperature": 0.05, "max_tokens": 40},
    {"num_groups": 5, "group_size": 2, "slots": 1, "temperature": 4.0, "max_tokens": 1},
    {"levels": 1, "temperature": 0.5, "sampler": "vllm", "gpu_memory": 0.9},
]
"""Values of keys of the section `rollout` that are far from the defaults; one run for each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model; its weights are large, so that its distributions are far from uniform."""
    folder, tokenizer = tmp_path_factory.mktemp("model") / "model", tiny_tokenizer("chatml")
    save_model(tiny_model(tokenizer, initializer_range=0.3), tokenizer, folder)
    return str(folder)


def settings(folder: str, **changes: Any) -> Config:
    """A run of one step, with the keys that change: ``section__key``."""
    keys: dict[str, Any] = {
        "steps": 1,
        "threads": 1,
        "model.path": folder,
        "rollout.num_groups": 2,
        "rollout.group_size": 2,
        "rollout.max_tokens": 8,
        "rollout.slots": 4,
        "env.max_turns": 2,
        "eval.episodes": 0,
        "filter.rule": "all",
        "filter.include_zero": True,
    }
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return merge("frozen-lake-still", keys | changed)


def watch(monkeypatch: pytest.MonkeyPatch, temperature: float) -> list[float]:
    """The largest gaps of a run's sampled and recomputed logprobs to those of the plain model."""
    largest, update = list[float](), LocalEngine.update

    async def checked(engine: LocalEngine, batch: Batch, step: int) -> Metrics:
        with torch.no_grad():
            logits_BTV = engine.model(batch.token_ids_BT).logits[:, :-1] / temperature
        targets_BT1 = batch.token_ids_BT[:, 1:, None]
        expected_BT = logits_BTV.log_softmax(-1).gather(-1, targets_BT1)[:, :, 0]
        for found_BT in (batch.sampled_logprobs_BT, engine.learner.logprobs(batch)[0]):
            gap_BT = (found_BT[:, 1:] - expected_BT)[batch.mask_BT[:, 1:]]
            largest.append(float(gap_BT.abs().max()))
        return await update(engine, batch, step)

    monkeypatch.setattr(LocalEngine, "update", checked)
    return largest


@pytest.mark.parametrize(
    "keys", [UNUSUAL[0], *(pytest.param(each, marks=pytest.mark.slow) for each in UNUSUAL[1:])]
)
def test_the_learner_scores_the_distribution_that_was_sampled_under_every_rollout_key(
    keys: dict[str, Any], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled, recomputed and independently computed logprobs are equal in float32."""
    monkeypatch.setattr("ragen.engines.factory.Vllm", PretendVllm)
    config = settings(folder, **{f"rollout__{key}": value for key, value in keys.items()})
    gaps = watch(monkeypatch, config.rollout.temperature)
    train(config, tmp_path / "run")
    bound = 1e-3 / min(1.0, config.rollout.temperature)
    assert gaps and max(gaps) <= bound
    assert read_metrics(tmp_path / "run")[MISMATCH][1] <= bound


def test_refilled_groups_are_scored_as_they_were_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the bandit, whose model plays either arm, so that rewards in a group differ."""
    more = {"steps": 1, "eval__episodes": 0, "rollout__refill": 2, "filter__include_zero": False}
    gaps = watch(monkeypatch, 1.0)
    train(merge("bandit", bandit_settings(**more)), tmp_path / "run")
    assert gaps and max(gaps) <= 1e-3


def test_every_rollout_key_has_an_unusual_value() -> None:
    assert {"refill", *(key for keys in UNUSUAL for key in keys)} == {*RolloutConfig.model_fields}


def skew(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the sampler draw from other logits than the model's."""
    draw = sampler.draw
    monkeypatch.setattr(
        sampler, "draw", lambda logits_NV, *rest: draw(change(logits_NV.clone()), *rest)
    )


def without_half(logits_NV: torch.Tensor) -> torch.Tensor:
    logits_NV[:, ::2] = -math.inf
    return logits_NV


def test_a_mismatch_stops_a_run_in_float32_before_its_update(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names difference and token, and the run can be resumed where the cause is gone."""
    with monkeypatch.context() as patch, pytest.raises(GuardStop) as stopped:
        skew(patch, without_half)
        train(settings(folder), tmp_path / "run")
    line = str(stopped.value)
    assert "\n" not in line and stopped.value.exit_code == 3
    for words in ("step 1, mismatch: ", " nats apart: token ", "the token is '", "after step 0"):
        assert words in line
    assert newest(tmp_path / "run").name == "step-0"
    kinds = [event["kind"] for event in read_events(tmp_path / "run")]
    assert kinds == ["alarm", "guard"]
    result = resume(tmp_path / "run")
    assert len(result.alarms) == 1
    assert newest(tmp_path / "run").name == "step-1"


def test_a_mismatch_that_is_not_a_number_stops_a_run(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = models.token_logprobs

    def broken(*arguments: Any) -> tuple[torch.Tensor, ...]:
        nothing = math.nan if torch.is_grad_enabled() else 1.0  # not where scores are verified
        return tuple(nothing * field for field in compute(*arguments))

    monkeypatch.setattr(models, "token_logprobs", broken)
    with pytest.raises(GuardStop, match="nan nats apart"):
        train(settings(folder), tmp_path / "run")


def test_another_arithmetic_has_a_wider_bound_and_only_an_alarm(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"steps": 1, "rollout__group_size": 2, "eval__episodes": 0, "model__dtype": "bfloat16"}
    quiet = train(merge("bandit", bandit_settings(**more)), tmp_path / "quiet")
    assert read_metrics(quiet.run)[MISMATCH_BOUND] == {1: 0.5} and not quiet.alarms
    skew(monkeypatch, without_half)
    result = train(settings(folder, model__dtype="bfloat16"), tmp_path / "run")
    assert [alarm.detector for alarm in result.alarms] == ["mismatch"]


def test_the_detector_reads_the_last_step() -> None:
    bounds = {1: 0.5, 2: 0.5}
    assert mismatch({}) is None
    assert mismatch({MISMATCH: {1: 0.6, 2: 0.4}, MISMATCH_BOUND: bounds}) is None
    for value in (0.6, math.inf, math.nan):
        found = mismatch({MISMATCH: {1: 0.1, 2: value}, MISMATCH_BOUND: bounds})
        assert found is not None and (found.onset, found.baseline) == (2, 0.5)
    missing = mismatch({MISMATCH: {1: 0.1}, MISMATCH_BOUND: bounds})
    assert missing is not None and math.isnan(missing.value)
