"""The questions that the viewer answers: each path of the API and the function behind it.

The server asks them for a browser; the export asks the same ones and writes the answers into a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ragen.viewer import (
    branching,
    collapse,
    contests,
    course,
    gains,
    lists,
    phrases,
    played,
    run_page,
    runs,
    tokens,
)
from ragen.viewer.reading import Answer, Query, folder_of, whole_number


def _branches(root: Path, query: Query) -> Answer:
    """``/api/branches``: what was played on from an episode's turns.

    Raises:
        Unanswered: There is no such run or episode, or one cannot be read.
    """
    return branching.branches_of(folder_of(root, query), whole_number(query, "episode"))


ANSWERS: Mapping[str, Callable[[Path, Query], Answer]] = MappingProxyType(
    {
        "/api/runs": runs.runs,
        "/api/run": run_page.run,
        "/api/metrics": course.metrics,
        "/api/difference": run_page.difference,
        "/api/episodes": lists.episodes,
        "/api/episode": played.episode,
        "/api/group": played.group,
        "/api/recurring": played.recurring,
        "/api/level": played.level,
        "/api/tokens": tokens.tokens,
        "/api/phrases": phrases.phrases,
        "/api/collapse": collapse.collapse,
        "/api/matrix": collapse.matrix,
        "/api/gains": gains.gains,
        "/api/compare": contests.compare,
        "/api/branches": _branches,
    }
)
"""By path: a function of the runs' folder and the parameters."""


def answer(root: Path, path: str, query: Query) -> Answer:
    """The answer to one question, as the server gives it.

    Args:
        root: The folder of the runs, or one run.
        path: One of `ANSWERS`.
        query: The parameters.

    Raises:
        Unanswered: There is no such run or thing, it cannot be read, or a parameter is wrong.
    """
    return ANSWERS[path](root, query)
