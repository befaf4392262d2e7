"""Samples: every sampled token is trained once, in every context window."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from ragen.algorithms.advantages import gae
from ragen.algorithms.batch import collate, episode_index
from ragen.algorithms.credit import token_rewards
from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.core.errors import RagenError
from ragen.core.types import Episode, Group, Sample
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup
from tests import records
from tests.rogue import Rogue
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import tiny_tokenizer


def sampled_ids(sample: Sample) -> list[int]:
    return [t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]


@given(records.groups())
def test_samples_hold_the_recorded_turns(groups: list[Group]) -> None:
    samples, episodes = to_samples(groups)
    expected = [(number, e) for number, group in enumerate(groups) for e in group.episodes]
    assert episodes == [episode for _, episode in expected]
    for index, (group, episode) in enumerate(expected):
        own = [sample for sample in samples if sample.episode == index]
        assert {sample.group for sample in own} == {group}
        previous: tuple[int, ...] = ()
        starts = 0
        for turn in episode.turns:
            prompt, completion = turn.prompt.token_ids or (), turn.completion.token_ids or ()
            starts += not previous or prompt[: len(previous)] != previous
            previous = prompt + completion
        assert len(own) == starts, "one for each prompt that does not extend the one before"
        covered: list[int] = []
        for sample in own:
            turns = sorted({turn for turn in sample.turn_index if turn >= 0})
            covered += turns
            last = episode.turns[turns[-1]]
            assert last.prompt.token_ids is not None and last.completion.token_ids is not None
            # All tokens of the prompt and the completion of its last turn.
            assert sample.token_ids == last.prompt.token_ids + last.completion.token_ids
            for number in turns:
                turn, at = episode.turns[number], len(episode.turns[number].prompt.token_ids or ())
                completion_ids = turn.completion.token_ids or ()
                here = slice(at, at + len(completion_ids))
                assert sample.token_ids[here] == completion_ids
                assert sample.loss_mask[here] == (True,) * len(completion_ids)
                assert sample.turn_index[here] == (number,) * len(completion_ids)
                assert sample.sampled_logprobs[here] == turn.completion.logprobs
                assert sample.turn_ends[here] == (False,) * (len(completion_ids) - 1) + (True,)
            count = sum(len(episode.turns[n].completion.token_ids or ()) for n in turns)
            assert sum(sample.loss_mask) == count and sum(sample.turn_ends) == len(turns)
            for on, logprob, turn_index in zip(
                sample.loss_mask, sample.sampled_logprobs, sample.turn_index, strict=True
            ):
                assert on or (logprob == 0 and turn_index == -1)
        assert covered == list(range(len(episode.turns)))


def test_failed_and_empty_episodes_are_left_out() -> None:
    good, bad = records.episode(records.turn(1.0)), records.episode(records.turn(1.0), stop="error")
    groups = [
        Group((bad, good, records.episode(stop="context"))),
        Group((records.episode(records.turn(), stop="timeout"),)),
        Group((good, records.episode(records.turn(), stop="context"))),
    ]
    samples, episodes = to_samples(groups)
    assert episodes == [good, good, groups[2].episodes[1]]
    assert [(s.episode, s.group) for s in samples] == [(0, 0), (1, 2), (2, 2)]
    assert to_samples([Group((bad,))]) == ([], [])


@pytest.mark.parametrize("missing", ["prompt", "token_ids", "logprobs"])
def test_episodes_without_tokens_or_logprobs_are_refused(missing: str) -> None:
    turn = records.turn()
    if missing == "prompt":
        turn = replace(turn, prompt=replace(turn.prompt, token_ids=None))
    else:
        turn = replace(turn, completion=replace(turn.completion, **{missing: None}))
    with pytest.raises(RagenError, match="keep the endpoint for evaluation"):
        to_samples([Group((records.episode(turn),))])


# The three context windows, with real prompts.

WINDOWS = (0, 2, 1)  # all turns, the last two, the current one
SCRIPT = ["Left", "Right", "Fly", "Right"]


def play(template: str, window: int) -> list[Group]:
    chat = Chat(tiny_tokenizer(template))
    setup = Setup("corridor", Rogue, turns=4, window=window, chat=chat, max_length=4096)
    replies = iter(
        [
            f"<think>turn {number}</think><answer>{action}</answer>".removeprefix(setup.prefill)
            for _ in range(4)
            for number, action in enumerate(SCRIPT)
        ]
    )
    end = min(chat.end_ids)
    policy = ScriptedPolicy(lambda prompt: next(replies), lambda text: (*chat.encode(text), end))
    return asyncio.run(run_groups(policy, setup, [1, 2], 2, (0, "train", 0), concurrency=1))


def returns_and_advantages(episodes: list[Episode], samples: list[Sample]) -> tuple[Any, Any]:
    """Returns and advantages of the sampled tokens of each episode, with a made-up critic."""
    index = episode_index(collate(samples))
    rewards_ES = token_rewards(episodes, index, "turn")
    values_ES = torch.linspace(0, 1, index.mask_ES.shape[1]) * index.mask_ES
    credit = gae(
        rewards_ES=rewards_ES,
        mask_ES=index.mask_ES,
        values_ES=values_ES,
        gamma=0.9,
        gae_lambda=0.8,
        whiten=False,
    )
    return credit.returns_ES, credit.advantages_ES


@pytest.mark.parametrize("template", ["chatml", "qwen3", "llama2", "thinker"])
def test_context_windows_differ_only_in_the_number_of_rows(template: str) -> None:
    exact = Chat(tiny_tokenizer(template)).exact
    # Number of rows of an episode of four turns: one for each first turn of a prompt.
    rows = {0: 1, 2: 3, 1: 4} if exact else dict.fromkeys(WINDOWS, 4)
    results = {}
    for window in WINDOWS:
        groups = play(template, window)
        samples, episodes = to_samples(groups)
        assert len(samples) == 4 * rows[window]
        for index, episode in enumerate(episodes):
            completions = [t for turn in episode.turns for t in turn.completion.token_ids or ()]
            own = [sample for sample in samples if sample.episode == index]
            assert [token for sample in own for token in sampled_ids(sample)] == completions
            assert [turn.reward for turn in episode.turns] == [0.25, 0.25, 0.0, 0.25]
        results[window] = returns_and_advantages(episodes, samples)
    for window in (2, 1):
        for one, other in zip(results[window], results[0], strict=True):
            torch.testing.assert_close(one, other)


def test_prefilled_tokens_are_never_trained() -> None:
    chat = Chat(tiny_tokenizer("chatml"))
    for group in play("chatml", 1):
        for sample in to_samples([group])[0]:
            start = sample.loss_mask.index(True)
            assert chat.decode(sample.token_ids[start - 1 : start]).endswith(">")
            assert chat.decode(sample.token_ids[:start]).endswith("<think>")
