"""A training run on many machines as a simulation of discrete events, from the cost of its parts.

    python benchmarks/cluster_simulation.py --learners 64 --samplers 64 --staleness 1 --kind heavy

What is simulated:

- **Samplers.** A forward samples a token of each of its rows and costs
  ``forward_s + rows · row_s + keys · key_s``, where `keys` are the stored tokens that it reads.
  Completions that arrive wait for the end of the forward, and are then read: ``forward_s +
  tokens · prefill_s``, which also draws their first token. An episode stays with its sampler, where
  its keys are kept until the next publication. Members that wait together share their first prompt.
- **The driver** does one thing at a time: `turn_s` for a completion (its message, the parser, the
  environment in its process), `episode_s` for an episode's part of the batch. With `players`, each
  of them is a process that pays `turn_s` for its episodes, and the driver pays `order_s` for one
  that has ended. The database is written beside it, `record_s` an episode; a step waits until the
  one before is written.
- **Learners.** Whole episodes are given to the learner that has fewest tokens, longest first. All
  wait for the slowest in each update, then sum their gradients: ``2 (L − 1) / L · reduce_s``.
- **A publication** lasts ``publish_s + samplers · publish_sampler_s``; samplers pause, and the
  completions that are open go on afterwards.
- **Staleness.** The collection of step s begins when s − max_staleness steps are recorded and the
  collection before has ended; with `overlap`, as in the loop, it begins during that one's last
  episodes. Where groups may close early, they all close when each has enough episodes;
  the others of a group join a later step as a group, and are dropped if they are too stale by then.

With one process for both (`colocated`) samplers and learners are the same devices.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

Kind = Literal["constant", "lognormal", "heavy", "bimodal"]
KINDS: tuple[Kind, ...] = ("constant", "lognormal", "heavy", "bimodal")


@dataclass(frozen=True)
class Spread:
    """A distribution of positive numbers with a mean, cut at `most`.

    - constant: always the mean;
    - lognormal: with σ = 1, so that one in a hundred is above 6 means;
    - heavy: Pareto's with α = 1.5, whose variance is infinite: P(x > y · mean) = (3y)^−1.5 above
      a third of the mean, so that one in a hundred is above 7 means and one in 10,000 above 155;
    - bimodal: half the mean, and for one in ten 5.5 means.
    """

    mean: float
    kind: Kind = "constant"
    most: float = math.inf

    def draw(self, random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        """Numbers of that shape."""
        if self.kind == "lognormal":
            numbers = np.exp(random.standard_normal(size) - 0.5)
        elif self.kind == "heavy":
            numbers = (1 - random.random(size)) ** (-1 / 1.5) / 3
        elif self.kind == "bimodal":
            numbers = np.where(random.random(size) < 0.1, 5.5, 0.5)
        else:
            numbers = np.ones(size)
        return np.minimum(self.mean * numbers, self.most)


@dataclass(frozen=True)
class Work:
    """What a step does: `groups` of `members` episodes of `turns` turns, in `updates` updates.

    Attributes:
        prompt: Tokens of the first prompt.
        answer: Tokens that the environment adds before each later turn.
        completion: Tokens of a completion.
        environment_s: Seconds of an environment's answer that no process of ours computes.
        scores: Whether the learner scores the batch once before the updates.
    """

    groups: int = 8
    members: int = 16
    turns: int = 5
    prompt: int = 102
    answer: int = 40
    completion: Spread = Spread(24)
    environment_s: Spread = Spread(0)
    updates: int = 1
    scores: bool = True


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts, as the module's text says; those of learners are for a token."""

    forward_s: float
    row_s: float
    key_s: float
    prefill_s: float
    score_s: float
    update_s: float
    update_fixed_s: float = 0.0
    reduce_s: float = 0.0
    publish_s: float = 0.0
    publish_sampler_s: float = 0.0
    turn_s: float = 0.0
    order_s: float = 0.0
    episode_s: float = 0.0
    record_s: float = 0.0
    switch_s: float = 0.0
    slots: int = 256


@dataclass(frozen=True)
class Cluster:
    """Who does the work. `switch_s` is paid twice a step where learners and samplers are one.

    Without `players`, the driver plays.
    """

    learners: int = 1
    samplers: int = 1
    colocated: bool = False
    max_staleness: int = 0
    min_members: int = 0
    close_after_s: float = 0.0
    overlap: bool = False
    players: int = 0

    @property
    def gpus(self) -> int:
        """The number of devices."""
        return self.samplers if self.colocated else self.learners + self.samplers


