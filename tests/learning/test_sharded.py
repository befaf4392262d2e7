"""Processes that train together: their gradients, weights and checkpoints are those of one.

Two processes do everything once (`two_processes`), and the tests read what they found.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from ragen.algorithms.batch import Batch, collate
from ragen.config.config import Config
from ragen.config.reading import changed
from ragen.core.errors import NotFiniteError, RagenError
from ragen.engines.local import LocalEngine
from ragen.engines.sharded import Rank
from ragen.learning import exactness
from ragen.learning import ranks as ranks_module
from ragen.learning.ranks import Ranks, _pieces, join, join_here, leave
from ragen.models.loading import load_policy
from ragen.storage.checkpoint import verified_state, write_state
from tests.bandit_model import bandit_model
from tests.learning.recorded import (
    Outcome,
    batch_for,
    collection,
    config_of,
    held_by,
    in_processes,
    outcome,
    outcome_of,
    relative,
)
from tests.shared import once

FLOAT32 = {"gradient": 1e-5, "weight": 1e-3, "score": 1e-4, "norm": 1e-4}
"""Largest differences: of gradients relative to the largest, of weights after some updates in
absolute numbers, of logprobs and values, and of gradient norms, relative."""

BFLOAT16 = {
    **{"gradient": 2e-2, "weight": 1e-2, "critic": 2e-2, "weights": 2e-2},
    **{"score": 0.1, "norm": 2e-2},
}
"""As `FLOAT32`, and of all weights relative to their norm. A process sums its gradients in another
order, and rounds each sum to 8 bits. Where a gradient is nearly 0, that decides its sign, and Adam
moves this one weight by the whole learning rate, which is 1e-2 for a critic: two such updates."""


def assert_weights_agree(
    actual: dict[str, Tensor], expected: dict[str, Tensor], bound: dict[str, float]
) -> None:
    differences = {name: actual[name].float() - weight.float() for name, weight in expected.items()}
    for name, difference in differences.items():
        role = "critic" if name.startswith("critic.") and "critic" in bound else "weight"
        assert difference.abs().max() <= bound[role], name
    if "weights" in bound:
        norm, whole = (
            math.hypot(*(float(each.detach().float().norm()) for each in found))
            for found in (differences.values(), expected.values())
        )
        assert norm <= bound["weights"] * whole


def assert_agree(actual: Outcome, expected: Outcome, bound: dict[str, float]) -> None:
    for field in fields(Batch):
        found, wanted = getattr(actual.batch, field.name), getattr(expected.batch, field.name)
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, atol=bound["score"], rtol=bound["score"])
    assert len(actual.gradients) == len(expected.gradients)
    for found, wanted in zip(actual.gradients, expected.gradients, strict=True):
        assert relative(found, wanted) <= bound["gradient"]
    assert actual.weights.keys() == expected.weights.keys()
    assert_weights_agree(actual.weights, expected.weights, bound)
    for name, norm in expected.norms.items():
        assert actual.norms[name].value == pytest.approx(norm.value, rel=bound["norm"], abs=1e-9)
    torch.testing.assert_close(
        actual.scores_NM, expected.scores_NM, atol=bound["score"], rtol=bound["score"]
    )
    metrics = actual.metrics[0], expected.metrics[0]
    assert set(metrics[0]) == set(metrics[1])
    for name, metric in metrics[1].items():
        found = metrics[0][name]
        assert found.kind == metric.kind
        if name != "update/padding_fraction":  # another split pads otherwise
            assert found.value == pytest.approx(metric.value, rel=bound["norm"], abs=bound["score"])
            assert found.weight == pytest.approx(metric.weight)


def assert_moved(config: Config, expected: Outcome, steps: int) -> None:
    """The weights were trained."""
    start, _ = load_policy(str(bandit_model()), "cpu", config.model.dtype)
    moved = [
        float((expected.weights[name] - weight).detach().abs().max())
        for name, weight in start.named_parameters()
    ]
    assert max(moved) > steps * 1e-4


def compare(config: Config, size: int, steps: int, bound: dict[str, float], **work: int) -> None:
    expected = outcome(config, steps, **work)
    if not config.lora.rank:
        assert_moved(config, expected, steps)
    found = in_processes(size, lambda rank, at: outcome(config, steps, rank, size, at, **work))
    assert_agree(found[0], expected, bound)
    assert all(name.startswith("critic.") for each in found[1:] for name in each.weights)


# Two processes.


def refused(work: Any) -> str:
    try:
        work()
    except (ValueError, RagenError) as error:
        return str(error)
    return ""


def with_critic_and_reference() -> Config:
    """All parts of a learner."""
    return config_of("ppo", loss__kl=0.01)


def everything(rank: int, address: str, folder: Path) -> dict[str, Any]:
    """Learn, write a checkpoint and learn on; refuse what is wrong at each point."""
    config, found = with_critic_and_reference(), dict[str, Any]()
    one = Rank(config, str(bandit_model()), rank, 2, address)
    batch = batch_for(one.learner, config)

    before = [each.full_tensor() for each in one.model.parameters()]  # type: ignore[operator]
    ids_BT = batch.token_ids_BT.clone()
    row = int(one.learner._splits(batch)[1][0][0])  # the second process trains on it
    ids_BT[row, int(batch.mask_BT[row].nonzero()[-1])] += 1
    altered = replace(batch, token_ids_BT=ids_BT)
    for where, liars in (("everywhere", (0, 1)), ("on the way to one", (1,))):
        given = altered if rank in liars else batch
        found[where] = refused(lambda given=given: one.learner.update(given, 0))  # type: ignore[misc]
    after = [each.full_tensor() for each in one.model.parameters()]  # type: ignore[operator]
    found["unchanged"] = all(map(torch.equal, before, after))

    with patch.object(exactness, "fingerprint", wraps=exactness.fingerprint) as counted:
        found["outcome"] = outcome_of(one, batch, 2)
    found["hashes"] = counted.call_count
    state = found["state"] = one.save(folder)
    found["written"] = one.weights()
    lost = state | {"reference": "another"}
    found["another reference"] = refused(lambda: one.load(folder, lost))
    found["later"] = learn_on(one, config)
    one.learner.synced = True  # in truth the weights are not those that sampled
    found["not on-policy"] = refused(lambda: one.learner.update(batch, 6))
    masters = one.learner.masters.trained.values()
    found["dropped"] = all(each.grad is None for each in masters)
    found["held"] = held_by(one)
    one.close()
    return found


def learn_on(one: Any, config: Config) -> dict[str, Tensor]:
    """The weights after two further updates, on values that do not depend on the weights."""
    batch = batch_for(one.learner, config)
    generator = torch.Generator().manual_seed(0)
    random_BT = torch.randn(batch.mask_BT.shape, generator=generator) * batch.mask_BT
    has_values = batch.values_BT is not None
    fixed = replace(
        batch,
        old_logprobs_BT=batch.sampled_logprobs_BT,
        advantages_BT=random_BT,
        returns_BT=random_BT if has_values else None,
        values_BT=0 * random_BT if has_values else None,
    )
    for step in (3, 4):
        one.learner.update(fixed, step)
    return one.weights()


def go_on(
    config: Config, path: Path, state: Any, rank: int = 0, size: int = 1, address: str = ""
) -> dict[str, Tensor]:
    """Load a checkpoint and learn on."""
    one = Rank(config, str(bandit_model()), rank, size, address)
    one.load(path, state)
    one.learner.synced = False  # what is recorded was sampled by the first weights
    weights = learn_on(one, config)
    one.close()
    return weights


def make_pair(folder: Path) -> None:
    folder.mkdir()
    collection()  # before processes are forked, so that all have the same
    found = in_processes(2, lambda rank, address: everything(rank, address, folder))
    assert not any(isinstance(each, str) for each in found), found
    write_state(folder, {})
    torch.save(found, folder.parent / "two-processes.pt")


@cache
def two_processes() -> tuple[Path, Any, Any]:
    """Their checkpoint, and what each of them found; made once for all workers."""
    folder = once("two-processes", make_pair)
    return folder, *torch.load(folder.parent / "two-processes.pt", weights_only=False)


@pytest.mark.slow
def test_two_processes_learn_what_one_does() -> None:
    _, first, second = two_processes()
    expected = outcome(with_critic_and_reference(), 2)
    assert_moved(with_critic_and_reference(), expected, 2)
    assert_agree(first["outcome"], expected, FLOAT32)
    assert all(name.startswith("critic.") for name in second["outcome"].weights)


@pytest.mark.slow
def test_a_changed_token_is_refused_by_all_processes_without_a_change() -> None:
    """Whether all of them have it, or only the one that trains on it."""
    _, first, second = two_processes()
    for where in ("everywhere", "on the way to one"):
        assert "are not those that were sampled" in first[where]
        assert second[where] == first[where]
    assert first["unchanged"] and second["unchanged"]


@pytest.mark.slow
def test_each_process_hashes_its_own_tokens_only() -> None:
    _, first, second = two_processes()
    updates = first["outcome"].metrics
    checked = sum(each["exactness/completions_checked"].value for each in updates)
    assert first["hashes"] + second["hashes"] == checked
    assert min(first["hashes"], second["hashes"]) > 0


@pytest.mark.slow
def test_other_logprobs_at_equal_weights_are_refused_by_all_processes() -> None:
    _, first, second = two_processes()
    assert first["not on-policy"] == second["not on-policy"]
    assert first["not on-policy"].startswith("token ")
    assert first["dropped"] and second["dropped"], "no gradient is left for a later update"


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_in_the_local_engine() -> None:
    folder, first, _ = two_processes()
    names = set(verified_state(folder)["files"])
    assert {"critic.safetensors", "optimizer-0.safetensors"} <= names
    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in first["written"].items())
    alone = go_on(with_critic_and_reference(), folder, first["state"])
    assert_weights_agree(alone, first["later"], {"weight": 1e-5})


@pytest.mark.slow
def test_a_checkpoint_with_another_kl_reference_is_refused_by_all() -> None:
    _, first, second = two_processes()
    assert first["another reference"] == second["another reference"]
    assert "its KL reference is lost" in first["another reference"]


@pytest.mark.slow
def test_adapters_of_two_processes_learn_what_those_of_one_do() -> None:
    compare(config_of("lora"), 2, 3, FLOAT32)


@pytest.mark.slow
def test_updates_in_bfloat16() -> None:
    compare(config_of("ppo", model__dtype="bfloat16"), 2, 4, BFLOAT16)


@pytest.mark.slow
def test_three_processes_with_two_episodes_split_each_layer() -> None:
    """One of them has none; with checkpointing, the layers are split on their own."""
    config = config_of("ppo-shared", model__gradient_checkpointing=True)
    compare(config, 3, 3, FLOAT32, groups=1, members=2)


@pytest.mark.slow
def test_a_checkpoint_of_the_local_engine_goes_on_in_two_processes(tmp_path: Path) -> None:
    config = config_of("ppo")
    engine = LocalEngine(config, str(bandit_model()))
    state = asyncio.run(engine.save(tmp_path))
    write_state(tmp_path, {})
    expected = go_on(config, tmp_path, state)
    found = in_processes(2, lambda rank, at: go_on(config, tmp_path, state, rank, 2, at))
    assert_weights_agree(found[0], expected, {"weight": 1e-5})


# Whole weights in every process.


def learn_whole(config: Config, size: int, steps: int, **work: int) -> list[Any]:
    """The outcome and the trained weights of each of several processes."""
    config = changed(config, {"engine.processes": size})

    def learn(rank: int, address: str) -> tuple[Outcome, dict[str, Tensor]]:
        one = Rank(config, str(bandit_model()), rank, size, address)
        found = outcome_of(one, batch_for(one.learner, config, **work), steps)
        weights = {name: each.clone() for name, each in one.learner.trained_weights()}
        one.close()
        return found, weights

    return in_processes(size, learn)


def assert_whole(
    config: Config, size: int, steps: int, bound: dict[str, float], **work: int
) -> None:
    """Several processes learn what one does, and all hold the same weights bit for bit."""
    expected = outcome(config, steps, **work)
    (first, weights), *others = learn_whole(config, size, steps, **work)
    assert_agree(first, expected, bound)
    for _, found in others:
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_processes_with_whole_weights_learn_what_one_does() -> None:
    assert_whole(config_of("grpo"), 2, 1, FLOAT32 | {"gradient": 1e-6})


@pytest.mark.slow
def test_three_processes_with_whole_weights_of_which_one_has_no_episode() -> None:
    config, bound = config_of("ppo-shared", loss__kl=0.01), FLOAT32 | {"gradient": 1e-6}
    assert_whole(config, 3, 3, bound, groups=1, members=2)


def test_sums_over_processes_are_whatever_fits_into_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small tensors travel together, and one that is larger than a message alone."""
    monkeypatch.setattr(ranks_module, "BUCKET", 4)
    shapes = ((2,), (1, 1), (3, 2), (1,), (2, 2))

    def add_up(rank: int, address: str) -> list[list[float]]:
        ranks = join_here(rank, 2, address)
        tensors = [torch.full(shape, 10.0 * place + rank) for place, shape in enumerate(shapes)]
        ranks.add_up(tensors)
        leave(ranks)
        assert tuple(tuple(each.shape) for each in tensors) == shapes
        return [each.flatten().tolist() for each in tensors]

    numbers = [math.prod(shape) for shape in shapes]
    wanted = [[20.0 * place + 1] * count for place, count in enumerate(numbers)]
    assert in_processes(2, add_up) == [wanted, wanted]


