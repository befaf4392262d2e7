"""The sampler: exact logprobs, equal paths, the cache across turns, order, and failures."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import PreTrainedModel

from ragen.core.errors import NotFiniteError
from ragen.core.types import Completion, Prompt
from ragen.networks.model import hidden_states, token_logprobs
from ragen.networks.packing import BEGINNING
from ragen.sampling.local_sampler import Sampler, draw
from tests.networks.test_model import tiny
from tests.tiny import ends
from tests.tolerance import LOGPROB

END = 2


def make_sampler(model: PreTrainedModel, **options: object) -> Sampler:
    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    settings = {"end_ids": [END], "slots": 4, "max_length": 96, **options}
    return Sampler(model, ends(*settings.pop("end_ids"), decode=decode), **settings)


def make_prompt(ids: Sequence[int], seed: int, **changes: object) -> Prompt:
    fields = {"num_prefill": 0, "max_tokens": 8, "temperature": 1.0, **changes}
    return Prompt(messages=(), token_ids=tuple(ids), seed=seed, **fields)


Turns = list[tuple[Prompt, Completion]]


async def play(sampler: Sampler, member: int, turns: int = 2, **changes: object) -> Turns:
    """One episode; three episodes of a group share their first prompt, and lengths differ."""
    ids: tuple[int, ...] = (3, 4, 5, *range(6, 8 + member // 3))
    played = []
    for turn in range(turns):
        prompt = make_prompt(ids, 100 * member + turn, max_tokens=5 + member, **changes)
        completion = await sampler.complete(prompt)
        played.append((prompt, completion))
        ids += (*completion.token_ids, 7, 8, 9 + member)
    return played


def run(sampler: Sampler, members: int = 4, **changes: object) -> list[Turns]:
    async def together() -> list[Turns]:
        return await asyncio.gather(*[play(sampler, m, **changes) for m in range(members)])

    return asyncio.run(asyncio.wait_for(together(), 60))


def recomputed(model: PreTrainedModel, prompt: Prompt, completion: Completion) -> torch.Tensor:
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    wanted[0, len(prompt.token_ids) - 1 : -1] = True
    states = hidden_states(model, ids, torch.tensor([ids.shape[1]]), wanted)
    targets = ids[0, len(prompt.token_ids) :]
    return token_logprobs(model, states, targets, prompt.temperature or 1.0)[0].detach()


@pytest.mark.parametrize(
    ("kind", "temperature"), [("qwen2", 0.6), ("qwen2", 0.0), ("llama", 1.0), ("gpt2", 0.6)]
)
def test_logprobs_equal_those_of_the_learner(kind: str, temperature: float) -> None:
    model = tiny(kind)
    for played in run(make_sampler(model), temperature=temperature):
        for prompt, completion in played:
            expected = recomputed(model, prompt, completion)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=LOGPROB)


def test_fast_and_general_path_sample_the_same_and_each_twice_the_same() -> None:
    model = tiny()
    fast, general = (run(make_sampler(model, fast=fast), turns=3) for fast in (True, False))
    for a, b in zip(fast, general, strict=True):
        for (_, mine), (_, other) in zip(a, b, strict=True):
            assert mine.token_ids == other.token_ids
            np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=0, atol=LOGPROB)
    assert run(make_sampler(model), turns=3) == fast
    assert run(make_sampler(model, fast=False), turns=3) == general


@pytest.mark.parametrize("slots", [1, 16])
def test_the_number_of_slots_changes_no_token(slots: int) -> None:
    model = tiny()
    tokens = [[c.token_ids for _, c in played] for played in run(make_sampler(model, slots=slots))]
    assert tokens == [[c.token_ids for _, c in played] for played in run(make_sampler(model))]


def test_greedy_equals_generate() -> None:
    model = tiny("llama")
    for played in run(make_sampler(model), members=2, turns=2, temperature=0.0):
        for prompt, completion in played:
            ids = torch.tensor([prompt.token_ids])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=prompt.max_tokens,
                eos_token_id=END,
                pad_token_id=0,
            )
            assert completion.token_ids == tuple(out[0, len(prompt.token_ids) :].tolist())


def test_completions_end_at_an_end_token_or_the_limit() -> None:
    completions = [c for played in run(make_sampler(tiny()), members=12) for _, c in played]
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}, "both cases are tested"
    for completion in completions:
        assert END not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop")
        body = completion.token_ids[: -1 if completion.finish_reason == "stop" else None]
        assert completion.text == " ".join(map(str, body))


def test_tokens_are_sampled_with_their_probabilities() -> None:
    model, count = tiny(), 2000

    async def many(sampler: Sampler) -> list[Completion]:
        requests = [
            sampler.complete(make_prompt((3, 4, 5), seed, max_tokens=1)) for seed in range(count)
        ]
        return await asyncio.gather(*requests)

    drawn = [c.token_ids[0] for c in asyncio.run(many(make_sampler(model, slots=64)))]
    expected = model(torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1).double().detach().numpy()
    seen = np.bincount(drawn, minlength=40)
    common = expected * count >= 5
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(seen, expected / expected.sum() * count).pvalue > 1e-3


def test_draw_never_takes_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf, -1e4]]).repeat(5, 1)
    uniforms = np.array([0.0, 0.4999, 0.5001, 1 - 2**-53, np.nextafter(0.5, 1)])
    tokens, logprobs = draw(logits, np.ones(5), uniforms)
    assert tokens.tolist() == [1, 1, 3, 3, 3]
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_every_turn_prefills_only_new_tokens() -> None:
    sampler = make_sampler(tiny(), slots=9)
    played = run(sampler, turns=3)
    # Two first prompts, prefilled once each; then the last sampled token and all after it.
    first = sum(len(played[m][0][0].token_ids) for m in (0, 3))
    later = sum(
        len(p.token_ids) - len(before.token_ids) - len(c.token_ids) + 1
        for turns in played
        for (before, c), (p, _) in pairwise(turns)
    )
    assert sampler.stats.prefilled == first + later
    prompts = sum(len(p.token_ids) for turns in played for p, _ in turns)
    assert sampler.stats.reused == prompts - sampler.stats.prefilled
    assert sampler.stats.sampled == sum(len(c.token_ids) for turns in played for _, c in turns)


@pytest.mark.parametrize(
    ("kind", "slots", "times"), [("qwen2", 3, 2), ("llama", 5, 1), ("gpt2", 8, 1)]
)
def test_different_prompts_that_begin_alike_read_their_beginning_once(
    kind: str, slots: int, times: int
) -> None:
    """Some begin longer alike; a slot that is not taken again gives its beginning to later ones."""
    model, rules = tiny(kind), tuple(3 + i % 20 for i in range(BEGINNING + 6))
    ends = [(1, 4, 5), (1, 4, 6, 7), (9,), (9, 8, 7), (1, 5), (10,)]
    prompts = [make_prompt(rules + end, seed) for seed, end in enumerate(ends)]
    sampler = make_sampler(model, slots=slots)

    async def together() -> list[Completion]:
        return await asyncio.gather(*map(sampler.complete, prompts))

    for prompt, completion in zip(prompts, asyncio.run(together()), strict=True):
        expected = recomputed(model, prompt, completion)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=LOGPROB)
    total = sum(len(prompt.token_ids) for prompt in prompts)
    assert sampler.stats.prefilled <= times * len(rules) + sum(map(len, ends))
    assert sampler.stats.reused == total - sampler.stats.prefilled


def test_running_episodes_keep_their_slots_when_slots_are_few() -> None:
    few, many = make_sampler(tiny(), slots=2), make_sampler(tiny(), slots=9)
    run(few)
    run(many)
    # A later episode copies the shared prompt and prefills its last token again, for the logits; a
    # shared prompt may have to be prefilled once more when no slot holds it any longer.
    assert few.stats.prefilled <= many.stats.prefilled + 2 * 6 + 6


def test_new_weights_reuse_no_cached_keys() -> None:
    model, other = tiny(), tiny()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    sampler = make_sampler(model)
    run(sampler)
    model.load_state_dict(other.state_dict())
    sampler.forget()
    sampler.version = 1
    fresh = make_sampler(other)
    fresh.version = 1
    assert run(sampler) == run(fresh)


def test_a_failed_forward_reaches_every_request_and_the_next_run_works() -> None:
    model = tiny("llama")
    sampler = make_sampler(model, slots=2)
    forward = model.model.forward

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    async def three() -> list[object]:
        requests = [sampler.complete(make_prompt((3, 4, k), k)) for k in range(3)]
        return await asyncio.gather(*requests, return_exceptions=True)

    model.model.forward = broken
    errors = asyncio.run(asyncio.wait_for(three(), 10))
    assert [str(error) for error in errors] == ["out of memory"] * 3
    model.model.forward = forward
    again, fresh = (run(each, 2) for each in (sampler, make_sampler(tiny("llama"), slots=2)))
    assert again == fresh


def test_cancelled_requests_free_their_slots() -> None:
    sampler = make_sampler(tiny(), slots=2, end_ids=())

    async def cancel_two() -> list[Completion]:
        prompts = [make_prompt((3, k), k, max_tokens=80) for k in range(4)]
        tasks = [asyncio.create_task(sampler.complete(prompt)) for prompt in prompts]
        while sampler.stats.forwards < 3:
            await asyncio.sleep(0)
        assert len(sampler._running) == len(sampler._waiting) == 2
        for task in tasks[1:3]:  # one that runs and one that waits
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(d, asyncio.CancelledError) for d in done] == [False, True, True, False]
        return await asyncio.gather(*[sampler.complete(make_prompt((3, k), k)) for k in range(4)])

    again = asyncio.run(asyncio.wait_for(cancel_two(), 30))

    async def uncancelled() -> list[Completion]:
        other = make_sampler(tiny(), slots=2, end_ids=())
        return await asyncio.gather(*[other.complete(make_prompt((3, k), k)) for k in range(4)])

    assert [c.token_ids for c in again] == [c.token_ids for c in asyncio.run(uncancelled())]


def test_the_sampler_works_after_its_event_loop_was_interrupted() -> None:
    sampler = make_sampler(tiny())

    async def interrupted() -> None:
        task = asyncio.create_task(play(sampler, 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise KeyboardInterrupt(task)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert run(sampler) == run(make_sampler(tiny()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_finite_logprob(bad: float) -> None:
    logits = torch.zeros(4, 6)
    logits[1] = bad
    logits[2, 3] = bad
    excludes = bad < 0  # −∞ leaves the other tokens of a row possible
    for temperature in (0.0, 0.001, 1.0, 100.0):
        tokens, logprobs = draw(logits, np.full(4, temperature), np.array([0.0, 0.5, 0.9, 0.99]))
        assert ((tokens >= 0) & (tokens < 6)).all()
        assert np.isfinite(logprobs).tolist() == [True, False, excludes, True]


@pytest.mark.parametrize("temperature", [0.001, 1.0, 100.0])
def test_drawing_is_exact_for_extreme_logits_at_every_temperature(temperature: float) -> None:
    """Against a softmax in float64, for logits up to 1e34 in size."""
    generator = np.random.default_rng(0)
    for size in (1e-30, 1.0, 1e4, 1e20, 1e34):
        logits = torch.from_numpy(generator.normal(0, size, (64, 50))).float()
        uniforms = generator.random(64)
        tokens, logprobs = draw(logits, np.full(64, temperature), uniforms)
        scaled = logits.double() / float(np.float32(temperature))
        expected = torch.log_softmax(scaled, dim=-1)
        drawn = expected.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()
        assert np.isfinite(logprobs).all()
        np.testing.assert_allclose(logprobs, drawn, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "fast", "part"),
    [("qwen2", True, "v_proj"), ("llama", True, "lm_head"), ("qwen2", False, "")],
)
def test_a_broken_model_is_named_and_the_sampler_works_again_after_it(
    kind: str, fast: bool, part: str
) -> None:
    """Also if NaN was stored as keys and values of all slots, behind the next prompts."""
    model = tiny(kind)
    sampler = make_sampler(model, fast=fast)
    before = run(sampler)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if part in name:
                weight[1] = torch.nan
    asyncio.run(sampler.publish(model, 1))
    with pytest.raises(NotFiniteError, match="the logits of the model are not finite"):
        run(sampler)
    model.load_state_dict(weights)
    asyncio.run(sampler.publish(model, 0))
    assert run(sampler) == before
