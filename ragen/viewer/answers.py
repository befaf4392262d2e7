"""The questions that the viewer answers: each path of the API and the function behind it.

The server asks them for a browser; the export asks the same ones and writes the answers into a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ragen.viewer import course, run_page, runs
from ragen.viewer.reading import Answer, Query

ANSWERS: Mapping[str, Callable[[Path, Query], Answer]] = MappingProxyType(
    {
        "/api/runs": runs.runs,
        "/api/run": run_page.run,
        "/api/metrics": course.metrics,
        "/api/difference": run_page.difference,
    }
)
"""By path: a function of the runs' folder and the parameters; it raises `reading.Unanswered`."""
