"""Gradient norms by in-group reward std: where the learning signal comes from.

RAGEN-2 (arXiv:2604.06268) expects of a healthy signal that the task's gradient norm grows with the
reward std of the groups, and that the norms of the regularisers do not. Measuring changes no
weight, no stored gradient, no optimiser and no random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import reward_std
from ragen.core.metrics import Metrics, last
from ragen.core.types import Group
from ragen.engines.engine import Engine

NUM_BUCKETS = 4
"""Quartiles of the in-group reward std, as arXiv:2604.06268 compares them."""


async def gradients_by_std(engine: Engine, batch: Batch, groups: Sequence[Group]) -> Metrics:
    """Gradient norms of task, entropy and KL by quartile of the in-group reward std.

    The engine has the weights that played the groups, which `Batch.group_B` indexes; the batch has
    advantages. For each bucket that holds a row, from 0 for the lowest:
    ``gradient_by_std/<bucket>/<term>_per_token``, ``…_per_sample``, the mean ``reward_std`` of its
    groups, and the number of its ``groups``.
    """
    present = sorted(set(batch.group_B.tolist()))
    stds = [reward_std(groups[index]) for index in present]
    bucket_of = dict(zip(present, std_buckets(stds), strict=True))
    bucket_B = batch.group_B.new_tensor([bucket_of[index] for index in batch.group_B.tolist()])
    metrics = await engine.gradient_norms(batch, bucket_B)
    for bucket in sorted(set(bucket_of.values())):
        inside = [
            std for index, std in zip(present, stds, strict=True) if bucket_of[index] == bucket
        ]
        metrics[f"{bucket}/reward_std"] = last(fmean(inside))
        metrics[f"{bucket}/groups"] = last(len(inside))
    return {f"gradient_by_std/{name}": metric for name, metric in metrics.items()}


def std_buckets(stds: Sequence[float]) -> list[int]:
    """The quartile of each group's reward std, from 0. Equal stds share the lowest quartile.

    Example:
        >>> std_buckets([0.0, 0.0, 0.5, 0.2]), std_buckets([0.5, 0.5])
        ([0, 0, 3, 2], [0, 0])
    """
    edges = np.quantile(stds, np.arange(1, NUM_BUCKETS) / NUM_BUCKETS)
    buckets: list[int] = np.searchsorted(edges, stds, side="left").tolist()
    return buckets
