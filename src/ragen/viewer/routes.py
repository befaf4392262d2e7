"""The routes of the JSON API: each path and the function that answers it.

The server calls them for a browser. The export (`ragen.viewer.share`) calls the same functions and
writes their answers into a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ragen.viewer import (
    collapse,
    comparison,
    episode_list,
    episode_page,
    phrases,
    run_list,
    run_metrics,
    run_page,
    tokens,
)
from ragen.viewer.reading import Answer, Query

ROUTES: Mapping[str, Callable[[Path, Query], Answer]] = MappingProxyType(
    {
        "/api/runs": run_list.runs,
        "/api/run": run_page.run,
        "/api/metrics": run_metrics.metrics,
        "/api/difference": run_page.difference,
        "/api/episodes": episode_list.episodes,
        "/api/episode": episode_page.episode,
        "/api/group": episode_page.group,
        "/api/tokens": tokens.tokens,
        "/api/compare": comparison.compare,
        "/api/levels": comparison.levels,
        "/api/level": comparison.level,
        "/api/phrases": phrases.phrases,
        "/api/collapse": collapse.collapse,
        "/api/matrix": collapse.matrix,
    }
)
"""By path, a function of the runs' folder and the request's parameters."""


def answer(root: Path, path: str, query: Query) -> Answer:
    """The answer to one request, as the server gives it.

    Args:
        root: The folder of the runs, or one run.
        path: One of `ROUTES`.
        query: The request's parameters.

    Raises:
        Unanswered: There is no such run or item, it cannot be read, or a parameter is wrong.
    """
    return ROUTES[path](root, query)
