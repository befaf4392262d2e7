"""Samplers on Ray that sample with vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.types import Prompt
from ragen.engines.machine import use_threads
from ragen.engines.memory import adapter_shapes
from ragen.models.names import resolve_model
from ragen.models.sizes import read_sizes
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
pytest.importorskip("ray", reason="needs Ray")


def config_of(**more: Any) -> Config:
    settings = {
        "engine.name": "ray",
        "engine.timeout_s": 120,
        "rollout.sampler": "vllm",
        "rollout.gpu_memory": 0.2,
        "threads": 1,
    }
    return resolve("bandit", settings | more)


def test_a_vllm_of_two_workers_that_loses_one_is_replaced() -> None:
    """Publications reach both workers, and each time they hold what was sent."""
    import psutil

    from ragen.engines.ray_engine import RayEngine

    config = config_of(**{"engine.tensor_parallel": 2})

    async def play() -> list[tuple[str, dict[str, Any]]]:
        use_threads(1)
        engine = RayEngine(config, resolve_model(config.model.path, config.env.name))
        try:
            await engine.publish()
            ids = engine.chat.open([{"role": "user", "content": "which of the two?"}])[0]
            prompts = [Prompt((), ids, 0, 8, 1.0, seed) for seed in range(8)]
            answers = await asyncio.gather(*map(engine.policy.complete, prompts))
            assert {each.policy_version for each in answers} == {1}
            pid = await engine._samplers[0].actor.pid.remote()
            workers = [
                each for each in psutil.Process(pid).children() if "Worker" in str(each.cmdline())
            ]
            assert len(workers) == 2
            workers[1].kill()
            again = await asyncio.gather(*map(engine.policy.complete, prompts))
            assert [each.token_ids for each in again] == [each.token_ids for each in answers]
            return engine.take_events()
        finally:
            await engine.close()

    (text, lost), (_, joined) = asyncio.run(play())
    assert text.startswith("sampler 0 ") and (lost["what"], joined["what"]) == ("lost", "joined")


def test_with_lora_only_the_adapter_travels(tmp_path: Path) -> None:
    settings = {"lora.rank": 4, "steps": 2, "update.lr": 5e-3, "eval.episodes": 0}
    few = {"rollout.num_groups": 2, "rollout.group_size": 4}
    all_kept = {"filter.rule": "all", "filter.include_zero": True}
    config = config_of(**settings, **few, **all_kept)
    train(config, tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    sizes = read_sizes(resolve_model("base", "bandit"))
    numbers = sum(rows * columns for rows, columns in adapter_shapes(config, sizes))
    assert set(metrics["publish/bytes"].values()) == {4.0 * numbers}
    assert max(metrics["gradient/policy_norm"].values()) > 0, "a publication has to change it"
    assert max(metrics["mismatch/max_abs"].values()) < 1e-3


@pytest.mark.parametrize("players", [0, 2])
def test_two_vllm_on_ray_sample_with_the_learners_weights(tmp_path: Path, players: int) -> None:
    settings = {
        "engine.players": players,
        "env.isolate": players > 0,
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
