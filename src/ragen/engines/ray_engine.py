"""The engine on Ray: learners, samplers and players in processes, on one machine or many."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from ragen.algorithms.batch import Batch
from ragen.config.config import Config
from ragen.core.errors import EngineLost, RagenError
from ragen.core.metrics import Metrics, mean, total
from ragen.core.types import Role
from ragen.engines.engine import Engine, Late
from ragen.engines.hosts import Beat, Failure
from ragen.engines.lost import GRACE_S, answers_of
from ragen.engines.model_hosts import LearnerHost, SamplerHost
from ragen.engines.player_host import PlayerHost
from ragen.engines.player_pool import PlayerPool
from ragen.engines.pool import Pool, ProcessLost, Seat
from ragen.engines.ray_cluster import Rooms, connect
from ragen.engines.ray_process import LOST, Process, RemoteProcess, actor_of, environment, ray
from ragen.engines.sampler_pool import SamplerPool
from ragen.engines.weights import some
from ragen.rollout.setup import make_chat

if ray is not None:
    from ray.exceptions import GetTimeoutError, RayError

BEAT_S = 1.0
"""Seconds from one sign of life to the next."""

LONGEST_PAUSE_S = 60.0
"""The longest pause between two attempts to start a process that its machine cannot run."""

Weights = tuple[Any, dict[str, int], int]
"""A publication: its block, the checksums of its tensors, and its version."""


class RayEngine:
    """The `Engine` of learners, samplers and players on Ray; without players, the driver plays.

    `path` is the folder or hub id of the policy's first weights. Weights are published through the
    shared memory of each machine. An engine that replaces another one, `after`, gets the same kind
    of room.

    Raises:
        MachineAway: The cluster lacks a machine that the engine `after` had.
        RagenError: Ray is missing, the cluster cannot be reached or is too small, or the model
            cannot be used.
    """

    rooms: Rooms

    def __init__(self, config: Config, path: str, after: Engine | None = None) -> None:
        if Path(path).exists():  # the processes have other working folders
            path = str(Path(path).resolve())
        self._config, self._path, self._settings = config, path, config.engine
        self._timeout_s = config.engine.timeout_s
        self.version = 0
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._late: list[Late] = []
        self._closed = False
        self._error: Exception | None = None
        self._weights: Weights | None = None
        self._published_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._measured = time.monotonic()
        self._health = threading.Thread(target=self._watch, name="engine-health", daemon=True)
        self._learners: list[Process] = []
        self._samplers: dict[int, Process] = {}  # by place
        self._players: dict[int, Process] = {}
        self._clients = count()
        most_known = 4 * config.episodes_at_once
        self.samplers = SamplerPool(most_known, self._timeout_s, self._on_end)
        self._player_pool: PlayerPool | None = None
        if config.engine.players:
            self._player_pool = PlayerPool(self.samplers, self._timeout_s, self._on_end)
        self._owns_ray = connect(config.engine.address, self._num_processes)
        try:
            self.rooms = Rooms(config.engine, after.rooms if isinstance(after, RayEngine) else None)
        except BaseException:
            if self._owns_ray:
                ray.shutdown()
            raise
        try:
            self._start()
        except BaseException:
            self._shut_down()
            raise
        self._health.start()

    @property
    def policy(self) -> SamplerPool | PlayerPool:
        """See `Engine.policy`."""
        return self._player_pool or self.samplers

    @property
    def _num_processes(self) -> int:
        return self._settings.learners + self._settings.samplers + self._settings.players

    @property
    def _pools(self) -> list[Pool]:
        return [self.samplers, *([self._player_pool] if self._player_pool else [])]

    # Starting.

    def _spawn(self, kind: type, name: str, room: dict[str, Any]) -> Process:
        """Begin a process in its room; its `start` is called later."""
        # Besides the thread that works, it has threads for the answers of each client and for signs
        # of life.
        clients = 1 + (self._settings.players if kind is SamplerHost else 0)
        groups = {"collect": clients, "health": 1}
        actor = ray.remote(concurrency_groups=groups)(actor_of(kind)).options(
            **room, max_restarts=0, runtime_env={"env_vars": environment()}
        )
        return Process(name, actor.remote())

    def _spawn_learner(self, place: int) -> Process:
        return self._spawn(LearnerHost, f"learner {place}", self.rooms.learner(place))

    def _spawn_sampler(self, place: int) -> Process:
        return self._spawn(SamplerHost, f"sampler {place}", self.rooms.sampler(place))

    def _spawn_player(self, place: int) -> Process:
        process = self._spawn(PlayerHost, f"player {place}", self.rooms.player(place))
        process.client = f"{process.name}, {next(self._clients)}"
        return process

    def _start(self) -> None:
        """Start all processes, and give the samplers the learner's weights."""
        config, path = self._config, self._path
        num = self._settings.learners
        self._learners = [self._spawn_learner(place) for place in range(num)]
        self._samplers = {
            place: self._spawn_sampler(place) for place in range(self._settings.samplers)
        }
        self._players = {
            place: self._spawn_player(place) for place in range(self._settings.players)
        }
        first = self._learners[0]
        store = self._wait(first, first.actor.address.remote())
        models = [*self._learners, *self._samplers.values()]
        threads = self.rooms.threads_of(each.name for each in models)
        started = [
            (each, each.actor.start.remote(config, path, threads[each.name], rank, num, store))
            for rank, each in enumerate(self._learners)
        ]
        started += [
            (each, each.actor.start.remote(config, path, threads[each.name]))
            for each in self._samplers.values()
        ]
        self._tokenizer, *_ = self._wait_all(started)
        self.chat = make_chat(config, self._tokenizer)
        self._wait_all(
            [
                (each, each.actor.start.remote(config, self._tokenizer))
                for each in self._players.values()
            ]
        )
        sent = [each.actor.weights.remote() for each in self._learners]
        about, *_ = self._wait_all(
            [(each, ref) for each, (_, ref) in zip(self._learners, sent, strict=True)]
        )
        weights = self._hold_weights(sent[0][0], *about)
        loads = [(each, each.actor.load.remote(weights[0], 0)) for each in self._samplers.values()]
        for process, held in zip(self._samplers.values(), self._wait_all(loads), strict=True):
            _check(process.name, held, weights)
        for process in self._samplers.values():
            self._join(self.samplers, process)
        met = [
            (each, each.actor.meet.remote(*self._known_as(seat, each)))
            for each in self._players.values()
            for seat in self.samplers.seats
        ]
        for process, ref in met:
            self._wait(process, ref)
        for process in self._players.values():
            assert self._player_pool is not None
            self._join(self._player_pool, process)

    def _wait_all(self, asked: Sequence[tuple[Process, Any]]) -> list[Any]:
        """As `_wait`, for several calls.

        A failure is raised without waiting for the other calls, because they may wait for the call
        that failed. A process that talks to a lost process may fail before Ray has noticed the
        loss. So another error of Ray is held back for up to `GRACE_S` seconds, and if a loss is
        noticed meanwhile, the loss is raised instead.
        """
        open_calls = {ref: process for process, ref in asked}
        answers = dict[Any, Any]()
        failure: RayError | None = None
        until = time.monotonic() + self._timeout_s
        while open_calls:
            done, _ = ray.wait([*open_calls], timeout=max(0.0, until - time.monotonic()))
            if failure is not None and not done:
                raise failure
            ref = (done or [*open_calls])[0]
            try:
                process = open_calls.pop(ref)
                answers[ref] = self._wait(process, ref, self._timeout_s if done else 0.0)
            except RagenError:
                raise
            except RayError as error:
                failure = failure or error
                until = min(until, time.monotonic() + GRACE_S)
            if failure is None:
                until = time.monotonic() + self._timeout_s
        if failure is not None:
            raise failure
        return [answers[ref] for _, ref in asked]

    def _wait(self, process: Process, ref: Any, timeout_s: float | None = None) -> Any:
        """The answer of a call during the engine's construction, before there is an event loop."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            answer = ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise EngineLost(
                f"{process.name} has not started within engine.timeout_s = {self._timeout_s:g} s; "
                "set it higher if the model takes longer to load"
            ) from error
        except LOST as error:
            loss = process.lost(error)
            raise EngineLost(str(loss), loss.details) from error
        if isinstance(answer, Failure):
            raise answer.error()
        process.alive = time.monotonic()
        return answer

    @property
    def _processes(self) -> list[Process]:
        return [*self._learners, *self._samplers.values(), *self._players.values()]

    # Learners.

    async def _train(self, method: str, *arguments: Any) -> Any:
        """The answer of the first learner to a call that all learners get (`answers_of`)."""
        self._raise_failure()
        if self._config.rollout.sampler == "vllm" and self.rooms.shares_gpus:
            await self._rest()
        calls = [each.call("call", method, *arguments, phase=method) for each in self._learners]
        return (await self._all(calls))[0]

    async def _all(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The answers of all learners (`answers_of`), unless the engine fails meanwhile."""
        try:
            return await answers_of(calls, self._end_learners)
        except EngineLost:
            self._raise_failure()  # the reason for which the learners were ended
            raise

    def _end_learners(self) -> None:
        for each in self._learners:
            ray.kill(each.actor)

    async def _rest(self) -> None:
        if self._settings.max_staleness == 0:
            seats = list(self.samplers.seats)
            await asyncio.gather(*(self._tell(self.samplers, each, "rest") for each in seats))

    async def score(self, batch: Batch, role: Role) -> Batch:
        """See `Engine.score`."""
        scored: Batch = await self._train("score", ray.put(batch), role)
        return scored

    async def update(self, batch: Batch, step: int) -> Metrics:
        """See `Engine.update`."""
        metrics: Metrics = await self._train("update", ray.put(batch), step)
        return metrics

    async def cross_scores(
        self, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
    ) -> Tensor:
        """See `Engine.cross_scores`."""
        scores: Tensor = await self._train("cross_scores", prompts, thoughts)
        return scores

    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        """See `Learner.gradient_norms`."""
        metrics: Metrics = await self._train("gradient_norms", ray.put(batch), bucket_B)
        return metrics

    async def save(self, folder: Path) -> dict[str, Any]:
        """See `Engine.save`; the learners have to see the folder, too."""
        state: dict[str, Any] = await self._train("save", folder.resolve())
        return state | {"version": self.version}

    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        """See `Engine.load`."""
        await self._train("load", folder.resolve(), state)
        self.version = int(state["version"])
        await self._push()

    # Publishing.

    async def publish(self) -> None:
        """See `Engine.publish`.

        Raises:
            EngineLost: A learner is gone.
            RagenError: A sampler does not hold the weights that were sent.
        """
        self._raise_failure()
        self.version += 1
        await self._push()

    async def _push(self) -> None:
        sent = [each.actor.weights.remote() for each in self._learners]
        pairs = zip(self._learners, sent, strict=True)
        (held, size), *_ = await self._all(
            [each.answer(about, "publish") for each, (_, about) in pairs]
        )
        weights = self._hold_weights(sent[0][0], held, size)
        # Without a pause in between, so that a sampler that joins gets them here or by itself.
        await asyncio.gather(*(self._give(seat, weights) for seat in list(self.samplers.seats)))

    def _hold_weights(self, block: Any, held: dict[str, int], size: int) -> Weights:
        self._weights, self._published_bytes = (block, held, self.version), size
        return self._weights

    async def _give(self, seat: Seat, weights: Weights) -> None:
        try:
            await self._load(self._process_of(seat), weights)
        except ProcessLost as failure:
            self.samplers.remove(seat, failure)

    async def _load(self, process: Process, weights: Weights) -> None:
        block, _, version = weights
        try:
            held = await process.call("load", block, version, phase="publish")
        except RagenError as error:
            raise RagenError(f"{process.name}: {error}") from error
        _check(process.name, held, weights)

    # Samplers and players that come and go.

    def _join(self, pool: Pool, process: Process) -> Seat:
        """Add a process that is ready to its pool; tell the players of a new sampler."""
        remote = RemoteProcess(process, "sampling" if pool is self.samplers else "playing")
        seat = Seat(process.name, remote)
        pool.join(seat)
        if self._player_pool is not None and pool is self.samplers:
            process.serves = True
            for player in self._player_pool.seats:
                known = self._known_as(seat, self._process_of(player))
                self._begin(self._tell(self._player_pool, player, "meet", *known))
        return seat

    def _known_as(self, sampler: Seat, player: Process) -> tuple[str, RemoteProcess]:
        """The name and the `Remote` by which a player knows a sampler."""
        process = self._process_of(sampler)
        return sampler.name, RemoteProcess(process, "sampling", player.client)

    def _process_of(self, seat: Seat) -> Process:
        assert isinstance(seat.remote, RemoteProcess)
        return seat.remote.process

    async def _tell(self, pool: Pool, seat: Seat, method: str, *arguments: Any) -> None:
        """Call a method of a process of a pool; a lost process is removed from the pool."""
        try:
            await self._process_of(seat).call(method, *arguments)
        except ProcessLost as failure:
            pool.remove(seat, failure)

    def _tell_all(self, pool: Pool, method: str, *arguments: Any) -> None:
        for seat in pool.seats:
            self._begin(self._tell(pool, seat, method, *arguments))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin work that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Let every open and later call of the run fail with the error of a background task."""
        self._error = error
        self._end_learners()
        for pool in self._pools:
            pool.fail(error)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _on_end(self, seat: Seat, loss: ProcessLost | None) -> None:
        """Replace a process that is lost, or that was asked to leave."""
        if self._closed:
            return
        process = self._process_of(seat)
        ray.kill(process.actor)
        is_player = process in self._players.values()
        processes = self._players if is_player else self._samplers
        place = next(place for place, each in processes.items() if each is process)
        further = not is_player and self.rooms.is_further(place)
        another = "another one joins where there is room" if further else ""
        if loss is None:
            another = another or "a new one takes its place"
            text = f"{seat.name} was asked to end, and has left; {another}"
            self._events.append((text, {"process": seat.name, "what": "left"}))
        else:
            what = "play what it had not finished" if is_player else "take what it has not answered"
            text = f"{loss}; others {what}, and {another or 'a new one takes its place'}"
            data = {"process": seat.name, "what": "lost", "details": loss.details}
            self._events.append((text, data))
        if is_player:
            self._tell_all(self.samplers, "dismiss", process.client)
        elif self._player_pool is not None:
            self._tell_all(self._player_pool, "part", seat.name, str(loss or "it has left"))
        del processes[place]
        if further:
            self.rooms.clear(place)
        else:
            self._begin(self._revive(place, is_player))

    async def _revive(self, place: int, is_player: bool = False) -> None:
        """Start a process in a place once there is room; repeat this until one has joined."""
        if self._closed:  # since this task was begun
            return
        start, pause_s, reported = time.monotonic(), BEAT_S, set[str]()
        processes = self._players if is_player else self._samplers
        while True:
            process = self._spawn_player(place) if is_player else self._spawn_sampler(place)
            processes[place] = process
            try:
                await process.begin()  # this may wait for a machine until the run ends
                if is_player:
                    await self._open_player(process)
                else:
                    await self._open_sampler(process)
                break
            except ProcessLost as failure:
                ray.kill(process.actor)
                del processes[place]  # there is no sign of life to ask for until the next attempt
                text = f"before it could join, the new {failure}; another one takes its place"
                about = {"process": process.name, "what": "lost", "details": failure.details}
                if text not in reported:
                    reported.add(text)
                    self._events.append((text, about))
                if not is_player and self.rooms.is_further(place):
                    self.rooms.clear(place)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        seconds = time.monotonic() - start
        text = f"a new {process.name} has joined after {seconds:.1f} s"
        data = {"process": process.name, "what": "joined", "seconds": seconds}
        self._events.append((text, data))

    async def _open_sampler(self, process: Process) -> None:
        threads = self.rooms.threads(process.name)
        await process.call("start", self._config, self._path, threads)
        loaded: Weights | None = None
        while loaded is not self._weights:  # a publication may come meanwhile
            loaded = self._weights
            assert loaded is not None
            await self._load(process, loaded)
        self._join(self.samplers, process)

    async def _open_player(self, process: Process) -> None:
        pool = self._player_pool
        assert pool is not None
        await process.call("start", self._config, self._tokenizer)
        seat = self._join(pool, process)
        seats = list(self.samplers.seats)  # `_join` introduces later ones
        known = [self._known_as(each, process) for each in seats]
        # If it is lost now, its pool has it replaced.
        await asyncio.gather(*(self._tell(pool, seat, "meet", *each) for each in known))

    # Signs of life.

    def _watch(self) -> None:
        """Ask every process for a sign of life and end those without one, in a thread."""
        tick = min(BEAT_S, self._timeout_s / 4)
        before = time.monotonic()
        while not self._closed:
            time.sleep(tick)
            now = time.monotonic()
            slept, before = now - before - tick, now
            try:
                processes = self._processes
                for process in processes if slept > BEAT_S else ():
                    process.alive += slept  # this process was suspended, or had no core
                self._look_at(processes, now)
                self._look_at_nodes()
                self._look_for_room()
            except RayError as error:
                text = f"the Ray cluster does not answer: {' '.join(str(error).split())[:200]}"
                self._end_watch(EngineLost(text, str(error)))
                return
            except Exception as error:
                self._end_watch(error)
                raise

    def _end_watch(self, error: Exception) -> None:
        """Let the run fail, because without this thread no hung process would be noticed."""
        self._error = error  # even if nothing was sampled yet and there is no event loop
        self._in_loop(self._fail, error)

    def _look_at_nodes(self) -> None:
        """Note the processes whose node is about to be taken away."""
        if ray.util.client.ray.is_connected():  # Ray's client does not learn of draining nodes
            return
        drained = ray._private.state.state.get_draining_nodes()
        if drained:
            nodes = self.rooms.nodes()
            for process in self._processes:
                process.drained = nodes.get(process.name, "") in drained

    def _look_for_room(self) -> None:
        """Let further samplers join, up to `engine.most_samplers`, once there is room for them."""
        loop = self.policy.loop
        if loop is None or loop.is_closed() or self._closed:
            return
        for place in self.rooms.further():
            self._in_loop(self._begin_further, place)

    def _begin_further(self, place: int) -> None:
        self._begin(self._revive(place))

    def _look_at(self, processes: Sequence[Process], now: float) -> None:
        """Take the signs of life that have come, and ask for the next ones."""
        for process in processes:
            if process.beating is None:
                process.beating = process.actor.beat.remote()
        # Ray is asked once, not once for each: with a thousand processes, that takes too long.
        asked = [process.beating for process in processes]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0) if asked else ([], [])
        beats = _beats(done) if done else {}
        for process in processes:
            self._note(process, beats.get(process.beating), now)

    def _note(self, process: Process, beat: Beat | RayError | None, now: float) -> None:
        if beat is not None:
            process.beating = None
            if isinstance(beat, RayError):
                self._in_loop(self._remove, process, process.lost(beat))
                return
            process.address = beat.address
            rests = beat.idle and not process.calls
            process.alive = now if rests else max(process.alive, now - beat.still_s)
            process.stacks = beat.stacks
            if beat.leaves or process.drained:
                self._in_loop(self._leave, process, beat.idle)
        calls = list(process.calls.values())
        if not calls and not process.serves:
            process.alive = now
        elif now - process.alive > self._timeout_s and not process.reason:
            phase = min(calls, key=lambda call: call[1])[0] if calls else "sampling"
            stacks = process.stacks or "it does not answer, so its stacks are not known"
            late = Late(process.name, phase, now - process.alive, stacks)
            process.reason = f"{late}, and was ended"
            self._late.append(late)
            ray.kill(process.actor)

    def _in_loop(self, function: Any, *arguments: Any) -> None:
        loop = self.policy.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    def _remove(self, process: Process, loss: ProcessLost) -> None:
        """Take out a process that was lost, at once, even if no call to it was open."""
        for pool in self._pools:
            for seat in list(pool.seats):
                if self._process_of(seat) is process:
                    pool.remove(seat, loss)

    def _leave(self, process: Process, idle: bool) -> None:
        """Let a process that is asked to end leave, once it has answered its open requests."""
        for pool in self._pools:
            for seat in list(pool.seats):
                if self._process_of(seat) is not process:
                    continue
                if pool is self.samplers and self._player_pool is not None:
                    self._tell_all(self._player_pool, "avoid", seat.name)
                    seat.leaves = True
                    if not idle:  # players have requests there
                        continue
                pool.leave(seat)

    def end_late(self) -> list[Late]:
        """See `Engine.end_late`; the engine's own thread has ended them already."""
        late, self._late = self._late, []
        return late

    # The rest.

    def forget(self) -> None:
        """See `Engine.forget`."""
        for pool in self._pools:
            pool.forget()

    def metrics(self) -> Metrics:
        """See `Engine.metrics`.

        ``engine/samplers`` and ``engine/players`` are the numbers of processes that are alive. The
        idle fractions are shares of the time since the last call.
        """
        now = time.monotonic()
        span, self._measured = now - self._measured, now
        idle = [1 - min(1.0, each.busy_s / span) for each in self._learners]
        for each in self._learners:
            each.busy_s = 0.0
        found = self.samplers.metrics() | {
            "engine/learner_idle_fraction": mean(sum(idle) / len(idle)),
            "publish/bytes": total(self._published_bytes),
        }
        return found | self._player_pool.metrics() if self._player_pool else found

    def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        """See `Engine.take_events`."""
        events, self._events = self._events, []
        return events

    async def close(self) -> None:
        """See `Engine.close`."""
        for task in self._tasks:
            task.cancel()
        self._shut_down()

    def _shut_down(self) -> None:
        """End all processes, and Ray if this engine started it; may be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        if self._health.is_alive():
            self._health.join()
        for process in self._processes:
            ray.kill(process.actor)
        self.rooms.close()
        if self._owns_ray:
            ray.shutdown()


def _beats(done: Sequence[Any]) -> dict[Any, Beat | RayError]:
    """The signs of life that have come, or what Ray raises for a process."""
    try:
        return dict(zip(done, ray.get(done), strict=True))
    except RayError:
        return {ref: _beat(ref) for ref in done}


def _beat(ref: Any) -> Beat | RayError:
    try:
        beat: Beat = ray.get(ref)
    except RayError as error:
        return error
    return beat


def _check(name: str, held: dict[str, int], weights: Weights) -> None:
    """Check that a sampler of this name holds what was sent; `held` are its checksums.

    Raises:
        RagenError: It holds other weights.
    """
    _, sent, version = weights
    if others := [each for each in sent if held.get(each) != sent[each]]:
        raise RagenError(
            f"the weights did not reach {name}: after publication {version} it holds others than "
            f"the learner in {some(others)}; suspect the memory or the network of its machine"
        )
