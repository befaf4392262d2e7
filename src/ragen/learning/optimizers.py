"""The optimisers of a model's weights, and their states as tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from typing_extensions import override

WEIGHT_DECAY = 0.01
"""Decay of AdamW, as published (arXiv:2504.20073)."""

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
"""Momentum, coefficients and steps of Muon, as published (kellerjordan.github.io/posts/muon)."""


class Muon(Optimizer):
    """Momentum whose direction is made orthogonal, for weights that are matrices.

    With gradient g, momentum μ and weight decay λ:
    ``m ← μ m + (1 − μ) g``,
    ``u = μ m + (1 − μ) g``,
    ``w ← (1 − lr λ) w − lr √max(1, rows / columns) orthogonal(u)``.

    The rule is that of `torch.optim.Muon`. It is computed in the precision of the weights, since
    bfloat16 is slow on many processors, and matrices of equal shape are multiplied together.
    """

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})

    @override
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the weights that have gradients."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    alike[weight.shape].append(weight)
            for (rows, columns), weights in alike.items():
                directions = orthogonal(torch.stack([self._update(weight) for weight in weights]))
                length = group["lr"] * math.sqrt(max(1, rows / columns))
                for weight, direction in zip(weights, directions, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(direction, alpha=-length)

    def _update(self, weight: Tensor) -> Tensor:
        """The gradient after Nesterov's momentum."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"]
        return gradient.lerp(momentum.lerp_(gradient, 1 - MOMENTUM), MOMENTUM)


def orthogonal(matrices: Tensor) -> Tensor:
    """The matrices with their singular values moved towards 1; shape (matrices, rows, columns).

    Newton–Schulz steps ``X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X`` from a norm of 1. Singular values
    that begin above 0.01 end between 0.6 and 1.3.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT
    a, b, c = NEWTON_SCHULZ
    norms: Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)
    found = matrices / norms.clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.mT
        found = torch.baddbmm(
            found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a
        )
    return found


def optimizers(
    trained: Mapping[str, nn.Parameter],
    lr: float,
    beta2: float,
    muon_lr: float = 0.0,
    weight_decay: float = WEIGHT_DECAY,
) -> list[Optimizer]:
    """AdamW for everything, or, with `muon_lr`, Muon for matrices and AdamW for the rest.

    Each parameter group keeps its learning rate as ``full_lr``, because a schedule scales ``lr``.
    """
    matrices = [p for name, p in trained.items() if muon_lr and is_matrix(name, p)]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in trained.values() if id(p) not in matrix_ids]
    chosen: list[Optimizer] = [
        AdamW(others, lr, (0.9, beta2), weight_decay=weight_decay, fused=True)
    ]
    if matrices:
        chosen.append(Muon(matrices, muon_lr, weight_decay))
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return chosen


LOOKED_UP = "embed_tokens.weight", "head.weight", "position_embedding.weight", "pos_embed.weight"
"""Ends of the names of weights with two axes that are no matrices: embeddings and heads."""


def is_matrix(name: str, weight: Tensor) -> bool:
    """True if a weight is a matrix in Muon's sense.

    Embeddings are not, of words or of positions: their rows are looked up, not multiplied. Nor are
    heads: the critic's is one row, which Muon would move by the same length at every step.
    """
    return weight.ndim == 2 and not name.endswith(LOOKED_UP)


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """An optimiser's state under flat names: ``"3.exp_avg"`` is `exp_avg` of its parameter 3."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned into an optimiser."""
    state: dict[int, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        index, name = path.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def weight_of_state(optimizer: Optimizer, path: str) -> Tensor | None:
    """The weight that a name of `optimizer_tensors` belongs to, ``None`` if it names a number."""
    index, _, name = path.partition(".")
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return None if name == "step" else weights[int(index)]
