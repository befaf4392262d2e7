"""Batches: fields by row and by episode, and the split of a collection."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from records import episode, samples, turn

from ragen.algorithms.batch import (
    collate,
    episode_index,
    flatten,
    minibatches,
    row_splits,
    scatter_to_rows,
    take,
    to_episodes,
)
from ragen.algorithms.samples import to_samples
from ragen.core.types import Group, Sample


def test_collate_pads_on_the_right() -> None:
    batch = collate(to_samples([Group((episode(turn()), episode(turn(sampled=(7,)))))])[0])
    assert batch.token_ids_BT.tolist() == [[1, 2, 7, 8], [1, 2, 7, 0]]
    assert batch.mask_BT.tolist() == [[False, False, True, True], [False, False, True, False]]
    assert batch.turn_BT.tolist() == [[-1, -1, 0, 0], [-1, -1, 0, -1]]
    assert batch.sampled_logprobs_BT.tolist() == [[0, 0, -0.5, -0.5], [0, 0, -0.5, 0]]
    assert batch.lengths_B.tolist() == [4, 3]
    assert (batch.num_rows, batch.num_tokens) == (2, 3)


@given(samples(), st.floats(0, 1), st.randoms(use_true_random=False))
def test_each_sampled_token_has_weight_one_and_one_place_by_row_and_by_episode(
    rows: list[Sample], context: float, random: Random
) -> None:
    batch = collate(rows, context_weight=context)
    assert torch.all(batch.weight_BT[batch.mask_BT] == 1)
    assert torch.all(batch.weight_BT[:, 0] == 0)
    beyond_BT = torch.arange(batch.mask_BT.shape[1]) >= batch.lengths_B[:, None]
    assert torch.all(batch.weight_BT[beyond_BT] == 0)

    # By episode, in the order of time, and back.
    index = episode_index(batch)
    ids_ES = to_episodes(batch.token_ids_BT, index)
    assert torch.equal(scatter_to_rows(ids_ES, index), batch.token_ids_BT * batch.mask_BT)
    assert index.mask_ES.sum() == batch.mask_BT.sum()
    for e, number in enumerate(index.episode_E.tolist()):
        own = [row for row in rows if row.episode == number]
        turns = [t for row in own for t in row.turn_index if t >= 0]
        assert ids_ES[e][index.mask_ES[e]].tolist() == [i for row in own for i in sampled(row)]
        assert index.turn_ES[e][index.mask_ES[e]].tolist() == turns == sorted(turns)
        assert index.turn_ends_ES[e].sum() == len(set(turns))
        assert index.group_E[e] == own[0].group

    # Whatever the order of the rows.
    other = collate(random.sample(rows, len(rows)))
    other_index = episode_index(other)
    assert torch.equal(ids_ES, to_episodes(other.token_ids_BT, other_index))
    assert torch.equal(index.turn_ES, other_index.turn_ES)

    # In a flat list, row by row.
    plain = collate(rows)
    tokens = flatten(replace(plain, values_BT=plain.token_ids_BT * 2.0))
    expected = [(i, row.episode) for row in rows for i in sampled(row)]
    pairs = zip(tokens.token_ids_N.tolist(), tokens.episode_N.tolist(), strict=True)
    assert list(pairs) == expected and tokens.advantages_N is None
    assert tokens.values_N is not None
    assert torch.equal(tokens.values_N, tokens.token_ids_N * 2.0)


def sampled(row: Sample) -> list[int]:
    return [i for i, on in zip(row.token_ids, row.loss_mask, strict=True) if on]


def test_an_untrained_completion_gets_no_context_weight() -> None:
    off, on = False, True
    row = Sample(
        (1, 5, 2, 8), (off, off, off, on), (0.0,) * 4, (-1, 0, -1, 1), (off, off, off, on), 0, 0
    )
    assert collate([row], context_weight=0.5).weight_BT.tolist() == [[0, 0, 0.5, 1]]


def test_take_cuts_to_the_longest_row_and_keeps_every_field() -> None:
    batch = collate(to_samples([Group((episode(turn()), episode(turn(sampled=(7,)))))])[0])
    batch = replace(batch, values_BT=batch.token_ids_BT.float())
    part = take(batch, torch.tensor([1]))
    assert part.values_BT is not None and part.values_BT.tolist() == [[1, 2, 7]]
    assert part.episode_B.tolist() == [1] and part.advantages_BT is None


@given(samples(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_each_episode_is_in_one_minibatch_per_epoch(
    rows: list[Sample], minibatch_episodes: int, epochs: int, seed: int
) -> None:
    batch = collate(rows)
    parts = minibatches(batch, minibatch_episodes, epochs, seed)
    num_episodes = len({row.episode for row in rows})
    assert len(parts) == epochs * max(1, round(num_episodes / minibatch_episodes))
    per_epoch = len(parts) // epochs
    for start in range(0, len(parts), per_epoch):
        epoch = parts[start : start + per_epoch]
        seen = Counter(row for part in epoch for row in _rows(part))
        assert seen == Counter(_rows(batch))
        sets = [set(part.episode_B.tolist()) for part in epoch]
        assert sum(map(len, sets)) == num_episodes
        assert max(map(len, sets)) - min(map(len, sets)) <= 1


def test_minibatches_are_determined_by_their_seed() -> None:
    batch = collate(to_samples([Group(tuple(episode(turn()) for _ in range(32)))])[0])
    torch.manual_seed(1)
    one = [part.episode_B.tolist() for part in minibatches(batch, 8, 2, seed=5)]
    torch.manual_seed(2)
    assert one == [part.episode_B.tolist() for part in minibatches(batch, 8, 2, seed=5)]
    assert one != [part.episode_B.tolist() for part in minibatches(batch, 8, 2, seed=6)]
    assert one[:4] != one[4:]


@given(samples(), st.integers(1, 40), st.booleans(), st.booleans())
def test_microbatches_hold_every_row_once_within_the_limit(
    rows: list[Sample], max_tokens: int, by_group: bool, whole_episodes: bool
) -> None:
    batch = collate(rows)
    splits = row_splits(batch, max_tokens, by_group, whole_episodes)
    if by_group:
        groups = batch.group_B[torch.cat(splits)].tolist()
        assert groups == sorted(groups)
    assert sorted(torch.cat(splits).tolist()) == list(range(len(rows)))
    for rows_R in splits:
        part = take(batch, rows_R)
        alone = len(set(part.episode_B.tolist())) == 1 if whole_episodes else part.num_rows == 1
        assert part.token_ids_BT.numel() <= max_tokens or alone
        assert part.token_ids_BT.shape[1] == part.lengths_B.max()
    if whole_episodes:
        episodes = [set(batch.episode_B[rows_R].tolist()) for rows_R in splits]
        assert sum(map(len, episodes)) == len(set().union(*episodes)), "no episode is split"


def _rows(batch: object) -> list[tuple[int, ...]]:
    ids, lengths = batch.token_ids_BT, batch.lengths_B  # type: ignore[attr-defined]
    episodes = batch.episode_B.tolist()  # type: ignore[attr-defined]
    return [
        (e, *row[:n].tolist()) for e, row, n in zip(episodes, ids, lengths.tolist(), strict=True)
    ]
