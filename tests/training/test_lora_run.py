"""Runs with LoRA: what they record, bit-exact resume, and learning."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.core.stopping import StopRequested
from ragen.engines.factory import load_model
from ragen.engines.local import LocalEngine
from ragen.evaluation.evaluation import evaluate_target
from ragen.evaluation.results import load_evaluations
from ragen.models.adapter_folder import ADAPTER_WEIGHTS
from ragen.models.names import ADAPTER_CONFIG
from ragen.networks import fast_qwen2, lora
from ragen.settings.target import config_for
from ragen.storage import checkpoint
from ragen.storage.reader import read_metrics
from ragen.training.trainer import resume, train
from tests.tiny import merged
from tests.tolerance import LOGPROB, assert_close
from tests.training.runs import (
    GAE,
    SMALL,
    SendSignal,
    assert_same_results,
    make_config,
    uninterrupted,
    uninterrupted_run,
)

LORA: dict[str, Any] = SMALL | {"lora__rank": 4, "lora__alpha": 8, "update__lr": 1e-2}


def lora_config(**more: Any) -> Config:
    return make_config(**(LORA | more))


@pytest.fixture
def finished() -> Path:
    """A run of two steps with a critic and a KL reference. Read only."""
    return uninterrupted_run(lora_config(**GAE))


# What a run records.


def test_a_checkpoint_holds_the_adapter_and_not_the_base(finished: Path) -> None:
    newest = checkpoint.newest(finished)
    names = {path.name for path in newest.iterdir()}
    assert {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json", "chat_template.jinja"} <= names
    assert {"critic.safetensors", "optimizer-0.safetensors", "state.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    critic = load_file(newest / "critic.safetensors")
    matrices = {name.rpartition(".lora_")[2] for name in critic if "lora_" in name}
    assert matrices == {"A.weight", "B.weight"} and "head.weight" in critic


def test_metrics_are_recorded_and_sampler_and_learner_agree(finished: Path) -> None:
    metrics = read_metrics(finished)
    assert max(metrics["mismatch/max_abs"].values()) < LOGPROB
    assert all(metrics["exactness/completions_checked"].values())
    assert all(metrics["gradient/policy_norm"].values())
    assert all(metrics["gradient/critic_norm"].values())
    # In the first step the policy equals the base, so that only rounding remains.
    kl = metrics["kl/reference"]
    assert kl[1] < LOGPROB**2 < 1e-6 < kl[2]


def test_sampler_and_learner_agree_without_the_fast_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other architectures, sampler and learner use transformers and peft."""
    monkeypatch.setattr(fast_qwen2, "supports", lambda _: False)
    more = {"lora__rank": 4, "steps": 1, "rollout__group_size": 2, "eval__episodes": 0}
    train(make_config(**more), tmp_path / "run")
    assert max(read_metrics(tmp_path / "run")["mismatch/max_abs"].values()) < LOGPROB


def test_adapter_and_merged_weights_give_the_trained_policy(finished: Path) -> None:
    """A checkpoint, with its base found by name, gives the policy that was trained."""
    newest = checkpoint.newest(finished)
    engine = LocalEngine(lora_config(**GAE), make_config().model.path)
    asyncio.run(engine.load(newest, checkpoint.read_state(newest)["engine"]))
    plain = LocalEngine(make_config(), str(newest)).model
    assert not lora.has_adapters(plain) and lora.has_adapters(engine.model)
    probe = torch.arange(1, 9)[None]
    expected = engine.model(probe).logits
    model, _ = load_model(make_config().model, str(newest))
    assert torch.equal(model(probe).logits, expected)
    assert_close(plain(probe).logits, expected)
    assert torch.equal(merged(engine.model)(probe).logits, plain(probe).logits)
    evaluation, _ = evaluate_target(str(finished), episodes=2)
    (last,) = [
        each
        for each in load_evaluations(finished)
        if each.step == 2 and each.evaluation.temperature
    ]
    assert evaluation.success == last.evaluation.success


@pytest.mark.slow
def test_training_starts_from_the_adapter_of_a_run(finished: Path, tmp_path: Path) -> None:
    """With adapters of the same shape, or merged and with all weights trained."""
    on = {"model__path": str(finished), "steps": 0, "algorithm": "starpo/grpo", "loss__kl": 0.0}
    train(lora_config(**on), tmp_path / "on")
    start = load_file(tmp_path / "on" / "checkpoints" / "step-0" / ADAPTER_WEIGHTS)
    end = load_file(checkpoint.newest(finished) / ADAPTER_WEIGHTS)
    assert start.keys() == end.keys() and all(torch.equal(start[k], end[k]) for k in end)
    base = json.loads((checkpoint.newest(tmp_path / "on") / ADAPTER_CONFIG).read_text())
    assert base["base_model_name_or_path"] == make_config().model.path
    train(make_config(**on, update__lr=1e-2), tmp_path / "all")
    assert (checkpoint.newest(tmp_path / "all") / "model.safetensors").is_file()


def test_invalid_settings_are_refused_before_the_run_folder_is_made(
    finished: Path, tmp_path: Path
) -> None:
    def message(**more: Any) -> str:
        with pytest.raises(RagenError) as caught:
            train(lora_config(model__path=str(finished), **more), tmp_path / "run")
        assert not (tmp_path / "run").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    assert "has rank 4 and alpha 8" in message(lora__rank=8)
    assert "the KL reference is the policy that the run begins with" in message(**GAE)
    back = {"guard__responses": {"grad_spike": "rollback"}, "guard__remedy": "kl"}
    assert "no guard.remedy = " in message(loss__kl=0.0, **back)
    assert "or all-linear for all of them" in message(lora__targets="q_proj,")


def test_settings_of_an_evaluation_override_those_of_the_run(finished: Path) -> None:
    """Settings of the run without effect are dropped; given settings without effect are refused."""
    evaluated = config_for(str(finished), {"lora.rank": 0})
    assert (evaluated.lora.alpha, evaluated.env) == (64, make_config().env)
    with pytest.raises(RagenError, match=r"lora\.alpha = 3 has no effect"):
        config_for(str(finished), {"lora.rank": 0, "lora.alpha": 3})


def test_a_changed_or_missing_base_is_refused(tmp_path: Path) -> None:
    model = shutil.copytree(make_config().model.path, tmp_path / "model")
    train(lora_config(model__path=str(model), steps=0), tmp_path / "run")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] *= 2
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    for use in (
        lambda: resume(tmp_path / "run", overrides={"steps": 1}),
        lambda: evaluate_target(str(tmp_path / "run")),
    ):
        with pytest.raises(RagenError, match=r"trained on another base than .*/model is now"):
            use()
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(RagenError, match="which is gone: put it back"):
        evaluate_target(str(tmp_path / "run"))


def test_resume_after_a_stop_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    config, run = lora_config(**GAE), tmp_path / "run"
    with pytest.raises(StopRequested):
        train(config, run, watcher=SendSignal("episode", 6, signal.SIGINT))
    resume(run)
    assert_same_results(run, uninterrupted(config))
