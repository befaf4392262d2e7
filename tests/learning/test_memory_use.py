"""Peak memory: logits are never held in full, and layers can be recomputed instead of stored.

Sizes are exact: a dispatch mode sees every tensor that an operator makes, forward and backward,
and when its storage is freed.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ragen.algorithms.batch import Batch, collate
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.errors import RagenError
from ragen.core.types import Prompt
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.loading import recompute_layers
from ragen.networks.decoder import HFDecoder
from ragen.networks.model import KEPT_LOGITS, is_fast, padded_hidden_states
from ragen.sampling.local_sampler import Sampler
from tests.learning.test_learner import PLAIN, batch, sample
from tests.tiny import ends, tiny_model, tiny_tokenizer
from tests.tolerance import assert_close

VOCABULARY = 18_750
KEPT = 2**21
"""Both are an eighth of those of a real model and of `KEPT_LOGITS`."""


class Memory(TorchDispatchMode):
    """Elements of the largest tensor made inside; bytes made inside and held, now and at peak."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.held = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        old = {each.untyped_storage() for each in tree_leaves(args) if isinstance(each, Tensor)}
        for each in tree_leaves(output):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage not in self._known and storage not in old:
                    self._known.add(storage)
                    self.largest = max(self.largest, storage.nbytes() // each.element_size())
                    self._count(storage.nbytes())
                    weakref.finalize(storage, self._count, -storage.nbytes())
        return output

    def _count(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)


def measured(work: Callable[[], object]) -> Memory:
    with Memory() as memory:
        work()
    return memory


# Logits.


def large_vocabulary_model(dtype: torch.dtype = torch.float32, kind: str = "qwen2") -> Any:
    """A tiny model whose vocabulary is much larger than all else."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
    if kind == "qwen2":
        return tiny_model(tiny_tokenizer("chatml"), **sizes).to(dtype)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval().to(dtype)


def long_batch(one: Learner, lengths: tuple[int, ...] = (200, 100, 60)) -> Batch:
    generator = torch.Generator().manual_seed(0)
    collated = collate([sample(e, length, generator) for e, length in enumerate(lengths)])
    zeros = torch.zeros(collated.mask_BT.shape)
    return replace(collated, old_logprobs_BT=zeros, advantages_BT=collated.mask_BT.float())


def test_the_learner_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16  # logits of a chunk are computed in float32
    monkeypatch.setattr("ragen.networks.model.KEPT_LOGITS", KEPT)
    assert KEPT == KEPT_LOGITS // 8
    one = Learner(Models(large_vocabulary_model(dtype)), UpdateConfig(), LossConfig(**PLAIN))
    part = long_batch(one)
    assert part.num_tokens * VOCABULARY > 2 * KEPT > 2 * VOCABULARY * 16
    for work in (lambda: one.logprobs(part), lambda: one.update(part, 0)):
        memory = measured(work)
        assert memory.largest <= KEPT
        # Logits of a chunk in float32 with their softmax and its gradient, and the gradient of W.
        assert memory.peak < 6 * 4 * KEPT


@pytest.mark.parametrize("fast", [True, False])
def test_the_sampler_computes_logits_only_at_last_positions(fast: bool) -> None:
    sampler = Sampler(large_vocabulary_model(), ends(2), slots=4, max_length=256, fast=fast)
    prompts = [
        Prompt((), tuple(range(start, start + 200)), 0, 2, 1.0, start) for start in (3, 4, 5)
    ]

    async def everyone() -> None:
        await asyncio.gather(*[sampler.complete(prompt) for prompt in prompts])

    memory = measured(lambda: asyncio.run(everyone()))
    assert sampler.stats.prefilled == 600
    assert VOCABULARY <= memory.largest <= max(3, 16) * VOCABULARY


def test_a_frozen_output_layer_gets_no_gradient_of_its_size() -> None:
    """As with LoRA, whose adapters do not train the output layer."""
    policy = large_vocabulary_model(kind="llama")
    policy.requires_grad_(False)
    policy.model.layers.requires_grad_(True)
    one = Learner(Models(policy), UpdateConfig(), LossConfig(**PLAIN), longest=20)
    short = long_batch(one, (8, 6))
    assert short.num_tokens < 16
    assert measured(lambda: one.update(short, 0)).largest < 16 * VOCABULARY


# Layers.

KINDS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: tiny_model(tiny_tokenizer("chatml"), num_hidden_layers=8),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=400,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval(),
}


def deep_learner(kind: str, recomputes: bool, dtype: torch.dtype = torch.float32) -> Learner:
    torch.manual_seed(0)
    policy = KINDS[kind]().to(dtype)
    if recomputes:
        recompute_layers(policy)
    settings = UpdateConfig(lr=1e-2, critic_lr=1e-2)
    models = Models(policy, critic=True, reference=True)
    return Learner(models, settings, LossConfig(**PLAIN))


def states(one: Learner) -> list[Tensor]:
    assert one.critic is not None
    return [*one.model.state_dict().values(), *one.critic.state_dict().values()]


@pytest.mark.slow
def test_recomputed_layers_give_the_same_updates_in_less_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The fast path, which does not recompute, rounds differently.
    monkeypatch.setattr("ragen.networks.model.is_fast", lambda _: False)
    results = []
    for recomputes in (False, True):
        one = deep_learner("qwen2", recomputes, torch.bfloat16)
        part = batch(one, (30, 40, 50, 60))
        part = replace(part, values_BT=one.values(part))
        one.update(part, 0)
        memory = measured(lambda one=one, part=part: one.update(part, 1))  # type: ignore[misc]
        results.append((states(one), one.logprobs(part, reference=True)[0], memory.peak))
    (stored, reference, peak), (again, reference_again, lower_peak) = results
    assert torch.equal(reference, reference_again)
    assert all(torch.equal(a, b) for a, b in zip(stored, again, strict=True)), "bit for bit"
    assert lower_peak < 0.5 * peak


def test_recomputing_uses_the_general_path_and_samples_the_same_tokens() -> None:
    one, plain = deep_learner("qwen2", True), deep_learner("qwen2", False)
    assert one.critic is not None
    assert not is_fast(one.model) and is_fast(plain.model)
    assert not is_fast(one.critic.backbone)
    part = batch(plain)
    assert_close(one.logprobs(part)[0], plain.logprobs(part)[0])

    async def sample_ids(sampler: Sampler) -> Any:
        return (await sampler.complete(Prompt((), (3, 4, 5, 6), 0, 20, 1.0, 7))).token_ids

    samplers = [
        Sampler(each, ends(2), slots=2, max_length=64, fast=False)
        for each in (one.model, plain.model)
    ]
    first, second = (asyncio.run(sample_ids(sampler)) for sampler in samplers)
    assert first == second
    one.update(part, 0)


def test_copied_models_recompute_their_own_layers() -> None:
    """A critic's backbone recomputes with its own weights, not with those of the policy."""
    one = deep_learner("qwen2", True)
    assert one.critic is not None and one.reference is not None
    with torch.no_grad():
        for weight in one.model.parameters():
            weight.zero_()
    ids, lengths = torch.arange(1, 9)[None], torch.tensor([8])
    wanted = torch.ones(1, 8, dtype=torch.bool)
    for copied in (one.critic.backbone, one.reference):
        assert padded_hidden_states(copied, ids, lengths, wanted).abs().sum() > 0


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(RagenError, match="gradient_checkpointing = false"):
        recompute_layers(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


# Attention.


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_decoder_gives_equal_logits_with_every_attention(kind: str) -> None:
    """Heads that share keys are grouped, with one query each or many; flash is only named."""
    torch.manual_seed(0)
    sizes = GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4)
    model = KINDS["llama"]() if kind == "llama" else GPT2LMHeadModel(sizes).eval()
    results = {}
    for attention in ("eager", "sdpa", "flash_attention_2"):
        model.config._attn_implementation = attention  # flash_attention_2 is not installed here
        decoder = HFDecoder(model, 3, 32)
        first = decoder.prefill([0, 2], [0, 0], [[3, 4, 5, 6], [7, 8]])
        more = decoder.prefill([2, 0], [2, 4], [[9, 3, 4], [5]])
        last = decoder.decode(torch.tensor([0, 2]), torch.tensor([5, 5]), torch.tensor([1, 2]))
        results[attention] = torch.cat((first, more, last))
        assert model.config._attn_implementation == attention
    plain = model.eval()
    plain.config._attn_implementation = "eager"
    exact = plain(torch.tensor([[3, 4, 5, 6, 5, 1]])).logits[0, -1]
    for logits in results.values():
        assert_close(logits, results["eager"])
        assert_close(logits[4], exact)


def test_long_rows_keep_no_attention_weights_and_get_the_same_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for kept in (10**9, 0):
        monkeypatch.setattr("ragen.networks.fast_qwen2.KEPT_SCORES", kept)
        models = Models(tiny_model(tiny_tokenizer("chatml")))
        one = Learner(models, UpdateConfig(), LossConfig(**PLAIN))
        assert is_fast(one.model)
        part = long_batch(one, (700, 300))
        memory = measured(lambda one=one, part=part: one.update(part, 0))  # type: ignore[misc]
        results.append((memory.peak, list(one.model.parameters())))
    (peak, stored), (lower_peak, again) = results
    assert lower_peak < 0.6 * peak
    assert all(map(torch.equal, stored, again)), "bit for bit"


@pytest.mark.parametrize("fast", [True, False])
def test_a_long_prompt_is_read_in_parts_of_bounded_memory(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt((), tuple(range(3, 203)) * 4, 0, 3, 1.0, 7)
    found = []
    for most in (1024, 100):
        monkeypatch.setattr("ragen.sampling.local_sampler.PREFILL_TOKENS", most)
        sampler = Sampler(
            tiny_model(tiny_tokenizer("chatml")), ends(), slots=2, max_length=1000, fast=fast
        )
        with Memory() as memory:
            completion = asyncio.run(sampler.complete(prompt))
        found.append((memory.largest, sampler.stats.prefilled, completion))
    (whole, num_read, once), (part, num_again, again) = found
    assert part < whole / 4 and num_read == num_again == 800
    assert once.token_ids == again.token_ids
    assert_close(torch.tensor(once.logprobs), torch.tensor(again.logprobs))


def test_decoding_repeats_no_keys() -> None:
    """Eight heads share the keys of one; without grouping, there would be eight times as many."""
    model = tiny_model(tiny_tokenizer("chatml"), num_attention_heads=8, num_key_value_heads=1)
    decoder = HFDecoder(model, 4, 512)
    decoder.prefill(range(4), [0] * 4, [[3] * 500] * 4)
    stored = decoder.cache.stored[0][0].numel()
    slots, starts = torch.arange(4), torch.full((4,), 500)
    memory = measured(lambda: decoder.decode(slots, starts, torch.ones(4, dtype=torch.long)))
    assert memory.largest <= stored
