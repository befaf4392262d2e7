"""Samplers on Ray that sample with vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragen.cluster.ray_cluster import connect
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.models.hub import read_sizes
from ragen.models.memory import adapter_shapes
from ragen.models.names import resolve_model
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
pytest.importorskip("ray", reason="needs Ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    connect("", 6)
    yield
    ray.shutdown()


def config_of(**more: Any) -> Config:
    """Two steps of two groups of four, without an evaluation."""
    keys = {
        "engine.name": "ray",
        "rollout.sampler": "vllm",
        "rollout.gpu_memory": 0.2,
        "rollout.num_groups": 2,
        "rollout.group_size": 4,
        "filter.rule": "all",
        "filter.include_zero": True,
        "eval.episodes": 0,
        "update.lr": 5e-3,
        "steps": 2,
        "threads": 1,
    }
    return merge("bandit", keys | {key.replace("__", "."): value for key, value in more.items()})


def test_with_lora_only_the_adapter_travels_to_a_vllm_of_two_workers(tmp_path: Path) -> None:
    config = config_of(lora__rank=4, engine__tensor_parallel=2)
    train(config, tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    sizes = read_sizes(resolve_model("base", "bandit"))
    numbers = sum(rows * columns for rows, columns in adapter_shapes(config.lora, sizes))
    assert set(metrics["publish/bytes"].values()) == {4.0 * numbers}
    assert max(metrics["gradient/policy_norm"].values()) > 0, "a publication has to change it"
    assert max(metrics["mismatch/max_abs"].values()) < 1e-3


def test_a_vllm_on_ray_samples_with_the_learners_weights(tmp_path: Path) -> None:
    train(config_of(), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert max(metrics["gradient/policy_norm"].values()) > 0, "a publication has to change weights"
    assert max(metrics["mismatch/max_abs"].values()) < 1e-3
