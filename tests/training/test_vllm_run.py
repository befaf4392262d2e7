"""Whole runs on vLLM in this process, and several engines in sequence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.engines.local import LocalEngine
from ragen.evaluation.evaluation import evaluate_target
from ragen.models.names import resolve_model
from ragen.sampling.vllm_engine import Vllm
from ragen.storage.reader import read_metrics
from ragen.training.trainer import resume, train

pytestmark = pytest.mark.vllm

SETTINGS = {"rollout.sampler": "vllm", "eval.episodes": 64, "threads": 1}


def test_training_on_vllm_learns_the_bandit(tmp_path: Path) -> None:
    """From about even odds; the local sampler reaches the same success in as many steps."""
    result = train(merge("bandit", SETTINGS | {"steps": 25}), tmp_path / "run")
    assert result.before.success < 0.75 < 0.85 < result.after.success
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics["publish/logprob_difference"]) == 25
    assert max(metrics["publish/logprob_difference"].values()) < 1e-3
    assert max(metrics["mismatch/max_abs"].values()) < 1e-3
    assert set(metrics["importance/capped_fraction"].values()) == {0.0}

    # Resume and evaluation each start an engine after one was closed.
    assert resume(tmp_path / "run").after.success == result.after.success
    again, _ = evaluate_target(str(tmp_path / "run"), episodes=64)
    assert again.success > 0.85


def test_an_adapter_rank_too_high_for_vllm_is_one_line() -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_length": 64, "slots": 2, "gpu_memory": 0.4}
    with pytest.raises(RagenError, match=r"lora.rank = 600: vLLM takes adapters up to rank 512"):
        Vllm(resolve_model("base", "bandit"), **options, adapter_rank=600)


def test_a_second_engine_starts_after_the_first_is_closed() -> None:
    """As in a rollback by the guard."""
    config = merge("bandit", SETTINGS)
    path = resolve_model("base", "bandit")
    for _ in range(2):
        engine = LocalEngine(config, path)
        asyncio.run(engine.publish())
        assert engine.metrics()["publish/logprob_difference"].value < 1e-3
        asyncio.run(engine.close())


def test_lora_training_on_vllm_learns_the_bandit(tmp_path: Path) -> None:
    """The adapter is pushed at each step, restored on resume and merged for an evaluation."""
    settings = SETTINGS | {"steps": 15, "lora.rank": 8, "update.lr": 5e-3}
    result = train(merge("bandit", settings), tmp_path / "run")
    assert result.after.success > result.before.success + 0.1
    metrics = read_metrics(tmp_path / "run")
    assert max(metrics["publish/logprob_difference"].values()) < 1e-3
    assert max(metrics["mismatch/max_abs"].values()) < 1e-3
    assert resume(tmp_path / "run").after.success == result.after.success
    again, _ = evaluate_target(str(tmp_path / "run"), episodes=64)
    assert again.success == pytest.approx(result.after.success, abs=0.1)
