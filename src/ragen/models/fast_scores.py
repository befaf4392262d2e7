"""States of many thoughts after one prompt, for a plain float32 Qwen2; without gradients.

The prompt's keys and values exist once. All queries of all thoughts attend to them in one product;
the products with each thought's own keys are small, and the softmax is over both.

Axes: **P** tokens of the prompt, **R** thoughts, **T** tokens of the longest, **F** flat tokens of
all thoughts, **H** heads, **K** key–value heads, **G** heads of each of these, **D** width, **E**
width of a head.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ragen.models.fast_decoder import fused_layers
from ragen.models.fast_qwen2 import as_complex, chunks, inverse_rms, rope_table
from ragen.models.key_store import SCORES, matmul


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
            q_PHE, k_PKE, v_PKE = self._project(x_PD, weights, rope_P1R)
            self._keys[layer] = k_PKE.permute(1, 2, 0).contiguous()  # (K, E, P)
            self._values[layer] = v_PKE.transpose(0, 1).contiguous()  # (K, P, E)
            is_last = layer == len(self._layers) - 1
            if is_last:
                q_PHE, x_PD = q_PHE[-1:], x_PD[-1:]
            q_1HPE, k_1KPE, v_1KPE = (x.transpose(0, 1)[None] for x in (q_PHE, k_PKE, v_PKE))
            mixed_1HPE = functional.scaled_dot_product_attention(
                q_1HPE, k_1KPE, v_1KPE, is_causal=not is_last, scale=1.0, enable_gqa=True
            )
            x_PD = self._finish(x_PD, mixed_1HPE[0].transpose(0, 1), weights)
        self._last_D = self._normed(x_PD)[0]

    @torch.no_grad()
    def follow(self, thoughts: Sequence[Sequence[int]]) -> Tensor:
        """The states from which each token of the thoughts is predicted, thought by thought.

        Each thought follows the prompt and has at least one token. The states are (N, D).
        """
        device = self._model.device
        rows = [torch.tensor(thought, device=device) for thought in thoughts]
        ids_RT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths_R = torch.tensor([len(thought) for thought in thoughts], device=device)
        is_real_RT = torch.arange(ids_RT.shape[1], device=device) < lengths_R[:, None]
        # The state before each token: the prompt's last one, then those of the thought's tokens.
        states_RTD = self._last_D.expand(*ids_RT.shape, -1).clone()
        if ids_RT.shape[1] > 1:
            is_followed_RT = is_real_RT[:, 1:]
            states_RTD[:, 1:][is_followed_RT] = self._read_after(ids_RT[:, :-1], is_followed_RT)
        return states_RTD[is_real_RT]

    def _read_after(self, ids_RT: Tensor, is_real_RT: Tensor) -> Tensor:
        """States (F, D) of the real tokens (R, T) of rows that are padded on the right."""
        num_prompt = self._keys[0].shape[2]
        rope_T1R = rope_table(self._model, num_prompt + ids_RT.shape[1])[num_prompt:]
        columns_F = is_real_RT.nonzero()[:, 1]
        ends = ids_RT.shape[1], ids_RT.shape[1]
        mask_TT = torch.full(ends, -torch.inf, device=ids_RT.device).triu(1)
        mask_QT = mask_TT.repeat_interleave(self.heads // self.key_heads, dim=0)
        x_FD = self._model.embed_tokens(ids_RT[is_real_RT])
        for keys, values, weights in zip(self._keys, self._values, self._layers, strict=True):
            q_FHE, k_FKE, v_FKE = self._project(x_FD, weights, rope_T1R[columns_F])
            q, k, v = (self._padded(each, is_real_RT) for each in (q_FHE, k_FKE, v_FKE))
            mixed_RTHE = self._attend(q, k, v, (keys, values), mask_QT)
            x_FD = self._finish(x_FD, mixed_RTHE[is_real_RT], weights)
        return self._normed(x_FD)

    def _attend(
        self,
        q_RTHE: Tensor,
        k_RTKE: Tensor,
        v_RTKE: Tensor,
        prompt: tuple[Tensor, Tensor],
        mask_QT: Tensor,
    ) -> Tensor:
        """Attention (R, T, H, E) to the prompt's keys and to the thought's own earlier ones."""
        k_KEP, v_KPE = prompt
        (rows, length), num_prompt = q_RTHE.shape[:2], k_KEP.shape[2]
        # The queries of heads that share keys are rows of one product: Q = T · G.
        q_RKQE = q_RTHE.unflatten(2, (self.key_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        k_RKET, v_RKTE = k_RTKE.permute(0, 2, 3, 1), v_RTKE.transpose(1, 2)
        mixed_RKQE = torch.empty_like(q_RKQE)
        step = max(1, SCORES // (self.heads * length * (num_prompt + length)))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            q = q_RKQE[part]
            of_all = q.transpose(0, 1).flatten(1, 2) @ k_KEP  # (K, R · Q, P)
            own = matmul(q, k_RKET[part]).add_(mask_QT).transpose(0, 1).flatten(1, 2)
            weights = torch.cat((of_all, own), dim=2).softmax(2)
            of_all, own = weights.split((num_prompt, length), dim=2)
            mixed = (of_all @ v_KPE).unflatten(1, (len(q), -1)).transpose(0, 1)
            own = own.unflatten(1, (len(q), -1)).transpose(0, 1).contiguous()
            mixed_RKQE[part] = mixed + matmul(own, v_RKTE[part])
        mixed_RTHE: Tensor = mixed_RKQE.unflatten(2, (length, -1)).permute(0, 2, 1, 3, 4)
        return mixed_RTHE.flatten(2, 3)

    def _project(
        self, x_FD: Tensor, weights: Sequence[Tensor], rope_F1R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, already scaled, keys and values."""
        qkv, bias, *_ = weights
        normed_FD = x_FD * inverse_rms(x_FD, self._epsilon)
        qkv_FHE = torch.addmm(bias, normed_FD, qkv).unflatten(1, (-1, self.head_width))
        as_complex(qkv_FHE[:, : self.heads + self.key_heads]).mul_(rope_F1R)
        q_FHE, k_FKE, v_FKE = qkv_FHE.split((self.heads, self.key_heads, self.key_heads), dim=1)
        return q_FHE, k_FKE, v_FKE

    def _finish(self, x_FD: Tensor, mixed_FHE: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The rest of a layer after attention."""
        _, _, mix, gate_up, down = weights
        x_FD = torch.addmm(x_FD, mixed_FHE.flatten(1), mix)
        for part in chunks(x_FD):
            x = x_FD[part]
            gate, up = ((x * inverse_rms(x, self._epsilon)) @ gate_up).chunk(2, dim=1)
            x.addmm_(functional.silu(gate).mul_(up), down)
        return x_FD

    def _normed(self, x_FD: Tensor) -> Tensor:
        normed_FD: Tensor = self._model.norm(x_FD)
        return normed_FD

    @staticmethod
    def _padded(x_FHE: Tensor, is_real_RT: Tensor) -> Tensor:
        if bool(is_real_RT.all()):
            return x_FHE.reshape(*is_real_RT.shape, *x_FHE.shape[1:])
        padded_RTHE = x_FHE.new_zeros(*is_real_RT.shape, *x_FHE.shape[1:])
        padded_RTHE[is_real_RT] = x_FHE
        return padded_RTHE
