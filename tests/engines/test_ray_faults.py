"""Faults in real runs on Ray: whatever dies, the run ends well and its rows are complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from faults import FAULTS, suffer, two_machines

pytestmark = pytest.mark.ray

NETWORK = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and network namespaces"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.slow] if fault.slow else []),
                *([NETWORK] if fault.where is two_machines else []),
            ],
        )
        for name, fault in FAULTS.items()
    ],
)
def test_a_run_survives_the_death_of(name: str, tmp_path: Path) -> None:
    outcome = suffer(name, tmp_path / "run")
    assert outcome.wrong == [], outcome.events
