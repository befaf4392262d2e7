"""The policy network and the critic: from token ids to logprobs, entropies and values.

Everything here works on flat lists of positions: of a padded batch of token ids ``(B, T)`` only the
positions that someone asks for are returned, as ``(N, …)`` in row-major order. Padding therefore
never reaches a loss, and what is not trained costs no output layer.

Axes: **B** samples, **T** tokens, **N** wanted positions, **V** vocabulary, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import ctypes
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ragen import fast_qwen2
from ragen.errors import RagenError

logging.disable_progress_bar()  # transformers draws one for every load and save, in logs too

KEPT_LOGITS = 2**24
"""Logits that may stay in memory until the backward pass (64 MB); more are computed twice."""


def load_policy(
    path: str | Path, device: str, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        path: A local folder in Hugging Face layout, or the id of a model on the Hub.
        device: ``cpu``, ``cuda``, or ``auto``: the GPU where there is one.
        dtype: ``float32`` or ``bfloat16``.

    Returns:
        The model in evaluation mode (dropout off: what samples must equal what learns), and its
        tokenizer.

    Raises:
        RagenError: No such model, no tokenizer, a weight that is not finite, or an output layer
            that is more than a matrix.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise RagenError('model.device = "cuda", but torch sees no GPU here; use "cpu" or "auto"')
    name = str(path)
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise RagenError(f"{name}: this folder holds no model (config.json is missing)")
    try:
        config = AutoConfig.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=getattr(torch, dtype)
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RagenError(
            f"cannot load the model '{name}': {_first_line(error)}; "
            "name a folder in Hugging Face layout, a model id of the Hub, or base"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise RagenError(
            f"the model '{name}' has no usable tokenizer: {_first_line(error)}; "
            "save one beside its weights"
        ) from error
    if len(tokenizer) <= len(
        tokenizer.all_special_ids
    ):  # what transformers makes up for a missing one
        raise RagenError(f"the model '{name}' has no tokenizer; save one beside its weights")
    for weight_name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise RagenError(
                f"the weights of '{name}' are damaged: {weight_name} holds NaN or infinity"
            )
    torch.nn.Module.to(model, device)
    model.eval()
    if device == "cpu":
        keep_freed_memory()
    _check_output_layer(model, name)
    return model, tokenizer


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in the process: 10–20 % of the time of small models on a CPU.

    By default it gives every large block back to the system and gets it anew, page by page, for the
    next tensor. Elsewhere than on glibc this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # the names in malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 2**30)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 2**26)


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Write weights (safetensors), config and tokenizer; `load_policy` reads them back."""
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def hidden_states(
    model: PreTrainedModel, token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor
) -> Tensor:
    """Final hidden states at the wanted positions: what the output layer or a value head reads.

    Args:
        model: A causal language model, or its backbone alone.
        token_ids_BT: Token ids, padded on the right with any valid id.
        lengths_B: Tokens of each row that count; the rest never changes the result.
        wanted_BT: True where the state is wanted; only within `lengths_B`.

    Returns:
        Hidden states (N, D), row by row, N being the number of true entries.
    """
    if shares_prompts(model):
        return fast_qwen2.hidden_states(model, token_ids_BT, lengths_B, wanted_BT)
    return padded_hidden_states(model, token_ids_BT, lengths_B, wanted_BT)


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether `hidden_states` computes a prompt that several rows begin with only once."""
    return model.device.type == "cpu" and fast_qwen2.supports(model)


def padded_hidden_states(
    model: PreTrainedModel, token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor
) -> Tensor:
    """`hidden_states` for any architecture: the model's own padded forward."""
    columns_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
    states_BTD = backbone(model)(
        input_ids=token_ids_BT,
        attention_mask=(columns_T < lengths_B[:, None]).long(),
        position_ids=columns_T.expand(token_ids_BT.shape),
        use_cache=False,
    ).last_hidden_state
    states_ND: Tensor = states_BTD[wanted_BT]
    return states_ND


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer (itself, where it has none)."""
    return model.get_decoder() if model.get_output_embeddings() is not None else model


def token_logprobs(
    model: PreTrainedModel, hidden_ND: Tensor, targets_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of the distribution it was drawn from.

    logprob = log softmax(W h / temperature)[target],  entropy = −Σ p log p, in nats, softmax in
    float32.

    Works in chunks: logits that do not fit in `KEPT_LOGITS` are computed again in the backward
    pass, so the full (N, V) is never in memory for a large vocabulary. Both results have gradients.

    Args:
        model: The model whose output layer reads the states.
        hidden_ND: From `hidden_states`, at the positions before the targets.
        targets_N: Token ids.
        temperature: What the logits are divided by.

    Returns:
        Logprobs (N,) and entropies (N,), float32.
    """
    head = model.get_output_embeddings()
    assert head is not None, "a backbone has no output layer"
    logprobs_N, entropy_N = _LogprobEntropy.apply(
        hidden_ND, head.weight, getattr(head, "bias", None), targets_N, float(temperature)
    )
    return logprobs_N, entropy_N


