"""Rollouts with vLLM, with a stand-in for vLLM itself: what is called when, and what goes wrong."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pretend import PretendVllm
from tiny import tiny_model, tiny_tokenizer

from ragen.config.reading import resolve
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Prompt
from ragen.engines.engine import Engine, check_parity
from ragen.engines.factory import make_policy
from ragen.engines.sampler_vllm import VllmSampler
from ragen.engines.vllm_engine import TESTED, Vllm
from ragen.evaluation.evaluation import evaluate_target, play_target
from ragen.models.loading import save_model
from ragen.models.lora import attach
from ragen.rollout.chat import Chat
from ragen.storage.reader import read_metrics
from ragen.training.trainer import examine, train
from tests.diagnostics.test_guard_run import Plan, alarms_at
from tests.tolerance import LOGPROB

__all__ = ["alarms_at"]  # a fixture that a test here asks for

SIZES = {"dtype": "float32", "max_length": 64, "slots": 4, "gpu_memory": 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    save_model(tiny_model(tokenizer), tokenizer, path)
    return str(path)


@pytest.fixture
def sampler(folder: str) -> VllmSampler:
    chat = Chat(tiny_tokenizer())
    return VllmSampler(PretendVllm(folder), chat.end_ids, chat.decode, max_length=64)


def ask(seed: int, **changes: Any) -> Prompt:
    fields = {"max_tokens": 6, "temperature": 1.0, **changes}
    return Prompt((), (5, 6, 7, 8), 0, seed=seed, **fields)


async def many(sampler: VllmSampler, count: int = 10) -> list[Completion]:
    return await asyncio.gather(*[sampler.complete(ask(seed)) for seed in range(count)])


def test_requests_meet_in_a_step_and_each_gets_its_own_answer(sampler: VllmSampler) -> None:
    together = asyncio.run(many(sampler))
    assert sampler._vllm.calls.count("step") == 3  # ten requests, four at once
    alone = [sampler.ask(ask(seed)) for seed in range(10)]
    assert together == alone
    assert len({c.token_ids for c in together}) == 10
    # The stand-in says that it remembered one token of four; `ask` is not counted.
    assert (sampler.stats.prefilled, sampler.stats.reused) == (30, 10)
    assert sampler.stats.sampled == sum(len(c.token_ids) for c in together)


def test_cancelled_requests_are_dropped_and_the_others_answered(sampler: VllmSampler) -> None:
    async def impatient() -> list[object]:
        tasks = [asyncio.create_task(sampler.complete(ask(seed))) for seed in range(6)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(impatient(), 10))
    gone = [isinstance(each, asyncio.CancelledError) for each in found]
    assert gone == [False, True, True, True, False, False]
    assert sampler._vllm.calls.count("drop") == 3
    assert not sampler._vllm.waiting and not sampler._open


def test_a_failed_step_reaches_every_request_and_the_next_run_works(sampler: VllmSampler) -> None:
    expected = asyncio.run(many(sampler, 3))
    sampler._vllm.fault = RuntimeError("out of memory")

    async def three() -> list[object]:
        asked = [sampler.complete(ask(seed)) for seed in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    errors = asyncio.run(asyncio.wait_for(three(), 10))
    assert [str(error) for error in errors] == ["out of memory"] * 3
    assert not sampler._vllm.waiting
    assert asyncio.run(asyncio.wait_for(many(sampler, 3), 10)) == expected


def test_it_outlives_an_event_loop_that_was_torn_down(sampler: VllmSampler) -> None:
    async def interrupted() -> None:
        task = asyncio.create_task(many(sampler))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise KeyboardInterrupt(task)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert len(asyncio.run(asyncio.wait_for(many(sampler), 10))) == 10


def test_publishing_wakes_loads_and_forgets(sampler: VllmSampler) -> None:
    tokenizer = tiny_tokenizer()
    before, other = sampler.ask(ask(1)), tiny_model(tokenizer, seed=1)
    sampler.rest()
    sampler._vllm.calls.clear()
    asyncio.run(sampler.publish(other, 7))
    assert sampler._vllm.calls == ["wake", "load", "wake", "forget"]
    after = sampler.ask(ask(1))
    assert (before.policy_version, after.policy_version) == (0, 7)
    assert before.token_ids != after.token_ids


def test_an_adapter_is_pushed_through_a_folder(sampler: VllmSampler) -> None:
    model = tiny_model(tiny_tokenizer())
    attach(model, ("policy",), rank=4, alpha=8, targets="q_proj", seed=0, base="base")
    asyncio.run(sampler.publish(model, 1))
    assert sampler._vllm.calls == ["wake", "load_adapter", "wake", "forget"]
    assert sampler._vllm.adapters == [["adapter_config.json", "adapter_model.safetensors"]]


def test_it_keeps_to_the_length_and_asks_nothing_while_it_samples(sampler: VllmSampler) -> None:
    with pytest.raises(AssertionError, match="length"):
        sampler.ask(ask(1, max_tokens=61))  # with four tokens of prompt

    async def forgetful() -> None:
        task = asyncio.create_task(sampler.complete(ask(1)))
        await asyncio.sleep(0)
        try:
            sampler.forget()
        finally:
            await task

    with pytest.raises(AssertionError, match="while completions are sampled"):
        asyncio.run(forgetful())


# vLLM itself.


def test_vllm_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RagenError, match=r"needs vLLM .*pip install 'ragen-rl\[vllm\]'"):
        Vllm(folder, **SIZES)


@pytest.mark.parametrize("version", ["0.11.2", "0.33.0", "1.0", "dev"])
def test_vllm_of_another_release_is_one_line(
    monkeypatch: pytest.MonkeyPatch, folder: str, version: str
) -> None:
    parts = ("config", "config.lora", "distributed", "inputs", "lora", "lora.request", "platforms")
    for name in ("vllm", "vllm.sampling_params", *(f"vllm.{part}" for part in parts)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = version
    with pytest.raises(RagenError, match=f"vLLM {version} is installed, .* tested with {TESTED}"):
        Vllm(folder, **SIZES)


# The engine's choice.


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[PretendVllm]:
    """All stand-ins that an engine makes instead of vLLM."""
    made: list[PretendVllm] = []

    def make(path: str, **options: Any) -> PretendVllm:
        made.append(PretendVllm(path, **options))
        return made[-1]

    monkeypatch.setattr("ragen.engines.factory.Vllm", make)
    return made


def settings(folder: str, **more: Any) -> Any:
    small = {
        "model.path": folder,
        "model.max_length": 256,
        "rollout.sampler": "vllm",
        "rollout.num_groups": 2,
        "rollout.group_size": 2,
        "rollout.max_tokens": 8,
        "filter.rule": "all",
        "filter.include_zero": True,
        "eval.episodes": 2,
        "steps": 2,
        "threads": 1,
    }
    return resolve("bandit", small | more)


def test_a_run_with_weights_of_its_own(
    folder: str, tmp_path: Path, pretended: list[PretendVllm]
) -> None:
    train(settings(folder, **{"rollout.gpu_memory": 0.3}), tmp_path / "run")
    (vllm,) = pretended
    assert vllm.options["gpu_memory"] == 0.3 and vllm.options["adapter_rank"] == 0
    assert vllm.calls.count("load") == 2 and vllm.calls[-1] == "close"
    metrics = read_metrics(tmp_path / "run")
    for name in ("publish/logprob_difference", "mismatch/kl", "importance/mean"):
        assert len(metrics[name]) == 2, name
    assert all(value < LOGPROB for value in metrics["publish/logprob_difference"].values())
    # No request before the learner's work is left without a call to wake: the stand-in asserts it.
    assert "sleep" in vllm.calls


def test_weights_that_do_not_arrive_stop_the_run(
    folder: str, tmp_path: Path, pretended: list[PretendVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretendVllm, "load", lambda self, weights: dict(weights))
    with pytest.raises(RagenError, match="did not reach the sampler: after publication 1"):
        train(settings(folder, **{"update.lr": 0.1}), tmp_path / "run")
    assert pretended[0].calls[-1] == "close"


def test_another_model_is_found_out_before_anything_is_written(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, tokenizer = tmp_path / "other", tiny_tokenizer()
    save_model(tiny_model(tokenizer, seed=5, initializer_range=0.5), tokenizer, other)
    monkeypatch.setattr(
        "ragen.engines.factory.Vllm", lambda path, **options: PretendVllm(str(other))
    )
    with pytest.raises(RagenError, match="after publication 0"):
        train(settings(folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_pushed_when_it_is_loaded(
    folder: str, tmp_path: Path, pretended: list[PretendVllm]
) -> None:
    engine = Engine(settings(folder), folder)
    with torch.no_grad():
        engine.model.get_input_embeddings().weight.mul_(1.5)
    state = asyncio.run(engine.save(tmp_path))
    again = Engine(settings(folder), folder)
    asyncio.run(again.load(tmp_path, state | {"version": 3}))
    assert pretended[1].calls.count("load") == 1
    assert again.metrics()["publish/logprob_difference"].value < LOGPROB
    assert again.policy.version == 3


def test_an_evaluation_samples_with_vllm_and_leaves_a_server_alone(
    folder: str, pretended: list[PretendVllm]
) -> None:
    policy, _ = make_policy(settings(folder), folder)
    assert isinstance(policy, VllmSampler)
    url = {"rollout.sampler": "http://127.0.0.1:1"}
    policy, _ = make_policy(settings(folder, **url), folder)
    assert not isinstance(policy, VllmSampler) and len(pretended) == 1


def test_an_evaluation_lets_go_of_the_engine_that_it_made(
    folder: str, pretended: list[PretendVllm]
) -> None:
    """Another environment's may follow in this process."""
    settings_ = {"model.path": folder, "rollout.sampler": "vllm", "model.max_length": 256}
    play_target(folder, settings_ | {"env": "bandit"})
    for env in ("bandit", "bandit-rev"):
        evaluate_target(folder, settings_ | {"env": env}, episodes=2)
    assert [vllm.calls[-1] for vllm in pretended] == ["close"] * 3


