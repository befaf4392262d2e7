"""Players, and samplers with several clients, without Ray: in threads of one process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_sampler_pool import Scripted, Threaded, ask, pool_of, sampler_of

from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.errors import RagenError
from ragen.core.types import Episode, Group, Turn
from ragen.engines.model_hosts import SamplerHost
from ragen.engines.player_host import PlayerHost
from ragen.engines.player_pool import Order, PlayerPool, PlayerTold
from ragen.engines.pool import Answers, ProcessLost, Seat
from ragen.models.loading import load_tokenizer
from ragen.models.names import resolve_model
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import ManySamplers
from ragen.rollout.setup import Setup, make_chat, make_setup

PATH = (0, "train", 3)


@pytest.fixture(scope="module")
def config() -> Config:
    return resolve("bandit", {"threads": 1})


@pytest.fixture(scope="module")
def samplers(config: Config) -> list[SamplerHost]:
    return [sampler_of(config), sampler_of(config)]


def setup_of(config: Config) -> tuple[Any, Setup]:
    folder = resolve_model(config.model.path, config.env.name)
    tokenizer = load_tokenizer(Path(folder), folder)
    return tokenizer, make_setup(config, make_chat(config, tokenizer))


# Several clients of one sampler.


def test_each_client_gets_the_answers_to_its_own_requests(samplers: list[SamplerHost]) -> None:
    """Both number them from 0, and both ask at the same time."""
    host = samplers[0]

    async def play(*clients: str) -> list[list[Any]]:
        async def one(client: str, first: int) -> list[Any]:
            pool = pool_of(Threaded(host, client))
            prompts = [ask(5, 6, 7, seed=seed) for seed in range(first, first + 12)]
            return [each.token_ids for each in await asyncio.gather(*map(pool.complete, prompts))]

        return await asyncio.gather(*(one(name, 12 * n) for n, name in enumerate(clients)))

    alone = [*asyncio.run(play("a")), asyncio.run(play("b", "c"))[1]]
    assert asyncio.run(play("d", "e")) == alone and alone[0] != alone[1]


def test_a_client_that_is_dismissed_is_served_no_more_and_the_others_are(
    samplers: list[SamplerHost],
) -> None:
    host = samplers[0]
    host.submit("lost", [(0, replace(ask(5, 6, 7), max_tokens=500))], 1)
    waiting = asyncio.run_coroutine_threadsafe(asyncio.to_thread(host.collect, "lost"), host._loop)
    host.dismiss("lost")
    assert waiting.result(10).finished == []  # nobody keeps the thread
    host.submit("lost", [(1, ask(5, 6, 7))], 1)  # was on its way
    host.submit("living", [(1, ask(5, 6, 7))], 1)
    assert [number for number, _ in host.collect("living").finished] == [1]
    assert host.beat().idle


def test_what_a_sampler_remembers_is_forgotten_once_in_an_era_whoever_asks(
    samplers: list[SamplerHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, forgotten = samplers[1], list[int]()
    forget = host._forget
    monkeypatch.setattr(host, "_forget", lambda: (forgotten.append(host._era), forget()))
    first = host._era + 1
    for client, era in (("f", first), ("g", first), ("g", first + 1), ("f", first)):
        host.submit(client, [(0, ask(5, 6, 7))], era)
        assert host.collect(client).told.era == max(era, host._era)
    assert forgotten == [first, first + 1]


# Episodes on players.


def players_of(pool: PlayerPool, *players: Any) -> PlayerPool:
    for number, player in enumerate(players):
        pool.join(Seat(f"player {number}", player))
    return pool


def pool_with(num_samplers: int) -> PlayerPool:
    samplers = pool_of(*(Scripted(number) for number in range(num_samplers)))
    return PlayerPool(samplers, 5.0, lambda seat, loss: None)


def test_both_pools_tell_how_many_samplers_there_are() -> None:
    async def play() -> list[int]:
        players = pool_with(3)
        found = list[int]()
        for pool in (players, players.samplers):
            assert isinstance(pool, ManySamplers)
            found.append(pool.num_samplers)
        players.samplers.remove(players.samplers.seats[0], ProcessLost("sampler was killed"))
        return [*found, players.num_samplers]

    assert asyncio.run(play()) == [3, 3, 2]


def exact(groups: Sequence[Group]) -> list[Episode]:
    """The episodes without times, and without logprobs, whose rounding depends on the forward."""

    def of(turn: Turn) -> Turn:
        completion = replace(turn.completion, logprobs=None, fingerprint=None)
        return replace(turn, completion=completion, completion_s=None)

    return [
        replace(episode, turns=tuple(map(of, episode.turns)))
        for group in groups
        for episode in group.episodes
    ]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_player_plays_the_same_episodes_as_the_driver(
    config: Config, samplers: list[SamplerHost]
) -> None:
    tokenizer, setup = setup_of(config)
    player = PlayerHost()
    assert player.start(config, tokenizer) is None
    for number, host in enumerate(samplers):
        player.meet(f"sampler {number}", Threaded(host, "player 0"))

    async def play(on_player: bool) -> tuple[list[Group], float]:
        pool: Any = pool_of(*map(Threaded, samplers))
        if on_player:
            pool = players_of(PlayerPool(pool, 5.0, lambda seat, loss: None), Threaded(player))
        setup.env_time.seconds = 0.0
        for each in (pool, pool.samplers) if on_player else (pool,):
            each.forget(1000 + on_player)
        groups = await run_groups(pool, setup, [10007, 10008, 10009], 4, PATH, 8)
        if on_player:
            told = pool.samplers.metrics()["rollout/prefix_cache_hit_fraction"].value
            assert 0 < told < 1 and pool.metrics()["engine/players"].value == 1
            assert set(pool._at.values()) == {0}
            player._told()
            assert player._told().samplers == {}  # the driver knows it already
        return groups, setup.env_time.seconds

    with closing(setup):
        (here, _), (there, env_s) = asyncio.run(play(False)), asyncio.run(play(True))
    assert exact(there) == exact(here) and env_s > 0
    assert all(turn.completion_s for group in there for turn in group.episodes[0].turns)


class ScriptedPlayer(Scripted):
    """A player whose episodes have the sampler's name as their environment."""

    async def collect(self) -> Answers:
        answers = await super().collect()
        return replace(answers, told=PlayerTold(0.0, 0.0, {}))

    def answer(self, number: int) -> None:
        for each, order in self.asked[-number:]:
            assert isinstance(order, Order)
            spec = order.spec
            place = spec.level_seed, 0, spec.group, spec.member, ()
            self.finished.append(
                (each, Episode(order.sampler, *place, "failed", True, False, False, None))
            )
        self.news.set()


