"""Rollouts with vLLM, with a fake in place of vLLM: the order of calls, and errors."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from pretend import PretendVllm
from tiny import tiny_model, tiny_tokenizer

from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Prompt
from ragen.engines.factory import make_policy
from ragen.engines.local import LocalEngine, check_parity
from ragen.evaluation.evaluation import evaluate_target, play_target
from ragen.models.loading import save_model
from ragen.networks.lora import attach
from ragen.sampling.vllm import VllmSampler
from ragen.sampling.vllm_engine import Vllm
from ragen.sampling.vllm_private import RELEASES, is_known
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train
from tests.tolerance import LOGPROB

SIZES = {"dtype": "float32", "max_length": 64, "slots": 4, "gpu_memory": 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    save_model(tiny_model(tokenizer), tokenizer, path)
    return str(path)


@pytest.fixture
def sampler(folder: str) -> VllmSampler:
    return VllmSampler(PretendVllm(folder), Chat(tiny_tokenizer()), 64)


def make_prompt(seed: int, **changes: Any) -> Prompt:
    fields = {"max_tokens": 6, "temperature": 1.0, **changes}
    return Prompt((), (5, 6, 7, 8), 0, seed=seed, **fields)


async def complete_many(sampler: VllmSampler, count: int = 10) -> list[Completion]:
    return await asyncio.gather(*[sampler.complete(make_prompt(seed)) for seed in range(count)])


def test_requests_share_steps_and_get_their_own_completions(sampler: VllmSampler) -> None:
    together = asyncio.run(complete_many(sampler))
    assert sampler._vllm.calls.count("step") == 3  # ten requests, four at once
    alone = [sampler.ask(make_prompt(seed)) for seed in range(10)]
    assert together == alone
    assert len({c.token_ids for c in together}) == 10
    # The fake reports one cached token of four; `ask` is not counted.
    assert (sampler.stats.prefilled, sampler.stats.reused) == (30, 10)
    assert sampler.stats.sampled == sum(len(c.token_ids) for c in together)


def test_cancelled_requests_are_dropped_and_others_completed(sampler: VllmSampler) -> None:
    async def cancel_three() -> list[object]:
        tasks = [asyncio.create_task(sampler.complete(make_prompt(seed))) for seed in range(6)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(cancel_three(), 10))
    cancelled = [isinstance(each, asyncio.CancelledError) for each in results]
    assert cancelled == [False, True, True, True, False, False]
    assert sampler._vllm.calls.count("drop") == 3
    assert not sampler._vllm.waiting and not sampler._open


def test_a_failed_step_reaches_every_request_and_the_next_run_works(sampler: VllmSampler) -> None:
    expected = asyncio.run(complete_many(sampler, 3))
    sampler._vllm.fault = RuntimeError("out of memory")

    async def three() -> list[object]:
        requests = [sampler.complete(make_prompt(seed)) for seed in range(3)]
        return await asyncio.gather(*requests, return_exceptions=True)

    errors = asyncio.run(asyncio.wait_for(three(), 10))
    assert [str(error) for error in errors] == ["out of memory"] * 3
    assert not sampler._vllm.waiting
    assert asyncio.run(asyncio.wait_for(complete_many(sampler, 3), 10)) == expected


def test_publishing_wakes_loads_and_forgets(sampler: VllmSampler) -> None:
    tokenizer = tiny_tokenizer()
    before, other = sampler.ask(make_prompt(1)), tiny_model(tokenizer, seed=1)
    sampler.rest()
    sampler._vllm.calls.clear()
    asyncio.run(sampler.publish(other, 7))
    assert sampler._vllm.calls == ["wake", "load", "wake", "forget"]
    after = sampler.ask(make_prompt(1))
    assert (before.policy_version, after.policy_version) == (0, 7)
    assert before.token_ids != after.token_ids


def test_an_adapter_is_published_through_a_folder(sampler: VllmSampler) -> None:
    model = tiny_model(tiny_tokenizer())
    attach(model, ("policy",), rank=4, alpha=8, targets="q_proj", seed=0, base="base")
    asyncio.run(sampler.publish(model, 1))
    assert sampler._vllm.calls == ["wake", "load_adapter", "wake", "forget"]
    assert sampler._vllm.adapters == [["adapter_config.json", "adapter_model.safetensors"]]


def test_weights_that_vllm_does_not_hold_are_one_line(sampler: VllmSampler) -> None:
    sampler._vllm.differing = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    with pytest.raises(RagenError, match=r"in model\.layers\.0\.mlp\.up_proj\.weight and 1 more"):
        asyncio.run(sampler.publish(tiny_model(tiny_tokenizer()), 1))
    assert sampler.version == 0


def test_too_long_requests_and_new_weights_while_sampling_are_errors(sampler: VllmSampler) -> None:
    with pytest.raises(AssertionError, match="length"):
        sampler.ask(make_prompt(1, max_tokens=61))  # with four tokens of prompt

    async def push_while_sampling() -> None:
        task = asyncio.create_task(sampler.complete(make_prompt(1)))
        await asyncio.sleep(0)
        try:
            sampler.forget()  # the completion needs its keys and values
            sampler.push(tiny_model(tiny_tokenizer()))
        finally:
            await task

    with pytest.raises(AssertionError, match="keys and values of earlier weights"):
        asyncio.run(push_while_sampling())


def test_a_publication_waits_for_open_completions(sampler: VllmSampler, monkeypatch: Any) -> None:
    pushed: list[int] = []
    monkeypatch.setattr(sampler, "push", lambda *_: pushed.append(len(sampler._open)))

    async def publish_while_sampling() -> list[int]:
        first = asyncio.create_task(sampler.complete(make_prompt(1)))
        await asyncio.sleep(0)
        publication = asyncio.create_task(sampler.publish(cast(Any, None), 7))
        await asyncio.sleep(0)
        second = asyncio.create_task(sampler.complete(make_prompt(2)))
        await publication
        return [(await task).policy_version for task in (first, second)]

    assert asyncio.run(publish_while_sampling()) == [0, 7] and pushed == [0]


# vLLM itself.


def test_missing_vllm_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RagenError, match=r"needs vLLM .*pip install 'ragen-rl\[vllm\]'"):
        Vllm(folder, **SIZES)


@pytest.mark.parametrize("version", ["0.11.2", "0.3", "0.34.0", "1.0", "dev"])
def test_another_release_of_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, folder: str, version: str
) -> None:
    parts = ("config", "config.lora", "distributed", "inputs", "lora", "lora.request", "platforms")
    for name in ("vllm", "vllm.sampling_params", *(f"vllm.{part}" for part in parts)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = version
    with pytest.raises(RagenError, match=f"vLLM {version} is installed, .* knows {RELEASES[0]}"):
        Vllm(folder, **SIZES)
    assert all(is_known(f"{each}.0") for each in RELEASES)


# The engine's choice.


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[PretendVllm]:
    """The fakes that engines make instead of vLLM."""
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
        "rollout.max_tokens": 4,
        "filter.rule": "all",
        "filter.include_zero": True,
        "eval.episodes": 0,
        "steps": 1,
        "threads": 1,
    }
    return merge("bandit", small | more)


def test_a_run_publishes_its_weights_to_vllm(
    folder: str, tmp_path: Path, fakes: list[PretendVllm]
) -> None:
    train(settings(folder, **{"rollout.gpu_memory": 0.3, "steps": 2}), tmp_path / "run")
    (vllm,) = fakes
    assert vllm.options["gpu_memory"] == 0.3 and vllm.options["adapter_rank"] == 0
    assert vllm.calls.count("load") == 2 and vllm.calls[-1] == "close"
    metrics = read_metrics(tmp_path / "run")
    for name in ("publish/logprob_difference", "mismatch/kl", "importance/mean"):
        assert len(metrics[name]) == 2, name
    assert all(value < LOGPROB for value in metrics["publish/logprob_difference"].values())
    # The fake asserts that it is awake at each request.
    assert "sleep" in vllm.calls


def test_weights_that_do_not_arrive_stop_the_run(
    folder: str, tmp_path: Path, fakes: list[PretendVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretendVllm, "load", lambda self, weights: [])
    with pytest.raises(RagenError, match="did not reach the sampler: after publication 1"):
        train(settings(folder, **{"update.lr": 0.1}), tmp_path / "run")
    assert fakes[0].calls[-1] == "close"


def test_another_model_is_refused_before_the_run_folder_is_made(
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


def test_a_loaded_checkpoint_is_published(
    folder: str, tmp_path: Path, fakes: list[PretendVllm]
) -> None:
    engine = LocalEngine(settings(folder), folder)
    with torch.no_grad():
        engine.model.get_input_embeddings().weight.mul_(1.5)
    state = asyncio.run(engine.save(tmp_path))
    again = LocalEngine(settings(folder), folder)
    asyncio.run(again.load(tmp_path, state | {"version": 3}))
    assert fakes[1].calls.count("load") == 1
    assert again.metrics()["publish/logprob_difference"].value < LOGPROB
    assert again.policy.version == 3


def test_an_evaluation_samples_with_vllm_but_not_with_a_server(
    folder: str, fakes: list[PretendVllm]
) -> None:
    policy, _ = make_policy(settings(folder), folder)
    assert isinstance(policy, VllmSampler)
    url = {"rollout.sampler": "http://127.0.0.1:1"}
    policy, _ = make_policy(settings(folder, **url), folder)
    assert not isinstance(policy, VllmSampler) and len(fakes) == 1


def test_an_evaluation_closes_its_engine(folder: str, fakes: list[PretendVllm]) -> None:
    """The engine of another environment may follow in this process."""
    settings_ = {"model.path": folder, "rollout.sampler": "vllm", "model.max_length": 256}
    settings_["prompt.style"] = "compact"
    play_target(folder, settings_ | {"env": "bandit"})
    evaluate_target(folder, settings_ | {"env": "bandit-rev"}, episodes=1)
    assert [vllm.calls[-1] for vllm in fakes] == ["close"] * 2


def test_evaluation_temperatures_outside_the_range_of_vllm_are_refused(
    folder: str, fakes: list[PretendVllm]
) -> None:
    settings_ = {"model.path": folder, "env": "bandit", "rollout.sampler": "vllm"}
    for temperature in (3.0, 0.005):
        with pytest.raises(RagenError, match=r"^temperature = .*: vLLM samples at 0.01 to 2, or"):
            evaluate_target(folder, settings_, episodes=2, temperature=temperature)
    assert not fakes


def test_vllm_loads_the_resolved_model_folder(
    folder: str, fakes: list[PretendVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the name of the model, so that the Hub is not asked again and its cache suffices."""
    monkeypatch.setattr("ragen.models.loading.model_folder", lambda path: Path(folder))
    make_policy(settings("nobody/nothing"), "nobody/nothing")
    assert fakes[0].path == folder


