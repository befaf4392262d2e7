"""The engine on Ray, with real processes on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults import rows

from ragen.config.config import Config
from ragen.config.reading import changed, resolve
from ragen.core.errors import EngineLost, RagenError
from ragen.core.types import Completion, Group, Prompt
from ragen.engines import ray_process
from ragen.engines.hosts import own_address
from ragen.engines.local import LocalEngine
from ragen.engines.machine import use_threads
from ragen.engines.pool import ProcessLost
from ragen.engines.ray_cluster import connect
from ragen.engines.ray_engine import RayEngine
from ragen.engines.ray_process import Process
from ragen.models.names import resolve_model
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import open_setups
from ragen.storage.reader import read_evaluations, read_metrics
from ragen.training.trainer import resume, train

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests: starting it takes longer than most of them."""
    import ray

    connect("", 6)
    yield
    ray.shutdown()


def config_of(**more: Any) -> Config:
    keys = {key.replace("__", "."): value for key, value in more.items()}
    few = {"steps": 2, "eval.episodes": 4, "rollout.num_groups": 2, "rollout.group_size": 4}
    ray_keys = {"engine.name": "ray", "engine.timeout_s": 120, "threads": 1}
    return resolve("bandit", few | ray_keys | keys)


def engine_of(config: Config) -> RayEngine:
    use_threads(1)
    return RayEngine(config, resolve_model(config.model.path, config.env.name))


def prompts(chat: Any, number: int, tokens: int = 8) -> list[Prompt]:
    ids = chat.open([{"role": "user", "content": "which of the two?"}])[0]
    return [Prompt((), ids, 0, tokens, 1.0, seed) for seed in range(number)]


def test_a_run_trains_and_resumes_with_other_numbers_of_processes(tmp_path: Path) -> None:
    train(config_of(checkpoint__every=1), tmp_path / "run")
    resume(tmp_path / "run", overrides={"steps": 3, "engine.samplers": 2, "engine.learners": 2})
    found = read_metrics(tmp_path / "run")
    assert sorted(found["reward/mean"]) == [1, 2, 3]
    assert found["engine/samplers"] == {1: 1.0, 2: 1.0, 3: 2.0}


PATH = (0, "train", 0)
PLAYED = (
    'SELECT step, "group", member, level_seed, noise_seed, stop_reason, reward, num_turns'
    " FROM episodes WHERE phase = 'train' ORDER BY 1, 2, 3"
)
REPLIES = """
    SELECT turn, observation, reply, completion_ids
    FROM turns JOIN episodes ON episodes.id = episode_id
    WHERE step = 1 AND phase = 'train' ORDER BY "group", member, turn
"""


def test_players_play_the_episodes_that_the_driver_would(tmp_path: Path) -> None:
    """And those of the evaluation before training, which they play, too."""
    same = {"env__isolate": True, "eval__episodes": 16, "steps": 1}
    train(config_of(**same), tmp_path / "driver")
    train(config_of(**same, engine__players=2), tmp_path / "players")
    found = [rows(tmp_path / name, PLAYED) for name in ("driver", "players")]
    assert found[0] == found[1] and len(found[0]) == 8
    found = [rows(tmp_path / name, REPLIES) for name in ("driver", "players")]
    assert found[0] == found[1] != []
    evaluated = [read_evaluations(tmp_path / name)[0]["success"] for name in ("driver", "players")]
    assert evaluated[0] == evaluated[1]
    metrics = read_metrics(tmp_path / "players")
    assert metrics["engine/players"] == {1: 2.0} and metrics["time/env_s"][1] > 0
    assert 0 < metrics["rollout/prefix_cache_hit_fraction"][1] < 1


HARDER: list[tuple[str, dict[str, Any]]] = [
    ("mixed", {}),
    ("frozen-lake-still", {"curriculum.stages": [{"max_turns": 1}], "curriculum.success": 0.5}),
]


