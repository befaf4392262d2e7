"""Does the guard help? Settings in which vanilla StarPO fails, with and without it.

    python benchmarks/guard.py --env bandit --seeds 5                       # all three arms
    python benchmarks/guard.py --env lake --arm guard --seeds 1 --first 3   # a part of it
    python benchmarks/guard.py --table bandit.jsonl lake.jsonl                # the table of parts

Prints one JSON line a run; `--table` makes the Markdown table of such lines.

Environments: `bandit` is the recipe `collapse` (vanilla GRPO in groups of 8, 60 steps). `lake` is
    the
recipe `frozen-lake-still` under vanilla GRPO at a constant learning rate of 3e-3 (the recipe's is
4e-4, falling), with two passes and eight prompts a step.
Arms: `vanilla`; `guard`, vanilla with rollbacks for the detectors in `ACTS`; `starpo-s`, StarPO-S
with the same learning rate and passes. In every arm all detectors watch.

Success is that of the sampled policy on held-out levels: 256 every five steps on `bandit`, 128
every three on `lake`.

- **Fall**: the first evaluation below the best one before it, by the whole 95 % interval of the
  difference (a run that is rolled back counts as it ended up, not what it gave up).
- **Collapse**: the first evaluation from which on success stays below half of what the untrained
  model reached, to the end.
- **Lead**: steps from the first alarm of all (in the first attempt) to the fall of that attempt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ragen
from ragen.core.errors import GuardStop
from ragen.core.statistics import difference, wilson
from ragen.diagnostics.guard import read_alarms
from ragen.storage.reader import read_evaluations, read_events, standing

ACTS = ("reward_std_cliff", "entropy_cliff", "entropy_blowup", "reward_drop", "format_loss")
ENVS: dict[str, tuple[str, dict[str, Any]]] = {
    "bandit": (
        "collapse",
        {
            "eval.every": 5,
            "eval.episodes": 256,
            "checkpoint.every": 5,
        },
    ),
    "lake": (
        "frozen-lake-still",
        {
            "algorithm": "starpo/grpo",
            "steps": 24,
            "rollout.num_groups": 8,
            "update.lr": 3e-3,
            "update.lr_end": 1.0,
            "update.epochs": 2,
            "eval.every": 3,
            "eval.episodes": 128,
            "checkpoint.every": 3,
        },
    ),
}
"""Recipe and changes of each environment."""

REMEDY = {"bandit": "filter", "lake": "lr"}

ARMS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "guard": {f"guard.responses.{name}": "rollback" for name in ACTS},
    "starpo-s": {"algorithm": "starpo-s/grpo"},
}

Success = dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--env", choices=ENVS, default="bandit")
    parser.add_argument("--arm", choices=ARMS, action="append", help="which arms [all]")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from --first")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the runs are kept")
    parser.add_argument("--table", type=Path, nargs="+", help="files of JSON lines; nothing is run")
    args = parser.parse_args()
    if args.table:
        lines = [line for path in args.table for line in path.read_text().splitlines()]
        print(table([json.loads(line) for line in lines if line.startswith("{")]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.first, args.first + args.seeds):
            for arm in args.arm or ARMS:
                folder = (args.out or Path(scratch)) / f"{args.env}-{arm}-{seed}"
                rows.append(run(args.env, arm, seed, folder))
                print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


def run(env: str, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    recipe, changes = ENVS[env]
    episodes: int = changes["eval.episodes"]
    arms = {**ARMS, "guard": {**ARMS["guard"], "guard.remedy": REMEDY[env]}}
    fixed = {"seed": seed, "threads": 1, "record.episodes_every": 0, "record.tokens_every": 0}
    cpu, stopped = time.process_time(), ""
    try:
        ragen.train(recipe, {**changes, **arms[arm], **fixed}, out=folder)
    except GuardStop as stop:
        stopped = str(stop)
    cpu = time.process_time() - cpu
    stands = standing(folder)
    evaluations = [each for each in read_evaluations(folder) if each["temperature"] == 1.0]
    course = {e["step"]: e["success"] for e in evaluations if stands(e["attempt"], e["step"])}
    first_attempt = {e["step"]: e["success"] for e in evaluations if e["attempt"] == 0}
    alarms = read_alarms(folder)
    fell = fall(first_attempt, episodes)
    return {
        "env": env,
        "arm": arm,
        "seed": seed,
        "episodes": episodes,
        "success": course,
        "final": list(course.values())[-1],
        "fall": fall(course, episodes),
        "collapse": collapse(course),
        "alarm": alarms[0].step if alarms else None,
        "alarms": [f"{alarm.detector}@{alarm.step}" for alarm in alarms],
        "lead": fell - alarms[0].step if fell is not None and alarms else None,
        "actions": [event["data"]["action"] for event in read_events(folder, "guard")],
        "stopped": stopped,
        "cpu_s": round(cpu, 1),
    }


def fall(success: Success, episodes: int) -> int | None:
    """The first evaluation that is surely below the best one before it."""
    best = 0.0
    for step, share in success.items():
        now, then = (wilson(round(s * episodes), episodes) for s in (share, best))
        if difference(now, then).high < 0:
            return step
        best = max(best, share)
    return None


def collapse(success: Success) -> int | None:
    """The first evaluation from which on success stays below half of the first one."""
    mark, since = next(iter(success.values())) / 2, None
    for step, share in success.items():
        since = (since if since is not None else step) if share < mark else None
    return since


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| environment | arm | seeds | collapsed | step of collapse | step of fall "
        "| step of the first alarm | lead before the fall | rollbacks | final success, by seed "
        "| mean of the seeds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for env in ENVS:
        for arm in ARMS:
            here = [row for row in rows if (row["env"], row["arm"]) == (env, arm)]
            if here:
                lines.append(line(env, arm, here))
    return "\n".join(lines)


def line(env: str, arm: str, rows: Sequence[dict[str, Any]]) -> str:
    collapsed = sum(row["collapse"] is not None for row in rows)
    rate = wilson(collapsed, len(rows))
    rollbacks = [row["actions"].count("rollback") for row in rows]
    finals = ", ".join(f"{row['final']:.0%}" for row in rows)
    cells = [
        *(env, arm, str(len(rows))),
        f"{collapsed} of {len(rows)} [{rate.low:.0%}, {rate.high:.0%}]",
        *(middle([row[name] for row in rows]) for name in ("collapse", "fall", "alarm", "lead")),
        ", ".join(map(str, rollbacks)),
        finals,
        mean_of_seeds([row["final"] for row in rows]),
    ]
    return f"| {' | '.join(cells)} |"


def middle(numbers: Sequence[float | None]) -> str:
    """Median and range of what there is, and of how many."""
    found = sorted(number for number in numbers if number is not None)
    if not found:
        return "–"
    spread = f"{statistics.median(found):g} ({found[0]:g} … {found[-1]:g})"
    return spread if len(found) == len(numbers) else f"{spread}, in {len(found)}"


def mean_of_seeds(shares: Sequence[float]) -> str:
    """Mean with its 95 % interval by Student's t, seeds being what is independent."""
    mean = statistics.fmean(shares)
    if len(shares) < 2:
        return f"{mean:.0%}"
    from scipy.stats import t

    half = float(t.ppf(0.975, len(shares) - 1)) * statistics.stdev(shares) / len(shares) ** 0.5
    return f"**{mean:.0%}** [{max(0.0, mean - half):.0%}, {min(1.0, mean + half):.0%}]"


if __name__ == "__main__":
    main()
