"""What dies in a run on Ray, what is lost, and how many seconds the run needs to go on.

    python benchmarks/faults.py [--quick] [--only NAME]

Each fault strikes a real run of Bandit, whose processes are its own (SIGKILL, unless named
otherwise), between two checkpoints. Afterwards every step, group and member must have exactly one
training episode. Prints a row of a table for each fault. The seconds are those until the run has
finished the second further step: the first may need no more of what died. `--quick` leaves out what
takes minutes.
The network faults need root: the second machine is a network namespace.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from ragen.storage.database import DATABASE
from ragen.storage.reader import read_events

STEPS, GROUPS, MEMBERS, EVERY = 10, 4, 4, 3
STRIKE = 4
"""The step after which a fault strikes; the last checkpoint is that of step 3."""

SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "threads": 1,
    "rollout.num_groups": GROUPS,
    "rollout.group_size": MEMBERS,
    "update.minibatch_episodes": 8,
    "eval.episodes": 8,
    "checkpoint.every": EVERY,
    "engine.name": "ray",
    "engine.timeout_s": 60,
}
PROMPT = {"RAY_worker_niceness": "0"}
"""Ray's own processes would wait for all others of a busy machine: their niceness is 15."""

MOST_S = 400.0
"""Seconds that a run may take."""


class Started:
    """A run in a process of its own."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, SETTINGS | settings
        options = [f"--{key}={str(value).lower()}" for key, value in self.settings.items()]
        self._start("train", "bandit", "--out", str(folder), *options)
        self.driver = self.process.pid

    def _start(self, *arguments: str) -> None:
        self.log = (self.folder.parent / f"{self.folder.name}.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ragen", *arguments],
            stdout=self.log,
            stderr=self.log,
            env=os.environ | PROMPT,
        )

    def resume(self) -> None:
        """Continue it, after its driver was killed."""
        self.process.wait()
        self._start("resume", str(self.folder))

    @property
    def step(self) -> int:
        """The last finished step that is in the database."""
        query = "SELECT max(step) FROM metrics WHERE name = 'reward/mean'"
        try:
            ((step,),) = rows(self.folder, query)
        except sqlite3.OperationalError:  # it has not begun
            return 0
        return step or 0

    def wait_for(self, condition: Callable[[], Any], what: str, most: float = MOST_S) -> Any:
        """What the condition returns once it is true."""
        end = time.monotonic() + most
        while not (found := condition()):
            assert self.process.poll() is None, f"the run ended before {what}: {self.tail()}"
            assert time.monotonic() < end, f"{what} did not happen in {most:g} s: {self.tail()}"
            time.sleep(0.05)
        return found

    def finish(self) -> None:
        """Wait for its end."""
        code = self.process.wait(MOST_S)
        assert code == 0, f"exit code {code}: {self.tail()}"

    def tail(self) -> str:
        """The end of what it printed."""
        return Path(self.log.name).read_text(errors="replace")[-3000:]

    def end(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query on a run that may be in progress."""
    uri = f"{(folder / DATABASE).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=10)) as connection:
        return connection.execute(query).fetchall()


# Processes.


def command_of(pid: int) -> str:
    """The command line of a process; Ray's have a title such as ``ray::Sampling.complete``."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def children() -> dict[int, list[int]]:
    """The living processes of this machine by their parent."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found.setdefault(int(fields[1]), []).append(int(entry.name))
    return found


def below(pid: int) -> list[int]:
    """The processes that descend from one."""
    tree, found = children(), list[int]()
    level = [pid]
    while level:
        level = [child for parent in level for child in tree.get(parent, [])]
        found += level
    return sorted(found)


def titled(role: str) -> list[int]:
    """The processes on Ray of this role, such as learner, that this process has started.

    Their titles are such as ``ray::Learner`` or ``ray::Learner.update``.
    """
    named = re.compile(rf"ray::\w*{role}", re.IGNORECASE)
    return [pid for pid in below(os.getpid()) if named.match(command_of(pid))]


