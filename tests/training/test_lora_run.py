"""Runs with LoRA: what they record, bit-exact resume, and learning."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.errors import RagenError
from ragen.core.stopping import StopRequested
from ragen.engines.factory import load_model, make_policy
from ragen.engines.local import LocalEngine
from ragen.evaluation.evaluation import evaluate_target
from ragen.evaluation.results import load_evaluations
from ragen.evaluation.targets import config_for
from ragen.models import fast_qwen2, lora
from ragen.models.adapter_folder import ADAPTER_WEIGHTS
from ragen.models.names import ADAPTER_CONFIG, is_adapter
from ragen.reports.export import export
from ragen.storage import checkpoint
from ragen.storage.reader import read_metrics
from ragen.training.trainer import examine, resume, train
from tests.diagnostics.test_guard_run import ROLLBACK, Plan, alarms_at, events
from tests.tiny import merged
from tests.tolerance import LOGPROB, assert_close
from tests.training.test_trainer import (
    GAE,
    GAE_AND_SLOW_GRPO,
    SendSignal,
    assert_same_results,
    kill_and_resume,
    make_config,
    recorded_results,
)

__all__ = ["alarms_at"]  # a fixture of tests in this module

LORA: dict[str, Any] = {"lora__rank": 4, "lora__alpha": 8, "update__lr": 1e-2}
SHARED = GAE | {"model__critic": "shared"}
HALF = GAE | {"model__dtype": "bfloat16"}
KINDS = pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="grpo", marks=pytest.mark.slow),
        pytest.param(GAE, id="gae", marks=pytest.mark.slow),
        pytest.param(SHARED, id="shared"),
        pytest.param(HALF, id="bfloat16"),
    ],
)


def lora_config(**more: Any) -> Config:
    return make_config(**(LORA | more))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("lora") / "run"
    train(lora_config(**GAE), run)
    return run


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
    assert kl[1] < LOGPROB**2 < 1e-6 < kl[3]


def test_sampler_and_learner_agree_without_the_fast_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other architectures, sampler and learner use transformers and peft."""
    monkeypatch.setattr(fast_qwen2, "supports", lambda _: False)
    train(lora_config(**GAE, steps=2, eval__episodes=0), tmp_path / "run")
    assert max(read_metrics(tmp_path / "run")["mismatch/max_abs"].values()) < LOGPROB


def test_adapter_and_merged_weights_give_the_trained_policy(finished: Path) -> None:
    """A checkpoint, with its base found by name, gives the policy that was trained."""
    newest = checkpoint.newest(finished)
    engine = LocalEngine(lora_config(**GAE), make_config().model.path)
    asyncio.run(engine.load(newest, checkpoint.read_state(newest)["engine"]))
    policy, _ = make_policy(make_config(), str(newest))
    plain = LocalEngine(make_config(), str(newest)).model
    assert not lora.has_adapters(plain) and lora.has_adapters(engine.model)
    probe = torch.arange(1, 9)[None]
    expected = engine.model(probe).logits
    model, _ = load_model(make_config(), str(newest))
    assert torch.equal(model(probe).logits, expected)
    assert_close(plain(probe).logits, expected)
    assert torch.equal(merged(engine.model)(probe).logits, plain(probe).logits)
    assert policy.version == 0
    evaluation, _ = evaluate_target(str(finished), episodes=4)
    (last,) = [
        each
        for each in load_evaluations(finished)
        if each.step == 3 and each.evaluation.temperature
    ]
    assert evaluation.success == last.evaluation.success


def test_export_writes_the_adapter_or_merged_weights(finished: Path, tmp_path: Path) -> None:
    expected = load_model(make_config(), str(checkpoint.newest(finished)))[0]
    export(finished, tmp_path / "adapter")
    export(finished, tmp_path / "merged", merge=True)
    assert is_adapter(tmp_path / "adapter") and not is_adapter(tmp_path / "merged")
    probe = torch.arange(1, 9)[None]
    adapter, full = (
        load_model(make_config(), str(tmp_path / name))[0] for name in ("adapter", "merged")
    )
    assert torch.equal(adapter(probe).logits, expected(probe).logits)
    assert_close(full(probe).logits, expected(probe).logits)