def test_groups_stay_together_on_players_and_samplers_which_all_get_the_same_number(
    config: Config,
) -> None:
    _, setup = setup_of(config)
    first, second = ScriptedPlayer(1, free=False), ScriptedPlayer(2, free=False)

    async def play() -> list[Group]:
        pool = players_of(pool_with(4), first, second)
        task = asyncio.ensure_future(run_groups(pool, setup, [1, 2, 3, 4], 4, PATH))
        await until(lambda: len(first.asked) == len(second.asked) == 8)
        first.answer(8)
        second.answer(8)
        return await task

    groups = asyncio.run(play())
    on_samplers = [{episode.env for episode in group.episodes} for group in groups]
    assert sorted(map(sorted, on_samplers)) == [[f"sampler {n}"] for n in range(4)]
    on_players = [Counter(order.spec.group for _, order in each.asked) for each in (first, second)]
    assert on_players == [{0: 4, 1: 4}, {2: 4, 3: 4}]


def test_what_a_lost_player_had_open_is_played_once_by_another(config: Config) -> None:
    _, setup = setup_of(config)
    dying, living = ScriptedPlayer(1, free=False), ScriptedPlayer(2)

    async def play() -> list[Group]:
        pool = players_of(pool_with(1), dying, living)
        task = asyncio.ensure_future(run_groups(pool, setup, [1, 2], 4, PATH))
        await until(lambda: len(dying.asked) == 4)
        dying.die()
        return await task

    groups = asyncio.run(play())
    places = [(e.group, e.member) for group in groups for e in group.episodes]
    assert places == [(group, member) for group in range(2) for member in range(4)]
    seeds = Counter(order.spec for _, order in living.asked)
    assert len(seeds) == 8 and set(seeds.values()) == {1}


def test_an_episode_that_every_player_is_lost_with_ends_the_run_in_a_line(config: Config) -> None:
    _, setup = setup_of(config)

    class Dying(ScriptedPlayer):
        async def submit(self, requests: Any, era: int) -> None:
            raise ProcessLost("player 7 was killed")

    async def play() -> None:
        pool = players_of(pool_with(1), *(Dying(number) for number in range(5)))
        try:
            await run_groups(pool, setup, [10001], 1, PATH)
        finally:
            assert len(pool.seats) == 2

    with pytest.raises(RagenError, match="3 players were lost, each with the episode of level 10"):
        asyncio.run(play())


def test_episodes_that_nobody_waits_for_are_given_up(config: Config) -> None:
    _, setup = setup_of(config)
    player = ScriptedPlayer(1, free=False)

    async def play() -> dict[str, int]:
        pool = players_of(pool_with(1), player)
        task = asyncio.ensure_future(run_groups(pool, setup, [1], 4, PATH))
        await until(lambda: len(player.asked) == 4)
        task.cancel()
        await until(lambda: len(player.dropped) == 4)
        assert not pool.seats[0].open
        return {name: count for name, count in pool._at.items() if name and count}

    assert asyncio.run(play()) == {}
    assert sorted(player.dropped) == [0, 1, 2, 3]
