"""What a step of each environment costs on this machine, beside the same games of other libraries.

In each round every environment plays its steps, one environment after the other, with random
actions that were drawn before; resets do not count. The table has medians over the rounds: of the
steps in a CPU second, and of the ratio to a peer in the same round, since what else the machine
does slows both. RAGEN's environments pass through 64 levels that they have seen before. They are
stepped as they are, and guarded as in a run. gym-sokoban draws its smallest picture in every step.
A question is made and answered once. Of WebShop the shop, a page and a search are timed, too:
medians over 500 goals.

    python benchmarks/environments.py [--rounds 7] [--steps 20000]

The peers are in the packages reasoning-gym, and gym-sokoban with gym.
"""

import argparse
import itertools
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import numpy as np

from ragen.envs.contract import pick
from ragen.envs.registry import make
from ragen.rollout.guarded import GuardedEnv

LEVELS = 64
"""The levels that the steps of an environment pass through."""
OURS = (
    *("frozen-lake", "sokoban", "bandit", "manor", "sudoku", "countdown", "word-problems"),
    "webshop",
)
NUMBERS, MAPS = "Gymnasium FrozenLake-v1", "Gymnasium FrozenLake-v1, map as text"
SOKOBAN = "gym-sokoban 6×6"
PEERS = {
    "frozen-lake": MAPS,
    "sokoban": SOKOBAN,
    "countdown, questions": "reasoning-gym countdown",
    "word-problems, questions": "reasoning-gym gsm_symbolic",
}
Work = Callable[[], float]
"""Plays its steps or questions and returns the CPU seconds of all."""


def ours(name: str, steps: int, guarded: bool) -> Work:
    """Steps of one of RAGEN's environments."""
    generator = np.random.Generator(np.random.PCG64(0))
    env = GuardedEnv(lambda: make(name), timeout_s=10.0)
    actions: list[str] = []

    def draw(_: int) -> str:
        free = env.actions is None
        action = env.env.random_action(generator) if free else pick(generator, env.actions)
        assert action is not None, f"{name} has no random play"
        actions.append(action)
        return action

    def step(action: str) -> bool:
        if guarded:
            env.step(action)
            return env.terminated or env.truncated
        _, _, terminated, truncated, _ = env.env.step(action)
        return terminated or truncated

    def reset(level: int) -> None:
        env.reset(level, level)

    played(steps, draw, step, reset)  # makes the levels
    return lambda: played(steps, actions.__getitem__, step, reset)


def gym(step: Callable[[int], Any], env: Any, steps: int) -> Work:
    """Steps of an environment with the interface of Gymnasium or gym."""
    drawn = np.random.default_rng(0).integers(env.action_space.n, size=steps).tolist()
    return lambda: played(
        steps, drawn.__getitem__, lambda action: bool(step(action)[2]), lambda _: env.reset()
    )


def played(
    steps: int,
    choose: Callable[[int], Any],
    step: Callable[[Any], bool],
    reset: Callable[[int], object],
) -> float:
    """CPU seconds of some steps, without those of the resets between them."""
    level, resets = 0, 0.0
    reset(level)
    begun = time.process_time()
    for number in range(steps):
        if step(choose(number)):
            before = time.process_time()
            level = (level + 1) % LEVELS
            reset(level)
            resets += time.process_time() - before
    return time.process_time() - begun - resets


def questions(name: str, count: int) -> Work:
    """Questions of an environment of one turn, each answered once by 1."""
    env, levels = make(name), itertools.count(10_000)

    def work() -> float:
        begun = time.process_time()
        for level in itertools.islice(levels, count):
            env.reset(seed=level)
            env.step("1")
        return time.process_time() - begun

    return work


def library_questions(task: str, count: int) -> Work:
    """Questions of reasoning-gym itself, each made and scored once."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=10_000, size=count)

    def work() -> float:
        begun = time.process_time()
        for index in range(count):
            dataset.score_answer("1", dataset[index])
        return time.process_time() - begun

    return work


def webshop() -> dict[str, float]:
    """CPU seconds to make the shop; median milliseconds of a clicked page and of a new search."""
    start = time.process_time()
    env = make("webshop", split="all")
    env.reset(seed=0)  # which makes the shop
    times: dict[str, list[float]] = {"click": [], "search": []}
    made = time.process_time() - start

    def step(action: str) -> bool:
        begun = time.process_time()
        _, _, terminated, _, _ = env.step(action)
        times[action.partition("[")[0]].append(1e3 * (time.process_time() - begun))
        return terminated

    for level in range(500):
        observation, _ = env.reset(seed=level)
        step(f"search[{observation}]")  # the instruction: the longest search that makes sense
        while not step(env.solve(9, 9, 1)[0]):
            pass
    pages, searches = map(statistics.median, times.values())
    return {"webshop_make_cpu_s": made, "webshop_page_ms": pages, "webshop_search_ms": searches}


@contextmanager
def where_installed() -> Iterator[None]:
    """Leave a peer out, and say so, where its package is not installed."""
    try:
        yield
    except ImportError as missing:
        print(f"left out: {missing}")


def subjects(steps: int) -> Iterator[tuple[str, int, Work, Work | None]]:
    """What is measured: its name, how many it plays, the work, and the work when guarded."""
    plain, ansi = (
        gymnasium.make("FrozenLake-v1", map_name="4x4", render_mode=mode).unwrapped
        for mode in (None, "ansi")
    )
    yield NUMBERS, steps, gym(plain.step, plain, steps), None
    yield MAPS, steps, gym(lambda action: (*ansi.step(action), ansi.render()), ansi, steps), None
    with where_installed():
        from gym_sokoban.envs.sokoban_env import SokobanEnv

        endless = SokobanEnv(dim_room=(6, 6), num_boxes=1, max_steps=10**9)
        small = partial(endless.step, observation_mode="tiny_rgb_array")
        yield SOKOBAN, steps, gym(small, endless, steps), None
    few = steps // 10
    with where_installed():
        for task in ("countdown", "gsm_symbolic"):
            yield f"reasoning-gym {task}", few // 10, library_questions(task, few // 10), None
    for name in OURS:
        count = few if name == "webshop" else steps
        yield name, count, ours(name, count, guarded=False), ours(name, count, guarded=True)
    for name in ("countdown", "word-problems"):
        yield f"{name}, questions", few, questions(name, few), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args()
    shop = webshop()
    known = list(subjects(args.steps))
    rates: dict[str, list[float]] = defaultdict(list)
    guarded: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for name, count, work, in_a_run in known:
            rates[name].append(count / work())
            if in_a_run is not None:
                guarded[name].append(count / in_a_run())
    print("| environment | as it is | guarded | as it is, beside |")
    print("|---|---|---|---|")
    for name, *_ in known:
        beside = ""
        if (peer := PEERS.get(name)) in rates:
            pairs = zip(rates[name], rates[peer], strict=True)
            beside = f"{rounded(statistics.median(a / b for a, b in pairs))} × {peer}"
        cells = (
            rounded(statistics.median(each)) if each else ""
            for each in (rates[name], guarded[name])
        )
        print(f"| {name} | {' | '.join(cells)} | {beside} |")
    print({name: float(f"{value:.2g}") for name, value in shop.items()})
    signal.setitimer(signal.ITIMER_REAL, 0)  # of the guarded environments, which are not closed


def rounded(value: float) -> str:
    """A number with two digits: 4700 as 4,700."""
    return f"{float(f'{value:.2g}'):,g}"


if __name__ == "__main__":
    main()
