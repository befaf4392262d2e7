"""The policy network and the critic: from token ids to logprobs, entropies and values.

Everything here works on flat lists of positions: of a padded batch of token ids ``(B, T)`` only the
requested positions are returned, as ``(N, …)`` in row-major order. Padding therefore never reaches
a loss, and positions that are not trained need no output layer.

Axes: **B** samples, **T** tokens, **N** wanted positions, **V** vocabulary, **D** width. In
`cross_scores`: **N** thoughts, **M** prompts, **R** thoughts of a rectangle.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragen.core.pictures import Picture
from ragen.core.types import TokenRows
from ragen.networks import fast_qwen2, packed
from ragen.networks.attention import Attending
from ragen.networks.beginnings import Beginnings, find_beginnings
from ragen.networks.device import to_device
from ragen.networks.fast_scores import PrefixReader
from ragen.networks.lora import adapter_of, has_adapters
from ragen.networks.pictures import (
    Features,
    features,
    inputs,
    last_seen,
    mask_up_to,
    reader_of,
    row_places,
)
from ragen.networks.precision import Shape, add_product, output_logits, product, shape_of
from ragen.networks.sizes import KEPT_LOGITS, KEPT_LOGITS_GPU


def hidden_states(
    model: PreTrainedModel,
    token_ids_BT: Tensor,
    lengths_B: Tensor,
    wanted_BT: Tensor,
    seen: Features | None = None,
) -> Tensor:
    """Final hidden states at the wanted positions: the input of the output layer or a value head.

    The model may be a backbone alone; the rest is on the CPU. Rows of `lengths_B` tokens are padded
    on the right with any valid id, which never changes the result. `wanted_BT` is true only within
    `lengths_B`. `seen` are the features of all pictures that the rows show. The states are (N, D),
    row by row, for N true entries.
    """
    if is_fast(model):
        return fast_qwen2.hidden_states(model, token_ids_BT, lengths_B, wanted_BT, seen)
    if token_ids_BT.shape[1] <= packed.longest(backbone(model)):
        return packed.hidden_states(backbone(model), token_ids_BT, lengths_B, wanted_BT, seen)
    return padded_hidden_states(model, token_ids_BT, lengths_B, wanted_BT, seen)


def is_fast(model: PreTrainedModel) -> bool:
    """True if `hidden_states` uses the code for a plain Qwen2 on a CPU."""
    # Recomputed layers, which that code does not support; transformers renames its own property.
    recomputes = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    return model.device.type == "cpu" and not recomputes and fast_qwen2.supports(model)


def shares_prompts(model: PreTrainedModel) -> bool:
    """True if `hidden_states` pads no rows and computes a prompt that several share only once."""
    return is_fast(model) or packed.longest(backbone(model)) > 0


def padded_hidden_states(
    model: PreTrainedModel,
    token_ids_BT: Tensor,
    lengths_B: Tensor,
    wanted_BT: Tensor,
    seen: Features | None = None,
) -> Tensor:
    """`hidden_states` for any architecture: the model's own padded forward.

    Padding follows every real token, so attention is plainly causal, which has the fastest kernels,
    but for pictures whose tokens see all of the picture.
    """
    used = backbone(model)
    given = inputs(used, token_ids_BT, seen)
    if seen is not None and reader_of(used).has_grid:
        given["position_ids"] = to_device(row_places(token_ids_BT, seen), model.device)
    if seen is not None and reader_of(used).sees_ahead:
        seen_BT = to_device(last_seen(token_ids_BT), model.device)
        given["attention_mask"] = mask_up_to(seen_BT, token_ids_BT.shape[1], model.dtype)
    with Attending(used.config):
        states_BTD = used(**given, use_cache=False).last_hidden_state
    # Indices, since counting the entries of a mask would wait for a GPU.
    wanted = (to_device(places_N, model.device) for places_N in wanted_BT.nonzero(as_tuple=True))
    states_ND: Tensor = states_BTD[tuple(wanted)]
    return states_ND


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer (the model itself if it has none)."""
    return model.get_decoder() if model.get_output_embeddings() is not None else model


