"""What the database keeps of one step beside its metrics: episodes, trained tokens, thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import scores_of
from ragen.core.types import Episode, Group
from ragen.diagnostics.information import CrossScores
from ragen.training.running import Run, is_due


async def record_step(
    run: Run,
    groups: Sequence[Group],
    kept: Sequence[int],
    episodes: Sequence[Episode],
    batch: Batch | None,
    matrices: Sequence[CrossScores],
) -> None:
    """Write what `config.record` asks for in the step that ended.

    `kept` indexes the `groups` that the filter kept, and `Batch.episode_B` the trained `episodes`.
    Without a `batch`, nothing was trained. `matrices` are the scores of thoughts under prompts.
    """
    step, record, recorder = run.state.step, run.config.record, run.recorder
    if is_due(step, record.episodes_every):
        kept_set = set(kept)
        flags = [index in kept_set for index in range(len(groups))]
        recorder.episodes(step, groups, flags, scores=scores_of(groups, run.config.filter.score))
    if batch is not None and is_due(step, record.tokens_every):
        updated = await run.engine.score(batch, "policy")
        rows = [sample_record(batch, updated, row, episodes) for row in range(batch.num_rows)]
        recorder.samples(step, rows)
    for each in matrices:
        scores, own = each.scores_NM.numpy(), each.own_N
        recorder.cross_scores(step, each.sampling, scores, own, each.thoughts, each.prompts)


def sample_record(
    batch: Batch, updated: Batch, row: int, episodes: Sequence[Episode]
) -> dict[str, Any]:
    """One row of a batch as the recorder stores it.

    `updated` is the same batch, scored after the step's updates.
    """
    assert batch.old_logprobs_BT is not None and updated.old_logprobs_BT is not None
    length = int(batch.lengths_B[row])
    episode = episodes[int(batch.episode_B[row])]
    arrays = {
        "token_ids": batch.token_ids_BT,
        "loss_mask": batch.mask_BT,
        "turn_index": batch.turn_BT,
        "sampled_logprobs": batch.sampled_logprobs_BT,
        "old_logprobs": batch.old_logprobs_BT,
        "ratios": (updated.old_logprobs_BT - batch.old_logprobs_BT).exp(),
        "entropies": updated.entropies_BT,
        "values": batch.values_BT,
        "advantages": batch.advantages_BT,
        "returns": batch.returns_BT,
    }
    stored = {k: v[row, :length].numpy() for k, v in arrays.items() if v is not None}
    return {"group": episode.group, "member": episode.member} | stored
