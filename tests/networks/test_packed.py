"""Packed rows give any model's own states, gradients, logits and scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragen.core.errors import RagenError
from ragen.models.experts import ChainConfig
from ragen.models.loading import recompute_layers
from ragen.networks import decoder as decoder_module
from ragen.networks import key_store, packed
from ragen.networks import packing as packing_module
from ragen.networks.decoder import FlatDecoder, HFDecoder, make_decoder
from ragen.networks.key_store import KeyStore
from ragen.networks.model import backbone, hidden_states, padded_hidden_states
from tests.tolerance import GRADIENT, assert_close, rounding

SIZE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
PACKED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 64},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "Chain": {"num_experts": 4, "num_experts_per_tok": 2},  # RAGEN's own
    "Gemma3Text": {"head_dim": 4},
    "Granite": {"attention_multiplier": 0.3},
    "Cohere": {},
    "SmolLM3": {},
    "GPTNeoX": {},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4},
}
"""Architectures that pack, and settings beyond `SIZE`."""
PADDED: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 4},  # caps its scores
    "GptOss": {"head_dim": 4, "num_local_experts": 4},  # has sinks
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = {**SIZE, **PACKED.get(name, {}), **PADDED.get(name, {}), **changes}
    name = f"{name[:-4]}TextConfig" if name.endswith("Text") else f"{name}Config"
    make: Any = ChainConfig if name == "ChainConfig" else getattr(transformers, name)
    config = make(**settings, initializer_range=0.3)
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return built


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Four rows: three with one prompt, of which one ends with it, and one of its own."""
    generator = torch.Generator().manual_seed(2)
    token_ids_BT = torch.randint(1, 40, (4, 30), generator=generator)
    token_ids_BT[1:3, :20] = token_ids_BT[0, :20]
    lengths_B = torch.tensor([30, 25, 20, 9])
    wanted_BT = torch.zeros(4, 30, dtype=torch.bool)
    wanted_BT[0, 20:29] = wanted_BT[1, 19:24] = wanted_BT[3, 3:8] = True
    return token_ids_BT, lengths_B, wanted_BT


def test_the_private_names_of_transformers_that_are_used_are_there() -> None:
    remedy = "adapt ragen.networks.attention, or lower the bound of transformers in pyproject"
    model = build("Llama")
    assert model.config._attn_implementation == "sdpa", remedy
    assert model._supports_attention_backend is True, remedy
    assert callable(transformers.masking_utils.find_packed_sequence_indices), remedy


def states_and_gradients(
    path: Any, model: PreTrainedModel, *inputs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    states_ND = path(model, *inputs)
    weights_ND = torch.randn(states_ND.shape, generator=torch.Generator().manual_seed(3))
    (states_ND * weights_ND).sum().backward()
    named = model.named_parameters()
    return states_ND.detach(), {n: w.grad.clone() for n, w in named if w.grad is not None}


@pytest.mark.parametrize("name", [*PACKED, "Qwen2"])
def test_states_and_gradients_equal_the_padded_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "QUERIES", 4)
    model = build(name)
    assert packed.longest(backbone(model)) > 30
    expected, expected_grads = states_and_gradients(padded_hidden_states, model, *rows())
    got, grads = states_and_gradients(hidden_states, model, *rows())
    assert_close(got, expected)
    assert_close(grads, expected_grads, GRADIENT)
    for grad, other in zip(grads.values(), expected_grads.values(), strict=True):
        assert float((grad - other).abs().max()) <= 1e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("name", list(PADDED))
def test_other_attention_keeps_the_padded_path(name: str) -> None:
    model = build(name)
    assert packed.longest(backbone(model)) == 0
    assert torch.equal(hidden_states(model, *rows()), padded_hidden_states(model, *rows()))


def test_rows_longer_than_a_sliding_window_keep_the_padded_path() -> None:
    model = build("Mistral", sliding_window=24)
    assert packed.longest(backbone(model)) == 24
    assert torch.equal(hidden_states(model, *rows()), padded_hidden_states(model, *rows()))