# The split.


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_shares_hold_whole_episodes_with_about_as_many_tokens(shares_prompts: bool) -> None:
    samples, _ = collection()
    generator = torch.Generator().manual_seed(0)
    batch = collate(samples)
    lengths_B = torch.randint(10, 200, (batch.num_rows,), generator=generator)
    batch = replace(batch, lengths_B=lengths_B)
    for size in (2, 3, 5, 40):
        shares = Ranks(0, size).shares(batch, shares_prompts)
        assert torch.equal(torch.cat(shares).sort().values, torch.arange(batch.num_rows))
        owners = [set(batch.episode_B[rows].tolist()) for rows in shares]
        assert sum(map(len, owners)) == len(set(batch.episode_B.tolist()))
        even = float(lengths_B.sum()) / size
        largest = max(float(lengths_B[rows].sum()) for rows in shares)
        assert shares_prompts or largest <= even + float(lengths_B.max())


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_largest_share_of_neighbours_is_as_small_as_possible(drawn: list[Any]) -> None:
    """Of all ways to cut them into three."""
    tokens = [own for own, _ in drawn]
    pairs = zip(pairwise(tokens), drawn[1:], strict=True)
    common = [0, *(min(before, own, shared) for (before, own), (_, shared) in pairs)]

    def largest(cuts: Sequence[int]) -> int:
        bounds = pairwise([0, *cuts, len(tokens)])
        return max(sum(tokens[a:b]) - sum(common[a + 1 : b]) for a, b in bounds)

    pieces = _pieces(tokens, common, 3)
    assert pieces == sorted(pieces) and set(pieces) <= {0, 1, 2}
    every = combinations_with_replacement(range(len(tokens) + 1), 2)
    assert largest([pieces.index(n) if n in pieces else len(tokens) for n in (1, 2)]) == min(
        map(largest, every)
    )


# What one alone refuses.


def test_a_learner_that_does_not_see_the_runs_folder_refuses_to_save(tmp_path: Path) -> None:
    """Otherwise it would write a checkpoint that the driver takes for an empty one."""
    rank = Rank(config_of("grpo"), str(bandit_model()))
    with pytest.raises(RagenError, match="does not see"):
        rank.save(tmp_path / "of another machine" / "step-1")


def test_weights_that_are_not_finite_in_one_part_are_known_as_such_in_all() -> None:
    """The guard goes back from them, and ends a run at other errors."""

    def part(rank: int, address: str) -> str:
        ranks = join(rank, 2, address, 60)

        def work() -> None:
            if rank == 1:
                raise NotFiniteError("the weights w")

        try:
            ranks.together(work)
        except NotFiniteError as error:
            return error.numbers
        finally:
            leave(ranks)
        return "nothing"

    assert in_processes(2, part) == ["the weights w", "the weights w"]
