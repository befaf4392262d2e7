"""Exactness: training uses exactly the tokens that were sampled, and detects any change."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from ragen.algorithms.batch import Batch, collate, minibatches, take
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.types import Group, Sample, fingerprint
from ragen.engines.local import LocalEngine
from ragen.learning.exactness import verify, verify_num_rows, verify_share, with_fingerprints
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import make_setup
from ragen.storage.checkpoint import folders
from ragen.storage.database import DATABASE
from ragen.storage.reader import read_metrics
from ragen.training import collection
from ragen.training.collection import make_batch
from ragen.training.trainer import train
from tests import records
from tests.bandit_model import bandit_model, settings
from tests.tolerance import LOGPROB

# The hash.


def test_fingerprints_depend_on_ids_logprobs_and_their_order() -> None:
    fingerprints = [
        fingerprint(ids, logprobs)
        for ids, logprobs in (
            ((8, 9), (-0.5, -0.25)),
            ((9, 8), (-0.5, -0.25)),
            ((8, 9), (-0.25, -0.5)),
            ((8,), (-0.5,)),
            ((), ()),
        )
    ]
    assert len(set(fingerprints)) == len(fingerprints) and all(
        0 <= value < 2**63 for value in fingerprints
    )
    assert fingerprint(torch.tensor([8, 9]), torch.tensor([-0.5, -0.25])) == fingerprints[0]
    # The next float32 is another logprob; numbers equal in float32 are the same logprob.
    assert fingerprint((8, 9), (-0.5, -0.25000003)) != fingerprints[0]
    assert fingerprint((8, 9), (-0.5, -0.25 - 1e-12)) == fingerprints[0]


# Batches.


@given(records.groups())
def test_an_unchanged_batch_passes_under_any_split(groups: list[Group]) -> None:
    samples, episodes = to_samples(groups)
    batch = with_fingerprints(collate(samples), episodes)
    for part in minibatches(batch, minibatch_episodes=2, epochs=1, seed=0):
        rows = [take(part, torch.tensor([row])) for row in range(part.num_rows)]
        for split in ([part], rows, rows[::-1]):
            counted = {name: each.value for name, each in verify(split).items()}
            in_part = set(part.episode_B.tolist())
            assert counted == {
                "exactness/completions_checked": sum(len(episodes[e].turns) for e in in_part),
                "exactness/tokens_checked": part.num_tokens,
            }


def test_demonstrations_are_not_verified() -> None:
    assert verify([collate(to_samples([records.group(0.0, 1.0)])[0])]) == {}


@given(records.groups(min_episodes=2))
def test_a_share_of_a_batch_is_verified_with_the_masks_of_all_rows(groups: list[Group]) -> None:
    """The loss of its tokens is divided by the number of all tokens, for example."""
    samples, episodes = to_samples(groups)
    batch = with_fingerprints(collate(samples), episodes)
    own = [take(batch, (batch.episode_B == episode).nonzero()[:, 0]) for episode in range(2)]
    assert verify_share(batch, own[:1]) == verify(own[:1])
    assert verify_share(batch, [])["exactness/tokens_checked"].value == 0
    row, column = ((batch.episode_B == 1)[:, None] & batch.mask_BT).nonzero()[-1].tolist()
    mask_BT = batch.mask_BT.clone()
    mask_BT[row, column] = False
    with pytest.raises(RagenError, match="the mask is not true exactly on the tokens of turns"):
        verify_share(replace(batch, mask_BT=mask_BT), own[:1])
    assert verify_share(replace(batch, born_BK=None), own) == {}


def test_a_row_that_no_process_or_more_than_one_trains_on_is_refused() -> None:
    batch = collate(to_samples([records.group(0.0, 1.0, 0.0)])[0])
    verify_num_rows(batch, 3)
    for number in (2, 4):
        with pytest.raises(RagenError, match=f"have {number} rows of a minibatch of 3; no weight"):
            verify_num_rows(batch, number)


def test_a_policy_without_fingerprints_is_refused_with_a_remedy() -> None:
    turn = records.turn()
    turn = replace(turn, completion=replace(turn.completion, fingerprint=None))
    groups = [Group((records.episode(turn),))]
    with pytest.raises(RagenError, match=r"let it set Completion\.fingerprint to"):
        with_fingerprints(collate(to_samples(groups)[0]), groups[0].episodes)


# Mutations, each of which must stop a step.

CORRIDOR = {
    "env.name": f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue",
    "env.max_turns": 3,
    "model.max_length": 256,
}


def corridor(**more: Any) -> Config:
    """A run of one step whose episodes have three turns."""
    return merge("bandit", settings(steps=1, eval__episodes=0, **more) | CORRIDOR)


@cache
def played(window: int) -> tuple[Config, LocalEngine, list[Group]]:
    """An engine that has sampled the episodes of a step: in one row each, or a row per turn."""
    config = corridor(prompt__window=window)
    engine = LocalEngine(config, str(bandit_model()))
    with closing(make_setup(config, engine.chat)) as setup:
        path = (0, "train", 0)
        groups = asyncio.run(run_groups(engine.policy, setup, range(2), 4, path))
    return config, engine, list(groups)


Parts = Callable[[list[Batch]], list[Batch]]
Samples = Callable[[list[Sample]], list[Sample]]


def assert_refused(
    window: int,
    words: str,
    samples: Samples = lambda samples: samples,
    parts: Parts = lambda parts: parts,
    minibatch_episodes: int = 4,
) -> None:
    """A step whose samples or minibatches are changed on the way ends without an update."""
    config, engine, groups = played(window)
    update = config.update.model_copy(update={"minibatch_episodes": minibatch_episodes})
    before = [weight.clone() for weight in engine.model.parameters()]

    async def step() -> None:
        rows, episodes = to_samples(groups)
        batch = await make_batch(engine, samples(list(rows)), episodes, config)
        for part in collection.split_batch(batch, update, 0):
            await engine.update(part, 0)

    with pytest.MonkeyPatch.context() as patch:
        split = collection.minibatches
        patch.setattr(collection, "minibatches", lambda *how: parts(split(*how)))
        with pytest.raises(RagenError, match=words) as caught:
            asyncio.run(step())
    assert str(caught.value).startswith("stopped before an update: ")
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, before, engine.model.parameters()))


def changed(sample: Sample, field: str, at: int, value: Any) -> Sample:
    values = list(getattr(sample, field))
    values[at] = value
    return replace(sample, **{field: tuple(values)})


def shifted(sample: Sample, *names: str) -> Sample:
    """The sample with the named fields shifted right by one token."""
    values = {name: getattr(sample, name) for name in names}
    return replace(sample, **{name: (each[0], *each[:-1]) for name, each in values.items()})


def first_end(sample: Sample) -> int:
    return sample.turn_ends.index(True)


def swap_an_id(samples: list[Sample]) -> list[Sample]:
    at = first_end(samples[0])
    return [changed(samples[0], "token_ids", at, samples[0].token_ids[at] ^ 1), *samples[1:]]


def swap_two_ids(samples: list[Sample]) -> list[Sample]:
    ids, at = samples[0].token_ids, first_end(samples[0])
    there = next(i for i in range(at) if samples[0].loss_mask[i] and ids[i] != ids[at])
    swapped = changed(samples[0], "token_ids", at, ids[there])
    return [changed(swapped, "token_ids", there, ids[at]), *samples[1:]]


def shift_the_mask(samples: list[Sample]) -> list[Sample]:
    return [shifted(samples[0], "loss_mask"), *samples[1:]]


def shift_all_but_the_ids(samples: list[Sample]) -> list[Sample]:
    names = ("loss_mask", "sampled_logprobs", "turn_index", "turn_ends")
    row = replace(samples[0], token_ids=(*samples[0].token_ids, 0))
    longer = replace(row, **{name: (*getattr(row, name), 0) for name in names})
    return [shifted(longer, *names), *samples[1:]]


def move_a_turn_end(samples: list[Sample]) -> list[Sample]:
    at = first_end(samples[0])
    moved = changed(changed(samples[0], "turn_ends", at, False), "turn_ends", at - 1, True)
    return [moved, *samples[1:]]


def forget_a_turn_end(samples: list[Sample]) -> list[Sample]:
    return [changed(samples[0], "turn_ends", first_end(samples[0]), False), *samples[1:]]


def alter_a_logprob(samples: list[Sample]) -> list[Sample]:
    at = first_end(samples[0])
    altered = samples[0].sampled_logprobs[at] - 1e-6
    return [changed(samples[0], "sampled_logprobs", at, altered), *samples[1:]]


def lose_a_row(samples: list[Sample]) -> list[Sample]:
    return samples[1:]


def train_a_row_twice(samples: list[Sample]) -> list[Sample]:
    return [*samples, samples[-1]]


def swap_two_episodes(samples: list[Sample]) -> list[Sample]:
    a, b = samples[0], samples[-1]
    return [replace(a, episode=b.episode), *samples[1:-1], replace(b, episode=a.episode)]


def train_on_a_prompt_token(samples: list[Sample]) -> list[Sample]:
    """Mark the token before the first turn as if it had been sampled in its own turn."""
    at = samples[0].loss_mask.index(True) - 2
    row = changed(changed(samples[0], "loss_mask", at, True), "turn_index", at, 7)
    return [changed(row, "turn_ends", at, True), *samples[1:]]


MUTATIONS: dict[Callable[[list[Sample]], list[Sample]], tuple[str, str]] = {
    swap_an_id: ("are not those that were sampled", "the same"),
    swap_two_ids: ("are not those that were sampled", "the same"),
    shift_the_mask: ("the mask is not true exactly on the tokens of turns", "the same"),
    shift_all_but_the_ids: ("are not those that were sampled", "the same"),
    move_a_turn_end: ("a turn's end is not on its last sampled token", "the same"),
    forget_a_turn_end: ("a turn's end is not on its last sampled token", "the same"),
    alter_a_logprob: ("are not those that were sampled", "the same"),
    lose_a_row: (
        "the batch does not hold each episode of the step",
        "was sampled and would not be trained",
    ),
    train_a_row_twice: ("would be trained twice", "the same"),
    swap_two_episodes: ("are not those that were sampled", "would be trained twice"),
    train_on_a_prompt_token: ("would be trained and was never sampled", "the same"),
}
"""Per mutation, the error of a run with all turns in one row and of one with a row per turn."""


@pytest.mark.parametrize("window", [0, 1])
def test_a_mutated_sample_stops_a_step(window: int) -> None:
    for mutation, (one_row, row_per_turn) in MUTATIONS.items():
        words = one_row if window == 0 or row_per_turn == "the same" else row_per_turn
        assert_refused(window, words, mutation)


def weight_a_prompt_token(batch: Batch) -> Batch:
    weight_BT = batch.weight_BT.clone()
    weight_BT[0, 1] = 1
    return replace(batch, weight_BT=weight_BT)


def lose_a_column(batch: Batch) -> Batch:
    return replace(batch, sampled_logprobs_BT=batch.sampled_logprobs_BT[:, :-1])


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        (
            lambda parts: [weight_a_prompt_token(part) for part in parts],
            "the loss does not cover exactly the sampled tokens",
        ),
        (
            lambda parts: [lose_a_column(part) for part in parts],
            "sampled_logprobs_BT and the mask differ in length",
        ),
        (
            lambda parts: [take(part, torch.arange(1, part.num_rows)) for part in parts],
            "was sampled and would not be trained",
        ),
        (lambda parts: parts[1:], "was sampled and would not be trained"),
        (lambda parts: [*parts, parts[0]], "would be trained twice in an epoch"),
    ],
    ids=["weight", "column", "lost row", "lost minibatch", "repeated minibatch"],
)
def test_a_mutated_lost_or_repeated_minibatch_stops_a_step(mutation: Parts, words: str) -> None:
    assert_refused(1, words, parts=mutation, minibatch_episodes=1)


def test_a_batch_without_fingerprints_is_not_trained_on() -> None:
    config, engine, groups = played(0)
    batch = asyncio.run(make_batch(engine, *to_samples(groups), config))
    with pytest.raises(AssertionError, match="trains on sampled tokens"):
        asyncio.run(engine.update(replace(batch, born_BK=None), 0))


def test_a_retokenised_reply_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most common fault in other systems: text that is encoded again gives other tokens."""

    async def retokenised(*arguments: Any, **named: Any) -> list[Group]:
        (first, *others) = await run_groups(*arguments, **named)
        episode = first.episodes[0]
        turn = episode.turns[0]
        ids = turn.completion.token_ids or ()
        completion = replace(turn.completion, token_ids=(ids[0] ^ 1, *ids[1:]))
        episode = replace(episode, turns=(replace(turn, completion=completion), *episode.turns[1:]))
        return [Group((episode, *first.episodes[1:])), *others]

    monkeypatch.setattr(collection, "run_groups", retokenised)
    run = tmp_path / "run"
    with pytest.raises(RagenError, match="turn 1 of the step's episode 0 are not those"):
        train(corridor(), run)
    with closing(sqlite3.connect(run / DATABASE)) as connection:
        assert connection.execute("SELECT max(step) FROM metrics").fetchone() == (0,)
    assert [path.name for path in folders(run)] == ["step-0"]


def test_every_run_verifies_all_completions_and_tokens(bandit_run: Path, tmp_path: Path) -> None:
    """All that are trained on: with one turn, and with three of which a prompt shows two."""
    checked = read_metrics(bandit_run)["exactness/completions_checked"]
    with closing(sqlite3.connect(bandit_run / DATABASE)) as connection:
        trained = dict(connection.execute("SELECT step, count(*) FROM samples GROUP BY step"))
    assert checked == trained and min(checked.values()) > 0

    more = {"algorithm": "starpo/ppo", "prompt__window": 2, "update__epochs": 2}
    train(corridor(**more), tmp_path / "run")
    metrics = {name: series[1] for name, series in read_metrics(tmp_path / "run").items()}
    # 2 groups × 4 episodes × 3 turns, and all of their tokens, in each of 2 epochs.
    assert metrics["exactness/completions_checked"] == 2 * 2 * 4 * 3
    assert metrics["exactness/tokens_checked"] == 2 * metrics["tokens/sampled"]
    assert metrics["mismatch/max_abs"] < LOGPROB