def test_temperatures_of_an_evaluation_are_refused_too(
    folder: str, pretended: list[PretendVllm]
) -> None:
    settings_ = {"model.path": folder, "env": "bandit", "rollout.sampler": "vllm"}
    for temperature in (3.0, 0.005):
        with pytest.raises(RagenError, match=r"^temperature = .*: vLLM samples at 0.01 to 2, or"):
            evaluate_target(folder, settings_, episodes=2, temperature=temperature)
    assert not pretended


def test_looking_closer_leaves_nothing_behind_and_servers_alone(
    folder: str, tmp_path: Path, pretended: list[PretendVllm]
) -> None:
    train(settings(folder, **{"steps": 1}), tmp_path / "run")
    expected = examine(tmp_path / "run")
    assert [vllm.calls[-1] for vllm in pretended] == ["close"] * 2
    text = (tmp_path / "run" / "config.toml").read_text()
    served = text.replace('sampler = "vllm"', 'sampler = "http://127.0.0.1:9"')
    (tmp_path / "run" / "config.toml").write_text(served)
    assert examine(tmp_path / "run").keys() == expected.keys() and len(pretended) == 2


def test_a_rollback_that_fails_is_told_and_closes_once(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alarms_at: Plan
) -> None:
    """The engine that was closed for the next one is still the run's when that cannot be made."""
    alarms_at((0, 2))
    made: list[PretendVllm] = []

    def make(path: str, **options: Any) -> PretendVllm:
        if made:
            raise RagenError("vLLM cannot serve it")
        made.append(PretendVllm(path, **options))
        return made[-1]

    monkeypatch.setattr("ragen.engines.factory.Vllm", make)
    back = {"guard.responses": {"grad_spike": "rollback"}, "checkpoint.every": 1, "steps": 3}
    with pytest.raises(RagenError, match="cannot serve it"):
        train(settings(folder, **back), tmp_path / "run")
    assert made[0].calls.count("close") == 1