class Critic(nn.Module):
    """The value function: a backbone under a linear head that starts at zero.

    The backbone is a copy of the policy's; or the policy's own under an adapter of the critic's,
    which acts where the caller lets it (`ragen.lora.acting`); or shared: the policy's as it is.
    The head and the copy or adapter belong to the critic, are optimised and saved with it.

    The estimate for a token is that of the state *before* it, so it sits at the position before;
    callers ask for those positions (`wanted_BT` of the policy's logprobs is the same).

    Args:
        policy: The model whose backbone is copied or read.
        shared: Whether it is read.
        adapter: The critic's own adapter, which is in the policy's backbone (LoRA).
    """

    def __init__(
        self, policy: PreTrainedModel, shared: bool = False, adapter: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.shared = shared
        seen = backbone(policy)
        if adapter is not None:
            self.adapter = adapter
        elif not shared:
            seen = self.backbone = copy.deepcopy(seen)
        self._seen = (seen,)  # a tuple hides it from torch: a shared backbone is not the critic's
        width = policy.config.get_text_config().hidden_size
        first = next(seen.parameters())
        self.head = nn.Linear(width, 1, device=first.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor) -> Tensor:
        """Values (N,) in float32 at the wanted positions; arguments as of `hidden_states`."""
        return self.read(hidden_states(self._seen[0], token_ids_BT, lengths_B, wanted_BT))

    def read(self, states_ND: Tensor) -> Tensor:
        """Values (N,) in float32 of its backbone's hidden states."""
        values_N: Tensor = self.head(states_ND.float()).squeeze(-1)
        return values_N


class _LogprobEntropy(torch.autograd.Function):
    """Log softmax at the targets, and entropy H, in chunks.

    Gradient of the logits z: g_logprob (1_target − p) − g_entropy p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
        chunk = max(1, KEPT_LOGITS // vocabulary)
        keep = num_rows <= chunk and any(ctx.needs_input_grad[:3])
        logprobs, entropies, kept = [], [], None
        for start in range(0, num_rows, chunk):
            part = slice(start, start + chunk)
            log_p_NV = _log_softmax(hidden_ND[part], weight_VD, bias_V, temperature)
            logprobs.append(log_p_NV.gather(1, targets_N[part, None])[:, 0])
            entropies.append(-(log_p_NV.exp() * log_p_NV.clamp_min(-1e30)).sum(1))
            kept = log_p_NV if keep else None
        empty = hidden_ND.new_zeros(0, dtype=torch.float32)
        logprobs_N = torch.cat(logprobs) if logprobs else empty
        entropy_N = torch.cat(entropies) if entropies else empty.clone()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropy_N, kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, entropy_N, kept = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p_NV = (
                kept
                if kept is not None
                else _log_softmax(hidden_ND[part], weight_VD, bias_V, ctx.temperature)
            )
            given_N1 = grad_logprobs_N[part, None]
            spread_N1 = grad_entropy_N[part, None]
            # −p (g + s (log p + H)), then + g at the target.
            dz_NV = log_p_NV.clamp_min(-1e30) + entropy_N[part, None]
            dz_NV = dz_NV.mul_(spread_N1).add_(given_N1).mul_(log_p_NV.exp()).neg_()
            dz_NV.scatter_add_(1, targets_N[part, None], given_N1)
            dz_NV = (dz_NV / ctx.temperature).to(weight_VD.dtype)
            grad_hidden_ND[part] = dz_NV @ weight_VD
            grad_weight_VD += dz_NV.t() @ hidden_ND[part]
            if grad_bias_V is not None:
                grad_bias_V += dz_NV.sum(0)
        bias_grad = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), bias_grad, None, None


def _log_softmax(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float
) -> Tensor:
    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD, bias_V).float()
    return torch.log_softmax(logits_NV / temperature if temperature != 1.0 else logits_NV, dim=-1)


@torch.no_grad()
def _check_output_layer(model: PreTrainedModel, name: str) -> None:
    """Refuse models that scale or cap their logits: `token_logprobs` knows the output layer."""
    probe_BT = (
        torch.arange(1, 5, device=model.device)[None]
        % model.get_output_embeddings().weight.shape[0]
    )
    logits = model(input_ids=probe_BT, use_cache=False).logits.float()
    states = backbone(model)(input_ids=probe_BT, use_cache=False).last_hidden_state
    plain = model.get_output_embeddings()(states).float()
    if not torch.allclose(logits, plain, rtol=1e-2, atol=1e-3 * float(plain.abs().max())):
        raise RagenError(
            f"the model '{name}' scales or caps its logits after the output layer; "
            "that is not supported, use a Qwen2, Qwen3, Llama, Mistral or similar model"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")
