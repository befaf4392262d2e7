"""What a training step does, in counts that do not depend on the machine's load.

    python benchmarks/counts.py                    # prints the counts
    python benchmarks/counts.py --check counts.json
    python benchmarks/counts.py --write counts.json

The run is that of `step.py`, with two groups of four episodes: its tokens are known in advance. The
counts are those of the second and third step, so that what is only done once is left out.

- **python_calls**: calls of RAGEN's own functions in the main thread.
- **operators**, **new_bytes**, **copied_bytes**: torch operators, the bytes of the tensors that
  they return in new memory, and the bytes that copies and conversions write.
- **forwards**, **prefilled**, **reused**: forwards of the sampler, prompt tokens that it read, and
  those that it found in its cache.

`--check` exits with 1 where a count differs by more than 3 % from the table's. The committed table
is for the versions of `constraints.txt`; a change that is meant is written with `--write`.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import step
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import ragen
from ragen.config.reading import changed
from ragen.engines import factory
from ragen.engines.sampler import Sampler
from ragen.training import trainer
from ragen.training.progress import Watcher

PACKAGE = str(Path(ragen.__file__).parent)
TOLERANCE = 0.03
SIZE = {
    "rollout.num_groups": 2,
    "rollout.group_size": 4,
    "update.minibatch_episodes": 8,
    "rollout.slots": 8,
}
FIRST, STEPS = 1, 3
"""The step after which counting begins, and the last step."""
COPIES = {"copy_", "clone", "_to_copy", "cat", "index", "index_put_", "index_select", "repeat"}


class Operators(TorchDispatchMode):
    """Counts operators and the bytes that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        new = sum(
            each.nbytes
            for each in tree_leaves(result)
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given
        )
        self.counts["operators"] += 1
        self.counts["new_bytes"] += new
        if name in COPIES:
            written = args[0].nbytes if name in ("copy_", "index_put_") else new
            self.counts["copied_bytes"] += written
        return result


class FromTo(Watcher):
    """Calls `begin` after the step `FIRST`."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == FIRST:
            self._begin()


@contextmanager
def run(begin: Callable[[], None]) -> Iterator[Sampler]:
    """Train the small run; yields its sampler when it has ended."""
    made: list[Sampler] = []

    def endless(*args: Any, **kwargs: Any) -> Sampler:
        made.append(step.endless(*args, **kwargs))
        return made[0]

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, patch.object(factory, "Sampler", endless):
        step.make_model(Path(folder, "model"))
        config = changed(step.make_config(Path(folder, "model"), STEPS), SIZE)
        trainer.train(config, Path(folder, "run"), watcher=FromTo(begin))
        yield made[0]


def count_operators() -> dict[str, int]:
    """The counts of torch operators and of the sampler."""
    mode, samplers = Operators(), dict[str, int]()
    mode.__enter__()
    try:
        with run(mode.counts.clear) as sampler:
            stats = sampler.stats
            samplers = {"forwards": stats.forwards, "prefilled": stats.prefilled}
            samplers["reused"] = stats.reused
    finally:
        mode.__exit__(None, None, None)
    return {**mode.counts, **samplers}


def count_calls() -> int:
    """The calls of RAGEN's own functions."""
    calls = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        # Comprehensions are functions in some versions of Python only.
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            calls += 1

    def begin() -> None:
        sys.setprofile(see)

    try:
        with run(begin):
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
    return calls


def counts() -> dict[str, int]:
    """All counts."""
    return {"python_calls": count_calls(), **count_operators()}


def differences(found: Mapping[str, int], table: Mapping[str, int]) -> list[str]:
    """One line for each count that is more than `TOLERANCE` away from the table's.

    Example:
        >>> differences({"forwards": 90, "reused": 5}, {"forwards": 100, "reused": 5})
        ['forwards: 90, in the table 100 (-10.0%)']
    """
    lines = []
    for name, before in table.items():
        change = found.get(name, 0) / before - 1
        if abs(change) > TOLERANCE:
            lines.append(f"{name}: {found.get(name, 0)}, in the table {before} ({change:+.1%})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = counts()
    for name, count in found.items():
        print(f"{name:16} {count:>14,}")
    if args.write:
        args.write.write_text(json.dumps(found, indent=2) + "\n")
    wrong = differences(found, json.loads(args.check.read_text())) if args.check else []
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
