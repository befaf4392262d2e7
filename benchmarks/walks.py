"""Success of simple walks on still FrozenLake, computed exactly: what a trained agent has to beat.

    python benchmarks/walks.py

``random`` takes any of the four actions. ``careful`` takes any that leads neither into a hole nor
against the edge, if there is one. ``goal`` is careful, and steps onto a goal beside it.
"""

from __future__ import annotations

import argparse
from statistics import fmean

from ragen.core.seeding import EVAL_LEVELS
from ragen.envs.frozen_lake import FrozenLake, Lake

WALKS = ("random", "careful", "goal")


def choices(lake: Lake, walk: str, cell: int) -> list[int]:
    """The cells that a walk may step to, each as likely as any other."""
    reached = [ahead[cell] for ahead in lake.neighbours]
    if walk == "random":
        return reached
    if walk == "goal" and lake.goal in reached:
        return [lake.goal]
    return [each for each in reached if each != cell and each not in lake.holes] or reached


def success(lake: Lake, walk: str, moves: int) -> float:
    """The probability that a walk from the start reaches the goal within so many moves."""
    reaches = [float(cell == lake.goal) for cell in range(lake.size**2)]
    for _ in range(moves):
        reaches = [
            reaches[cell]
            if cell == lake.goal or cell in lake.holes
            else fmean(reaches[ahead] for ahead in choices(lake, walk, cell))
            for cell in range(lake.size**2)
        ]
    return reaches[lake.start]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--episodes", type=int, default=512, help="held-out levels")
    parser.add_argument("--moves", type=int, default=10)
    args = parser.parse_args()
    env, lakes = FrozenLake(success_probability=1.0), []
    for number in range(args.episodes):
        env.reset(seed=EVAL_LEVELS + number)
        lakes.append(env.lake)
    for walk in WALKS:
        print(f"{walk}: {fmean(success(lake, walk, args.moves) for lake in lakes):.1%}")


if __name__ == "__main__":
    main()