@pytest.mark.parametrize(("recipe", "more"), HARDER, ids=["a mixture", "a curriculum"])
def test_players_play_mixtures_and_stages(
    tmp_path: Path, recipe: str, more: dict[str, Any]
) -> None:
    """The curriculum is in its first stage."""
    few = {"steps": 2, "eval.episodes": 4, "rollout.num_groups": 4, "rollout.group_size": 2}
    ray_keys = {"engine.name": "ray", "engine.timeout_s": 120, "threads": 1, "env.isolate": True}
    config = resolve(recipe, few | ray_keys | more)
    train(config, tmp_path / "driver")
    train(changed(config, {"engine.players": 2}), tmp_path / "players")
    found = [rows(tmp_path / name, PLAYED) for name in ("driver", "players")]
    assert found[0] == found[1] and len(found[0]) == 2 * 8
    found = [rows(tmp_path / name, REPLIES) for name in ("driver", "players")]
    assert found[0] == found[1] != []
    stages = read_metrics(tmp_path / "players").get("curriculum/stage", {2: 0})
    assert (stages[2] > 0) == (recipe != "mixed")


def test_players_play_ahead_of_training(tmp_path: Path) -> None:
    ahead = {"engine__max_staleness": 1, "engine__samplers": 2, "steps": 4}
    config = config_of(**ahead, env__isolate=True, engine__players=2)
    train(config, tmp_path / "run")
    places = [row[:3] for row in rows(tmp_path / "run", PLAYED)]
    assert places == [(s, g, m) for s in range(1, 5) for g in range(2) for m in range(4)]
    metrics = read_metrics(tmp_path / "run")
    assert max(metrics["engine/staleness_max"].values()) <= 1
    assert set(metrics["engine/samplers"].values()) == {2.0}


def test_players_outlive_samplers_that_leave_and_each_other() -> None:
    """One sampler is asked to end and one player is killed, while both have open requests."""

    async def play() -> tuple[list[Group], list[tuple[str, str]]]:
        import ray

        config = config_of(engine__players=2, env__isolate=True, rollout__max_tokens=60)
        engine = engine_of(config)
        happened: list[tuple[str, str]] = []

        async def wait_for(what: str, process: str) -> None:
            for _ in range(1200):
                events = [data for _, data in engine.take_events()]
                happened.extend((each["what"], each["process"]) for each in events)
                if (what, process) in happened:
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(f"{process} has not {what}: {happened}")

        try:
            with ExitStack() as stack:
                (setup,) = open_setups(config, engine.chat, stack).values()
                pid = await engine._samplers[0].actor.pid.remote()
                playing = asyncio.ensure_future(run_groups(engine.policy, setup, [1, 2], 8, PATH))
                await asyncio.sleep(0.2)
                os.kill(pid, signal.SIGTERM)
                ray.kill(engine._players[1].actor)
                groups = await playing
                await wait_for("left", "sampler 0")
                await wait_for("joined", "player 1")
                await wait_for("joined", "sampler 0")
                groups += await run_groups(engine.policy, setup, [1, 2], 8, PATH)
                return groups, happened
        finally:
            await engine.close()

    groups, happened = asyncio.run(play())
    played = [
        [[turn.completion.text for turn in episode.turns] for episode in group.episodes]
        for group in groups
    ]
    assert played[:2] == played[2:] and [len(group) for group in played] == [8] * 4
    assert Counter(happened) == {
        ("left", "sampler 0"): 1,
        ("joined", "sampler 0"): 1,
        ("lost", "player 1"): 1,
        ("joined", "player 1"): 1,
    }


def test_it_samples_as_the_local_engine() -> None:
    config = config_of()
    local = LocalEngine(config, resolve_model(config.model.path, config.env.name))

    async def both() -> tuple[list[Completion], list[Completion]]:
        engine = engine_of(config)
        asked = prompts(engine.chat, 8)
        remote = await asyncio.gather(*map(engine.policy.complete, asked))
        await engine.close()
        return remote, await asyncio.gather(*map(local.policy.complete, asked))

    remote, here = asyncio.run(both())
    assert [each.token_ids for each in remote] == [each.token_ids for each in here]


def test_other_weights_than_were_sent_stop_the_run() -> None:
    async def publish() -> None:
        engine = engine_of(config_of())
        try:
            hold = engine._hold_weights
            engine._hold_weights = lambda block, held, size: hold(
                block, dict.fromkeys(held, 0), size
            )  # type: ignore[method-assign]
            await engine.publish()
        finally:
            await engine.close()

    with pytest.raises(RagenError, match="the weights did not reach sampler 0: after publication"):
        asyncio.run(publish())


