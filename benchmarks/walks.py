"""Success of simple walks on still FrozenLake, computed exactly: what a trained agent has to beat.

    python benchmarks/walks.py

``random`` takes any of the four actions. ``careful`` takes any that leads neither into a hole nor
against the edge, if there is one. ``goal`` is careful, and steps onto a goal beside it.

    python benchmarks/walks.py runs/frozen-lake-no-skill-1

prints instead, for the first and the last evaluation of each run at its temperature, how often the
first move of a turn led onto a goal beside the player, and how often into a hole.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from ragen.core.seeding import EVAL_LEVELS
from ragen.envs.frozen_lake import MOVES, FrozenLake, Lake
from ragen.envs.grid import cells_of
from ragen.storage.database import read
from ragen.storage.reader import standing

WALKS = ("random", "careful", "goal")
_TURNS = """
    SELECT attempt, step, state_key, actions_executed
    FROM turns JOIN episodes ON episodes.id = episode_id
    WHERE phase = 'eval' AND actions_executed != '[]'
"""


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


def first_moves(run: Path) -> list[tuple[int, float, float]]:
    """Of the first and the last evaluation: the step, the share of the turns beside the goal whose
    first move leads onto it, and the share of all turns whose first move leads into a hole."""
    counts, turns = standing(run), dict[int, list[tuple[bool, str]]]()
    for attempt, step, grid, actions in read(run, _TURNS):
        if counts(attempt, step):
            cells = cells_beside(grid)
            reached = cells[json.loads(actions)[0]]
            turns.setdefault(step, []).append(("G" in cells.values(), reached))
    return [
        (
            step,
            fmean(cell == "G" for beside_goal, cell in turns[step] if beside_goal),
            fmean(cell == "O" for _, cell in turns[step]),
        )
        for step in (min(turns), max(turns))
    ]


def cells_beside(grid: str) -> dict[str, str]:
    """What lies beside the player in each direction; nothing beyond the edge."""
    cells = cells_of(grid.split("\n"))
    row, col = next(cell for cell, symbol in cells.items() if symbol == "P")
    return {move: cells.get((row + down, col + right), "") for move, (down, right) in MOVES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="*", type=Path, help="runs on FrozenLake")
    parser.add_argument("--episodes", type=int, default=512, help="held-out levels")
    parser.add_argument("--moves", type=int, default=10)
    args = parser.parse_args()
    for run in args.runs:
        for step, goal, hole in first_moves(run):
            print(f"{run}, step {step}: {goal:.1%} onto a goal beside, {hole:.1%} into a hole")
    if args.runs:
        return
    env, lakes = FrozenLake(success_probability=1.0), []
    for number in range(args.episodes):
        env.reset(seed=EVAL_LEVELS + number)
        lakes.append(env.lake)
    for walk in WALKS:
        print(f"{walk}: {fmean(success(lake, walk, args.moves) for lake in lakes):.1%}")


if __name__ == "__main__":
    main()
