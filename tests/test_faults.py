"""Known faults of other implementations: docs/algorithms.md names a test for each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAULTS = (
    *("retokenised", "mask covers", "count rows", "normalised rewards", "penalties are lost"),
    *("reward 0", "duplicated", "random events", "different prompts", "replays", "salted hash"),
    *("over-long prompt", "silently ignored"),
)


def test_every_known_fault_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (.+) \| `(tests/[\w/]+\.py)::(\w+)` \|$", text, re.MULTILINE)
    for fault in FAULTS:
        assert any(fault in description for description, _, _ in table), fault
    for _, file, name in table:
        assert re.search(
            rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE
        ), f"{file}::{name}"
