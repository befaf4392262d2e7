"""A folder of runs as large as one will ever look at: made up, but written by the recorder itself.

    python benchmarks/fill.py FOLDER [--episodes 100000] [--runs 200]

``FOLDER/large`` is a run of Sokoban with that many episodes of five turns: groups of sixteen that
were really played, by chance, and are written again and again under other thoughts, rewards and
levels; every `EVERY` steps an evaluation on the same 128 levels, the token sequences of a step, an
alarm and a matrix of cross-scores. The other runs are short and all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ragen.config.config import Config
from ragen.config.reading import dump, merge
from ragen.core.metrics import Metrics, last, mean
from ragen.core.seeding import EVAL_LEVELS, train_level
from ragen.core.types import Completion, Episode, Group, Prompt, Turn
from ragen.evaluation.results import Evaluation
from ragen.reports.facts import SIGNALS
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import written_completion
from ragen.rollout.setup import make_setup
from ragen.storage.recorder import Recorder

LARGE = "large"
PROMPTS, MEMBERS, TURNS = 16, 16, 5
TOKENS, VOCABULARY = 24, 512
"""Sampled tokens of a turn, and how many different ones there are."""
EVERY = 40
NUM_EVAL_LEVELS = 128

STATEMENTS = (
    "P {0} : {0} {1} _ Right {1} {2} _ Down",
    "The target is two down and one right of {0}, {1} is a wall, so I go by {2}.",
    "I stand on {0}. {1} is free and safe; the box is next to {2}.",
    "From {0} the short way over {1} is blocked, the long way goes around by {2}.",
)
WORDS = ("target", "box", "below", "left", "edge", "corner", "safe", "push", "around", "wall")
RARE = "zugzwang"
"""A word that one thought in some ten thousand holds."""


def settled(steps: int) -> Config:
    return merge(
        "sokoban",
        {
            "steps": steps,
            "rollout.num_groups": PROMPTS,
            "rollout.group_size": MEMBERS,
            "env.max_actions": 5,
        },
    )


def thought(source: random.Random) -> str:
    cells = [f"{source.choice('abcdef')}{source.randrange(6)}" for _ in range(3)]
    words = source.choices(WORDS, k=4)
    if source.random() < 1e-4:
        words.append(RARE)
    return f"{source.choice(STATEMENTS).format(*cells)} {' '.join(words)}"


def played(config: Config, source: random.Random) -> list[Group]:
    """Groups that were really played, by chance."""

    class Chance:
        async def complete(self, _: Prompt) -> Completion:
            action = source.choice(("Up", "Down", "Left", "Right"))
            return written_completion(f"{thought(source)}</think><answer>{action}</answer>")

    levels = [train_level(group) for group in range(PROMPTS)]
    work = run_groups(Chance(), make_setup(config, None), levels, MEMBERS, (0, "train", 0))
    return asyncio.run(work)


class Retold:
    """Writes the same games again as if other thoughts had led to them."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.numbers = np.random.default_rng(0)

    def group(self, group: Group, level_seed: int, number: int) -> Group:
        return Group(tuple(self.episode(each, level_seed, number) for each in group.episodes))

    def episode(self, episode: Episode, level_seed: int, number: int) -> Episode:
        history: tuple[int, ...] = ()
        turns = []
        for turn in episode.turns:
            turns.append(self.turn(turn, history))
            history = turns[-1].prompt.token_ids + turns[-1].completion.token_ids
        success = self.source.random() < 0.4
        turns[-1] = replace(turns[-1], reward=round(self.source.gauss(10 * success, 1), 2))
        return replace(
            episode,
            level_seed=level_seed,
            noise_seed=self.source.getrandbits(62),
            group=number,
            turns=tuple(turns),
            success=success,
            terminated=success,
            stop_reason="solved" if success else episode.stop_reason,
        )

    def turn(self, turn: Turn, history: tuple[int, ...]) -> Turn:
        said = thought(self.source)
        new = self.numbers.integers(3, VOCABULARY, 40 + TOKENS).tolist()
        logprobs = np.log(self.numbers.uniform(0.05, 1, TOKENS)).tolist()
        prompt = replace(turn.prompt, token_ids=(*history, *new[:40]))
        text = f"{said}</think><answer>{' || '.join(turn.actions_asked)}</answer>"
        ids = tuple(new[40:])
        completion = replace(turn.completion, token_ids=ids, logprobs=tuple(logprobs), text=text)
        span = (0, TOKENS - 6)
        return replace(turn, prompt=prompt, completion=completion, thought=said, thought_span=span)


def metrics_of(step: int, steps: int, source: random.Random) -> Metrics:
    """As many names as a run has, the report's among them, all on a plausible way."""
    done = step / steps
    values: Metrics = {name: mean(source.gauss(1 - done, 0.1)) for name in SIGNALS}
    values |= {f"ema/{name}": mean(1 - done) for name in SIGNALS}
    values |= {f"time/{part}_s": mean(source.uniform(0.1, 3)) for part in ("rollout", "update")}
    values["success/mean"] = mean(min(1.0, max(0.0, source.gauss(0.2 + 0.5 * done, 0.05))))
    played = step * PROMPTS * MEMBERS
    values |= {
        "progress/episodes": last(played),
        "progress/updates": last(4 * step),
        "progress/tokens": last(played * TURNS * TOKENS),
    }
    return values