def test_training_starts_from_the_adapter_of_a_run(finished: Path, tmp_path: Path) -> None:
    """With adapters of the same shape, or merged and with all weights trained."""
    on = {"model__path": str(finished), "steps": 1, "algorithm": "starpo/grpo", "loss__kl": 0.0}
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
    with pytest.raises(RagenError, match="expected all-linear, or names of layers"):
        lora_config(lora__targets="q_proj,")


def test_an_adapter_with_a_wrong_tokenizer_is_refused(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint.newest(finished), tmp_path / "adapter")
    more = AutoTokenizer.from_pretrained(folder)
    more.add_tokens([f"<extra{number}>" for number in range(1000)])
    more.save_pretrained(folder)
    with pytest.raises(RagenError, match="does not fit its weights: token '<extra999>'"):
        load_model(make_config(), str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(RagenError, match=r"tokenizer of .* failed a trial"):
        load_model(make_config(), str(folder))


def test_settings_of_an_evaluation_override_those_of_the_run(finished: Path) -> None:
    """Settings of the run without effect are dropped; given settings without effect are refused."""
    evaluated = config_for(str(finished), {"lora.rank": 0})
    assert (evaluated.lora.alpha, evaluated.env) == (64, make_config().env)
    with pytest.raises(RagenError, match=r"lora\.alpha = 3 has no effect"):
        config_for(str(finished), {"lora.rank": 0, "lora.alpha": 3})


def test_a_changed_or_missing_base_is_refused(tmp_path: Path) -> None:
    model = shutil.copytree(make_config().model.path, tmp_path / "model")
    train(lora_config(model__path=str(model), steps=1), tmp_path / "run")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] *= 2
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    for use in (
        lambda: resume(tmp_path / "run", overrides={"steps": 2}),
        lambda: evaluate_target(str(tmp_path / "run")),
    ):
        with pytest.raises(RagenError, match=r"trained on another base than .*/model is now"):
            use()
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(RagenError, match="which is gone: put it back"):
        evaluate_target(str(tmp_path / "run"))


@KINDS
def test_training_twice_gives_identical_results(tmp_path: Path, more: dict[str, Any]) -> None:
    train(lora_config(**more), tmp_path / "a")
    train(lora_config(**more), tmp_path / "b")
    assert_same_results(tmp_path / "b", recorded_results(tmp_path / "a"))


# Stop, kill and resume.


@KINDS
def test_resume_after_a_stop_equals_the_uninterrupted_run(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    config = lora_config(**more)
    train(config, tmp_path / "uninterrupted")
    with pytest.raises(StopRequested):
        train(config, tmp_path / "run", watcher=SendSignal("episode", 10, signal.SIGINT))
    resume(tmp_path / "run")
    assert_same_results(tmp_path / "run", recorded_results(tmp_path / "uninterrupted"))
    # The base is recognised in another precision, too.
    evaluate_target(str(tmp_path / "run"), {"model.dtype": "float32"}, episodes=2)


@GAE_AND_SLOW_GRPO
def test_resume_after_a_kill_equals_the_uninterrupted_run(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    config = lora_config(**more)
    start = time.monotonic()
    train(config, tmp_path / "uninterrupted")
    seconds = time.monotonic() - start
    assert kill_and_resume(tmp_path, config, seconds, random.Random(1), most=4) > 0
    assert_same_results(tmp_path / "run", recorded_results(tmp_path / "uninterrupted"))


def test_rollback_restores_the_adapter(tmp_path: Path, alarms_at: Plan) -> None:
    alarms_at((0, 3))
    train(lora_config(**ROLLBACK), tmp_path / "run")
    assert events(tmp_path / "run") == [(0, 3, "alarm"), (0, 3, "guard")]
    assert checkpoint.read_state(checkpoint.newest(tmp_path / "run"))["loop"]["attempt"] == 1


def test_examine_reports_gradients_by_reward_std(finished: Path) -> None:
    metrics = examine(finished)
    assert any(name.startswith("gradient_by_std/0/kl_per_token") for name in metrics)


def test_lora_learns_the_bandit(tmp_path: Path) -> None:
    """Adapters of rank 8 take the embedded model from even odds to the better arm."""
    values = {
        "steps": 20,
        "threads": 1,
        "lora.rank": 8,
        "lora.alpha": 16,
        "update.lr": 5e-3,
        "eval.episodes": 64,
        "record.episodes_every": 0,
    }
    result = train(resolve("bandit", values), tmp_path / "run")
    assert result.before is not None and result.after is not None
    assert result.before.success < 0.75 and result.after.success > 0.9
