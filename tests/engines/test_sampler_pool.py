"""The pool of samplers, without Ray: real samplers in threads of their own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.errors import EngineLost, NotFiniteError
from ragen.core.types import Completion, Prompt
from ragen.engines.hosts import Failure, ServingHost
from ragen.engines.model_hosts import LearnerHost, SamplerHost
from ragen.engines.pool import Answers, ProcessLost, Seat
from ragen.engines.sampler_pool import SamplerPool, SamplerTold
from ragen.engines.sampling import Stats
from ragen.models.names import resolve_model


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
            raise ProcessLost("sampler was killed")
        finished, self.finished = self.finished, []
        return Answers(finished, SamplerTold(0.0, max(self.eras), Stats(sampled=len(finished))))

    async def drop(self, numbers: Sequence[int]) -> None:
        self.dropped += numbers
        self.news.set()

    def die(self) -> None:
        self.dead = True
        self.news.set()


ENDED = list[tuple[str, str]]()


@pytest.fixture(autouse=True)
def no_end() -> Iterator[None]:
    ENDED.clear()
    yield


def pool_of(*samplers: Any, timeout_s: float = 5.0) -> SamplerPool:
    pool = SamplerPool(
        100, timeout_s, lambda seat, loss: ENDED.append((seat.name, str(loss or "")))
    )
    for number, sampler in enumerate(samplers):
        pool.join(Seat(f"sampler {number}", sampler))
    return pool


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


class Watched(dict[Any, Any]):
    """A mapping that counts how often one of its kind is looked at."""

    looks = 0

    def __len__(self) -> int:
        Watched.looks += 1
        return super().__len__()

    def pop(self, *arguments: Any) -> Any:
        Watched.looks += 1
        return super().pop(*arguments)

    def __iter__(self) -> Iterator[Any]:
        Watched.looks += super().__len__()
        return super().__iter__()


def test_a_turn_costs_as_much_with_many_samplers_and_conversations_as_with_few() -> None:
    """Else the driver of a thousand samplers takes longer for a turn than a sampler."""

    async def play() -> tuple[bool, int]:
        pool = pool_of(*(Scripted(number) for number in range(40)))
        pool._known = Watched()
        for seat in pool.seats:
            seat.open = Watched()
        prompts = [ask(7, number) for number in range(80)]
        first = await asyncio.gather(*map(pool.complete, prompts))
        Watched.looks = 0
        ids = first[11].token_ids
        second = await pool.complete(ask(7, 11, *(ids or ()), 9))
        return second.token_ids == ids, Watched.looks

    stayed, looks = asyncio.run(play())
    assert stayed and looks < 10


def test_what_a_lost_sampler_had_open_comes_once_from_another() -> None:
    async def play() -> tuple[list[int], list[Prompt], list[Prompt]]:
        dying, living = Scripted(1, free=False), Scripted(2)
        pool = pool_of(dying, living)
        waiting = [asyncio.ensure_future(pool.complete(ask(5, seed=s))) for s in range(8)]
        await asyncio.sleep(0.01)
        sent = [prompt for _, prompt in dying.asked]
        dying.die()
        answers = await asyncio.gather(*waiting)
        dying.dead = False
        dying.answer(4)  # too late: these are somebody else's now
        return [each.token_ids[0] for each in answers], sent, [p for _, p in living.asked]  # type: ignore[index]

    tokens, sent, others = asyncio.run(play())
    assert tokens == [2] * 8 and len(sent) == 4
    assert sorted(p.seed for p in others) == list(range(8)) and others[-4:] == sent
    assert ENDED == [("sampler 0", "sampler was killed")]


def test_without_any_sampler_what_waits_is_kept_for_the_next_one_or_fails_in_time() -> None:
    async def play(joins: bool) -> Any:
        dying = Scripted(1, free=False)
        pool = pool_of(dying, timeout_s=0.3)
        waiting = [asyncio.ensure_future(pool.complete(ask(5, seed=s))) for s in range(3)]
        await asyncio.sleep(0.01)
        dying.die()
        await asyncio.sleep(0.1)
        if joins:
            pool.join(Seat("sampler 1", Scripted(2)))
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [each.token_ids for each in asyncio.run(play(True))] == [(2,)] * 3
    failures = asyncio.run(play(False))
    assert all(isinstance(each, EngineLost) for each in failures)
    assert str(failures[0]) == "there has been no sampler for 0.3 s: sampler was killed"


def test_a_sampler_that_leaves_answers_what_it_has_and_gets_no_more() -> None:
    async def play() -> tuple[list[int], list[int]]:
        leaving, staying = Scripted(1, free=False), Scripted(2)
        pool = pool_of(leaving, staying)
        waiting = [asyncio.ensure_future(pool.complete(ask(5, seed=s))) for s in range(4)]
        await asyncio.sleep(0.01)
        pool.leave(pool.seats[0])
        later = [await pool.complete(ask(6)) for _ in range(3)]
        assert [seat.name for seat in pool.seats] == ["sampler 0", "sampler 1"]
        leaving.answer(2)
        first = await asyncio.gather(*waiting)
        await asyncio.sleep(0.01)
        return [e.token_ids[0] for e in first], [e.token_ids[0] for e in later]  # type: ignore[index]

    first, later = asyncio.run(play())
    assert sorted(first) == [1, 1, 2, 2] and later == [2, 2, 2] and ENDED == [("sampler 0", "")]


def test_what_nobody_waits_for_is_dropped_and_caches_are_forgotten_once() -> None:
    async def play() -> None:
        slow = Scripted(1, free=False)
        pool = pool_of(slow)
        waiting = asyncio.ensure_future(pool.complete(ask(5)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert slow.dropped == [slow.asked[0][0]] and not pool.seats[0].open
        slow.free = True
        pool.forget()
        await pool.complete(ask(5))
        await pool.complete(ask(5))
        assert slow.eras == {1, 2}

    asyncio.run(play())


def opened(answer: Any) -> Any:
    return answer.error() if isinstance(answer, Failure) else answer


class Threaded:
    """A real host, called as Ray calls it: `collect` from a thread of its own."""

    def __init__(self, host: ServingHost, client: str = "driver") -> None:
        self.host, self.client = host, client

    async def submit(self, requests: Sequence[tuple[int, Any]], era: int) -> None:
        await asyncio.to_thread(self.host.submit, self.client, requests, era)

    async def collect(self) -> Answers:
        answers = await asyncio.to_thread(self.host.collect, self.client)
        return replace(answers, finished=[(n, opened(each)) for n, each in answers.finished])

    async def drop(self, numbers: Sequence[int]) -> None:
        await asyncio.to_thread(self.host.drop, self.client, numbers)


@pytest.fixture(scope="module")
def config() -> Config:
    return resolve("bandit", {"threads": 1})


@pytest.fixture(scope="module")
def learner(config: Config) -> LearnerHost:
    host = LearnerHost()
    host.start(config, resolve_model(config.model.path, config.env.name), 1)
    return host


def sampler_of(config: Config, **more: Any) -> SamplerHost:
    host = SamplerHost()
    path = resolve_model(config.model.path, config.env.name)
    assert host.start(config, path, 1) is None
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
