"""Runs under LoRA: what they leave behind, that they go on bit for bit, and that they learn."""

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
from ragen.engines.engine import Engine
from ragen.engines.factory import load_model, make_policy
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
from tests.diagnostics.test_guard_run import BACK, Plan, alarms_at, events
from tests.tiny import merged
from tests.tolerance import LOGPROB, assert_close
from tests.training.test_trainer import (
    CRITIC,
    GAE,
    Interrupts,
    config,
    kill_and_resume,
    numbers,
    same,
)

__all__ = ["alarms_at"]  # a fixture that tests here ask for

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


def asked(**more: Any) -> Config:
    return config(**(LORA | more))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("lora") / "run"
    train(asked(**GAE), run)
    return run


# What a run leaves behind.


def test_a_checkpoint_holds_the_adapter_and_not_the_base(finished: Path) -> None:
    newest = checkpoint.newest(finished)
    names = {path.name for path in newest.iterdir()}
    assert {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json", "chat_template.jinja"} <= names
    assert {"critic.safetensors", "optimizer-0.safetensors", "state.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    critic = load_file(newest / "critic.safetensors")
    matrices = {name.rpartition(".lora_")[2] for name in critic if "lora_" in name}
    assert matrices == {"A.weight", "B.weight"} and "head.weight" in critic


def test_every_number_is_there_and_the_sampler_agrees(finished: Path) -> None:
    metrics = read_metrics(finished)
    assert max(metrics["mismatch/max_abs"].values()) < LOGPROB
    assert all(metrics["exactness/completions_checked"].values())
    assert all(metrics["gradient/policy_norm"].values())
    assert all(metrics["gradient/critic_norm"].values())
    # In the first step the policy is the base: what remains is rounding.
    kl = metrics["kl/reference"]
    assert kl[1] < LOGPROB**2 < 1e-6 < kl[3]


def test_the_general_path_agrees_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any architecture: sampler and learner go through transformers and peft."""
    monkeypatch.setattr(fast_qwen2, "supports", lambda _: False)
    train(asked(**GAE, steps=2, eval__episodes=0), tmp_path / "run")
    assert max(read_metrics(tmp_path / "run")["mismatch/max_abs"].values()) < LOGPROB


def test_a_run_is_played_as_it_is_and_merged(finished: Path) -> None:
    """The checkpoint alone, the base found by its name, is the policy that was trained."""
    newest = checkpoint.newest(finished)
    engine = Engine(asked(**GAE), config().model.path)
    asyncio.run(engine.load(newest, checkpoint.read_state(newest)["engine"]))
    policy, _ = make_policy(config(), str(newest))
    plain = Engine(config(), str(newest)).model
    assert not lora.has_adapters(plain) and lora.has_adapters(engine.model)
    probe = torch.arange(1, 9)[None]
    expected = engine.model(probe).logits
    loaded_on, _ = load_model(config(), str(newest))
    assert torch.equal(loaded_on(probe).logits, expected)
    assert_close(plain(probe).logits, expected)
    assert torch.equal(merged(engine.model)(probe).logits, plain(probe).logits)
    assert policy.version == 0
    found, _ = evaluate_target(str(finished), episodes=4)
    (last,) = [
        each
        for each in load_evaluations(finished)
        if each.step == 3 and each.evaluation.temperature
    ]
    assert found.success == last.evaluation.success


def test_a_run_is_exported_as_an_adapter_and_merged(finished: Path, tmp_path: Path) -> None:
    expected = load_model(config(), str(checkpoint.newest(finished)))[0]
    export(finished, tmp_path / "adapter")
    export(finished, tmp_path / "whole", merge=True)
    assert is_adapter(tmp_path / "adapter") and not is_adapter(tmp_path / "whole")
    probe = torch.arange(1, 9)[None]
    adapter, whole = (
        load_model(config(), str(tmp_path / name))[0] for name in ("adapter", "whole")
    )
    assert torch.equal(adapter(probe).logits, expected(probe).logits)
    assert_close(whole(probe).logits, expected(probe).logits)


def test_training_goes_on_from_a_run(finished: Path, tmp_path: Path) -> None:
    """With adapters of the same shape, or merged with all weights."""
    on = {"model__path": str(finished), "steps": 1, "algorithm": "starpo/grpo", "loss__kl": 0.0}
    train(asked(**on), tmp_path / "on")
    start = load_file(tmp_path / "on" / "checkpoints" / "step-0" / ADAPTER_WEIGHTS)
    end = load_file(checkpoint.newest(finished) / ADAPTER_WEIGHTS)
    assert start.keys() == end.keys() and all(torch.equal(start[k], end[k]) for k in end)
    base = json.loads((checkpoint.newest(tmp_path / "on") / ADAPTER_CONFIG).read_text())
    assert base["base_model_name_or_path"] == config().model.path
    train(config(**on, update__lr=1e-2), tmp_path / "all")
    assert (checkpoint.newest(tmp_path / "all") / "model.safetensors").is_file()


def test_what_cannot_go_on_is_told_before_anything_is_written(
    finished: Path, tmp_path: Path
) -> None:
    def message(**more: Any) -> str:
        with pytest.raises(RagenError) as caught:
            train(asked(model__path=str(finished), **more), tmp_path / "run")
        assert not (tmp_path / "run").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    assert "has rank 4 and alpha 8" in message(lora__rank=8)
    assert "the KL reference is the policy that the run begins with" in message(**GAE)
    back = {"guard__responses": {"grad_spike": "rollback"}, "guard__remedy": "kl"}
    assert "no guard.remedy = " in message(loss__kl=0.0, **back)
    with pytest.raises(RagenError, match="expected all-linear, or names of layers"):
        asked(lora__targets="q_proj,")


def test_an_adapters_tokenizer_has_to_fit(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint.newest(finished), tmp_path / "adapter")
    more = AutoTokenizer.from_pretrained(folder)
    more.add_tokens([f"<extra{number}>" for number in range(1000)])
    more.save_pretrained(folder)
    with pytest.raises(RagenError, match="does not fit its weights: token '<extra999>'"):
        load_model(config(), str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(RagenError, match="has no usable tokenizer"):
        load_model(config(), str(folder))


def test_a_run_is_evaluated_under_other_settings(finished: Path) -> None:
    """What they leave unread of the run's falls away; of what is asked for, it is refused."""
    asked_ = config_for(str(finished), {"lora.rank": 0})
    assert (asked_.lora.alpha, asked_.env) == (64, config().env)
    with pytest.raises(RagenError, match=r"lora\.alpha = 3 has no effect"):
        config_for(str(finished), {"lora.rank": 0, "lora.alpha": 3})


def test_the_base_is_known_again(tmp_path: Path) -> None:
    model = shutil.copytree(config().model.path, tmp_path / "model")
    train(asked(model__path=str(model), steps=1), tmp_path / "run")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] *= 2
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    for use in (lambda: resume(tmp_path / "run"), lambda: evaluate_target(str(tmp_path / "run"))):
        with pytest.raises(RagenError, match=r"trained on another base than .*/model is now"):
            use()
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(RagenError, match="which is gone: put it back"):
        evaluate_target(str(tmp_path / "run"))


@KINDS
def test_the_same_run_twice_is_the_same_run(tmp_path: Path, more: dict[str, Any]) -> None:
    train(asked(**more), tmp_path / "a")
    train(asked(**more), tmp_path / "b")
    same(tmp_path / "b", numbers(tmp_path / "a"))


# Stopped, killed, gone on with.


@KINDS
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path, more: dict[str, Any]) -> None:
    whole = asked(**more)
    train(whole, tmp_path / "whole")
    with pytest.raises(StopRequested):
        train(whole, tmp_path / "run", watcher=Interrupts("episode", 10, signal.SIGINT))
    resume(tmp_path / "run")
    same(tmp_path / "run", numbers(tmp_path / "whole"))
    # The base is known again in the other precision too.
    evaluate_target(str(tmp_path / "run"), {"model.dtype": "float32"}, episodes=2)


@CRITIC
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, more: dict[str, Any]) -> None:
    whole = asked(**more)
    start = time.monotonic()
    train(whole, tmp_path / "whole")
    seconds = time.monotonic() - start
    assert kill_and_resume(tmp_path, whole, seconds, random.Random(1), most=4) > 0
    same(tmp_path / "run", numbers(tmp_path / "whole"))


def test_a_rollback(tmp_path: Path, alarms_at: Plan) -> None:
    alarms_at((0, 3))
    train(asked(**BACK), tmp_path / "run")
    assert events(tmp_path / "run") == [(0, 3, "alarm"), (0, 3, "guard")]
    assert checkpoint.read_state(checkpoint.newest(tmp_path / "run"))["loop"]["attempt"] == 1


def test_looking_closer(finished: Path) -> None:
    found = examine(finished)
    assert any(name.startswith("gradient_by_std/0/kl_per_token") for name in found)


def test_bandit_is_learnt(tmp_path: Path) -> None:
    """The embedded model, from even odds to the better arm, by adapters of rank 8 alone."""
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
