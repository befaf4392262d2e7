"""Every thought under every prompt: log p(z_i | x_j) by teacher forcing.

A prompt is read once; its keys and values then serve as the prefix of all thoughts. For small
models on a CPU this costs as much as the flat path of `fast_qwen2` would, and it works for every
model with a cache.

Axes: **N** thoughts, **M** prompts, **R** thoughts of a rectangle, **T** tokens, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ragen.models.model import backbone, token_logprobs


@torch.no_grad()
def cross_scores(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    thoughts: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
) -> Tensor:
    """The matrix S_ij = log p(z_i | x_j), (N, M) in float64 on the CPU.

    The x_j and z_i are given as token ids, at least one of each; logits are divided by
    `temperature`. At most `max_tokens` tokens are in memory at once, including each thought's
    prompt; a single row may be longer.
    """
    scores_NM = torch.zeros(len(thoughts), len(prompts), dtype=torch.float64)
    for column, prompt in enumerate(prompts):
        cache = DynamicCache(config=model.config)
        ids_1T = torch.tensor([list(prompt)], device=model.device)
        last_11D = _read(model, ids_1T, cache)[:, -1:]
        for rows in rectangles([len(thought) for thought in thoughts], len(prompt), max_tokens):
            part = [thoughts[row] for row in rows]
            scores_NM[rows, column] = _scores(model, last_11D, cache, part, temperature)
    return scores_NM


def rectangles(lengths: Sequence[int], prefix: int, max_tokens: int) -> list[list[int]]:
    """Rows of one forward each: at most `max_tokens`, and less than half of each row padding.

    Example:
        >>> rectangles([3, 9, 8, 4], prefix=1, max_tokens=20)
        [[1, 2], [3, 0]]
    """
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


def _scores(
    model: PreTrainedModel,
    last_11D: Tensor,
    cache: DynamicCache,
    thoughts: Sequence[Sequence[int]],
    temperature: float,
) -> Tensor:
    """Scores (R,) of thoughts after the prompt in `cache`, whose last state is `last_11D`."""
    device, num_rows = model.device, len(thoughts)
    ids_RT = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(thought) for thought in thoughts], batch_first=True
    )
    lengths_R = torch.tensor([len(thought) for thought in thoughts])
    is_real_RT = torch.arange(ids_RT.shape[1]) < lengths_R[:, None]
    states_RTD = last_11D.expand(num_rows, -1, -1)
    if ids_RT.shape[1] > 1:  # the state before each token: the prompt's last one, then its own
        repeated = copy.deepcopy(cache)
        repeated.batch_repeat_interleave(num_rows)
        following_RTD = _read(model, ids_RT[:, :-1].to(device), repeated)
        states_RTD = torch.cat((states_RTD, following_RTD), dim=1)
    states_ND, targets_N = states_RTD[is_real_RT.to(device)], ids_RT[is_real_RT].to(device)
    logprobs_N, _ = token_logprobs(model, states_ND, targets_N, temperature)
    scores_R = torch.zeros(num_rows, dtype=torch.float64)
    row_N = is_real_RT.nonzero()[:, 0]
    return scores_R.index_add_(0, row_N, logprobs_N.double().cpu())


def _read(model: PreTrainedModel, ids_RT: Tensor, cache: DynamicCache) -> Tensor:
    """States after tokens that continue `cache`; padding on the right affects no real token."""
    states_RTD: Tensor = backbone(model)(
        input_ids=ids_RT, past_key_values=cache, use_cache=True
    ).last_hidden_state
    return states_RTD