def test_what_a_killed_sampler_had_open_is_answered_once_and_a_new_one_joins() -> None:
    async def play() -> tuple[list[Completion], list[tuple[str, dict[str, Any]]], int]:
        import ray

        engine = engine_of(config_of(engine__samplers=2))
        try:
            asked = prompts(engine.chat, 64, tokens=100)
            waiting = [asyncio.ensure_future(engine.policy.complete(each)) for each in asked]
            await asyncio.sleep(0.05)
            ray.kill(engine._samplers[0].actor)
            answers = await asyncio.gather(*waiting)
            for _ in range(600):
                if len(engine.policy.seats) == 2:
                    break
                await asyncio.sleep(0.1)
            await asyncio.gather(*map(engine.policy.complete, asked))
            return answers, engine.take_events(), len(engine.policy.seats)
        finally:
            await engine.close()

    answers, events, alive = asyncio.run(play())
    assert len(answers) == 64 and all(each.token_ids for each in answers)
    assert [data["what"] for _, data in events] == ["lost", "joined"] and alive == 2
    text, data = events[0]
    assert re.fullmatch(
        "sampler 0 on .* was ended; others take .*, and a new one takes its place", text
    )
    assert "ray.kill" in data["details"]


def test_a_killed_learner_is_an_engine_lost() -> None:
    """In one line, which names its machine; what Ray says of it, 300 words, are its details."""

    async def play() -> None:
        engine = engine_of(config_of())
        try:
            os.kill(await engine._learners[0].actor.pid.remote(), signal.SIGKILL)
            await engine.publish()
        finally:
            await engine.close()

    with pytest.raises(EngineLost) as caught:
        asyncio.run(play())
    words = f"learner 0 on {re.escape(own_address())} (was killed|does not answer)"
    assert re.match(words, str(caught.value)) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150 < len(caught.value.details)


def test_a_learner_that_is_lost_at_the_start_is_named_while_the_other_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn = RayEngine._spawn

    def losing(engine: RayEngine, kind: type, name: str, room: Any) -> Process:
        process = spawn(engine, kind, name, room)
        if name == "learner 1":
            ray_process.ray.kill(process.actor)
        return process

    monkeypatch.setattr(RayEngine, "_spawn", losing)
    with pytest.raises(EngineLost, match=r"^learner 1 "):
        engine_of(config_of(engine__learners=2, engine__timeout_s=300))


def test_a_process_that_ray_kills_for_its_memory_is_a_lost_one() -> None:
    """`OutOfMemoryError` is none of Ray's actor errors."""

    async def lose() -> Any:
        gone = asyncio.get_running_loop().create_future()
        gone.set_exception(ray_process.OutOfMemoryError("killed: the node running low on memory\n"))
        return await Process("sampler 1", None).answer(gone, "sampling")

    with pytest.raises(ProcessLost, match=r"^sampler 1 was killed by Ray, because its machine"):
        asyncio.run(lose())


def test_a_sampler_that_is_suspended_is_late_and_replaced() -> None:
    async def play() -> str:
        engine = engine_of(config_of(engine__timeout_s=40))
        pid = await engine._samplers[0].actor.pid.remote()
        try:
            os.kill(pid, signal.SIGSTOP)
            answer = await engine.policy.complete(prompts(engine.chat, 1)[0])
            assert answer.token_ids
            (late,) = engine.end_late()
            return str(late)
        finally:
            await engine.close()

    text = asyncio.run(play())
    assert text.startswith("sampler 0 has not answered for ")


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process.ray, "is_initialized", lambda: False)
    with pytest.raises(RagenError, match=r"cannot be reached.*ray start --head") as caught:
        engine_of(config_of(engine__address="127.0.0.1:1"))
    assert "\n" not in str(caught.value)


def test_a_cluster_that_is_too_small_is_one_line() -> None:
    with pytest.raises(RagenError, match=r"lower engine\.learners or engine.samplers") as caught:
        engine_of(config_of(engine__samplers=1000))
    assert "\n" not in str(caught.value)
