"""A sampler that takes the place of a lost one, on a stand-in for Ray."""

from __future__ import annotations

import asyncio
import threading
import types
from typing import Any

import pytest

from ragen.config.sections import EngineConfig
from ragen.core.errors import EngineLost, MachineAway, RagenError
from ragen.core.types import Prompt
from ragen.engines import ray_cluster, ray_engine
from ragen.engines.hosts import Beat
from ragen.engines.player_pool import PlayerPool
from ragen.engines.pool import ProcessLost, Seat
from ragen.engines.ray_cluster import Rooms
from ragen.engines.ray_process import Process, RemoteProcess
from ragen.engines.sampler_pool import SamplerPool


class New:
    """A sampler's process that is lost before it runs, or whose weights are others."""

    name, actor = "sampler 0", None

    def __init__(self, is_lost: bool) -> None:
        self.is_lost = is_lost

    async def begin(self) -> None:
        if self.is_lost:
            raise ProcessLost("sampler 0 could not be started")

    async def call(self, method: str, *_: Any, phase: str = "") -> dict[str, int] | None:
        return {"w": 1} if method == "load" else None


def engine_of(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> Any:
    monkeypatch.setattr(ray_engine, "BEAT_S", 0.0)
    monkeypatch.setattr(ray_engine, "ray", types.SimpleNamespace(kill=lambda actor: None))
    engine: Any = object.__new__(ray_engine.RayEngine)
    engine._closed, engine._events, engine._samplers, engine._tasks = False, [], {}, set()
    engine.version, engine._weights = 0, (None, {"w": 2}, 0)
    engine._config, engine._path, engine._error = None, "", None
    engine._players, engine._player_pool, engine._learners = {}, None, []
    engine.rooms = types.SimpleNamespace(is_further=lambda place: False, threads=lambda name: 1)
    engine.samplers = SamplerPool(10, 60.0, engine._on_end)
    engine._spawn_sampler = lambda place: New(is_lost)
    return engine


def test_a_sampler_that_never_starts_is_tried_again_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=True)
        task = asyncio.create_task(engine._revive(0))
        for _ in range(20_000):
            await asyncio.sleep(0)
        assert not task.done()
        assert len(engine._events) == 1
        task.cancel()

    asyncio.run(play())


@pytest.mark.parametrize("is_player", [False, True])
def test_between_two_attempts_nothing_asks_for_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, is_player: bool
) -> None:
    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=True)
        engine._spawn_player = engine._spawn_sampler
        monkeypatch.setattr(ray_engine, "BEAT_S", 60.0)
        task = asyncio.create_task(engine._revive(0, is_player))
        while not engine._events:
            await asyncio.sleep(0)
        assert not task.done() and engine._processes == []
        task.cancel()

    asyncio.run(play())


def test_wrong_weights_of_a_new_sampler_end_the_run_also_if_nobody_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=False)
        engine.samplers._enter(asyncio.get_running_loop())
        engine._begin(engine._revive(0))
        await asyncio.wait(set(engine._tasks))
        await asyncio.sleep(0)  # nobody has asked for a completion until now
        with pytest.raises(RagenError, match="the weights did not reach"):
            await engine.samplers.complete(Prompt((), (1,), 0, 4, 1.0, 0))
        with pytest.raises(RagenError, match="the weights did not reach"):
            await engine.publish()

    asyncio.run(play())