def evaluation(success: float) -> dict[str, Any]:
    """The record of an evaluation."""
    mean_return = {"mean_return": success, "mean_return_low": success - 0.1}
    return Evaluation(
        **{"env": "sokoban", "target": "large", "temperature": 1.0, "episodes": NUM_EVAL_LEVELS},
        **{"success": success, "success_low": success - 0.08, "success_high": success + 0.08},
        **{"random": 0.165, "optimal": 0.988, "random_return": -0.5, "optimal_return": 10.4},
        **{**mean_return, "mean_return_high": success + 0.1, "mean_turns": 4.5, "failed": 0},
        **{"mean_actions": 4.8, "valid_fraction": 1.0, "completion_tokens": 24.0},
        **{"first_level": 123, "seconds": 12.0},
    ).record()


def samples_of(groups: Sequence[Group], numbers: np.random.Generator) -> list[dict[str, Any]]:
    found = []
    for episode in (each for group in groups for each in group.episodes):
        final = episode.turns[-1]
        ids = [*final.prompt.token_ids, *final.completion.token_ids]
        mask = np.zeros(len(ids), bool)
        mask[-TOKENS:] = True
        arrays = ("sampled_logprobs", "old_logprobs", "entropies", "advantages", "ratios")
        found.append(
            {
                **{"group": episode.group, "member": episode.member, "token_ids": ids},
                **{"loss_mask": mask, "turn_index": np.where(mask, len(episode.turns) - 1, -1)},
                **{name: numbers.normal(size=len(ids)) for name in arrays},
            }
        )
    return found


def fill_large(folder: Path, episodes: int) -> None:
    """The long run."""
    source = random.Random(0)
    steps = max(1, -(-episodes // (PROMPTS * MEMBERS)))
    config = settled(steps)
    pool, retold = played(config, source), Retold(source)
    folder.mkdir(parents=True)
    with Recorder.create(folder, dump(config), lambda token: f" t{token}") as recorder:
        for step in range(steps + 1):
            if step % EVERY == 0 or step == steps:
                firsts = [Group(group.episodes[:1]) for group in pool]
                tests = [
                    retold.group(firsts[index % PROMPTS], EVAL_LEVELS + index, index)
                    for index in range(NUM_EVAL_LEVELS)
                ]
                recorder.episodes(step, tests, phase="eval")
                recorder.evaluation(step, evaluation(0.2 + 0.6 * step / steps))
            if step < steps:
                one_step(recorder, step, steps, pool, retold)


def one_step(
    recorder: Recorder, step: int, steps: int, pool: Sequence[Group], retold: Retold
) -> None:
    """A step of training, committed as a run commits it."""
    source, numbers = retold.source, retold.numbers
    groups = [
        retold.group(group, train_level(step * PROMPTS + number), number)
        for number, group in enumerate(pool)
    ]
    recorder.log(step, metrics_of(step, steps, source))
    recorder.episodes(
        step,
        groups,
        kept=[source.random() < 0.5 for _ in groups],
        scores=[source.random() for _ in groups],
    )
    if step % EVERY == 0:
        recorder.samples(step, samples_of(groups, numbers))
        firsts = [group.episodes[0].turns[0] for group in groups]
        thoughts = [turn.thought for turn in firsts]
        prompts = [turn.observation for turn in firsts]
        scores = numbers.normal(-30, 5, (len(thoughts), len(prompts)))
        recorder.cross_scores(step, "first", scores, range(len(prompts)), thoughts, prompts)
    recorder.commit()
    if step % EVERY == 0:
        recorder.event(
            step, "alarm", f"reward std fell at step {step}", {"detector": "reward_drop"}
        )


def fill_small(folder: Path) -> None:
    """A short run: what a list of runs shows of it."""
    source, steps = random.Random(1), 20
    folder.mkdir(parents=True)
    with Recorder.create(folder, dump(settled(steps))) as recorder:
        for step in range(steps):
            recorder.log(step, metrics_of(step, steps, source))
        for step in (0, steps):
            recorder.evaluation(step, evaluation(0.2 + 0.02 * step))


def fill(folder: Path, episodes: int, runs: int) -> None:
    """All of them, where they are not there yet."""
    if not (folder / LARGE).exists():
        fill_large(folder / LARGE, episodes)
    for number in range(runs):
        small, first = folder / f"small-{number}", folder / "small-0"
        if number == 0 and not small.exists():
            fill_small(small)
        elif not small.exists():
            shutil.copytree(first, small)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    start = time.perf_counter()
    fill(options.folder, options.episodes, options.runs)
    size = sum(path.stat().st_size for path in (options.folder / LARGE).iterdir())
    print(f"{options.folder}: {time.perf_counter() - start:.0f} s, {size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
