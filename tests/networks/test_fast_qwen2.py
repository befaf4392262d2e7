"""The fast path of Qwen2 computes the same function as transformers, forward and backward."""

import pytest
import torch
from transformers import PreTrainedModel

from ragen.networks import fast_decoder, fast_qwen2, key_store
from ragen.networks import model as ragen_model
from ragen.networks.decoder import HFDecoder, make_decoder
from ragen.networks.model import Critic, cross_scores, padded_hidden_states
from tests.networks.test_model import ragged, tiny
from tests.networks.test_packed import assert_equals_the_general_decoder
from tests.tolerance import GRADIENT, assert_close


@pytest.mark.parametrize(("layers", "chunk", "tied"), [(1, 4, True), (3, 512, True), (3, 4, False)])
def test_hidden_states_and_gradients_equal_the_general_path(
    layers: int, chunk: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_qwen2, "CHUNK", chunk)
    model = tiny(num_hidden_layers=layers, tie_word_embeddings=tied, rope_theta=300.0)
    assert fast_qwen2.supports(model) and fast_qwen2.supports(Critic(model).backbone)
    assert_equal_to_the_general_path(model, *ragged())


def assert_equal_to_the_general_path(model: PreTrainedModel, *inputs: torch.Tensor) -> None:
    """Compares the hidden states, and all gradients of a random weighted sum of them."""
    results = []
    for path in (padded_hidden_states, fast_qwen2.hidden_states):
        model.zero_grad()
        states = path(model, *inputs)
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
        (states * weights).sum().backward()
        grads = {n: p.grad for n, p in model.model.named_parameters()}
        results.append((states, grads))
    (expected, expected_grads), (got, grads) = results
    assert_close(got, expected)
    assert_close(grads, expected_grads, GRADIENT)


def test_other_architectures_dtypes_and_layers_are_not_supported() -> None:
    assert not fast_qwen2.supports(tiny("llama"))
    assert not fast_qwen2.supports(tiny("gpt2"))
    assert not fast_qwen2.supports(tiny().to(torch.bfloat16))
    window = tiny(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert not fast_qwen2.supports(window)
    adapted = tiny()
    adapted.model.layers[0].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[0].mlp.up_proj)
    assert not fast_qwen2.supports(adapted)


def test_the_fast_decoder_equals_the_general_one() -> None:
    decoder = make_decoder(tiny(), 8, 48)
    assert isinstance(decoder, fast_decoder.Qwen2Decoder)
    assert_equals_the_general_decoder(decoder)


def test_attention_scores_in_several_parts_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny(), [list(range(i, i + 3 + i)) for i in range(5)]
    full = make_decoder(model, 5, 16).prefill(range(5), [0] * 5, tokens)
    monkeypatch.setattr(key_store, "SCORES", 1)
    parts = make_decoder(model, 5, 16).prefill(range(5), [0] * 5, tokens)
    assert_close(parts, full)


def test_prefill_of_a_long_history_and_a_long_prompt_stays_within_the_slots() -> None:
    model = tiny()
    decoders = [HFDecoder(model, 2, 16), make_decoder(model, 2, 16)]
    long = list(range(3, 17))
    for decoder in decoders:
        decoder.prefill([0], [0], [long[:13]])
    # Slot 0 continues at position 13 and slot 1 reads 14 tokens: 27 positions, but a slot has 16.
    expected, got = (decoder.prefill([0, 1], [13, 0], [[5], long]) for decoder in decoders)
    assert_close(got, expected)


def test_scores_of_thoughts_equal_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few words, so that thoughts repeat, begin alike, and are the beginning of another one."""
    model, generator = tiny(num_hidden_layers=2), torch.Generator().manual_seed(5)
    prompts, thoughts = (
        [torch.randint(0, 3, (count,), generator=generator).tolist() for count in counts]
        for counts in ((1, 6, 11), (4, 1, 7, 7, 2, 6, 3))
    )
    got = cross_scores(model, prompts, thoughts, 0.7, 16)
    monkeypatch.setattr(ragen_model, "is_fast", lambda _: False)
    monkeypatch.setattr(ragen_model, "shares_prompts", lambda _: False)
    assert_close(got, cross_scores(model, prompts, thoughts, 0.7, 16))