def test_a_shared_prompt_is_computed_once() -> None:
    """Every token but those of a prompt that an earlier row has."""
    model, counted = build("Llama"), []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _, __, out: counted.append(out.shape[1])
    )
    packed.longest(backbone(model))
    counted.clear()
    hidden_states(model, *rows())
    hook.remove()
    assert counted == [30 + 6 + 0 + 9]  # the third row has no wanted token: all of it is a prompt


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_different_prompts_that_begin_alike_share_their_beginning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts that begin alike, two of them for longer, and a row of its own."""
    monkeypatch.setattr(packing_module, "QUERIES", 4)
    generator = torch.Generator().manual_seed(6)
    token_ids_BT = torch.randint(1, 40, (6, 30), generator=generator)
    token_ids_BT[[1, 2, 4, 5], :12] = token_ids_BT[0, :12]
    token_ids_BT[4, :20], token_ids_BT[2, :18] = token_ids_BT[1, :20], token_ids_BT[0, :18]
    token_ids_BT[5, :16] = token_ids_BT[1, :16]
    lengths_B = torch.tensor([30, 28, 26, 9, 27, 29])
    wanted_BT = torch.zeros(6, 30, dtype=torch.bool)
    wanted_BT[0, 18:29] = wanted_BT[1, 20:27] = wanted_BT[2, 18:25] = True
    wanted_BT[3, 3:8] = wanted_BT[4, 20:26] = wanted_BT[5, 22:28] = True
    shared = {}
    for least in (12, 17):
        monkeypatch.setattr(packing_module, "BEGINNING", least)
        origin_B, shared_B = packing_module.shared_prefixes(token_ids_BT, lengths_B, wanted_BT)
        shared[least] = list(zip(origin_B.tolist(), shared_B.tolist(), strict=True))
    assert shared[12] == [(0, 0), (0, 12), (0, 18), (3, 0), (1, 20), (1, 16)]
    assert shared[17] == [(0, 0), (1, 0), (0, 18), (3, 0), (1, 20), (5, 0)]
    monkeypatch.setattr(packing_module, "BEGINNING", 12)
    model, batch = build(name), (token_ids_BT, lengths_B, wanted_BT)
    expected, expected_grads = states_and_gradients(padded_hidden_states, model, *batch)
    got, grads = states_and_gradients(hidden_states, model, *batch)
    assert_close(got, expected)
    assert_close(grads, expected_grads, GRADIENT)


def test_padding_is_no_part_of_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes on, after all of an earlier row, with the token that pads that row."""
    monkeypatch.setattr(packing_module, "BEGINNING", 8)
    token_ids_BT = torch.arange(1, 21).repeat(2, 1)
    token_ids_BT[0, 12:], token_ids_BT[1, 12:14] = 0, 0
    wanted_BT = torch.zeros(2, 20, dtype=torch.bool)
    wanted_BT[0, 9:11] = wanted_BT[1, 16:19] = True
    batch = token_ids_BT, torch.tensor([12, 20]), wanted_BT
    assert packing_module.shared_prefixes(*batch)[1].tolist() == [0, 12]
    model = build("Llama")
    assert_close(hidden_states(model, *batch), padded_hidden_states(model, *batch))


def test_recomputed_layers_use_the_attention_of_their_forward() -> None:
    plain, recomputing = build("Llama"), build("Llama")
    recompute_layers(recomputing)
    expected = states_and_gradients(hidden_states, plain, *rows())
    got = states_and_gradients(hidden_states, recomputing, *rows())
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[1][name], grad) for name, grad in expected[1].items())


def test_bfloat16_states_are_as_near_to_float32_as_the_padded_ones() -> None:
    exact = build("Llama", num_hidden_layers=4)
    expected = padded_hidden_states(exact, *rows())
    half = build("Llama", num_hidden_layers=4).to(torch.bfloat16)
    errors = [
        float((path(half, *rows()).float() - expected).detach().square().mean())
        for path in (hidden_states, padded_hidden_states)
    ]
    assert packed.longest(backbone(half)) > 0 and errors[0] < 1.5 * errors[1]


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What torch's `varlen_attn` documents, sequence by sequence; the last query sees all keys."""
    assert (scale, window_size) == (0.5, (-1, 0)) and enable_gqa == (key.shape[1] < query.shape[1])
    mixed = []
    for number in range(len(query_ends) - 1):
        queries, keys = (slice(*ends[number : number + 2]) for ends in (query_ends, key_ends))
        q, k, v = (
            x[part].transpose(0, 1) for x, part in ((query, queries), (key, keys), (value, keys))
        )
        assert q.shape[1] <= most_queries and k.shape[1] <= most_keys
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        mixed.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, seen, scale=0.5, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(mixed)


