"""vLLM with tensor parallelism: two workers in processes of their own, each with half of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tiny import tiny_tokenizer

from ragen.core.errors import RagenError
from ragen.models.loading import save_model
from ragen.sampling.vllm import VllmSampler
from ragen.sampling.vllm_private import Weights, differing, tensors_of
from tests.sampling.test_vllm import difference, engine_of, make_prompt, model_of, weights_of

pytestmark = pytest.mark.vllm

SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Two heads, and one of keys, for each worker."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_model(model_of(**SHAPE), tiny_tokenizer(), path)
    return str(path)


@pytest.fixture(scope="module")
def parallel(folder: str) -> Iterator[VllmSampler]:
    sampler = engine_of(folder, tensor_parallel=2)
    yield sampler
    asyncio.run(sampler.close())


def spoil(worker: Any, what: str) -> None:
    """Change a number that only the second worker holds."""
    if worker.rank == 1:
        layer = worker.get_model().model.layers[0]
        if what == "bias":
            layer.self_attn.qkv_proj.bias.data[-1] += 1e-3
        else:
            multiply = layer.mlp.down_proj.cpu_linear
            layer.mlp.down_proj.cpu_linear = lambda x, *more: multiply(x, *more) * 1.001


def compare(worker: Any, weights: Weights) -> list[str]:
    return differing(worker.get_model(), tensors_of(weights))


def test_two_workers_sample_with_published_weights_as_one_model(parallel: VllmSampler) -> None:
    for version, seed in enumerate((1, 0), 1):
        model = model_of(seed, **SHAPE)
        asyncio.run(parallel.publish(model, version))
        for prompt in map(make_prompt, range(2)):
            completion = parallel.ask(prompt)
            assert completion.policy_version == version
            assert difference(model, prompt, completion) < 1e-3


@pytest.mark.parametrize(
    ("what", "name"), [("bias", "self_attn.v_proj.bias"), ("packed", "mlp.down_proj.weight")]
)
def test_a_weight_that_one_of_the_workers_does_not_hold_is_named(
    parallel: VllmSampler, what: str, name: str
) -> None:
    vllm, weights = parallel._vllm, weights_of(model_of(2, **SHAPE))
    assert vllm.load(weights) == []
    vllm._engine.collective_rpc(spoil, args=(what,))
    assert vllm._in_workers(compare, weights) == [f"model.layers.0.{name}"]
    assert vllm.load(weights) == []
    others = weights_of(model_of(3, **SHAPE))
    changed = {name for (name, a), (_, b) in zip(weights, others, strict=True) if not a.equal(b)}
    assert set(vllm._in_workers(compare, others)) == changed
    assert len(changed) > len(weights) / 2


def test_heads_that_cannot_be_divided_are_one_line(folder: str) -> None:
    with pytest.raises(
        RagenError, match=r"divisible by .* lower .*engine\.tensor_parallel"
    ) as caught:
        engine_of(folder, tensor_parallel=3)
    assert "\n" not in str(caught.value)