def test_samplers_that_join_load_their_weights_at_the_same_time_and_none_misses_a_publication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 64 samplers of 7B, one after the other takes ten minutes, also of a publication."""
    loaded = list[tuple[str, int]]()

    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=False)
        every, published = asyncio.Event(), asyncio.Event()

        class Loading(Process):
            """A sampler that loads its first weights until others are published."""

            async def begin(self) -> None:
                """It runs."""

            async def call(self, method: str, *arguments: Any, phase: str = "") -> Any:
                if method != "load":
                    return None
                _, version = arguments
                loaded.append((self.name, version))
                if len(loaded) == 3:
                    every.set()
                if version == 0:
                    await published.wait()
                return {"w": version}

        class Publishing(Process):
            async def answer(self, ref: Any, phase: str) -> Any:
                return {"w": engine.version}, 8

        weights = types.SimpleNamespace(remote=lambda: ("a block", "about it"))
        engine._learners = [Publishing("learner 0", types.SimpleNamespace(weights=weights))]
        engine._weights = (None, {"w": 0}, 0)
        engine._spawn_sampler = lambda place: Loading(f"sampler {place}", None)
        for place in range(3):
            engine._begin(engine._revive(place))
        await asyncio.wait_for(every.wait(), 5.0)
        await asyncio.wait_for(engine.publish(), 5.0)
        assert not engine.samplers.seats
        published.set()
        while engine._tasks:
            await asyncio.sleep(0)
        assert engine._error is None
        assert [seat.name for seat in engine.samplers.seats] == [f"sampler {n}" for n in range(3)]

    asyncio.run(play())
    assert loaded == [(f"sampler {place}", version) for version in (0, 1) for place in range(3)]


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_player_that_is_lost_as_it_meets_the_samplers_is_replaced_once(
    is_told_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failed call tells of the loss, and so does the thread that looks at all processes."""
    made, killed = list[Process](), list[Any]()

    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=False)
        monkeypatch.setattr(ray_engine, "ray", types.SimpleNamespace(kill=killed.append))
        engine._player_pool = pool = PlayerPool(engine.samplers, 60.0, engine._on_end)
        engine._tokenizer = None

        class Meeting(Process):
            """A player of which the first is lost at its first sampler."""

            async def begin(self) -> None:
                """It runs."""

            async def call(self, method: str, *_: Any, phase: str = "") -> None:
                await asyncio.sleep(0)
                if method == "meet" and self.actor == 0:
                    loss = ProcessLost("player 0 was killed")
                    if is_told_first:
                        engine._remove(self, loss)
                    else:
                        asyncio.get_running_loop().call_soon(engine._remove, self, loss)
                    raise loss

        def spawn(place: int) -> Process:
            made.append(Meeting(f"player {place}", len(made)))
            return made[-1]

        engine._spawn_player = spawn
        for number in range(2):
            sampler = Meeting(f"sampler {number}", "a sampler")
            engine.samplers.join(Seat(sampler.name, RemoteProcess(sampler, "sampling")))
        for each in (engine.samplers, pool):
            each._enter(asyncio.get_running_loop())
        engine._begin(engine._revive(0, True))
        while engine._tasks:
            await asyncio.sleep(0)
        assert [engine._process_of(seat) for seat in pool.seats] == [engine._players[0]]
        assert len(made) == 2 and killed == [0] and engine._error is None

    asyncio.run(play())


def test_samplers_rest_at_the_same_time_and_a_new_player_meets_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To free a GPU's memory takes a second or more, which learners would wait for each sampler."""
    called = list[tuple[str, str]]()

    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=False)
        engine._settings = EngineConfig(name="ray", samplers=3)
        every = asyncio.Event()

        class Waiting(Process):
            """A process whose calls last until there are three of them."""

            async def call(self, method: str, *_: Any, phase: str = "") -> None:
                if method == "start":
                    return
                called.append((self.name, method))
                if len(called) == 3:
                    every.set()
                await every.wait()

        for number in range(3):
            sampler = Waiting(f"sampler {number}", None)
            engine.samplers.join(Seat(sampler.name, RemoteProcess(sampler, "sampling")))
        await asyncio.wait_for(engine._rest(), 5.0)
        assert called == [(f"sampler {number}", "rest") for number in range(3)]
        called.clear()
        every.clear()
        engine._player_pool = PlayerPool(engine.samplers, 60.0, engine._on_end)
        engine._tokenizer = None
        await asyncio.wait_for(engine._open_player(Waiting("player 0", None)), 5.0)
        assert called == [("player 0", "meet")] * 3

    asyncio.run(play())


