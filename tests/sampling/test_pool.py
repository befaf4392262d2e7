"""The pool of samplers, without Ray: real samplers in threads of their own."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ragen.cluster.model_hosts import LearnerHost, SamplerHost
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.errors import EngineLost, NotFiniteError
from ragen.core.pictures import Picture
from ragen.core.types import Completion, Prompt
from ragen.sampling.pool import Answers, SamplerPool, sent_once
from ragen.sampling.weighted_policy import Stats
from tests.bandit_model import settings


class Scripted:
    """A sampler that answers when it is let to; its completions name it."""

    def __init__(self, token: int, free: bool = True) -> None:
        self.token, self.asked, self.dead = token, list[tuple[int, Prompt]](), False
        self.news, self.finished, self.dropped = asyncio.Event(), list[Any](), list[int]()
        self.free, self.eras = free, set[int]()

    async def submit(self, requests: Sequence[tuple[int, Prompt]], era: int) -> None:
        self.eras.add(era)
        self.asked += requests
        if self.free:
            self.answer(len(requests))

    def answer(self, number: int) -> None:
        for each, _ in self.asked[-number:]:
            self.finished.append((each, Completion((self.token,), (0.0,), "", "length", 0)))
        self.news.set()

    async def collect(self) -> Answers:
        await self.news.wait()
        self.news.clear()
        if self.dead:
            raise EngineLost("sampler 0 was killed")
        finished, self.finished = self.finished, []
        return Answers(finished, 0.0, max(self.eras), Stats(sampled=len(finished)))

    async def drop(self, numbers: Sequence[int]) -> None:
        self.dropped += numbers
        self.news.set()

    def die(self) -> None:
        self.dead = True
        self.news.set()


def pool_of(*samplers: Any) -> SamplerPool:
    return SamplerPool(samplers, 100)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def ask(*ids: int, seed: int = 0) -> Prompt:
    return Prompt((), ids, 0, 4, 1.0, seed)


def test_a_conversation_stays_where_it_began_and_the_rest_is_shared_out() -> None:
    async def play() -> tuple[Counter[int], bool]:
        pool = pool_of(Scripted(1), Scripted(2), Scripted(3))
        first = await asyncio.gather(*(pool.complete(ask(7, number)) for number in range(30)))
        said = [each.token_ids[0] for each in first]  # type: ignore[index]
        order = list(reversed(range(30)))
        second = await asyncio.gather(
            *(pool.complete(ask(7, number, said[number], 9)) for number in order)
        )
        again = {number: each.token_ids[0] for number, each in zip(order, second, strict=True)}  # type: ignore[index]
        return Counter(said), [again[number] for number in range(30)] == said

    counts, stayed = asyncio.run(play())
    assert counts == {1: 10, 2: 10, 3: 10} and stayed


def test_a_lost_sampler_fails_what_waits_and_what_comes_later() -> None:
    async def play() -> list[Any]:
        dying, living = Scripted(1, free=False), Scripted(2, free=False)
        pool = pool_of(dying, living)
        waiting = [asyncio.ensure_future(pool.complete(ask(5, seed=s))) for s in range(8)]
        await until(lambda: len(dying.asked) == 4)
        dying.die()
        failed = await asyncio.gather(*waiting, return_exceptions=True)
        return [*failed, *await asyncio.gather(pool.complete(ask(5)), return_exceptions=True)]

    failures = asyncio.run(play())
    assert len(failures) == 9 and all(isinstance(each, EngineLost) for each in failures)
    assert {str(each) for each in failures} == {"sampler 0 was killed"}


def test_what_nobody_waits_for_is_dropped_and_caches_are_forgotten_once() -> None:
    async def play() -> None:
        slow = Scripted(1, free=False)
        pool = pool_of(slow)
        waiting = asyncio.ensure_future(pool.complete(ask(5)))
        await until(lambda: bool(slow.asked))
        waiting.cancel()
        await until(lambda: bool(slow.dropped))
        assert slow.dropped == [slow.asked[0][0]] and not pool._members[0].open
        slow.free = True
        pool.forget()
        await pool.complete(ask(5))
        await pool.complete(ask(5))
        assert slow.eras == {1, 2}

    asyncio.run(play())


class Threaded:
    """A real host, called as Ray calls it: `collect` from a thread of its own."""

    def __init__(self, host: SamplerHost) -> None:
        self.host = host

    async def submit(self, requests: Sequence[tuple[int, Any]], era: int) -> None:
        await asyncio.to_thread(self.host.submit, requests, era)

    async def collect(self) -> Answers:
        return await asyncio.to_thread(self.host.collect)

    async def drop(self, numbers: Sequence[int]) -> None:
        await asyncio.to_thread(self.host.drop, numbers)


@pytest.fixture(scope="module")
def config() -> Config:
    return merge("bandit", settings())


@pytest.fixture(scope="module")
def learner(config: Config) -> LearnerHost:
    host = LearnerHost()
    host.start(1, config, config.model.path)
    return host


def sampler_of(config: Config) -> SamplerHost:
    host = SamplerHost()
    host.start(1, config, config.model.path)
    return host


def test_real_samplers_hold_the_weights_they_were_sent_and_sample_as_one_alone(
    config: Config, learner: LearnerHost
) -> None:
    block, (held, size) = learner.weights()
    one, two = sampler_of(config), sampler_of(config)
    assert one.load(block, 3) == two.load(block, 3) == held and size == block.num_bytes

    async def play(*hosts: SamplerHost) -> list[Completion]:
        pool = pool_of(*map(Threaded, hosts))
        prompts = [ask(5, 6, 7, seed=seed) for seed in range(20)]
        return await asyncio.gather(*map(pool.complete, prompts))

    alone, both = asyncio.run(play(one)), asyncio.run(play(one, two))
    assert [each.token_ids for each in alone] == [each.token_ids for each in both]
    assert {each.policy_version for each in both} == {3}


def test_weights_that_are_not_finite_fail_the_completion(config: Config) -> None:
    host = sampler_of(config)
    next(iter(host._model.parameters())).data.fill_(float("nan"))

    async def play() -> None:
        await pool_of(Threaded(host)).complete(ask(5, 6, 7))

    with pytest.raises(NotFiniteError, match="not finite"):
        asyncio.run(play())


def test_a_message_has_each_picture_once() -> None:
    """Prompts of a group show equal pictures, and later prompts repeat earlier ones."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    prompts = [
        Prompt((), (1, *picture.token_ids(4), 2), 0, 8, 1.0, 0, pictures=(picture,) * 3)
        for picture in (Picture.of(pixels) for _ in range(50))
    ]
    sent = sent_once(list(enumerate(prompts)))
    assert [prompt for _, prompt in sent] == prompts
    message = pickle.dumps(sent)
    assert len(message) < 2 * pixels.nbytes < len(pickle.dumps(prompts)) / 10
    (_, received), *_ = pickle.loads(message)
    assert (received.pictures[0].pixels == pixels).all()
