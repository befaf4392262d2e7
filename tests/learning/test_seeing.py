"""Models that see: one function in sampler and learner, what pictures change, and what is saved.

Every architecture samples what its learner computes, and each is compared with its own forward when
it is loaded. All else is tested where architectures compute differently: one row of features a
picture token (``llava``), pictures in parts (``idefics3``), positions on three axes with features
in several layers (``qwen3_vl``), and tokens that see all of their picture (``gemma3``).
"""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from ragen.algorithms.batch import Batch, collate, take
from ragen.config.sections import LoraConfig, LossConfig, UpdateConfig
from ragen.core.pictures import Picture, by_key
from ragen.core.types import Completion, Prompt, Sample
from ragen.engines.factory import TOLERANCES, prepare_model
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.learning.saving import one_turn
from ragen.models.hub import read_sizes
from ragen.models.loading import load_policy, recompute_layers, save_model
from ragen.models.pictures import token_types
from ragen.networks.lora import adapter_tensors, attach, attach_saved, linear_layers
from ragen.networks.model import cross_scores, hidden_states
from ragen.networks.packing import pack
from ragen.networks.pictures import features
from ragen.sampling.local_sampler import Sampler
from tests.seeing import EACH, board, first_and_slow, folder_of, prompt_ids, seeing
from tests.tiny import ends
from tests.tolerance import LOGPROB

UNUSED = re.compile("vision_.*(head|post_layernorm)")
"""Weights behind the layer whose states a projector reads."""
RULES = "Each cell shows its tile and there is one player. " * 2
"""Long enough that different prompts share it."""


def prompts(tokenizer: Any, *boards: Picture, members: int = 2) -> list[Prompt]:
    """Groups with one text and different boards."""
    return [
        Prompt(
            (),
            prompt_ids(tokenizer, RULES, shown, " What now?"),
            0,
            6,
            1.0,
            seed=group * members + member,
            pictures=(shown,),
        )
        for group, shown in enumerate(boards)
        for member in range(members)
    ]


def play(model: Any, tokenizer: Any, asked: list[Prompt], turns: int = 2, **options: Any) -> Batch:
    """Episodes of some turns, each with a picture of its own, as a batch."""
    sampler = Sampler(model, ends(0), **{"slots": 3, "max_length": 256} | options)

    async def episode(number: int, prompt: Prompt) -> Sample:
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        played = list[tuple[int, Completion]]()
        for turn in range(turns):
            completion = await sampler.complete(prompt)
            assert completion.token_ids is not None and prompt.token_ids is not None
            assert completion.logprobs is not None
            new = len(prompt.token_ids) - len(ids)
            ids = [*prompt.token_ids, *completion.token_ids]
            mask += [False] * new + [True] * len(completion.token_ids)
            logprobs += [0.0] * new + list(completion.logprobs)
            played.append((new, completion))
            shown = board(100 + number + turn, 32, 48)
            text = prompt_ids(tokenizer, "then", shown, "and?")
            prompt = replace(
                prompt, token_ids=(*ids, *text), pictures=(*prompt.pictures, shown), seed=number
            )
        turn_index = [
            at
            for turn, (new, completion) in enumerate(played)
            for at in [-1] * new + [turn] * len(completion.token_ids or ())
        ]
        turn_ends = [on and (at + 1 == len(mask) or not mask[at + 1]) for at, on in enumerate(mask)]
        return Sample(
            tuple(ids),
            tuple(mask),
            tuple(logprobs),
            tuple(turn_index),
            tuple(turn_ends),
            number,
            number // 2,
            tuple(by_key(prompt.pictures[:-1]).values()),
        )

    async def together() -> list[Sample]:
        return await asyncio.gather(*[episode(*each) for each in enumerate(asked)])

    batch = collate(asyncio.run(asyncio.wait_for(together(), 60)))
    return replace(batch, pictures=tuple(by_key(batch.pictures).values()))


def learner_of(model: Any, **models: Any) -> Learner:
    update = UpdateConfig(lr=1e-2, critic_lr=1e-2)
    return Learner(Models(model, **models), update, LossConfig(kl=0.0))


