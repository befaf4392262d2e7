"""CPU seconds that commands take: to their end, or to the end of the first step of a run.

    python benchmarks/startup.py [--repeat 5]    # commands that should start at once
    python benchmarks/startup.py --whole         # demo.sh and test.sh, whole, once

Prints a table of medians, with the least and the most. The commands take turns. CPU seconds are
those of the process and hardly depend on what else the machine does; the clock's do.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

RAGEN = [sys.executable, "-m", "ragen"]
COMMANDS: dict[str, list[str]] = {
    "ragen envs": [*RAGEN, "envs"],
    "ragen study": [*RAGEN, "study"],
    "ragen train bandit --dry-run": [*RAGEN, "train", "bandit", "--dry-run"],
    "ragen train bandit, first step": [*RAGEN, "train", "bandit", "--steps=1"],
    "the same with --eval.episodes 0": [
        *RAGEN,
        "train",
        "bandit",
        "--steps=1",
        "--eval.episodes=0",
    ],
}
ROOT = Path(__file__).resolve().parents[1]
SCRIPTS: dict[str, list[str]] = {
    "./demo.sh": [str(ROOT / "demo.sh"), "--out=run"],
    "./test.sh": [str(ROOT / "test.sh")],
}
"""The README's first two commands. Where .venv is not ready, their first run also makes it."""
FIRST_STEP = "step 1/1  success"
"""How the line of the first step begins; the process is ended there."""

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU seconds so far of a running process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """CPU seconds and the clock's seconds of one command in an empty folder."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(FIRST_STEP):
                found = cpu_seconds(process.pid), time.monotonic() - start
                process.kill()
                return found
    assert process.returncode == 0, f"{' '.join(command)} failed"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="demo.sh and test.sh, once")
    args = parser.parse_args()
    commands = SCRIPTS if args.whole else COMMANDS
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(1 if args.whole else args.repeat):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(measure(command, Path(folder)))
    print("| command | CPU seconds | the clock's |\n|---|---|---|")
    for name, pairs in found.items():
        cells = [
            f"{median(each):.2f} ({min(each):.2f}–{max(each):.2f})"
            for each in zip(*pairs, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
