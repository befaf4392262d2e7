"""With an ordered sampler, no bit depends on when requests arrive or on who shares a forward."""

import asyncio
import random
from collections.abc import Iterable

import pytest
from transformers import PreTrainedModel

from ragen.core.types import Completion
from ragen.models.loading import load_policy
from ragen.models.names import base_folder
from ragen.networks import decoder
from ragen.networks.machine import use_threads
from ragen.networks.packing import BEGINNING
from ragen.rollout.policies import Seating, seated
from ragen.sampling.local_sampler import Sampler
from tests.networks.test_model import tiny
from tests.sampling.test_local_sampler import make_prompt, make_sampler

Played = dict[int, list[Completion]]
GROUP = 4


def ordered(model: PreTrainedModel, **options: object) -> Sampler:
    sampler = make_sampler(model, **{"slots": 16, "max_length": 400, **options})
    sampler.ordered = True
    return sampler


async def episode(sampler: Sampler, number: int, delays: random.Random | None) -> list[Completion]:
    """Three turns: of a group's shared prompt, and in every other group of rules that all share.

    The third turn of some episodes does not extend the second one, as with a window of turns.
    """
    vocabulary = sampler._decoder.model.config.vocab_size
    rules, group, own = (random.Random(seed) for seed in (99, number // GROUP, -number - 1))
    ids = tuple(group.choices(range(3, vocabulary), k=group.randint(2, BEGINNING + 9)))
    if number // GROUP % 2:
        ids = (*rules.choices(range(3, vocabulary), k=BEGINNING + 20), *ids)
    played = []
    with seated(sampler, (7, "train", 0, number // GROUP, number % GROUP)) as policy:
        for turn in range(3):
            if delays is not None:
                await asyncio.sleep(delays.choice((0, 0, 0.001, 0.004)))
            if turn == 2 and number % 3 == 0:
                ids = ids[:2] + ids[-20:]
            prompt = make_prompt(ids, 10 * number + turn, max_tokens=3 + number % 3)
            played.append(await policy.complete(prompt))
            more = own.choices(range(3, vocabulary), k=own.randint(1, 12))
            ids += (*played[-1].token_ids, *more)
    return played


def play(sampler: Sampler, numbers: Iterable[int], delays: int | None = None) -> Played:
    """Episodes at once; with `delays`, a seed, in another order and with pauses."""
    numbers, generator = list(numbers), random.Random(delays)
    if delays is not None:
        generator.shuffle(numbers)

    async def together() -> list[list[Completion]]:
        pauses = generator if delays is not None else None
        return await asyncio.gather(*[episode(sampler, each, pauses) for each in numbers])

    sampler.forget()
    played = asyncio.run(asyncio.wait_for(together(), 300))
    return dict(sorted(zip(numbers, played, strict=True)))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_reply_depends_on_its_own_episode_alone(kind: str) -> None:
    sampler = ordered(tiny(kind))
    full = play(sampler, range(8))
    assert sampler._independent
    for delays in range(2):
        assert play(sampler, range(8), delays) == full
    for numbers in ([3], [1, 4, 6]):
        assert play(sampler, numbers) == {number: full[number] for number in numbers}


def test_without_it_the_last_bits_depend_on_the_company() -> None:
    """So the tests of this file compare something."""
    sampler = ordered(tiny())
    sampler.ordered = False
    assert play(sampler, [5]) != {5: play(sampler, range(8))[5]}


@pytest.mark.parametrize("fast", [False, True])
def test_elsewhere_requests_are_answered_in_rounds(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the general path, and where products on this machine depend on the number of rows."""
    monkeypatch.setattr(decoder, "_passes", lambda decoder: False)
    sampler = ordered(tiny(), slots=4, fast=fast)  # fewer than episodes
    full = play(sampler, range(6))
    assert not sampler._independent
    for delays in range(2):
        assert play(sampler, range(6), delays) == full


def test_a_live_episode_keeps_its_slot_however_long_its_environment_takes() -> None:
    sampler = ordered(tiny(), slots=4)

    async def slow() -> list[Completion]:
        ids, played = (3, 4, 5, 6), []
        with sampler.seat((0,)) as seat:
            for turn in range(2):
                played.append(await seat.complete(make_prompt(ids, turn)))
                ids += (*played[-1].token_ids, 9)
                if turn == 0:
                    for number in range(1, 6):
                        await episode(sampler, number, None)
        return played

    played = asyncio.run(slow())
    prefilled, sampler.stats.prefilled = sampler.stats.prefilled, 0
    assert prefilled > 0

    async def alone() -> list[Completion]:
        ids, again = (3, 4, 5, 6), []
        with sampler.seat((0,)) as seat:
            for turn in range(2):
                again.append(await seat.complete(make_prompt(ids, turn)))
                ids += (*again[-1].token_ids, 9)
        return again

    sampler.forget()
    assert asyncio.run(alone()) == played
    assert sampler.stats.prefilled == 4 + 2  # a resumed turn reads its last token and what is new


def test_the_number_of_slots_changes_no_bit() -> None:
    """Fewer than live episodes, which wait for one that ends, and more than there are token ids."""
    few, many = (ordered(tiny(), slots=slots) for slots in (3, 64))
    assert many._independent and play(few, range(6), 0) == play(many, range(6))


def test_a_round_waits_for_live_episodes_and_goes_on_when_they_end() -> None:
    sampler = ordered(tiny(), fast=False)

    async def together() -> None:
        with sampler.seat((0,)) as first, sampler.seat((1,)) as second:
            one = asyncio.create_task(first.complete(make_prompt((3, 4), 0)))
            await asyncio.sleep(0.02)
            assert not one.done() and not sampler._running
            await asyncio.gather(one, second.complete(make_prompt((3, 5), 1)))
            one = asyncio.create_task(first.complete(make_prompt((3, 4), 2)))
            await asyncio.sleep(0.02)
            assert not one.done() and not sampler._running
        await one

    asyncio.run(asyncio.wait_for(together(), 10))


def test_cancelled_episodes_give_up_seats_and_slots() -> None:
    for fast in (True, False):
        sampler = ordered(tiny(), slots=2, fast=fast)

        async def cancelled(sampler: Sampler = sampler) -> None:
            tasks = [asyncio.create_task(episode(sampler, number, None)) for number in range(4)]
            await asyncio.sleep(0.01)
            for task in tasks[:3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(asyncio.wait_for(cancelled(), 10))
        assert not sampler._seats and not sampler._open and not sampler._table._owned
        assert play(sampler, range(4)) == play(ordered(tiny(), slots=2, fast=fast), range(4))


def test_other_policies_give_no_seats() -> None:
    class Scripted:
        async def complete(self, prompt: object) -> None: ...

    scripted = Scripted()
    assert not isinstance(scripted, Seating)
    with seated(scripted, (0,)) as policy:
        assert policy is scripted


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "number"), [(1, 64), (2, 12)])
def test_many_episodes_in_random_orders(threads: int, number: int) -> None:
    model, _ = load_policy(base_folder("bandit"), "cpu", "float32")
    use_threads(threads)
    try:
        sampler = ordered(model, slots=number)
        full = play(sampler, range(number))
        assert sampler._independent
        for delays in range(2):
            assert play(sampler, range(number), delays) == full
        for alone in range(0, number, 5):
            assert play(sampler, [alone]) == {alone: full[alone]}
    finally:
        use_threads(1)
