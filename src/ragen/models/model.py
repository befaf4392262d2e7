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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging
from transformers.utils.import_utils import is_flash_attn_2_available

from ragen.core.errors import RagenError
from ragen.models import fast_qwen2
from ragen.models.precision import Shape, output_logits, shape_of
from ragen.models.pretrained import (
    LOAD_ERRORS,
    cannot_load,
    check_weights,
    first_line,
    model_config,
    model_folder,
)

logging.disable_progress_bar()  # transformers draws one for every load and save, in logs too

KEPT_LOGITS = 2**24
"""Logits that may stay in memory until the backward pass (64 MB); more are computed twice."""
KEPT_LOGITS_GPU = 2**27
"""The same on a GPU (512 MB): each chunk reads the output layer and its gradient once, which for
150,000 words takes as long as a thousand rows do."""


def load_policy(
    path: str | Path, device: str, dtype: str, *, attention: str = "auto", max_length: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        path: A local folder in Hugging Face layout, or the id of a model on the Hub.
        device: ``cpu``, ``cuda``, or ``auto``: the GPU where there is one.
        dtype: ``float32`` or ``bfloat16``.
        attention: Attention implementation of transformers; ``auto`` leaves the choice to it.
        max_length: Tokens that a sequence shall have at most.

    Returns:
        The model in evaluation mode (dropout off: what samples must equal what learns), and its
        tokenizer.

    Raises:
        RagenError: No such model, one that is no causal language model or shorter than
            `max_length`, weights that are missing, pickled or not finite, a tokenizer that is
            missing or does not fit, or an output layer that is more than a matrix.
    """
    device = found_device(device)
    _check_attention(attention, device, dtype)
    name = str(path)
    folder = model_folder(path)
    config = model_config(folder, name, max_length)
    check_weights(folder, name)
    model = _load_weights(folder, name, config, dtype, attention)
    tokenizer = load_tokenizer(folder, name, model)
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


def found_device(device: str) -> str:
    """``cpu`` or ``cuda``; what ``auto`` means here.

    Raises:
        RagenError: The GPU is asked for, and there is none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise RagenError('model.device = "cuda", but torch sees no GPU here; use "cpu" or "auto"')
    return device


def _check_attention(attention: str, device: str, dtype: str) -> None:
    if attention != "flash_attention_2":
        return
    if device == "cpu" or dtype == "float32":
        raise RagenError(
            'model.attention = "flash_attention_2" runs on a GPU and in bfloat16 only: set '
            'model.device and model.dtype so, or model.attention = "sdpa"'
        )
    if not is_flash_attn_2_available():
        raise RagenError(
            'model.attention = "flash_attention_2" needs the package flash-attn, which is not '
            'installed (or not for this GPU); install it, or use "sdpa"'
        )


def _load_weights(
    folder: Path, name: str, config: PreTrainedConfig, dtype: str, attention: str
) -> PreTrainedModel:
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # else it draws a table of what is told here in one line
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=None if attention == "auto" else attention,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        raise cannot_load(name, error) from error
    finally:
        logging.set_verbosity(level)
    model: PreTrainedModel = found[0]
    # What does not fit or is not there, transformers fills at random.
    for key, *_ in sorted(found[1]["mismatched_keys"]):
        raise RagenError(f"the weights of '{name}' do not fit its config.json: {key} differs")
    for key in sorted(found[1]["missing_keys"]):
        raise RagenError(
            f"the weights of '{name}' are not those of a causal language model: {key} is missing"
        )
    return model


def load_tokenizer(folder: Path, name: str, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, which has to fit the model.

    Raises:
        RagenError: It is missing, cannot be read, or has tokens that the model does not know.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False
        )
    except LOAD_ERRORS as error:
        raise RagenError(
            f"the model '{name}' has no usable tokenizer: {first_line(error)}; "
            "save one beside its weights"
        ) from error
    # Special tokens alone are what transformers makes up for a missing one.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise RagenError(f"the model '{name}' has no tokenizer; save one beside its weights")
    _check_vocabulary(model, tokenizer, name)
    return tokenizer


def _check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if largest >= rows:
        raise RagenError(
            f"the tokenizer of '{name}' is not that of its weights: token {token!r} has the id "
            f"{largest}, and the embedding {rows} rows; use the tokenizer that it was trained with"
        )


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


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only what goes into a layer for the backward pass, and compute the rest there again.

    transformers' own switch (`gradient_checkpointing_enable`) acts in training mode alone, in which
    dropout would be on. So the layers are wrapped here; copies of the model are wrapped too.
    Without gradients nothing is done twice, and keys and values are cached as ever.

    Raises:
        RagenError: The architecture names no layers that could be.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise RagenError(
            f"{type(model).__name__} cannot compute its layers again: "
            "set model.gradient_checkpointing = false"
        )
    for layer in layers:
        layer.gradient_checkpointing = True  # what `is_gradient_checkpointing` looks at
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = again


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
    recomputes = model.is_gradient_checkpointing  # as the fast path does not
    return model.device.type == "cpu" and not recomputes and fast_qwen2.supports(model)


def padded_hidden_states(
    model: PreTrainedModel, token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor
) -> Tensor:
    """`hidden_states` for any architecture: the model's own padded forward.

    It takes no mask: padding on the right is behind every token that counts, and a causal model
    never looks there. So attention is plainly causal, for which there are the fastest kernels.
    """
    states_BTD = backbone(model)(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    states_ND: Tensor = states_BTD[wanted_BT]
    return states_ND


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer (itself, where it has none)."""
    return model.get_decoder() if model.get_output_embeddings() is not None else model


def token_logprobs(
    model: PreTrainedModel, hidden_ND: Tensor, targets_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of the distribution it was drawn from.

    logprob = log softmax(z / temperature)[target],  entropy = −Σ p log p, in nats, softmax in
    float32, the logits z being W h, scaled or capped where the architecture does so (`shape_of`).

    Works in chunks: logits that do not fit in `KEPT_LOGITS` are computed again in the backward
    pass, so the full (N, V) is never in memory for a large vocabulary. Both results have gradients.
    Those of the output layer are added up in float32, and not at all where it is frozen.

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
        *(hidden_ND, head.weight, getattr(head, "bias", None), targets_N),
        *(float(temperature), shape_of(model)),
    )
    return logprobs_N, entropy_N


class Critic(nn.Module):
    """The value function: a backbone under a linear head that starts at zero.

    The backbone is a copy of the policy's; or the policy's own under an adapter of the critic's,
    which acts where the caller lets it (`ragen.models.lora.acting`); or shared: the policy's as it
    is. The head and the copy or adapter belong to the critic, are optimised and saved with it.

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

    Gradient of z / temperature: g_logprob (1_target − p) − g_entropy p (log p + H); of W h, that
    times the slope of the logits' `Shape`, over the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        shape: Shape,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
        kept_logits = KEPT_LOGITS_GPU if hidden_ND.is_cuda else KEPT_LOGITS
        chunk = max(1, kept_logits // vocabulary)
        keep = num_rows <= chunk and any(ctx.needs_input_grad[:3]) and not shape.cap
        logprobs, entropies, kept = [], [], None
        for start in range(0, num_rows, chunk):
            part = slice(start, start + chunk)
            logits_NV = shape.of(output_logits(hidden_ND[part], weight_VD, bias_V))
            log_p_NV = _log_softmax(logits_NV, temperature)
            logprobs.append(log_p_NV.gather(1, targets_N[part, None])[:, 0])
            entropies.append(-(log_p_NV.exp() * log_p_NV.clamp_min(-1e30)).sum(1))
            kept = log_p_NV if keep else None
        empty = hidden_ND.new_zeros(0, dtype=torch.float32)
        logprobs_N = torch.cat(logprobs) if logprobs else empty
        entropy_N = torch.cat(entropies) if entropies else empty.clone()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropy_N, kept)
        ctx.temperature, ctx.chunk, ctx.shape = temperature, chunk, shape
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, entropy_N, kept = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD, grad_bias_V = (
            torch.zeros_like(each, dtype=torch.float32) if needed else None
            for each, needed in zip((weight_VD, bias_V), ctx.needs_input_grad[1:3], strict=True)
        )
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            slope: Tensor | float = ctx.shape.scale
            log_p_NV = kept
            if kept is None:
                logits_NV = ctx.shape.of(output_logits(hidden_ND[part], weight_VD, bias_V))
                slope = ctx.shape.slope(logits_NV)
                log_p_NV = _log_softmax(logits_NV, ctx.temperature)
            given_N1 = grad_logprobs_N[part, None]
            spread_N1 = grad_entropy_N[part, None]
            # −p (g + s (log p + H)), then + g at the target.
            dz_NV = log_p_NV.clamp_min(-1e30) + entropy_N[part, None]
            dz_NV = dz_NV.mul_(spread_N1).add_(given_N1).mul_(log_p_NV.exp()).neg_()
            dz_NV.scatter_add_(1, targets_N[part, None], given_N1)
            dz_NV = (dz_NV * slope / ctx.temperature).to(weight_VD.dtype)
            grad_hidden_ND[part] = dz_NV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += dz_NV.t() @ hidden_ND[part]
            if grad_bias_V is not None:
                grad_bias_V += dz_NV.sum(0)
        grads_of_layer = (
            None if grad is None else grad.to(weight_VD.dtype)
            for grad in (grad_weight_VD, grad_bias_V)
        )
        return grad_hidden_ND, *grads_of_layer, None, None, None


def _log_softmax(logits_NV: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits_NV / temperature if temperature != 1.0 else logits_NV, dim=-1)


@torch.no_grad()
def _check_output_layer(model: PreTrainedModel, name: str) -> None:
    """Refuse models that are not what `token_logprobs` and the samplers take them for.

    Those whose states depend on what comes after them, and those that do to their logits what
    `shape_of` does not know.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise RagenError(f"the model '{name}' has no output layer over a vocabulary")
    probe_BT = torch.arange(1, 5, device=model.device)[None] % head.weight.shape[0]
    logits = model(input_ids=probe_BT, use_cache=False).logits.float()
    before = model(input_ids=probe_BT[:, :2], use_cache=False).logits.float()
    if not _alike(before, logits[:, :2], model.dtype):
        raise RagenError(
            f"the model '{name}' looks ahead: what it says of a token depends on those behind it; "
            "use a causal language model"
        )
    states = backbone(model)(input_ids=probe_BT, use_cache=False).last_hidden_state
    # A cap hardly moves the logits of a probe: large ones are put into the layer's mouth besides.
    large_V = torch.linspace(-1e3, 1e3, head.weight.shape[0], device=model.device)
    hook = head.register_forward_hook(lambda _, __, said: large_V.to(said.dtype).expand_as(said))
    try:
        capped = model(input_ids=probe_BT, use_cache=False).logits.float()
    finally:
        hook.remove()
    shape = shape_of(model)
    if not (
        _alike(logits, shape.of(head(states).float()), model.dtype)
        and _alike(capped, shape.of(large_V).expand_as(capped), model.dtype)
    ):
        raise RagenError(
            f"the model '{name}' does something to its logits behind the output layer that is not "
            "known here; use a Qwen, Llama, Mistral, Gemma, Granite or similar model"
        )


def _alike(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Equal but for the rounding of a whole forward pass: half the digits of `dtype`."""
    tolerance = torch.finfo(dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
