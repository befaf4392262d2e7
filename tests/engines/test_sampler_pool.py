"""The pool of samplers, without Ray: real samplers in threads of their own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.errors import EngineLost, NotFiniteError
from ragen.core.types import Completion, Group, Prompt
from ragen.engines.hosts import Failure, ServingHost
from ragen.engines.model_hosts import LearnerHost, SamplerHost
from ragen.engines.player_host import PlayerHost
from ragen.engines.player_pool import PlayerPool
from ragen.engines.pool import Answers, ProcessLost, Seat
from ragen.engines.sampler_pool import SamplerPool, SamplerTold
from ragen.engines.sampling import Stats
from ragen.models.loading import load_tokenizer
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import make_chat, make_setup
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


def test_what_a_lost_sampler_had_open_comes_once_from_another() -> None:
    async def play() -> tuple[list[int], list[Prompt], list[Prompt]]:
        dying, living = Scripted(1, free=False), Scripted(2)
        pool = pool_of(dying, living)
        waiting = [asyncio.ensure_future(pool.complete(ask(5, seed=s))) for s in range(8)]
        await until(lambda: len(dying.asked) == 4)
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


def test_without_any_sampler_what_waits_fails_in_time() -> None:
    async def play() -> Any:
        dying = Scripted(1, free=False)
        pool = pool_of(dying, timeout_s=0.05)
        waiting = [asyncio.ensure_future(pool.complete(ask(5, seed=s))) for s in range(3)]
        await until(lambda: len(dying.asked) == 3)
        dying.die()
        return await asyncio.gather(*waiting, return_exceptions=True)

    failures = asyncio.run(play())
    assert all(isinstance(each, EngineLost) for each in failures)
    assert str(failures[0]) == "there has been no sampler for 0.05 s: sampler was killed"


def test_what_nobody_waits_for_is_dropped_and_caches_are_forgotten_once() -> None:
    async def play() -> None:
        slow = Scripted(1, free=False)
        pool = pool_of(slow)
        waiting = asyncio.ensure_future(pool.complete(ask(5)))
        await until(lambda: bool(slow.asked))
        waiting.cancel()
        await until(lambda: bool(slow.dropped))
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
    return resolve("bandit", settings())


@pytest.fixture(scope="module")
def learner(config: Config) -> LearnerHost:
    host = LearnerHost()
    host.start(config, config.model.path, 1)
    return host


def sampler_of(config: Config) -> SamplerHost:
    host = SamplerHost()
    assert host.start(config, config.model.path, 1) is None
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


def test_a_player_plays_the_same_episodes_as_the_driver(config: Config) -> None:
    host = sampler_of(config)
    tokenizer = load_tokenizer(Path(config.model.path), config.model.path)
    player = PlayerHost()
    assert player.start(config, tokenizer) is None
    player.meet("sampler 0", Threaded(host, "player 0"))

    async def play(on_player: bool) -> list[Group]:
        pool: Any = pool_of(Threaded(host))
        if on_player:
            pool = PlayerPool(pool, 5.0, lambda seat, loss: None)
            pool.join(Seat("player 0", Threaded(player)))
        return await run_groups(pool, setup, [10007, 10008], 4, (0, "train", 3), 8)

    with closing(make_setup(config, make_chat(config, tokenizer))) as setup:
        here, there = asyncio.run(play(False)), asyncio.run(play(True))
    texts = [
        [[turn.completion.text for turn in episode.turns] for group in each for episode in group]
        for each in ([group.episodes for group in groups] for groups in (here, there))
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 8