@pytest.mark.parametrize("kind", EACH)
def test_a_sampler_draws_what_the_learner_computes(kind: str) -> None:
    model, tokenizer = seeing(kind)
    asked = prompts(tokenizer, board(1), board(2), board(1, 48, 32))
    batch = play(model, tokenizer, asked)
    logprobs_BT, _ = learner_of(model).logprobs(batch)
    gap = (logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs()
    assert float(gap.max()) < LOGPROB
    general = play(model, tokenizer, asked, fast=False)
    assert torch.equal(general.token_ids_BT, batch.token_ids_BT)


@pytest.mark.parametrize("kind", first_and_slow("qwen3_vl", "gemma3"))
def test_rows_agree_with_the_models_own_forward(kind: str) -> None:
    model, tokenizer = seeing(kind)
    shown = board(3), board(4)
    ids = prompt_ids(tokenizer, "See", shown[0], "then", shown[1], "so?")
    ids_1T = torch.tensor([ids])
    is_picture_1T = ids_1T < 0
    reader = tokenizer.picture_reader
    tensors = [reader.tensors(each) for each in shown]
    given = {name: torch.cat([each[name] for each in tensors], reader.axis) for name in tensors[0]}
    given |= token_types(model.config.model_type, is_picture_1T)
    given["input_ids"] = ids_1T.masked_fill(is_picture_1T, model.config.image_token_id)
    expected_TD = model.base_model(**given, use_cache=False).last_hidden_state[0]
    every_1T = torch.ones_like(is_picture_1T)
    seen = features(model, ids_1T, shown)
    ours_TD = hidden_states(model, ids_1T, torch.tensor([len(ids)]), every_1T, seen)
    torch.testing.assert_close(ours_TD, expected_TD, atol=1e-4, rtol=0)


def test_boards_under_one_text_share_nothing_beyond_them() -> None:
    model, tokenizer = seeing("llava")
    one, two = (each.token_ids for each in prompts(tokenizer, board(1), board(2), members=1))
    assert one is not None and two is not None
    ids_BT, length = torch.tensor([one, two]), len(one)
    wanted_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    wanted_BT[:, -1] = True
    packing = pack(ids_BT, torch.tensor([length, length]), wanted_BT)
    first = next(at for at, token in enumerate(one) if token < 0)
    assert int(packing.shared_B[1]) == first
    seen = features(model, ids_BT, (board(1), board(2)))
    states_2D = hidden_states(model, ids_BT, torch.tensor([length, length]), wanted_BT, seen)
    assert not torch.allclose(states_2D[0], states_2D[1])


@pytest.mark.parametrize("kind", first_and_slow("qwen3_vl"))
def test_an_update_moves_tower_projector_and_words(kind: str) -> None:
    model, tokenizer = seeing(kind)
    model = copy.deepcopy(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    batch = play(model, tokenizer, prompts(tokenizer, board(1), board(2)), turns=1)
    learner = learner_of(model, critic=True)
    logprobs_BT, _ = learner.logprobs(batch)
    batch = replace(batch, old_logprobs_BT=logprobs_BT, values_BT=learner.values(batch))
    advantages_BT = torch.randn(logprobs_BT.shape) * batch.mask_BT
    batch = replace(batch, advantages_BT=advantages_BT, returns_BT=advantages_BT)
    learner.update(take(batch, torch.tensor([3, 0])), 0)
    still = {name for name, weight in model.named_parameters() if weight.equal(before[name])}
    assert all(map(UNUSED.search, still)) and len(still) < len(before) / 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl"])
def test_a_saved_model_loads_here_and_in_transformers(kind: str, tmp_path: Path) -> None:
    model, tokenizer = seeing(kind)
    save_model(model, tokenizer, tmp_path / "saved")
    again, _ = load_policy(tmp_path / "saved", "cpu", "float32")
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    for name, weight in plain.state_dict().items():
        assert weight.equal(again.state_dict()[name]) and weight.equal(model.state_dict()[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl"])
def test_an_adapter_leaves_the_tower_as_it_is(kind: str, tmp_path: Path) -> None:
    model, tokenizer = seeing(kind)
    model = copy.deepcopy(model)
    attach(model, ("policy", "critic"), rank=2, alpha=4, targets="all-linear", seed=0, base="base")
    sizes = read_sizes(str(folder_of(kind)))
    layers = linear_layers(model).items()
    shapes = [(name.rpartition(".")[2], tuple(layer.weight.shape)) for name, layer in layers]
    found = [(name.rpartition(".")[2], shape) for name, shape in sizes.linear.items()]
    assert sorted(found) == sorted(shapes)  # files have other paths than modules
    batch = play(model, tokenizer, prompts(tokenizer, board(1), board(2)), turns=1)
    learner = learner_of(model, critic=True)
    logprobs_BT, _ = learner.logprobs(batch)
    gap = (logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs()
    assert float(gap.max()) < LOGPROB
    assert not any("vision" in name or "visual" in name for name, _ in learner.trained_weights())
    save_model(model, tokenizer, tmp_path / "saved", "base")
    again, _ = seeing(kind)
    again = copy.deepcopy(again)
    attach_saved(again, tmp_path / "saved", "base")
    assert list(adapter_tensors(again)) == list(adapter_tensors(model))


def gap(model: Any, batch: Batch) -> float:
    """The largest difference of a sampled and a recomputed logprob."""
    logprobs_BT, _ = learner_of(model).logprobs(batch)
    return float((logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_prompts_are_read_in_parts_that_may_end_in_a_picture(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = seeing(kind)
    monkeypatch.setattr("ragen.sampling.local_sampler.PREFILL_TOKENS", 7)
    asked = prompts(tokenizer, board(1), board(2), board(1, 48, 32))
    for fast in (True, False):
        assert gap(model, play(model, tokenizer, asked, fast=fast)) < LOGPROB


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl"])
def test_new_weights_see_anew(kind: str) -> None:
    """A sampler's features are those of the weights that were published last."""
    model, tokenizer = seeing(kind)
    model = copy.deepcopy(model)
    sampler = Sampler(model, ends(0), slots=2, max_length=256)
    (prompt, _) = prompts(tokenizer, board(1))
    asyncio.run(sampler.complete(prompt))
    language = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    with torch.no_grad():
        for weight in {*model.parameters()} - language:
            weight.mul_(1.5)
    asyncio.run(sampler.publish(model, 1))
    completion = asyncio.run(sampler.complete(prompt))
    assert prompt.token_ids and completion.token_ids and completion.logprobs
    batch = one_turn(prompt.token_ids, completion.token_ids, completion.logprobs)
    assert gap(model, replace(batch, pictures=prompt.pictures)) < LOGPROB


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_thoughts_are_scored_under_prompts_with_pictures(kind: str) -> None:
    model, tokenizer = seeing(kind)
    asked = prompts(tokenizer, board(1), board(2), members=1)
    thoughts = [(5, 6, 7), (5, 9)]
    read = [prompt.token_ids or () for prompt in asked]
    scores_NM = cross_scores(model, read, thoughts, 1.0, 4096, pictures=(board(1), board(2)))
    for column, prompt in enumerate(asked):
        for row, thought in enumerate(thoughts):
            batch = one_turn(read[column], thought, (0.0,) * len(thought))
            logprobs_BT, _ = learner_of(model).logprobs(replace(batch, pictures=prompt.pictures))
            assert float(scores_NM[row, column]) == pytest.approx(
                float(logprobs_BT.sum()), abs=1e-4
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_every_way_to_compute_sees_the_same(kind: str) -> None:
    """Recomputed layers, bfloat16, a shared critic and one of its own, a frozen tower."""
    model, tokenizer = seeing(kind)
    asked = prompts(tokenizer, board(1), board(2))
    batch = play(model, tokenizer, asked)
    recomputing = copy.deepcopy(model)
    recompute_layers(recomputing)
    assert gap(recomputing, batch) < LOGPROB
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert gap(half, play(half, tokenizer, asked)) < TOLERANCES["bfloat16"]
    learned = replace(
        batch,
        old_logprobs_BT=batch.sampled_logprobs_BT,
        advantages_BT=torch.randn(batch.mask_BT.shape) * batch.mask_BT,
        returns_BT=batch.mask_BT.float(),
    )
    for shared in (True, False):
        learner = learner_of(copy.deepcopy(model), critic=True, shared=shared, reference=True)
        values_BT = learner.values(learned)
        learner.update(replace(learned, values_BT=values_BT), 0)
        assert not learner.values(learned).equal(values_BT)
        before_BT, _ = learner.logprobs(learned, reference=True)
        assert float((before_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs().max()) < LOGPROB
    settings = LoraConfig(rank=0)
    frozen = prepare_model(copy.deepcopy(model), "base", settings, 0, train_vision=False)
    learner_of(frozen).update(learned, 0)
    moved = {
        name.partition(".layers.")[0]
        for (name, weight), first in zip(frozen.named_parameters(), model.parameters(), strict=True)
        if not weight.equal(first)
    }
    assert moved and all(re.search("language_model|text_model", name) for name in moved)
