"""A control for reinforcement learning: rejection sampling with the same number of episodes.

    python benchmarks/rejection.py frozen-lake-no-skill --stage-rounds 3 --threads 1

A round plays the recipe with the last round's model at temperature 1, keeps the episodes that
succeed, and fine-tunes the model on them (RAFT, arXiv:2304.06767). The first rounds play the first
stage of the recipe's curriculum. Prints one JSON line a round, and at the end the success on
held-out levels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import ragen
from ragen.config.reading import changed
from ragen.finetuning.sft import sft
from ragen.rollout.env_settings import resolve_run
from ragen.rollout.setup import at_stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipe")
    parser.add_argument("--model", help="the model to start from [the recipe's]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--stage-rounds", type=int, default=0, help="rounds in the first stage")
    parser.add_argument("--played", type=int, default=51_200, help="episodes of all rounds")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, help="[the recipe's update.lr]")
    parser.add_argument("--episodes", type=int, default=256, help="held-out levels")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    given = {"threads": args.threads} | ({"model.path": args.model} if args.model else {})
    config, _ = resolve_run(args.recipe, given)
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(args.rounds):
            staged = index < args.stage_rounds
            seed = args.seed * args.rounds + index
            tuned = sft(
                changed(at_stage(config, 1) if staged else config, {"seed": seed}),
                Path(scratch) / str(index),
                config.model.path,
                keep="solved",
                episodes=args.played // args.rounds,
                epochs=args.epochs,
                lr=args.lr or config.update.lr,
            )
            config = changed(config, {"model.path": str(tuned.model)})
            played = tuned.examples + tuned.held_out + tuned.unsolved + tuned.too_long
            success = 1 - tuned.unsolved / played
            print(json.dumps({"staged": staged, "success": success} | tuned.record()), flush=True)
        for temperature in (1.0, 0.0):
            result = ragen.evaluate(
                config.model.path,
                {"env": args.recipe, "threads": args.threads},
                episodes=args.episodes,
                temperature=temperature,
            )
            print(json.dumps(result.record()))


if __name__ == "__main__":
    main()