@pytest.mark.ray
@pytest.mark.parametrize("later", ["lost", "fine", "open"])
def test_a_broken_connection_at_the_start_is_told_unless_a_loss_explains_it(
    later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learner 0 cannot reach learner 1, which gloo tells before Ray has noticed the loss."""
    from ray.exceptions import ActorDiedError, RayTaskError

    broken = RayTaskError("start", "...", RuntimeError("Connection closed by peer"))
    answers: dict[str, Any] = {"0": broken, "1": ActorDiedError() if later == "lost" else "ready"}

    def wait(refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout <= 60.0
        return [] if later == "open" and refs == ["1"] else refs[:1], []

    def get(ref: Any, timeout: float | None = None) -> Any:
        if isinstance(answers[ref], Exception):
            raise answers[ref]
        return answers[ref]

    monkeypatch.setattr(ray_engine, "ray", types.SimpleNamespace(wait=wait, get=get))
    engine: Any = object.__new__(ray_engine.RayEngine)
    engine._timeout_s = 60.0
    asked = [(Process(f"learner {ref}", None), ref) for ref in answers]
    with pytest.raises(EngineLost if later == "lost" else RayTaskError) as caught:
        engine._wait_all(asked)
    named = str(caught.value).startswith("learner 1 ")
    assert named if later == "lost" else caught.value is broken


@pytest.mark.ray
def test_a_sign_of_life_that_fails_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray raises for it, the thread that looks at all processes goes on."""
    from ray.exceptions import RaySystemError, RayTaskError

    for failure in (RaySystemError("no room"), RayTaskError("beat", "...", ValueError("odd"))):

        def get(ref: Any, failure: Exception = failure) -> Any:
            raise failure

        stand_in = types.SimpleNamespace(wait=lambda refs, **_: (refs, []), get=get)
        monkeypatch.setattr(ray_engine, "ray", stand_in)
        engine: Any = object.__new__(ray_engine.RayEngine)
        removed: list[Any] = []
        engine._in_loop = lambda function, *arguments, to=removed: to.append(arguments)
        process = Process("sampler 0", None, beating="asked")
        engine._look_at([process], 0.0)
        ((lost, loss),) = removed
        assert lost is process and str(loss).startswith("sampler 0 ")


@pytest.mark.ray
@pytest.mark.parametrize("is_lost", [False, True])
def test_ray_is_asked_once_for_the_signs_of_life_of_all_processes(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand processes, questions for each take a fifth of the driver's time."""
    from ray.exceptions import ActorDiedError

    asked = list[str]()

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        asked.append("wait")
        assert num_returns == len(refs) == 4 and timeout == 0
        return [ref for ref in refs if ref != "silent"], ["silent"]

    def get(refs: str | list[str]) -> Any:
        asked.append("get")
        if is_lost and "lost" in refs:
            raise ActorDiedError()
        beats = {ref: Beat(0.0, "", False, f"at {ref}") for ref in ("one", "two", "lost")}
        return beats[refs] if isinstance(refs, str) else [beats[ref] for ref in refs]

    monkeypatch.setattr(ray_engine, "ray", types.SimpleNamespace(wait=wait, get=get))
    engine: Any = object.__new__(ray_engine.RayEngine)
    removed, engine._timeout_s = list[Any](), 60.0
    engine._in_loop = lambda function, *arguments: removed.append(arguments)
    refs = ["one", "lost", "silent", "two"]
    processes = [Process(ref, None, beating=ref, alive=0.0) for ref in refs]
    for process in processes:
        process.calls[0] = "update", 0.0
    engine._look_at(processes, 50.0)
    lost = {"lost"} if is_lost else set()
    heard = {"one", "two", "lost"} - lost
    assert {each.name for each in processes if each.beating is not None} == {"silent"}
    assert {each.name for each in processes if each.address == f"at {each.name}"} == heard
    assert {each.name for each in processes if each.alive == 50.0} == heard
    assert {process.name for process, _ in removed} == lost
    assert asked == (["wait", *["get"] * 4] if is_lost else ["wait", "get"])


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_processes_nobody_looks_at_any_more_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("the cluster says nothing of its nodes")

    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=False)
        engine._timeout_s = 0.04
        engine._look_at_nodes = fail
        engine.samplers._enter(asyncio.get_running_loop())
        health = threading.Thread(target=engine._watch)
        health.start()
        with pytest.raises(RuntimeError, match="nothing of its nodes"):
            await engine.samplers.complete(Prompt((), (1,), 0, 4, 1.0, 0))
        with pytest.raises(RuntimeError, match="nothing of its nodes"):
            await engine.publish()
        health.join()

    asyncio.run(play())


@pytest.mark.ray
def test_a_learner_that_hangs_ends_with_the_cluster_and_a_new_engine_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.exceptions import RaySystemError

    def fail() -> None:
        raise RaySystemError("the head of the cluster is gone")

    class Hanging:
        """A learner that answers once it is killed, with its loss."""

        name, actor, alive = "learner 0", "its actor", 0.0

        async def call(self, *_: Any, phase: str) -> None:
            await killed.wait()
            raise ProcessLost("learner 0 was ended")

    killed = asyncio.Event()

    async def play() -> None:
        engine = engine_of(monkeypatch, is_lost=False)
        stand_in = types.SimpleNamespace(kill=lambda actor: actor and killed.set())
        monkeypatch.setattr(ray_engine, "ray", stand_in)
        engine._timeout_s, engine._learners = 0.04, [Hanging()]
        engine._config = types.SimpleNamespace(rollout=types.SimpleNamespace(sampler="local"))
        engine._look_at, engine._look_at_nodes = lambda *_: None, fail
        engine.samplers._enter(asyncio.get_running_loop())
        health = threading.Thread(target=engine._watch)
        health.start()
        with pytest.raises(EngineLost, match=r"cluster does not answer: .*the head .* is gone"):
            await engine._train("update")
        health.join()

    asyncio.run(play())


@pytest.mark.parametrize("address", ["head..example:10001", f"ray://{'a' * 70}:1", "head:²"])
def test_an_address_that_cannot_be_one_is_refused(address: str) -> None:
    with pytest.raises(RagenError, match=r"cannot be reached.*leave engine\.address out"):
        ray_cluster._refuse_silent(address)


CLUSTERS = {
    "a GPU for each": ((1, 1, 1), (2, 8), None, (False, [(1, 1), (1, 1)])),
    "one for both": ((1, 1, 1), (1, 8), None, (True, [(2, 1)])),
    "none": ((1, 2, 1), (0, 8), None, (False, [(1, 0), (1, 0), (1, 0)])),
    "two workers a sampler": ((1, 1, 2), (3, 8), None, (False, [(1, 1), (2, 2)])),
    "two workers a sampler, one GPU too few": ((1, 1, 2), (2, 8), None, RagenError),
    "a machine is back": ((1, 1, 1), (2, 8), (2, 8), (False, [(1, 1), (1, 1)])),
    "a machine is away": ((1, 1, 1), (1, 8), (2, 8), MachineAway),
    "all GPUs are away": ((1, 1, 1), (0, 8), (1, 8), MachineAway),
    "shared as before": ((1, 1, 1), (2, 8), (1, 8), (True, [(2, 1)])),
    "CPUs are away": ((1, 1, 1), (0, 1), (0, 2), MachineAway),
    "no GPUs as before": ((1, 1, 1), (2, 8), (0, 8), (False, [(1, 0), (1, 0)])),
}
"""Learners, samplers and their workers; GPUs and CPUs of the cluster, and those of the engine
before; and whether GPUs are shared, with the CPUs and GPUs of each part, or the error."""


@pytest.mark.ray
@pytest.mark.parametrize("about", CLUSTERS)
def test_room_on_gpus(about: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (learners, samplers, workers), now, earlier, expected = CLUSTERS[about]
    settings = EngineConfig(
        name="ray", learners=learners, samplers=samplers, tensor_parallel=workers
    )
    reserved: list[Any] = []

    def on(cluster: tuple[int, int], before: Rooms | None = None) -> Rooms:
        resources = {"GPU": cluster[0], "CPU": cluster[1]}
        stand_in = types.SimpleNamespace(
            cluster_resources=lambda: resources, wait=lambda refs, timeout: (refs, [])
        )
        monkeypatch.setattr(ray_cluster, "ray", stand_in)
        return Rooms(settings, before)

    def reserve(bundles: list[dict[str, float]], strategy: str) -> Any:
        reserved[:] = [(each["CPU"], each.get("GPU", 0)) for each in bundles]
        return types.SimpleNamespace(ready=lambda: "ready")

    monkeypatch.setattr(ray_cluster, "placement_group", reserve)
    before = None if earlier is None else on(earlier)
    if isinstance(expected, type):
        with pytest.raises(expected) as caught:
            on(now, before)
        assert type(caught.value) is expected
    else:
        assert (on(now, before).shares_gpus, reserved) == expected


@pytest.mark.ray
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_cluster_is_asked_for_the_nodes_of_all_processes_at_once(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 512 learners and 512 samplers, a question for each pair of processes takes an hour."""
    asked = list[str]()
    nodes = {part: f"node {part // 8}" for part in range(32)}

    def table(group: Any) -> dict[str, Any]:
        asked.append("group")
        return {"bundles_to_node_id": nodes}

    stand_in = types.SimpleNamespace(
        cluster_resources=lambda: {"CPU": 64},
        wait=lambda refs, timeout: (refs, []),
        nodes=lambda: (
            asked.append("nodes")
            or [{"NodeID": f"node {n}", "Resources": {"CPU": 48.0}} for n in range(4)]
        ),
        get_runtime_context=lambda: types.SimpleNamespace(get_node_id=lambda: "node 0"),
    )
    monkeypatch.setattr(ray_cluster, "ray", stand_in)
    monkeypatch.setattr(ray_cluster, "placement_group_table", table)
    monkeypatch.setattr(
        ray_cluster,
        "placement_group",
        lambda bundles, strategy: types.SimpleNamespace(ready=lambda: "ready"),
    )
    monkeypatch.setattr(ray_cluster, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr("torch.get_num_threads", lambda: 24)
    rooms = Rooms(EngineConfig(name="ray", learners=12, samplers=20, max_staleness=staleness))
    names = [f"learner {place}" for place in range(12)] + [
        f"sampler {place}" for place in range(20)
    ]
    for name in names:
        kind, place = name.split()
        getattr(rooms, kind)(int(place))
    found = rooms.threads_of(names)
    assert sorted(asked) == ["group", "nodes"]
    assert rooms.nodes() == {name: f"node {number // 8}" for number, name in enumerate(names)}
    if staleness:
        assert found == {name: 3 if number < 8 else 6 for number, name in enumerate(names)}
    else:  # 8 learners; 4 learners and 4 samplers; 8 samplers; 8 samplers
        expected = [3] * 8 + [12] * 8 + [6] * 16
        assert found == dict(zip(names, expected, strict=True))
    assert rooms.threads("learner 9") == found["learner 9"]


@pytest.mark.ray
def test_the_cluster_is_asked_for_many_further_samplers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other, each with a look of its own, 1,000 samplers take half an hour."""
    groups, there, removed, tables = list[str](), set[str](), list[Any](), list[str]()

    def reserve(bundles: list[dict[str, float]], strategy: str = "PACK") -> Any:
        name = f"group {len(groups)}"
        groups.append(name)
        number = types.SimpleNamespace(hex=lambda: name)
        return types.SimpleNamespace(name=name, id=number, ready=lambda: name)

    def table(group: Any = None) -> dict[str, Any]:
        assert group is None, "one question for each sampler, and each of them asks"
        tables.append("asked")
        return {name: {"bundles_to_node_id": {0: f"node of {name}"}} for name in groups}

    def wait(refs: list[str], timeout: float, num_returns: int = 1) -> tuple[list[str], list[str]]:
        assert num_returns == len(refs)
        return [ref for ref in refs if ref in there], [ref for ref in refs if ref not in there]

    stand_in = types.SimpleNamespace(cluster_resources=lambda: {"CPU": 8}, wait=wait)
    monkeypatch.setattr(ray_cluster, "ray", stand_in)
    monkeypatch.setattr(ray_cluster, "placement_group", reserve)
    monkeypatch.setattr(ray_cluster, "placement_group_table", table)
    monkeypatch.setattr(ray_cluster, "remove_placement_group", lambda each: removed.append(each))
    monkeypatch.setattr(ray_cluster, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    there.add("group 0")
    rooms = Rooms(EngineConfig(name="ray", samplers=2, most_samplers=202, timeout_s=1.0))
    assert rooms.further() == [] and len(groups) == 1 + ray_cluster.MOST_ASKED == 65
    there |= {"group 3", "group 9"}
    assert rooms.further() == [2, 3] and len(groups) == 65
    assert rooms.further() == [] and len(groups) == 67
    there |= {f"group {number}" for number in range(202)}
    joined = [2, 3]
    while places := rooms.further():
        joined += places
    assert joined == [*range(2, 202)] and len(groups) == 201
    assert rooms.further() == [] and len(groups) == 201
    assert rooms.sampler(7) and rooms.sampler(8) and rooms.is_further(7)
    found = {"sampler 7": "node of group 5", "sampler 8": "node of group 6"}
    assert rooms.nodes() == found and len(tables) == 1
    rooms.clear(7)
    assert rooms.further() == [7] and len(groups) == 202
    assert rooms.sampler(7) is not None
    rooms.clear(7)
    there.clear()
    assert rooms.further() == []
    removed.clear()
    rooms.close()
    assert len(removed) == len({each.name for each in removed}) == 1 + 199 + 1