def test_vllm_gets_the_folder_that_was_loaded(
    folder: str, pretended: list[PretendVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the name: nothing asks the Hub again, and what is in its cache will do."""
    monkeypatch.setattr("ragen.models.loading.model_folder", lambda path: Path(folder))
    make_policy(settings("nobody/nothing"), "nobody/nothing")
    assert pretended[0].path == folder


def test_agreement_is_judged_by_what_the_arithmetic_allows(
    folder: str, pretended: list[PretendVllm]
) -> None:
    engine = Engine(settings(folder, **{"rollout.temperature": 0.5}), folder)

    def off_by(distance: float, dtype: str) -> float:
        class Off:
            version, max_length = 4, 256

            def ask(self, prompt: Prompt) -> Completion:
                assert prompt.temperature == 0.5
                said = engine.policy.ask(prompt)
                moved = (said.logprobs[0] + distance, *said.logprobs[1:])
                return Completion(said.token_ids, moved, said.text, "length", 4)

        told = check_parity(Off(), engine.learner, engine.chat, 0.5, dtype)
        return told["publish/logprob_difference"].value

    assert off_by(0.005, "float32") == pytest.approx(0.005, abs=LOGPROB)
    assert off_by(-0.4, "bfloat16") == pytest.approx(0.4, abs=LOGPROB)
    for distance, dtype in ((0.02, "float32"), (0.6, "bfloat16"), (float("nan"), "bfloat16")):
        with pytest.raises(RagenError, match=r"publication 4 .* in " + dtype):
            off_by(distance, dtype)


@pytest.mark.parametrize("key", ["rollout.temperature", "eval.temperature"])
def test_temperatures_that_vllm_would_move_are_refused(key: str) -> None:
    for sampler in ("vllm", "http://127.0.0.1:8000"):
        for temperature in (0.005, 2.5):
            with pytest.raises(RagenError, match=f"{key} = .*: vLLM samples at 0.01 to 2"):
                resolve("bandit", {"rollout.sampler": sampler, key: temperature})
    resolve("bandit", {key: 2.5})
    resolve("bandit", {"rollout.sampler": "vllm", "eval.temperature": 0.0})


def test_only_names_of_samplers_are_taken() -> None:
    with pytest.raises(RagenError, match=r"rollout\.sampler"):
        resolve("bandit", {"rollout.sampler": "sglang"})
    with pytest.raises(RagenError, match=r"rollout\.gpu_memory"):
        resolve("bandit", {"rollout.gpu_memory": 0.5})
