"""Policy network and critic: exact logprobs, entropies and values for any causal model."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ragen.core.errors import RagenError
from ragen.models import loading
from ragen.models.loading import load_policy, save_model
from ragen.networks import model as ragen_model
from ragen.networks.model import Critic, hidden_states, token_logprobs
from ragen.networks.precision import Shape
from tests.tolerance import GRADIENT, assert_close

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.4,
}


def tiny(kind: str = "qwen2", **changes: object) -> PreTrainedModel:
    """A random model whose norms and biases are random too, so that every term has an effect."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, initializer_range=0.4)
        built: PreTrainedModel = GPT2LMHeadModel(config)
    elif kind == "llama":
        built = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))
    else:
        built = Qwen2ForCausalLM(Qwen2Config(**{**SMALL, **changes}))
    for name, weight in built.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 0.0 if name.endswith("bias") else 1.0, 0.3)
    return built.eval()


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """Four rows of lengths 9, 4, 1, 7 with some wanted positions each, one row with none."""
    generator = torch.Generator().manual_seed(1)
    token_ids_BT = torch.randint(0, 40, (4, 9), generator=generator)
    lengths_B = torch.tensor([9, 4, 1, 7])
    wanted_BT = torch.zeros(4, 9, dtype=torch.bool)
    wanted_BT[0, [0, 3, 4, 8]] = True
    wanted_BT[2, 0] = True
    wanted_BT[3, 2:7] = True
    return token_ids_BT, lengths_B, wanted_BT


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_hidden_states_equal_those_of_single_rows(kind: str) -> None:
    model = tiny(kind)
    token_ids_BT, lengths_B, wanted_BT = ragged()
    states = hidden_states(model, token_ids_BT, lengths_B, wanted_BT)
    alone = []
    for ids, length, wanted in zip(token_ids_BT, lengths_B.tolist(), wanted_BT, strict=True):
        out = model.base_model(input_ids=ids[None, :length]).last_hidden_state[0]
        alone.append(out[wanted[:length]])
    assert_close(states, torch.cat(alone))
    padding_BT = torch.arange(9) >= lengths_B[:, None]
    other_padding = token_ids_BT.masked_fill(padding_BT, 7), lengths_B, wanted_BT
    assert torch.equal(hidden_states(model, *other_padding), states)
    nothing = hidden_states(model, token_ids_BT, lengths_B, torch.zeros_like(wanted_BT))
    logprobs, entropy = token_logprobs(model, nothing, torch.zeros(0, dtype=torch.long))
    assert len(nothing) == len(logprobs) == len(entropy) == 0


def test_token_logprobs_golden() -> None:
    model = tiny(vocab_size=3, hidden_size=4, num_attention_heads=2, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.eye(3, 4))
    hidden = torch.tensor([[2.0, 1.0, 0.0, 9.0]])
    # At temperature 2 the logits are 1, ½, 0; their exponentials 2.71828, 1.64872, 1 sum to
    # 5.36700. p = .50648, .30720, .18632; log p[1] = ½ − log 5.36700 = −1.18027;
    # entropy = Σ −p log p = 1.02020.
    logprob, entropy = token_logprobs(model, hidden, torch.tensor([1]), temperature=2.0)
    assert logprob.item() == pytest.approx(-1.18027, abs=1e-5)
    assert entropy.item() == pytest.approx(1.02020, abs=1e-4)


