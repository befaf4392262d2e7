"""Samplers on Ray that sample with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragen.config.reading import resolve
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def test_two_vllm_on_ray_sample_with_the_learners_weights(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    settings = {
        "engine.name": "ray",
        "engine.samplers": 2,
        "rollout.sampler": "vllm",
        "rollout.gpu_memory": 0.2,
        "rollout.num_groups": 2,
        "rollout.group_size": 4,
        "filter.rule": "all",
        "filter.include_zero": True,
        "eval.episodes": 0,
        "update.minibatch_episodes": 4,
        "update.lr": 1e-3,
        "steps": 3,
        "threads": 1,
    }
    train(resolve("bandit", settings), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert metrics["engine/samplers"] == {1: 2.0, 2: 2.0, 3: 2.0}
    assert max(metrics["gradient/policy_norm"].values()) > 0, "a publication has to change weights"
    assert max(metrics["mismatch/max_abs"].values()) < 1e-3