@dataclass
class Outcome:
    """What happened in the steps that count; shares are of their time.

    Attributes:
        tokens_per_s: Sampled tokens that were trained on, a second.
        sampler_idle: Share of the samplers' time without an open completion.
        rows: Mean rows of a forward.
        balance: Mean learner's work as a share of the slowest one's, in updates.
        staleness: Episodes trained by staleness.
        played, trained, dropped, left: Episodes since the beginning; `left` were not trained yet.
    """

    seconds: float = 0.0
    steps: int = 0
    tokens_per_s: float = 0.0
    learner_idle: float = 0.0
    sampler_idle: float = 0.0
    driver_busy: float = 0.0
    database_busy: float = 0.0
    rows: float = 0.0
    balance: float = 1.0
    staleness: dict[int, int] = field(default_factory=dict)
    late_episodes: int = 0
    dropped_groups: int = 0
    played: int = 0
    trained: int = 0
    dropped: int = 0
    left: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps


class _Episode:
    """One episode; `version` is that of its first token, `known` what its sampler remembers."""

    __slots__ = (
        *("group", "lengths", "waits", "turn", "context", "known", "known_version"),
        *("sampler", "version", "sampled", "player"),
    )

    def __init__(self, group: _Group, lengths: Sequence[int], waits: Sequence[float]) -> None:
        self.group, self.lengths, self.waits = group, lengths, waits
        self.turn, self.context, self.known, self.known_version = 0, 0, 0, -1
        self.sampler, self.version, self.sampled, self.player = -1, -1, 0, -1


class _Group:
    """The episodes of a prompt that are trained together; `late` ones did not close with theirs."""

    __slots__ = ("ended", "late", "members", "step")

    def __init__(self, step: int, late: bool = False) -> None:
        self.step, self.late = step, late
        self.members, self.ended = list[_Episode](), list[_Episode]()


class _Collection:
    """The groups of a step; `open` episodes, and groups with too few to close after `closes`."""

    def __init__(self, groups: list[_Group], work: Work, closes: float) -> None:
        self.groups, self.closes, self.closed = groups, closes, False
        self.open, self.short = work.groups * work.members, work.groups


class _Server:
    """Something that does one thing at a time, in order."""

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def finish(self, now: float, seconds: float) -> float:
        """When a task that comes now, and takes so many seconds, will be done."""
        self.free = max(now, self.free) + seconds
        self.busy += seconds
        return self.free

    def busy_at(self, now: float) -> float:
        """Busy seconds until now."""
        return self.busy - max(0.0, self.free - now)


class _Sampler:
    """Rows that step together. Between two events the same rows sample: `plan` forwards."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.waiting: list[_Episode] = []
        self.rows: list[tuple[int, int, _Episode]] = []  # a heap by the forward that ends each
        self.count = self.keys = self.plan = 0
        self.clock = self.busy = self.paused = 0.0
        self.row_forwards = self.version = self.ticket = self.admitted = 0

    def seconds(self, forwards: int) -> float:
        """Of the next forwards, in which each row reads one more key from one to the next."""
        rows, cost = len(self.rows), self.costs
        each = cost.forward_s + rows * cost.row_s + self.keys * cost.key_s
        return forwards * each + cost.key_s * rows * forwards * (forwards - 1) / 2

    def forwards_until(self, now: float) -> int:
        """The forwards of the plan that have begun by now."""
        rows, cost = len(self.rows), self.costs
        square = cost.key_s * rows / 2
        each = cost.forward_s + rows * cost.row_s + self.keys * cost.key_s - square
        elapsed = max(0.0, now - self.clock)  # 0 while prompts are read
        found = elapsed / each
        if square > 0:
            found = (math.sqrt(each * each + 4 * square * elapsed) - each) / (2 * square)
        return min(self.plan, math.ceil(found - 1e-9))

    def advance(self) -> list[_Episode]:
        """Do the plan's forwards; the episodes whose completions end with them."""
        seconds = self.seconds(self.plan)
        self.clock += seconds
        self.busy += seconds
        self.count += self.plan
        self.keys += self.plan * len(self.rows)
        self.row_forwards += self.plan * len(self.rows)
        self.plan = 0
        return self._ended()

    def _ended(self) -> list[_Episode]:
        ended = []
        while self.rows and self.rows[0][0] <= self.count:
            episode = heapq.heappop(self.rows)[2]
            episode.context += episode.lengths[episode.turn]
            self.keys -= episode.context - 1  # the last token was never read
            episode.known, episode.known_version = episode.context - 1, self.version
            ended.append(episode)
        return ended

    def admit(self, version: int) -> list[_Episode]:
        """Read the prompts of those that wait, as far as there is room; those that end at once."""
        free = self.costs.slots - len(self.rows)
        fresh, self.waiting = self.waiting[:free], self.waiting[free:]
        if not fresh:
            return []
        tokens, prompts = 0, set[int]()
        for episode in fresh:
            known = episode.known if episode.known_version == self.version else 0
            shared = episode.turn == 0 and id(episode.group) in prompts
            prompts.add(id(episode.group))
            tokens += 0 if shared else episode.context - known
            if episode.version < 0:
                episode.version = version
            last = self.count + episode.lengths[episode.turn] - 1
            self.admitted += 1
            heapq.heappush(self.rows, (last, self.admitted, episode))
            self.keys += episode.context
        seconds = self.costs.forward_s + tokens * self.costs.prefill_s
        self.clock += seconds
        self.busy += seconds
        return self._ended()

    def busy_at(self, now: float) -> float:
        """Busy seconds until now."""
        return self.busy + (min(self.seconds(self.plan), max(0.0, now - self.clock)))