@pytest.mark.parametrize("kept_logits", [2**24, 7 * 40], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_and_entropy_equal_autograd(
    kept_logits: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragen_model, "KEPT_LOGITS", kept_logits)
    model = tiny(tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(20, 16, generator=generator).requires_grad_()
    targets = torch.randint(0, 40, (20,), generator=generator)
    weight = model.get_output_embeddings().weight
    a, b = torch.randn(2, 20, generator=generator)

    log_p = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1)
    plain_logprobs = log_p.gather(1, targets[:, None])[:, 0]
    plain_entropy = -(log_p.exp() * log_p).sum(-1)
    expected = torch.autograd.grad((a * plain_logprobs + b * plain_entropy).sum(), [hidden, weight])

    logprobs, entropy = token_logprobs(model, hidden, targets, temperature=0.7)
    got = torch.autograd.grad((a * logprobs + b * entropy).sum(), [hidden, weight])
    assert_close(logprobs, plain_logprobs)
    assert_close(entropy, plain_entropy)
    assert_close(got, expected, GRADIENT)


def test_critic_starts_at_zero_and_learns_separately_from_the_policy() -> None:
    policy = tiny()
    before = [weight.clone() for weight in policy.parameters()]
    critic = Critic(policy)
    values = critic.values(*ragged())
    assert values.shape == (10,) and values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(10))

    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    for _ in range(2):  # the first step changes the head, the second also the backbone
        optimizer.zero_grad()
        (critic.values(*ragged()) - 1).square().mean().backward()
        optimizer.step()
    assert not torch.equal(critic.values(*ragged()), torch.zeros(10))
    pairs = zip(critic.backbone.parameters(), policy.base_model.parameters(), strict=True)
    assert any(not torch.equal(mine, theirs) for mine, theirs in pairs)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {f"t{i}": i for i in range(29)} | {"Go": 29}
    raw = Tokenizer(WordLevel(words, unk_token="t0"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="t0", eos_token="t2")


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_loaded_unchanged(tied: bool, tmp_path) -> None:
    model = tiny(tie_word_embeddings=tied)
    save_model(model, tokenizer(), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded, words = load_policy(tmp_path, "cpu", "float32")
    assert words.convert_tokens_to_ids("t7") == 7
    assert not loaded.training
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    probe = torch.arange(6)[None]
    assert torch.equal(loaded(probe).logits, model(probe).logits)


LOGIT_SHAPES: dict[str, dict[str, object]] = {
    "Gemma2": {"head_dim": 4, "final_logit_softcapping": 2.0},
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.25},
}


def model_with_shaped_logits(kind: str) -> PreTrainedModel:
    """A model that scales its logits after the output layer, or caps large ones."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **LOGIT_SHAPES[kind], pad_token_id=0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kept_logits", [2**24, 7 * 40], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", LOGIT_SHAPES)
def test_scaled_and_capped_logits_equal_those_of_the_model(
    kind: str, kept_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragen_model, "KEPT_LOGITS", kept_logits)
    model = model_with_shaped_logits(kind)
    ids_BT = torch.randint(0, 40, (1, 20), generator=torch.Generator().manual_seed(3))
    targets = ids_BT[0].roll(1)
    weight = model.get_output_embeddings().weight
    a, b = torch.randn(2, 20, generator=torch.Generator().manual_seed(4))

    logits = model(input_ids=ids_BT, use_cache=False).logits[0]
    states = hidden_states(model, ids_BT, torch.tensor([20]), ids_BT >= 0)
    assert not torch.allclose(logits, states @ weight.t(), atol=0.1), "logits are transformed"
    log_p = torch.log_softmax(logits / 0.7, dim=-1)
    plain = (log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    got = token_logprobs(model, states, targets, temperature=0.7)
    assert_close(got, plain)
    gradients = [
        torch.autograd.grad((a * logprobs + b * entropy).sum(), list(model.parameters()))
        for logprobs, entropy in (got, plain)
    ]
    assert_close(*gradients, GRADIENT)


def test_unknown_transformations_of_logits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also if it hardly changes a probe: a cap c changes a small logit z by a relative (z / c)² / 3,
    # which is 4e-6 for z = .1 and the c = 30 of Gemma 2.
    small = {**SMALL, "initializer_range": 0.02, "head_dim": 4}
    config = transformers.Gemma2Config(**small, final_logit_softcapping=30.0)
    save_model(transformers.Gemma2ForCausalLM(config), tokenizer(), tmp_path)
    assert load_policy(tmp_path, "cpu", "bfloat16")
    monkeypatch.setattr(loading, "shape_of", lambda _: Shape())
    with pytest.raises(RagenError, match="transforms its logits after the output layer"):
        load_policy(tmp_path, "cpu", "bfloat16")


def test_a_cap_of_attention_scores_is_kept(tmp_path: Path) -> None:
    """sdpa and flash attention would leave out Gemma 2's cap without a word."""
    config = transformers.Gemma2Config(**SMALL, head_dim=4, attn_logit_softcapping=0.5)
    model = transformers.Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(20)
    save_model(model, tokenizer(), tmp_path)
    loaded, _ = load_policy(tmp_path, "cpu", "float32")
    ids_1T = torch.arange(3, 15)[None]
    config.attn_logit_softcapping = None
    without = transformers.Gemma2ForCausalLM(config).eval()
    without.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids_1T).logits
        assert not torch.allclose(without(ids_1T).logits, expected, atol=1e-2)
        assert_close(loaded(ids_1T).logits, expected)
