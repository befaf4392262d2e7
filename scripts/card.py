"""Run the phases of card.sh, each with its own time limit; none stops the others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SMOL = "models/smollm2", "models/smollm2-bandit"
PHASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "tests": (60, ("-m", "pytest", "-m", "gpu", "-n", "0", "-rP", "tests/engines/test_gpu.py")),
    "demo": (90, ("benchmarks/learning.py", "demo", "--seeds", "1", "--episodes", "256")),
    "speed": (270, ("benchmarks/gpu.py", "--steps", "1")),
    # From here on, SmolLM2: its folder, the warm-up, and Bandit.
    "smollm2": (60, ("scripts/smollm2.py", SMOL[0])),
    "warm-up": (
        60,
        (
            *("-m", "ragen.cli.main", "sft", "smol/bandit", "--model", SMOL[0]),
            *("--player", "random", "--episodes", "256", "--epochs", "2", "--out", SMOL[1]),
        ),
    ),
    "bandit": (90, ("benchmarks/learning.py", "smol/bandit", "--seeds", "1", "--episodes", "256")),
}
"""Seconds and Python's arguments of each, in order of value."""


def run(name: str, out: Path) -> dict[str, Any]:
    """One phase: its exit status, seconds, and the JSON lines among what it printed."""
    limit_s, arguments = PHASES[name]
    print(f"{name}: python {' '.join(arguments)}", flush=True)
    log, begun = out / f"{name}.log", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = f"stopped after {limit_s} s"
    printed = log.read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in printed if line.startswith("{")]
    if status != 0:
        print("\n".join(printed[-15:]), flush=True)
    return {"status": status, "seconds": round(time.monotonic() - begun, 1), "found": found}


def machine() -> dict[str, str]:
    """The card, and the versions of what decides its speed."""
    import torch
    import transformers

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"card": card, "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    """Run the phases that were named, or all; the results are written after each."""
    out, chosen = Path(sys.argv[1]), sys.argv[2:] or PHASES
    results: dict[str, Any] = {"machine": machine()}
    for name in chosen:
        results[name] = run(name, out)
        (out / "card.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + ", ".join(f"{key} {value}" for key, value in results.pop("machine").items()))
    for name, result in results.items():
        print(f"\n{name}: {result['seconds']} s, exit status {result['status']}")
        for row in result["found"]:
            print("  " + ", ".join(f"{key} {value}" for key, value in row.items()))
    sys.exit(any(result["status"] != 0 for result in results.values()))


if __name__ == "__main__":
    main()