class Simulation:
    """One run; `simulate` is how it is used."""

    def __init__(self, work: Work, costs: Costs, cluster: Cluster, seed: int = 0) -> None:
        assert not (cluster.colocated and cluster.max_staleness), "one device cannot do both"
        self.work, self.costs, self.cluster = work, costs, cluster
        self.random = np.random.default_rng(seed)
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.now, self.tickets, self.version = 0.0, 0, 0
        self.driver, self.database = _Server(), _Server()
        self.players = [_Server() for _ in range(cluster.players)]
        self.assigned = 0
        self.samplers = [_Sampler(costs) for _ in range(cluster.samplers)]
        self.loads = [(0, index) for index in range(cluster.samplers)]  # a heap, with old entries
        self.load = [0] * cluster.samplers
        self.started, self.recorded, self.training = 0, 0, False
        self.collections: dict[int, _Collection] = {}  # by step, until they are trained on
        self.late: list[_Group] = []
        self.learner_busy = self.tokens = 0.0
        self.balances: list[float] = []
        self.staleness: Counter[int] = Counter()
        self.outcome = Outcome()

    def at(self, time: float, what: Callable[..., None], *of: object) -> None:
        """Let something happen."""
        self.tickets += 1
        heapq.heappush(self.events, (time, self.tickets, what, of))

    def run(self, steps: int, warm_up: int) -> Outcome:
        """Simulate until so many steps are trained behind the warm-up."""
        self._start_collections()
        before: dict[str, float] | None = None
        while self.version < warm_up + steps:
            self.now, _, what, of = heapq.heappop(self.events)
            what(*of)
            if before is None and self.version >= warm_up:
                before = self._totals()
                self.staleness.clear()
                self.balances.clear()
        assert before is not None
        after = self._totals()
        spent = {name: after[name] - before[name] for name in after}
        seconds, done, samplers = spent["now"], self.outcome, self.cluster.samplers
        done.seconds, done.steps = seconds, steps
        done.tokens_per_s = spent["tokens"] / seconds
        done.learner_idle = 1 - spent["learner"] / seconds
        done.sampler_idle = 1 - spent["sampler"] / seconds / samplers
        done.driver_busy = spent["driver"] / seconds
        done.database_busy = spent["database"] / seconds
        done.rows = spent["row_forwards"] / max(1, spent["forwards"])
        done.balance = float(np.mean(self.balances))
        done.staleness = dict(sorted(self.staleness.items()))
        done.left = done.played - done.trained - done.dropped
        return done

    def _totals(self) -> dict[str, float]:
        now = self.now
        return {
            "now": now,
            "tokens": self.tokens,
            "learner": self.learner_busy,
            "sampler": sum(each.busy_at(now) for each in self.samplers),
            "driver": self.driver.busy_at(now),
            "database": self.database.busy_at(now),
            "row_forwards": sum(each.row_forwards for each in self.samplers),
            "forwards": sum(each.count for each in self.samplers),
        }

    # Collections.

    def _start_collections(self) -> None:
        while self.started <= self.recorded + self.cluster.max_staleness:
            before = self.collections.get(self.started - 1)
            if before is not None and not before.closed and not self.cluster.overlap:
                return
            self._start(self.started)
            self.started += 1

    def _start(self, step: int) -> None:
        work = self.work
        shape = (work.groups, work.members, work.turns)
        drawn = work.completion.draw(self.random, shape)
        lengths = np.maximum(1, np.rint(drawn)).astype(int).tolist()
        waits = work.environment_s.draw(self.random, shape).tolist()
        groups = [_Group(step) for _ in range(work.groups)]
        closes = self.now + self.cluster.close_after_s
        self.collections[step] = _Collection(groups, work, closes)
        for place, group in enumerate(groups):
            for each in range(work.members):
                episode = _Episode(group, lengths[place][each], waits[place][each])
                episode.context = work.prompt
                group.members.append(episode)
                self._assign(episode)
                self._ask(episode)
        self.outcome.played += work.groups * work.members
        if self.cluster.min_members:
            self.at(closes, self._close_if_done, step)

    def _assign(self, episode: _Episode) -> None:
        """Give an episode to the sampler with fewest of them."""
        load, index = heapq.heappop(self.loads)
        while load != self.load[index]:
            load, index = heapq.heappop(self.loads)
        episode.sampler = index
        self._count(index, 1)
        if self.players:
            episode.player = self.assigned % len(self.players)
            self.assigned += 1

    def _count(self, index: int, more: int) -> None:
        self.load[index] += more
        heapq.heappush(self.loads, (self.load[index], index))

    def _ask(self, episode: _Episode) -> None:
        sampler = self.samplers[episode.sampler]
        sampler.waiting.append(episode)
        if len(sampler.waiting) == 1:
            self._wake(sampler)

    def _wake(self, sampler: _Sampler) -> None:
        """Let a sampler look at what waits, when its forward ends."""
        if sampler.plan:
            if len(sampler.rows) == self.costs.slots:
                return
            sampler.plan = sampler.forwards_until(self.now)
        time = max(self.now, sampler.clock + sampler.seconds(sampler.plan), sampler.paused)
        sampler.ticket += 1
        self.at(time, self._step, sampler, sampler.ticket)

    def _step(self, sampler: _Sampler, ticket: int) -> None:
        """The end of a sampler's plan, or the first look of an idle one."""
        if ticket != sampler.ticket:
            return  # another event took its place
        for episode in sampler.advance():
            self.at(self.now, self._answer, episode)
        if self.now < sampler.paused:
            self.at(sampler.paused, self._step, sampler, ticket)
            return
        sampler.clock = max(sampler.clock, self.now)
        for episode in sampler.admit(self.version):
            self.at(sampler.clock, self._answer, episode)
        sampler.ticket += 1
        has_room = len(sampler.rows) < self.costs.slots
        if sampler.rows and not (sampler.waiting and has_room):
            sampler.plan = sampler.rows[0][0] - sampler.count
        if sampler.rows or sampler.waiting:
            time = sampler.clock + sampler.seconds(sampler.plan)
            self.at(time, self._step, sampler, sampler.ticket)

    def _answer(self, episode: _Episode) -> None:
        """A completion reaches who plays the episode."""
        playing = self.players[episode.player] if self.players else self.driver
        done = playing.finish(self.now, self.costs.turn_s)
        episode.sampled += episode.lengths[episode.turn]
        wait = episode.waits[episode.turn]
        episode.turn += 1
        if episode.turn < self.work.turns:
            episode.context += self.work.answer
            self.at(done + wait, self._ask, episode)
        else:
            self.at(done + wait, self._deliver if self.players else self._end, episode)

    def _deliver(self, episode: _Episode) -> None:
        """An episode reaches the driver."""
        self.at(self.driver.finish(self.now, self.costs.order_s), self._end, episode)

    def _end(self, episode: _Episode) -> None:
        self._count(episode.sampler, -1)
        group = episode.group
        group.ended.append(episode)
        if group.late:
            if len(group.ended) == len(group.members):
                self.late.append(group)
            return
        collection = self.collections[group.step]
        collection.open -= 1
        collection.short -= len(group.ended) == self.cluster.min_members
        self._close_if_done(group.step)

    def _close_if_done(self, step: int) -> None:
        """Close the groups of a step if they are complete, or may close as they are."""
        collection = self.collections.get(step)
        if collection is None or collection.closed:
            return
        enough = self.cluster.min_members and not collection.short
        if collection.open and not (enough and self.now >= collection.closes):
            return
        collection.closed = True
        for group in collection.groups if collection.open else ():
            ended = set(map(id, group.ended))
            rest = _Group(step, late=True)
            rest.members = [each for each in group.members if id(each) not in ended]
            for each in rest.members:
                each.group = rest
        self._train_if_ready()
        self._start_collections()

    # Steps.

    def _train_if_ready(self) -> None:
        step = self.version
        collection = self.collections.get(step)
        if self.training or collection is None or not collection.closed:
            return
        self.training = True
        groups, self.late = self.collections.pop(step).groups + self.late, []
        episodes = list[_Episode]()
        for group in groups:
            oldest = self.version - min(each.version for each in group.ended)
            if oldest > self.cluster.max_staleness:
                self.outcome.dropped_groups += 1
                self.outcome.dropped += len(group.ended)
                continue
            episodes += group.ended
            self.outcome.late_episodes += len(group.ended) if group.late else 0
            self.staleness.update(self.version - each.version for each in group.ended)
        self.outcome.trained += len(episodes)
        done = self.driver.finish(self.now, len(episodes) * self.costs.episode_s)
        self.at(done, self._learn, episodes)

    def _learn(self, episodes: list[_Episode]) -> None:
        work, costs, learners = self.work, self.costs, self.cluster.learners
        seconds = 0.0
        if work.scores:
            seconds += slowest([each.context for each in episodes], learners) * costs.score_s
        order = self.random.permutation(len(episodes))
        for part in np.array_split(order, work.updates):
            tokens = [episodes[place].context for place in part]
            most = slowest(tokens, learners)
            self.balances.append(sum(tokens) / learners / most)
            seconds += costs.update_fixed_s + most * costs.update_s
            seconds += 2 * (learners - 1) / learners * costs.reduce_s
        self.learner_busy += seconds
        if self.cluster.colocated:
            seconds += 2 * costs.switch_s
        self.at(self.now + seconds, self._publish, episodes)

    def _publish(self, episodes: list[_Episode]) -> None:
        costs = self.costs
        done = self.now + costs.publish_s + len(self.samplers) * costs.publish_sampler_s
        for sampler in self.samplers:
            sampler.paused = done
            if sampler.plan:
                sampler.plan = sampler.forwards_until(self.now)
                sampler.ticket += 1
                time = sampler.clock + sampler.seconds(sampler.plan)
                self.at(time, self._step, sampler, sampler.ticket)
        self.at(done, self._published, episodes)

    def _published(self, episodes: list[_Episode]) -> None:
        self.version += 1
        for sampler in self.samplers:
            sampler.version = self.version  # the keys of idle episodes are dropped
        self.tokens += sum(each.sampled for each in episodes)
        # The thread that writes takes a step when it has written the one before.
        self.driver.free = max(self.now, self.driver.free, self.database.free)
        self.database.finish(self.driver.free, len(episodes) * self.costs.record_s)
        self.at(self.driver.free, self._go_on)

    def _go_on(self) -> None:
        self.training, self.recorded = False, self.version
        self._start_collections()
        self._train_if_ready()