def token_logprobs(
    model: PreTrainedModel, hidden_ND: Tensor, targets_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of the distribution it is drawn from.

    logprob = log softmax(z / temperature)[target] and entropy = −Σ p log p, in nats, softmax in
    float32. The logits z are W h, scaled or capped where the architecture does so (`shape_of`); the
    rows h of `hidden_ND` are the `hidden_states` at the positions before the targets.

    Chunks of logits that do not fit in `KEPT_LOGITS` are computed again in the backward pass, so a
    large (N, V) is never in memory. Both results, (N,) in float32, have gradients. The output
    layer's gradients are accumulated in float32, and skipped if it is frozen.
    """
    head = model.get_output_embeddings()
    assert head is not None, "a backbone has no output layer"
    bias_V, shape = getattr(head, "bias", None), shape_of(model)
    logprobs_N, entropy_N = _LogprobEntropy.apply(
        hidden_ND, head.weight, bias_V, targets_N, float(temperature), shape
    )
    return logprobs_N, entropy_N


class Critic(nn.Module):
    """The value function: a backbone under a linear head that starts at zero.

    The backbone is one of three: a copy of the policy's; the policy's with the critic's own
    adapter, active inside `ragen.networks.lora.acting`; or, if `shared`, the policy's as it is. The
    head and the copy or adapter belong to the critic, and are optimised and saved with it.

    With pictures, a critic of its own reads the features of the policy's tower.

    The value of a token is the estimate of the state *before* it, so it is computed at the position
    before; `wanted_BT` is the same as for the policy's logprobs.
    """

    def __init__(self, policy: PreTrainedModel, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.has_backbone = not shared and not has_adapters(policy)
        used = backbone(policy)
        if self.has_backbone:
            used = self.backbone = copy.deepcopy(used)
        elif not shared:
            self.adapter = adapter_of(policy, "critic")
        # A tuple hides it from torch, because a shared backbone is not part of the critic.
        self._backbone = (used,)
        width = policy.config.get_text_config().hidden_size
        first = next(used.parameters())
        self.head = nn.Linear(width, 1, device=first.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(
        self,
        token_ids_BT: Tensor,
        lengths_B: Tensor,
        wanted_BT: Tensor,
        seen: Features | None = None,
    ) -> Tensor:
        """Values (N,) in float32 at the wanted positions; arguments as for `hidden_states`."""
        return self.read(hidden_states(self._backbone[0], token_ids_BT, lengths_B, wanted_BT, seen))

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
            grad_hidden_ND[part] = product(dz_NV, weight_VD)
            if grad_weight_VD is not None:
                add_product(grad_weight_VD, dz_NV.t(), hidden_ND[part])
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
def cross_scores(
    model: PreTrainedModel,
    prompts: TokenRows,
    thoughts: TokenRows,
    temperature: float,
    max_tokens: int,
    rank: int = 0,
    num_ranks: int = 1,
    pictures: Sequence[Picture] = (),
) -> Tensor:
    """The matrix S_ij = log p(z_i | x_j) at a temperature, (N, M) in float64 on the CPU.

    At least one x_j and one z_i are given as token ids, with the `pictures` that the x_j show. At
    most `max_tokens` tokens are in memory at once; a single row may be longer. Thoughts scored
    together share their prompt where the model `shares_prompts`; then `max_tokens` bounds the
    thoughts alone. With several ranks, they take the prompts in turn, in equally many forwards,
    and each leaves the rest 0: their matrices add up to S.
    """
    scores_NM = torch.zeros(len(thoughts), len(prompts), dtype=torch.float64)
    reader = PrefixReader(model) if is_fast(model) else None
    lengths, shares = [len(thought) for thought in thoughts], shares_prompts(model)
    if reader is not None:
        equal = neighbours(thoughts, max_tokens)
        known = [find_beginnings([thoughts[row] for row in rows]) for rows in equal]
        parts_M = [equal] * len(prompts)
    else:
        parts_M = [rectangles(lengths, 0 if shares else len(x), max_tokens) for x in prompts]
    for first in range(0, len(prompts), num_ranks):
        at_once = range(len(prompts))[first : first + num_ranks]
        column = at_once[min(rank, len(at_once) - 1)]
        prompt, parts = prompts[column], parts_M[column]
        # Where weights are split, all ranks pass the same layers: also for the others' pictures.
        looks = {m: features(model, torch.tensor(prompts[m]), pictures) for m in at_once}
        seen = looks[column]
        if reader is not None:
            reader.read(prompt, seen)
        for forward in range(max(len(parts_M[m]) for m in at_once)):
            number = min(forward, len(parts) - 1)
            rows = parts[number]
            if reader is not None:
                logprobs_N = _after_beginnings(model, reader, known[number], temperature)
            else:
                part = [thoughts[row] for row in rows]
                targets_N = torch.tensor(list(chain.from_iterable(part)), device=model.device)
                states_ND = _states_before(model, prompt, part, seen)
                logprobs_N, _ = token_logprobs(model, states_ND, targets_N, temperature)
            if column != first + rank or number != forward:
                continue  # done once more, since another rank is not ready yet
            counts_R = torch.tensor([lengths[row] for row in rows])
            row_N = torch.repeat_interleave(torch.tensor(rows), counts_R)
            scores_NM[:, column].index_add_(0, row_N, logprobs_N.double().cpu())
    return scores_NM


def _after_beginnings(
    model: PreTrainedModel, reader: PrefixReader, known: Beginnings, temperature: float
) -> Tensor:
    """Logprobs of thoughts' tokens after a prompt; each beginning passes the output layer once."""
    states_FD, head = reader.follow(known), model.get_output_embeddings()
    logprobs_P = torch.empty(len(known.targets_P))
    chunk = max(1, KEPT_LOGITS // head.weight.shape[0])
    for start, states_ND in zip(count(0, chunk), states_FD.split(chunk), strict=False):
        log_p_NV = _log_softmax(output_logits(states_ND, head.weight, head.bias), temperature)
        here_P = (known.before_P >= start) & (known.before_P < start + chunk)
        logprobs_P[here_P] = log_p_NV[known.before_P[here_P] - start, known.targets_P[here_P]]
    return logprobs_P[known.pairs_N]


def neighbours(thoughts: TokenRows, max_tokens: int) -> list[list[int]]:
    """Parts of at most `max_tokens`; what begins alike is together. A single one may be longer."""
    parts, room = list[list[int]](), 0
    for row in sorted(range(len(thoughts)), key=lambda row: tuple(thoughts[row])):
        room -= len(thoughts[row])
        if room < 0 or not parts:
            parts.append([])
            room = max_tokens - len(thoughts[row])
        parts[-1].append(row)
    return parts


def rectangles(lengths: Sequence[int], prefix: int, max_tokens: int) -> list[list[int]]:
    """Rows of one forward each: at most `max_tokens`, with less than half of each row padded."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if parts:
            longest = lengths[parts[-1][0]]
            fits = (len(parts[-1]) + 1) * (prefix + longest) <= max_tokens
            if fits and 2 * lengths[row] > longest:
                parts[-1].append(row)
                continue
        parts.append([row])
    return parts


def _states_before(
    model: PreTrainedModel,
    prompt: Sequence[int],
    thoughts: TokenRows,
    seen: Features | None,
) -> Tensor:
    """The states from which each token of the thoughts is predicted, thought by thought."""
    rows = [torch.tensor([*prompt, *thought]) for thought in thoughts]
    ids_RT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths_R = torch.tensor([len(row) for row in rows])
    columns_T = torch.arange(ids_RT.shape[1])
    before_RT = (columns_T >= len(prompt) - 1) & (columns_T < lengths_R[:, None] - 1)
    return hidden_states(model, ids_RT, lengths_R, before_RT, seen)
