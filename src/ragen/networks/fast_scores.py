"""States of many thoughts after one prompt, for a plain float32 Qwen2; without gradients.

The prompt's keys and values exist once, and so does each beginning that thoughts share. All queries
attend to the prompt in one product, to what they continue in a second, and softmax is over both.

Axes: **P** tokens of the prompt, **F** beginnings of thoughts, **U** blocks of **B** beginnings,
**W** those that a block sees (`beginnings`), **H** heads, **K** key–value heads, **G** heads of
each of these, **Q** queries of a block, **D** width, **E** width of a head.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ragen.networks.beginnings import Beginnings
from ragen.networks.fast_decoder import finish, fused_layers, project
from ragen.networks.fast_qwen2 import rope_table
from ragen.networks.key_store import SCORES, matmul
from ragen.networks.pictures import Features, embedded


class PrefixReader:
    """Reads prompts, and thoughts that follow the last one, with copies of a Qwen2's weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.get_decoder()
        attention = self._model.layers[0].self_attn
        self.head_width = attention.head_dim
        self.heads = attention.q_proj.out_features // attention.head_dim
        self.key_heads = attention.k_proj.out_features // attention.head_dim
        self._epsilon = self._model.config.rms_norm_eps
        self._layers = fused_layers(model)
        self._keys = [torch.empty(0)] * len(self._layers)
        self._values = [torch.empty(0)] * len(self._layers)

    @torch.no_grad()
    def read(self, prompt: Sequence[int], seen: Features | None = None) -> None:
        """Keep a prompt's keys and values, and its last state."""
        device = self._model.device
        rope_P1R = rope_table(self._model, len(prompt))
        x_PD = embedded(self._model.embed_tokens, torch.tensor(prompt, device=device), seen)
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
        """The states after the prompt alone and after each beginning behind it, (1 + F, D)."""
        num_prompt, depths_F = self._keys[0].shape[2], beginnings.depths_F
        states_1D: Tensor = self._last_D[None]
        if not len(depths_F):
            return states_1D
        longest = num_prompt + int(depths_F.max()) + 1
        rope_F1R = rope_table(self._model, longest)[num_prompt + depths_F]
        mask_UQW = torch.zeros(beginnings.hidden_UBW.shape)
        mask_UQW.masked_fill_(beginnings.hidden_UBW, -torch.inf)
        mask_UQW = mask_UQW.repeat_interleave(self.heads // self.key_heads, dim=1)
        x_FD = self._model.embed_tokens(beginnings.ids_F)
        for keys, values, weights in zip(self._keys, self._values, self._layers, strict=True):
            q_FHE, k_FKE, v_FKE = project(x_FD, weights, rope_F1R, self._epsilon, self.key_heads)
            k_UWKE, v_UWKE = k_FKE[beginnings.seen_UW], v_FKE[beginnings.seen_UW]
            own = k_UWKE.permute(2, 0, 3, 1), v_UWKE.permute(2, 0, 1, 3)
            mixed_FHE = self._attend(q_FHE, (keys, values), own, mask_UQW)
            x_FD = finish(x_FD, mixed_FHE.flatten(1), weights, self._epsilon)
        return torch.cat((states_1D, self._model.norm(x_FD)))

    def _attend(
        self,
        q_FHE: Tensor,
        prompt: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        mask_UQW: Tensor,
    ) -> Tensor:
        """Attention (F, H, E) to the prompt's keys and to those that each block sees."""
        (k_KEP, v_KPE), (k_KUEW, v_KUWE) = prompt, own
        num_prompt, (blocks, queries, seen) = k_KEP.shape[2], mask_UQW.shape
        # The queries of heads that share keys are rows of one product: Q = B · G.
        q_KUQE = q_FHE.unflatten(1, (self.key_heads, -1)).transpose(0, 1).flatten(1, 2)
        q_KUQE = q_KUQE.view(self.key_heads, blocks, queries, -1)
        mixed_KUQE = torch.empty_like(q_KUQE)
        step = max(1, SCORES // (self.key_heads * queries * (num_prompt + seen)))
        for start in range(0, blocks, step):
            part = slice(start, start + step)
            q = q_KUQE[:, part]
            of_all = q.flatten(1, 2) @ k_KEP
            of_own = matmul(q, k_KUEW[:, part]).add_(mask_UQW[part])
            weights = torch.cat((of_all, of_own.flatten(1, 2)), dim=2).softmax(2)
            of_all, of_own = weights.split((num_prompt, seen), dim=2)
            mixed = matmul(of_own.reshape(*q.shape[:3], seen), v_KUWE[:, part])
            mixed_KUQE[:, part] = mixed.add_((of_all @ v_KPE).view(q.shape))
        mixed_KFGE = mixed_KUQE.view(self.key_heads, len(q_FHE), -1, self.head_width)
        return mixed_KFGE.transpose(0, 1).flatten(1, 2)