def env_workers(run: Started) -> list[int]:
    """The processes of isolated environments: the children of the fork server."""
    servers = [pid for pid in below(run.driver) if "forkserver" in command_of(pid)]
    return [pid for server in servers for pid in children().get(server, [])]


def kill(*pids: int) -> None:
    """SIGKILL."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# Faults.


@dataclass
class Outcome:
    """What a fault did to a run.

    Attributes:
        seconds: Until the run had finished the second step that it had not finished before.
        steps: Finished steps that were played again.
        events: The texts of its events of the kind ``engine``.
        wrong: What is not as it must be.
    """

    seconds: float
    steps: int
    events: list[str]
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A fault of a run: its settings, and what strikes it.

    `where` gives the settings of the cluster that it runs on, and takes it down. `expects` are the
    kinds of events that must follow, by ``what``. A `slow` one takes minutes.
    """

    strike: Callable[[Started, Any], None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    expects: tuple[str, ...] = ()
    where: Callable[[], Any] | None = None
    slow: bool = False


LEARNER, SAMPLER, PLAYER = "learn", "sampl", "play"
"""What the titles of Ray's processes have in them."""


def kill_sampler(run: Started, _: Any) -> None:
    kill(run.wait_for(lambda: titled(SAMPLER), "a sampler")[0])


def kill_learner(run: Started, _: Any) -> None:
    kill(run.wait_for(lambda: titled(LEARNER), "a learner")[-1])


def kill_player(run: Started, _: Any) -> None:
    kill(run.wait_for(lambda: titled(PLAYER), "a player")[0])


def stop_player(run: Started, _: Any) -> None:
    os.kill(run.wait_for(lambda: titled(PLAYER), "a player")[0], signal.SIGSTOP)


def stop_sampler(run: Started, _: Any) -> None:
    os.kill(run.wait_for(lambda: titled(SAMPLER), "a sampler")[0], signal.SIGSTOP)


def stop_learner(run: Started, _: Any) -> None:
    os.kill(run.wait_for(lambda: titled(LEARNER), "a learner")[-1], signal.SIGSTOP)


def kill_env_worker(run: Started, _: Any) -> None:
    kill(run.wait_for(lambda: env_workers(run), "an environment's process")[0])


def kill_driver(run: Started, _: Any) -> None:
    kill(run.driver)
    run.resume()


def remove_node(run: Started, cluster: Any) -> None:
    samplers = run.wait_for(lambda: titled(SAMPLER), "a sampler")
    node = next(
        node
        for node in cluster.list_all_nodes()
        if node is not cluster.head_node
        and set(samplers) & set(below(node.all_processes["raylet"][0].process.pid))
    )
    cluster.remove_node(node, allow_graceful=False)


def cut_network(_: Started, join: Callable[[], None]) -> None:
    shell(f"ip link set {OURS} down")
    join()  # a machine for what is lost


def slow_network(_: Started, __: Any) -> None:
    limit = "root tbf rate 8mbit burst 32kbit latency 400ms"  # of what is sent
    inside = f"ip netns exec {NAMESPACE} tc"
    shell(f"tc qdisc add dev {OURS} {limit}", f"{inside} qdisc add dev {THEIRS} {limit}")


@contextmanager
def simulated_nodes() -> Iterator[tuple[dict[str, Any], Any]]:
    """A cluster of three nodes on this machine; each has room for one process of the engine."""
    from ray.cluster_utils import Cluster

    with mock.patch.dict(os.environ, PROMPT):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            for _ in range(3):
                cluster.add_node(num_cpus=1)
            yield {"engine.address": cluster.address}, cluster
        finally:
            cluster.shutdown()


NAMESPACE, OURS, THEIRS = "ragen-faults", "rgf0", "rgf1"
HERE, THERE = "10.77.0.1", "10.77.0.2"
OF_NETWORK = PROMPT | {
    "RAY_AUTH_MODE": "token",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
}
"""Its nodes are guarded by a token, and one that is out of reach is given up within seconds."""

WAIT_FOR_TWO = """
import sys, time, ray
ray.init(sys.argv[1], log_to_driver=False)
while len(ray.nodes()) < 2:
    time.sleep(0.2)
"""
"""Of a process of its own: Ray reads whether there is a token once for each process."""


@contextmanager
def two_machines() -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """A cluster of this machine and of a network namespace, with a cable between.

    What comes with its settings is a function that lets another node join, on this machine.
    """
    port = free_port()
    ray = str(Path(sys.executable).with_name("ray"))
    start = [ray, "start", "--disable-usage-stats", "--num-cpus=1", "--block"]
    nodes: list[subprocess.Popen[bytes]] = []

    def join(address: str = HERE, *within: str) -> None:
        more = [f"--address={HERE}:{port}", f"--node-ip-address={address}"]
        nodes.append(subprocess.Popen([*within, *start, *more], stdout=subprocess.DEVNULL))

    with mock.patch.dict(os.environ, OF_NETWORK):
        token = [ray, "get-auth-token", "--generate"]
        subprocess.run(token, check=True, stdout=subprocess.DEVNULL)
        disconnect()  # what a killed process left
        shell(f"ip netns add {NAMESPACE}")
        try:
            shell(f"ip link add {OURS} type veth peer name {THEIRS} netns {NAMESPACE}")
            shell(f"ip addr add {HERE}/24 dev {OURS}", f"ip link set {OURS} up")
            inside = f"ip netns exec {NAMESPACE} ip"
            shell(f"{inside} addr add {THERE}/24 dev {THEIRS}")
            shell(f"{inside} link set {THEIRS} up", f"{inside} link set lo up")
            head = [f"--port={port}", "--head", f"--node-ip-address={HERE}"]
            head += ["--include-dashboard=false"]
            nodes.append(subprocess.Popen([*start, *head], stdout=subprocess.DEVNULL))
            wait_for_port(HERE, port)
            join(THERE, "ip", "netns", "exec", NAMESPACE)
            wait = [sys.executable, "-c", WAIT_FOR_TWO, f"{HERE}:{port}"]
            subprocess.run(wait, check=True, timeout=120)
            yield {"engine.address": f"{HERE}:{port}"}, join
        finally:
            for node in nodes:
                processes = [*below(node.pid), node.pid]
                node.terminate()
                with suppress(subprocess.TimeoutExpired):
                    node.wait(20)
                kill(*(pid for pid in processes if command_of(pid)))
                node.wait()
            disconnect()


def disconnect() -> None:
    """Remove the cable and the network namespace, where they are."""
    if Path(f"/sys/class/net/{OURS}").exists():
        shell(f"ip link del {OURS}")  # with its other end
    if Path(f"/run/netns/{NAMESPACE}").exists():
        shell(f"ip netns del {NAMESPACE}")


def shell(*commands: str) -> None:
    """Run commands that must succeed."""
    for command in commands:
        subprocess.run(command.split(), check=True)


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def wait_for_port(host: str, port: int) -> None:
    """Wait until someone listens."""
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end, f"nobody listens on {host}:{port}"
            time.sleep(0.2)


TWO = {"engine.samplers": 2}
PLAYERS = {"engine.players": 2, "env.isolate": True}
FAULTS: dict[str, Fault] = {
    "a sampler of two": Fault(kill_sampler, TWO, ("lost",)),
    "the only sampler": Fault(kill_sampler, {}, ("lost",)),
    "the only learner": Fault(kill_learner, {}, ("lost", "restored")),
    "a learner of two": Fault(kill_learner, {"engine.learners": 2}, ("lost", "restored")),
    "an environment's process": Fault(kill_env_worker, {"env.isolate": True}),
    "a player": Fault(kill_player, PLAYERS, ("lost",)),
    "a sampler of players": Fault(kill_sampler, PLAYERS, ("lost",)),
    "the driver": Fault(kill_driver),
    "a sampler hangs (SIGSTOP)": Fault(stop_sampler, TWO, ("late",), slow=True),
    "a player hangs (SIGSTOP)": Fault(stop_player, PLAYERS, ("late", "lost"), slow=True),
    "a sampler of players hangs (SIGSTOP)": Fault(
        stop_sampler, PLAYERS, ("late", "lost"), slow=True
    ),
    "a learner hangs (SIGSTOP)": Fault(stop_learner, {}, ("late", "lost", "restored"), slow=True),
    "a node": Fault(remove_node, TWO, ("lost",), simulated_nodes, slow=True),
    "the network is slow": Fault(slow_network, {}, (), two_machines, slow=True),
    "the network is cut": Fault(cut_network, {}, ("lost",), two_machines, slow=True),
}
"""By what dies."""


def suffer(name: str, folder: Path, settings: Mapping[str, Any] | None = None) -> Outcome:
    """Let a fault strike a run in `folder`, and see what becomes of it."""
    fault = FAULTS[name]
    if fault.where is None:
        return _suffer(fault, folder, dict(settings or {}), None)
    with fault.where() as (address, cluster):
        return _suffer(fault, folder, dict(settings or {}) | address, cluster)


def _suffer(fault: Fault, folder: Path, settings: dict[str, Any], cluster: Any) -> Outcome:
    run = Started(folder, {**fault.settings, **settings})
    try:
        step = run.wait_for(lambda: run.step if run.step >= STRIKE else 0, f"step {STRIKE}")
        struck = time.monotonic()
        fault.strike(run, cluster)
        run.wait_for(lambda: run.step > step + 1 or run.process.poll() == 0, "two further steps")
        seconds = time.monotonic() - struck
        run.finish()
    finally:
        run.end()
    events = [each for each in read_events(folder) if each["kind"] in ("engine", "resume")]
    found = {each["data"].get("what") for each in events}
    # The step that the run went back to: with a new engine, or on a resume.
    to = [each["data"]["to"] for each in events if each["data"].get("what") == "restored"]
    to += [each["step"] for each in events if each["kind"] == "resume"]
    wrong = [f"no event {what!r}" for what in fault.expects if what not in found]
    wrong += flaws(folder)
    lost = max((step - each for each in to), default=0)
    return Outcome(seconds, lost, [each["text"] for each in events], wrong)


def flaws(folder: Path) -> list[str]:
    """What is wrong with the rows of a run: steps or episodes that are missing or double."""
    found = []
    steps = rows(folder, "SELECT step FROM metrics WHERE name = 'reward/mean' ORDER BY step")
    if steps != [(step,) for step in range(1, STEPS + 1)]:
        found.append(f"the steps are {[step for (step,) in steps]}")
    counted = rows(
        folder,
        "SELECT step, \"group\", member, count(*) FROM episodes WHERE phase = 'train'"
        ' GROUP BY attempt, step, "group", member',
    )
    once = {
        (step, group, member, 1)
        for step in range(1, STEPS + 1)
        for group in range(GROUPS)
        for member in range(MEMBERS)
    }
    if set(counted) != once:
        found.append(f"missing or double episodes: {sorted(set(counted) ^ once)[:5]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--only", choices=FAULTS, help="one fault")
    args = parser.parse_args()
    print("| what died | what was lost | seconds to recover |\n|---|---|---|")
    scratch = Path(tempfile.mkdtemp(prefix="ragen-faults-"))
    failed = False
    for number, (name, fault) in enumerate(FAULTS.items()):
        if (args.quick and fault.slow) or args.only not in (None, name):
            continue
        outcome = suffer(name, scratch / str(number))
        failed |= bool(outcome.wrong)
        steps = "one step" if outcome.steps == 1 else f"{outcome.steps} steps"
        lost = f"{steps}, played again" if outcome.steps else "nothing"
        verdict = f" WRONG: {'; '.join(outcome.wrong)}" if outcome.wrong else ""
        print(f"| {name} | {lost} | {outcome.seconds:.0f} |{verdict}", flush=True)
        for text in outcome.events:
            print(f"  {text}", file=sys.stderr, flush=True)
    shutil.rmtree(scratch)
    sys.exit(failed)


if __name__ == "__main__":
    main()
