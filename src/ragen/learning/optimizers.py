"""The optimisers of a model's weights, and their states as tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

WEIGHT_DECAY = 0.01
"""Decay of AdamW, as published (arXiv:2504.20073)."""


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
        chosen.append(Muon(matrices, muon_lr, weight_decay=weight_decay))
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return chosen


def is_matrix(name: str, weight: Tensor) -> bool:
    """True if a weight is a matrix in Muon's sense.

    Embeddings are not: their rows are looked up, not multiplied. Nor are heads: the critic's is one
    row, which Muon would move by the same length at every step.
    """
    return weight.ndim == 2 and not name.endswith(("embed_tokens.weight", "head.weight"))


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
