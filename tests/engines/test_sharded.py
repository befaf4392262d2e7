"""Processes that train together: their gradients, weights and checkpoints are those of one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
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
from ragen.config.reading import resolve
from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.types import Sample
from ragen.engines import exactness
from ragen.engines.local import LocalEngine
from ragen.engines.ranks import Ranks, _pieces, join, leave
from ragen.engines.sharded import Rank
from ragen.models.loading import load_policy
from ragen.models.names import resolve_model
from ragen.storage.checkpoint import verified_state, write_state
from tests.bandit_model import bandit_model
from tests.engines.recorded import (
    RECIPES,
    Outcome,
    batch_for,
    collection,
    config_of,
    in_processes,
    outcome,
    relative,
)

FLOAT32 = {"gradient": 1e-5, "weight": 1e-3, "score": 1e-4, "norm": 1e-4}
"""Largest differences: of gradients relative to the largest, of weights after ten updates in
absolute numbers, of logprobs and values, and of gradient norms, relative."""

BFLOAT16 = {
    **{"gradient": 2e-2, "weight": 1e-2, "critic": 2e-2, "weights": 2e-2},
    **{"score": 0.1, "norm": 2e-2},
}
"""As `FLOAT32`, and of all weights relative to their norm. A process sums its gradients in another
order, and rounds each sum to 8 bits. Where a gradient is nearly 0, that decides its sign, and Adam
moves this one weight by the whole learning rate, which is 1e-2 for a critic: two such updates."""


@pytest.fixture(scope="module", autouse=True)
def recorded() -> Iterator[None]:
    """Sample the collection before processes are forked, so that all have the same."""
    collection()
    collection(groups=1, members=2)
    yield


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


def compare(config: Config, sizes: tuple[int, ...], steps: int, bound: dict[str, float]) -> None:
    expected = outcome(config, steps)
    start = dict(load_policy(str(bandit_model()), "cpu", config.model.dtype)[0].named_parameters())
    if not config.lora.rank:
        moved = [
            float((expected.weights[name] - weight).detach().abs().max())
            for name, weight in start.items()
        ]
        assert max(moved) > steps * 1e-4
    for size in sizes:
        found = in_processes(size, lambda rank, at: outcome(config, steps, rank, size, at))  # noqa: B023
        assert_agree(found[0], expected, bound)
        assert all(name.startswith("critic.") for each in found[1:] for name in each.weights)


@pytest.mark.parametrize("recipe", ["ppo", "lora"])
def test_two_processes_learn_what_one_does(recipe: str) -> None:
    compare(config_of(recipe), (2,), 3, FLOAT32)


def test_layers_are_split_on_their_own_where_the_model_computes_by_itself() -> None:
    """Three processes have different numbers of microbatches."""
    compare(config_of("ppo-shared", model__gradient_checkpointing=True), (3,), 3, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_updates_of_one_two_and_three_processes(recipe: str, checkpointing: bool) -> None:
    config = config_of(recipe, model__gradient_checkpointing=checkpointing)
    compare(config, (2, 3), 10, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_updates_in_bfloat16(recipe: str) -> None:
    compare(config_of(recipe, model__dtype="bfloat16"), (2,), 10, BFLOAT16)


def test_a_batch_of_fewer_episodes_than_processes() -> None:
    config = config_of("ppo")
    few = {"groups": 1, "members": 2}
    expected = outcome(config, 2, **few)
    found = in_processes(3, lambda rank, at: outcome(config, 2, rank, 3, at, **few))
    assert_agree(found[0], expected, FLOAT32)


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


def share_loads(num_groups: int, prompt: int, size: int, shares_prompts: bool) -> list[int]:
    """The tokens that each process computes, of groups of 16 with lengths as in `docs/scaling.md`.

    All samples of a group begin with the same `prompt` tokens.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [
        Sample((1, 2), (False, True), (0.0, 0.0), (-1, 0), (False, True), episode, episode // 16)
        for episode in torch.randperm(16 * num_groups, generator=generator).tolist()
    ]
    own_B = ((torch.randn(len(rows), generator=generator) - 0.5).exp() * 1500).clamp(max=8000)
    mask_BT = torch.zeros(len(rows), prompt + 1, dtype=torch.bool)
    mask_BT[:, -1] = True
    batch = replace(collate(rows), lengths_B=prompt + 8 + own_B.long(), mask_BT=mask_BT)
    loads = []
    for rows_B in Ranks(0, size).shares(batch, shares_prompts):
        repeated = len(rows_B) - len(set(batch.group_B[rows_B].tolist()))
        loads.append(int(batch.lengths_B[rows_B].sum()) - shares_prompts * repeated * prompt)
    return loads


def test_no_process_waits_long_for_the_one_with_the_largest_share() -> None:
    loads = share_loads(num_groups=16, prompt=300, size=16, shares_prompts=False)
    assert max(loads) < 1.03 * sum(loads) / 16
    loads = share_loads(num_groups=16, prompt=300, size=16, shares_prompts=True)
    assert max(loads) < 1.15 * sum(loads) / 16
    least = share_loads(num_groups=16, prompt=1500, size=1, shares_prompts=True)
    loads = share_loads(num_groups=16, prompt=1500, size=16, shares_prompts=True)
    assert sum(loads) <= sum(least) + 15 * 1500, "most prompts are computed once"


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


# What is refused.


def test_a_changed_token_is_refused_by_all_processes_without_a_change() -> None:
    config = config_of("grpo")

    def refused(rank: int, address: str, liar: int | None) -> tuple[str, bool]:
        one = Rank(config, str(bandit_model()), rank, 2, address)
        batch = batch_for(one, config)
        before = [each.full_tensor() for each in one.model.parameters()]  # type: ignore[operator]
        ids_BT = batch.token_ids_BT.clone()
        row = int(one.learner._splits(batch)[1][0][0])  # the second process trains on it
        ids_BT[row, int(batch.mask_BT[row].nonzero()[-1])] += 1
        if liar in (None, rank):
            batch = replace(batch, token_ids_BT=ids_BT)
        message = ""
        try:
            one.update(batch, 0)
        except ValueError as error:
            message = str(error)
        after = [each.full_tensor() for each in one.model.parameters()]  # type: ignore[operator]
        one.close()
        return message, all(map(torch.equal, before, after))

    for liar in (None, 1):  # in all processes, or on the way to one
        found = in_processes(2, lambda rank, at: refused(rank, at, liar))  # noqa: B023
        (message, same), other = found
        assert "are not those that were sampled" in message and same
        assert other == (message, same)


def test_each_process_hashes_its_own_tokens_only() -> None:
    config = config_of("grpo")

    def hashed(rank: int, address: str) -> tuple[int, float]:
        one = Rank(config, str(bandit_model()), rank, 2, address)
        batch = batch_for(one, config)
        with patch.object(exactness, "fingerprint", wraps=exactness.fingerprint) as counted:
            metrics = one.update(batch, 0)
        one.close()
        return counted.call_count, metrics["exactness/completions_checked"].value

    (first, checked), (second, same) = in_processes(2, hashed)
    assert first + second == checked == same and min(first, second) > 0


def test_other_logprobs_at_equal_weights_are_refused_by_all_processes() -> None:
    config = config_of("grpo")

    def refused(rank: int, address: str) -> str:
        one = Rank(config, str(bandit_model()), rank, 2, address)
        batch = batch_for(one, config)
        one.update(batch, 0)
        one.published()  # in truth the weights have changed
        one.update(batch, 1)
        return ""

    first, second = in_processes(2, refused)
    assert first == second and first.startswith("MismatchError: token ")


# Checkpoints.


def go_on(
    config: Config, path: Path, state: Any, steps: range, rank: int, size: int, address: str
) -> dict[str, Tensor]:
    """Load a checkpoint and train on; returns the weights."""
    one = Rank(config, str(bandit_model()), rank, size, address)
    one.load(path, state)
    one.learner.synced = False  # what is recorded was sampled by the first weights
    batch = batch_with(one, config)
    for step in steps:
        one.update(batch, step)
    weights = dict(one.weights())
    one.close()
    return weights


def batch_with(one: Any, config: Config) -> Batch:
    """The collection, with random values and advantages, which do not depend on the weights."""
    batch = batch_for(one, config)
    generator = torch.Generator().manual_seed(0)
    shape = batch.mask_BT.shape
    random_BT = torch.randn(shape, generator=generator) * batch.mask_BT
    return replace(
        batch,
        old_logprobs_BT=batch.sampled_logprobs_BT,
        advantages_BT=random_BT,
        returns_BT=random_BT if batch.values_BT is not None else None,
        values_BT=0 * random_BT if batch.values_BT is not None else None,
    )


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("ppo", "float32"),
        pytest.param("ppo", "bfloat16", marks=pytest.mark.slow),
        pytest.param("lora", "float32", marks=pytest.mark.slow),
        pytest.param("ppo-shared", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_two_processes_goes_on_in_any_number(
    tmp_path: Path, recipe: str, dtype: str
) -> None:
    config = config_of(recipe, model__dtype=dtype)

    def saved(rank: int, address: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        one = Rank(config, str(bandit_model()), rank, 2, address)
        batch = batch_with(one, config)
        for step in range(3):
            one.update(batch, step)
        state = one.save(tmp_path)
        written = dict(one.weights())
        for step in range(3, 6):
            one.update(batch, step)
        weights = dict(one.weights())
        one.close()
        return state, written, weights

    (state, written, expected), _ = in_processes(2, saved)
    write_state(tmp_path, {})
    names = set(verified_state(tmp_path)["files"])
    assert {f"optimizer-0/shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)} <= names
    assert all(not name.endswith((".metadata", ".distcp", ".pt")) for name in names)
    if recipe == "ppo" and dtype == "float32":
        exported = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(exported[name], weight) for name, weight in written.items())
    bound = {"weight": 1e-5 if dtype == "float32" else BFLOAT16["weight"]}

    for size in (2, 3):
        found = in_processes(
            size,
            lambda rank, at: go_on(config, tmp_path, state, range(3, 6), rank, size, at),  # noqa: B023
        )
        assert_weights_agree(found[0], expected, bound)
    alone = go_on(config, tmp_path, state, range(3, 6), 0, 1, "")
    assert_weights_agree(alone, expected, bound)


def test_checkpoints_travel_between_the_local_engine_and_two_processes(tmp_path: Path) -> None:
    config = config_of("ppo")
    local, split = tmp_path / "local", tmp_path / "split"
    split.mkdir()

    def engine_at(step: int) -> LocalEngine:
        engine = LocalEngine(config, str(bandit_model()))
        if step:
            state = {"version": 1} | states["split"]
            asyncio.run(engine.load(split, state))
            engine.learner.synced = False
        return engine

    states: dict[str, Any] = {}
    engine = engine_at(0)
    batch = batch_with(engine.learner, config)
    for step in range(3):
        asyncio.run(engine.update(batch, step))
    states["local"] = asyncio.run(engine.save(local))
    for step in range(3, 6):
        asyncio.run(engine.update(batch, step))
    expected = {name: each.detach().clone() for name, each in engine.model.named_parameters()}

    def half(rank: int, address: str) -> Any:
        one = Rank(config, str(bandit_model()), rank, 2, address)
        one.load(local, states["local"])
        one.learner.synced = False
        for step in range(3, 5):
            one.update(batch, step)
        state = one.save(split)
        one.close()
        return state

    states["split"], _ = in_processes(2, half)
    engine = engine_at(5)
    asyncio.run(engine.update(batch, 5))
    for name, weight in engine.model.named_parameters():
        assert (weight - expected[name]).abs().max() <= 1e-5, name


def test_a_checkpoint_of_another_model_is_refused_by_all(tmp_path: Path) -> None:
    config = config_of("grpo")

    def saved(rank: int, address: str) -> str:
        one = Rank(config, str(bandit_model()), rank, 2, address)
        state = one.save(tmp_path)
        one.load(tmp_path, state | {"reference": "another"})
        return ""

    first, second = in_processes(2, saved)
    assert first == second and "its KL reference is lost" in first


def test_a_learner_that_does_not_see_the_runs_folder_refuses_to_save(tmp_path: Path) -> None:
    """Otherwise it would write a checkpoint that the driver takes for an empty one."""
    config = resolve("bandit", {"threads": 1})
    rank = Rank(config, resolve_model(config.model.path, config.env.name))
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