def reference_2_11(*args: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """That of torch 2.11, which takes no groups of heads."""
    return reference(*args, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [reference, reference_2_11])
def test_sequences_of_various_lengths_see_what_blocks_see(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention of GPUs, with its kernel replaced: the same queries see the same keys."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    packing = packing_module.pack(*rows())
    count, cpu = len(packing.places[0]), torch.device("cpu")
    query, key, value = (torch.randn(count, heads, 4) for heads in (4, 2, 2))
    expected = packed._learning(packing, cpu)(0, query, key, value, 0.5)
    got = packed._Lengths.of(packing, cpu)(0, query, key, value, 0.5)
    assert_close(got, expected)


# Sampling.


@pytest.mark.parametrize(
    ("name", "queries"),
    [("Llama", 1), ("Gemma3Text", 12), ("GPT2", 4096), ("Qwen3Moe", 12), ("Chain", 12)],
)
def test_the_flat_decoder_equals_the_general_one(
    name: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "PADDED_QUERIES", queries)
    flat = make_decoder(build(name), 8, 48)
    assert isinstance(flat, FlatDecoder)
    assert_equals_the_general_decoder(flat)


@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Gemma3Text"])
def test_sequences_longer_than_a_sliding_window_are_refused(name: str) -> None:
    """Configs with one kind of layer need not name it."""
    model = build(name, sliding_window=24)
    make_decoder(model, 2, 24)
    with pytest.raises(RagenError, match="attend to 24 tokens only"):
        make_decoder(model, 2, 25)


def assert_equals_the_general_decoder(decoder: Any) -> None:
    """Ragged slots, shared beginnings, late members, reused slots: logits and later logits.

    The decoder has 8 slots for 48 tokens.
    """
    general = HFDecoder(decoder.model, 8, 48)
    generator = torch.Generator().manual_seed(4)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 40, (count,), generator=generator).tolist()

    def both(method: str, *inputs: Any) -> None:
        assert_close(getattr(decoder, method)(*inputs), getattr(general, method)(*inputs))

    def copy(source: int, target: int, length: int) -> None:
        decoder.copy(source, target, length)
        general.copy(source, target, length)

    both("prefill", [0, 3], [0, 0], [ids(9), ids(12)])
    for target in (1, 2):
        copy(0, target, 9)
    copy(3, 4, 12)
    slots = torch.tensor([0, 1, 2, 3, 4])
    both("decode", slots, torch.tensor([9, 9, 9, 12, 12]), torch.tensor(ids(5)))
    both("decode", slots, torch.tensor([10, 10, 10, 13, 13]), torch.tensor(ids(5)))
    copy(0, 5, 8)  # a late member reads the last token of the prompt again
    both("prefill", [5, 1], [8, 11], [ids(1), ids(6)])
    both("prefill", [0], [0], [ids(4)])  # the slot that held the prompt begins anew
    both("decode", torch.tensor([1, 2, 5]), torch.tensor([17, 11, 9]), torch.tensor(ids(3)))
    copy(2, 6, 11)  # more of a slot than the beginning that it shares
    copy(6, 7, 5)  # less than it shares
    copy(4, 0, 12)
    every = torch.arange(8)
    lengths = torch.tensor([12, 18, 12, 14, 14, 10, 11, 5])
    both("decode", every, lengths, torch.tensor(ids(8)))
    both("prefill", [2], [0], [ids(7)])
    both(
        "decode", every, lengths + 1 - torch.tensor([0, 0, 6, 0, 0, 0, 0, 0]), torch.tensor(ids(8))
    )


def test_a_shared_beginning_is_held_once() -> None:
    store = KeyStore(3, 8)
    one, first = torch.ones(1, 1, 4), torch.tensor([0])
    store.write(0, store.reach(first, first, torch.tensor([1])).places, one, one)
    store.share(0, 1, 1)
    store.share(1, 2, 1)
    keys, values = store.layers[0]
    assert not keys[1:].any() and not values[1:].any()
    store.begin(torch.tensor([0]), torch.tensor([0]))  # slot 0 is used anew: slot 1 inherits
    assert keys[1, :, :, 0].all() and not keys[2].any()


@given(
    data=st.data(),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    sums=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_stored_keys_give_plain_attention(
    data: st.DataObject, kv_heads: int, shared: int, sums: bool, seed: int
) -> None:
    """One new token in some slots, again and again, while the store grows under them."""
    random = torch.Generator().manual_seed(seed)
    slots, longest, width = 4, 8, 4
    store = KeyStore(slots, longest)
    told = torch.full((2, slots, kv_heads, longest, width), torch.nan, dtype=torch.float64)
    lengths = torch.zeros(slots, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_store, "ROOM", 3)
        if not sums:
            patch.setattr(key_store, "HAVE_BAGS", ())
        for _ in range(longest):
            chosen = data.draw(st.sets(st.integers(0, slots - 1), min_size=1))
            slots_N = torch.tensor(sorted(chosen))
            starts_N = lengths[slots_N]
            reach = store.reach(slots_N, starts_N, torch.ones_like(slots_N))
            k, v = torch.randn(2, len(chosen), kv_heads, width, generator=random)
            q = torch.randn(len(chosen), kv_heads * shared, width, generator=random)
            found = reach.attend(q, store.write(0, reach.places, k, v)).view(q.shape)
            told[:, slots_N, :, starts_N] = torch.stack((k, v), 1).double()
            lengths[slots_N] += 1
            for row, slot in enumerate(slots_N.tolist()):
                keys, values = told[:, slot, :, : lengths[slot]].repeat_interleave(shared, dim=1)
                scores = (keys @ q[row].double()[:, :, None])[:, :, 0]
                expected = (scores.softmax(-1)[:, None] @ values)[:, 0]
                largest = max(1.0, float(scores.abs().max()), float(values.abs().max()))
                bound = rounding(longest * width, largest**2)
                assert (found[row].double() - expected).abs().max() <= bound