def test_parity_bounds_depend_on_the_dtype(folder: str, fakes: list[PretendVllm]) -> None:
    engine = LocalEngine(settings(folder, **{"rollout.temperature": 0.5}), folder)

    def off_by(distance: float, dtype: str) -> float:
        class Shifted:
            version, max_length = 4, 256

            def ask(self, prompt: Prompt) -> Completion:
                assert prompt.temperature == 0.5
                exact = engine.policy.ask(prompt)
                logprobs = (exact.logprobs[0] + distance, *exact.logprobs[1:])
                return Completion(exact.token_ids, logprobs, exact.text, "length", 4)

        metrics = check_parity(Shifted(), engine.learner, engine.chat, 0.5, dtype)
        return metrics["publish/logprob_difference"].value

    assert off_by(0.005, "float32") == pytest.approx(0.005, abs=LOGPROB)
    assert off_by(-0.4, "bfloat16") == pytest.approx(0.4, abs=LOGPROB)
    for distance, dtype in ((0.02, "float32"), (0.6, "bfloat16"), (float("nan"), "bfloat16")):
        with pytest.raises(RagenError, match=r"publication 4 .* in " + dtype):
            off_by(distance, dtype)


@pytest.mark.parametrize("key", ["rollout.temperature", "eval.temperature"])
def test_temperatures_outside_the_range_of_vllm_are_refused(key: str) -> None:
    for sampler in ("vllm", "http://127.0.0.1:8000"):
        for temperature in (0.005, 2.5):
            with pytest.raises(RagenError, match=f"{key} = .*: vLLM samples at 0.01 to 2"):
                merge("bandit", {"rollout.sampler": sampler, key: temperature})
    merge("bandit", {key: 2.5})
    merge("bandit", {"rollout.sampler": "vllm", "eval.temperature": 0.0})
