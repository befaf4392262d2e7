"""Looking closer than the signals: what thoughts tell, and where the gradients come from.

Both read the policy as it is and change nothing: no weight, no stored gradient, no optimiser, no
random generator. A run with them is the run without them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import reward_std
from ragen.core.metrics import Metrics, last, total
from ragen.core.seeding import derive
from ragen.core.types import Group
from ragen.diagnostics.information import CrossScores, draw, measure
from ragen.diagnostics.regimes import SAMPLINGS
from ragen.diagnostics.signals import std_buckets
from ragen.engines.engine import Engine


async def information(
    engine: Engine, groups: Sequence[Group], count: int, path: tuple[int, int]
) -> tuple[Metrics, list[CrossScores]]:
    """What the groups' thoughts tell of their prompts, as ``information/<sampling>/…``.

    Args:
        engine: With the weights that the groups were played with.
        groups: All of a step's groups.
        count: Thoughts that are scored at most.
        path: The run's seed and the step, from which the choice of the thoughts follows.

    Returns:
        ``left_out`` (turns without a valid thought) and, where there are thoughts, the fields of
        `ragen.diagnostics.information.Information` and the regime, for each of `SAMPLINGS`; and
        the scores that they were read from.
    """
    metrics: Metrics = {}
    matrices: list[CrossScores] = []
    seed, step = path
    for sampling in SAMPLINGS:
        drawn = draw(groups, sampling, count, derive(seed, "information", step, sampling))
        metrics[f"information/{sampling}/left_out"] = total(drawn.left_out)
        if drawn.thoughts:
            scores = await engine.cross_scores(drawn.prompts, drawn.thoughts)
            scores_NM = scores[list(drawn.thought_N)]
            lengths = [len(drawn.thoughts[index]) for index in drawn.thought_N]
            found = measure(scores_NM, drawn.prompt_N, lengths)
            metrics |= found.metrics(f"information/{sampling}")
            texts = tuple(drawn.texts[index] for index in drawn.thought_N)
            matrices.append(
                CrossScores(sampling, scores_NM, drawn.prompt_N, texts, drawn.observations)
            )
    return metrics, matrices


async def gradients_by_std(engine: Engine, batch: Batch, groups: Sequence[Group]) -> Metrics:
    """Norms of the gradients of task, entropy and KL by quartile of the in-group reward std.

    Expected of a healthy signal (arXiv:2604.06268): the task's norm grows with the std, those of
    the regularisers are flat.

    Args:
        engine: With the weights that the groups were played with.
        batch: The groups' tokens, credited.
        groups: What `Batch.group_B` indexes.

    Returns:
        For each bucket that holds a row, ``gradient_by_std/<bucket>/<term>_per_token``,
        ``…_per_sample``, and the mean ``reward_std`` of its ``groups``. Bucket 0 is the lowest.
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