def slowest(tokens: Sequence[int], learners: int) -> int:
    """The most tokens of a learner, if each episode goes where fewest are, longest first.

    Example:
        >>> slowest([5, 4, 3, 3, 3], 2)
        10
    """
    loads = [0] * learners
    for each in sorted(tokens, reverse=True):
        heapq.heapreplace(loads, loads[0] + each)
    return max(loads)


def simulate(
    work: Work, costs: Costs, cluster: Cluster, steps: int = 4, warm_up: int = 2, seed: int = 0
) -> Outcome:
    """Simulate a run; what is returned is of the `steps` behind the `warm_up`."""
    return Simulation(work, costs, cluster, seed).run(steps, warm_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="constant")
    parser.add_argument("--tokens", type=float, default=24, help="mean tokens of a completion")
    parser.add_argument("--costs", default="{}", help='such as {"row_s": 1e-4}')
    args = parser.parse_args()
    costs = {"forward_s": 1e-3, "row_s": 1e-4, "key_s": 0.0, "prefill_s": 1e-5}
    costs |= {"score_s": 1e-5, "update_s": 3e-5} | json.loads(args.costs)
    cluster = Cluster(args.learners, args.samplers, max_staleness=args.staleness)
    work = Work(completion=Spread(args.tokens, args.kind))
    print(json.dumps(asdict(simulate(work, Costs(**costs), cluster))))


if __name__ == "__main__":
    main()
