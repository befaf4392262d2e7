"""States of many thoughts after one prompt, for a plain float32 Qwen2; without gradients.

The prompt's keys and values exist once. All queries attend to them in one product; the keys of a
query's own thought are a second, small one, and the softmax is over both. Everything else is
computed once for each beginning that thoughts have in common.

Axes: **P** tokens of the prompt, **R** thoughts, padded to **T** tokens, **F** their distinct
beginnings, **N** tokens of the thoughts, **H** heads, **K** key–value heads, **G** heads of each of
these, **Q** queries of a thought, **D** width, **E** width of a head.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ragen.models.fast_decoder import finish, fused_layers, project
from ragen.models.fast_qwen2 import rope_table
from ragen.models.key_store import SCORES, matmul


class Beginnings(NamedTuple):
    """The distinct beginnings of thoughts that a further token follows.

    `ids_F` is the last token of each, `depths_F` the number of tokens before it, `first_F` its
    first place in the padded thoughts. `index_RT` is the beginning at each place, and `before_N`
    the beginning before each token of the thoughts, counted from 1; 0 is the empty one.
    """

    ids_F: Tensor
    depths_F: Tensor
    first_F: Tensor
    index_RT: Tensor
    before_N: Tensor


def find_beginnings(thoughts: Sequence[Sequence[int]]) -> Beginnings:
    """The beginnings of thoughts of at least one token.

    Example:
        Of (7, 8, 9) and (7, 5), only (7) and (7, 8) are continued.

        >>> found = find_beginnings([(7, 8, 9), (7, 5)])
        >>> found.ids_F.tolist(), found.depths_F.tolist(), found.before_N.tolist()
        ([7, 8], [0, 1], [0, 1, 2, 0, 1])
    """
    known = dict[tuple[int, int], int]()  # by the beginning before it, and its last token
    places, before = list[tuple[int, int, int]](), list[int]()
    longest = max(map(len, thoughts)) - 1
    index_RT = torch.zeros(len(thoughts), longest, dtype=torch.long)
    for row, thought in enumerate(thoughts):
        beginning = 0
        before.append(beginning)
        for column, token in enumerate(thought[:-1]):
            beginning = known.setdefault((beginning, token), len(known) + 1)
            if beginning > len(places):
                places.append((token, column, row * longest + column))
            index_RT[row, column] = beginning - 1
            before.append(beginning)
    ids_F, depths_F, first_F = torch.tensor(places, dtype=torch.long).view(-1, 3).unbind(1)
    return Beginnings(ids_F, depths_F, first_F, index_RT, torch.tensor(before))


class PrefixReader:
    """Reads one prompt after another, and then thoughts that follow it.

    `model` is one that `ragen.models.fast_qwen2.supports` accepts; its weights are copied.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        attention = model.model.layers[0].self_attn
        self.head_width = attention.head_dim
        self.heads = attention.q_proj.out_features // attention.head_dim
        self.key_heads = attention.k_proj.out_features // attention.head_dim
        self._model, self._epsilon = model.model, model.config.rms_norm_eps
        self._layers = fused_layers(model)
        self._keys = [torch.empty(0)] * len(self._layers)
        self._values = [torch.empty(0)] * len(self._layers)

    @torch.no_grad()
    def read(self, prompt: Sequence[int]) -> None:
        """Keep a prompt's keys and values, and its last state."""
        device = self._model.device
        rope_P1R = rope_table(self._model, len(prompt))
        x_PD = self._model.embed_tokens(torch.tensor(prompt, device=device))
        for layer, weights in enumerate(self._layers):
            q_PHE, k_PKE, v_PKE = project(x_PD, weights, rope_P1R, self._epsilon, self.key_heads)
            self._keys[layer] = k_PKE.permute(1, 2, 0).contiguous()  # (K, E, P)
            self._values[layer] = v_PKE.transpose(0, 1).contiguous()  # (K, P, E)
            is_last = layer == len(self._layers) - 1
            if is_last:
                q_PHE, x_PD = q_PHE[-1:], x_PD[-1:]
            q_1HPE, k_1KPE, v_1KPE = (x.transpose(0, 1)[None] for x in (q_PHE, k_PKE, v_PKE))
            mixed_1HPE = functional.scaled_dot_product_attention(
                q_1HPE, k_1KPE, v_1KPE, is_causal=not is_last, scale=1.0, enable_gqa=True
            )
            mixed_PHE = mixed_1HPE[0].transpose(0, 1)
            x_PD = finish(x_PD, mixed_PHE.flatten(1), weights, self._epsilon)
        self._last_D = self._model.norm(x_PD)[0]

    @torch.no_grad()
    def follow(self, beginnings: Beginnings) -> Tensor:
        """The states from which each token of the thoughts is predicted, (N, D)."""
        num_prompt, length = self._keys[0].shape[2], beginnings.index_RT.shape[1]
        states_1D: Tensor = self._last_D[None]
        if not length:
            return states_1D[beginnings.before_N]
        rope_T1R = rope_table(self._model, num_prompt + length)[num_prompt:]
        rope_F1R, index = rope_T1R[beginnings.depths_F], beginnings.index_RT
        hidden_TT = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask_TT = torch.zeros(hidden_TT.shape).masked_fill_(hidden_TT, -torch.inf)
        mask_QT = mask_TT.repeat_interleave(self.heads // self.key_heads, dim=0)
        x_FD = self._model.embed_tokens(beginnings.ids_F)
        for keys, values, weights in zip(self._keys, self._values, self._layers, strict=True):
            q_FHE, k_FKE, v_FKE = project(x_FD, weights, rope_F1R, self._epsilon, self.key_heads)
            own = k_FKE[index].permute(2, 0, 3, 1), v_FKE[index].permute(2, 0, 1, 3)
            mixed = self._attend(q_FHE[index.flatten()], (keys, values), own, mask_QT)
            mixed_FE = mixed[beginnings.first_F].flatten(1)
            x_FD = finish(x_FD, mixed_FE, weights, self._epsilon)
        return torch.cat((states_1D, self._model.norm(x_FD)))[beginnings.before_N]

    def _attend(
        self,
        q_FHE: Tensor,
        prompt: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        mask_QT: Tensor,
    ) -> Tensor:
        """Attention (F, H, E) to the prompt's keys and to those of the own thought."""
        (k_KEP, v_KPE), (k_KRET, v_KRTE) = prompt, own
        num_prompt, rows, (queries, length) = k_KEP.shape[2], k_KRET.shape[1], mask_QT.shape
        # The queries of heads that share keys are rows of one product: Q = T · G.
        q_KRQE = q_FHE.unflatten(1, (self.key_heads, -1)).transpose(0, 1).flatten(1, 2)
        q_KRQE = q_KRQE.view(self.key_heads, rows, queries, -1)
        mixed_KRQE = torch.empty_like(q_KRQE)
        step = max(1, SCORES // (self.key_heads * queries * (num_prompt + length)))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            q = q_KRQE[:, part]
            of_all = q.flatten(1, 2) @ k_KEP
            of_own = matmul(q, k_KRET[:, part]).add_(mask_QT)
            weights = torch.cat((of_all, of_own.flatten(1, 2)), dim=2).softmax(2)
            of_all, of_own = weights.split((num_prompt, length), dim=2)
            mixed = matmul(of_own.reshape(*q.shape[:3], length), v_KRTE[:, part])
            mixed_KRQE[:, part] = mixed.add_((of_all @ v_KPE).view(q.shape))
        mixed_KFGE = mixed_KRQE.view(self.key_heads, len(q_FHE), -1, self.head_width)
        return mixed_KFGE.transpose(0, 1).flatten(1, 2)
