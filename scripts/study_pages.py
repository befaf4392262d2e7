"""Write the pages of the studies in `docs/studies` that were run, from their tables of runs.

    ragen study NAME
    mkdir -p docs/studies/NAME
    cp runs/study-NAME-laptop/runs.csv runs/study-NAME-laptop/study.svg docs/studies/NAME/
    python scripts/study_pages.py

It writes each ``study.md``, and the table and the figure of ``index.md``. A test compares the pages
with the tables, so that no verdict is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ragen.studies.overview import FIGURE, draw_overview, overview, undecided
from ragen.studies.results import RUNS, Findings, page, read_findings, written
from ragen.studies.study import load_study, study_names

FOLDER = Path(__file__).parents[1] / "docs" / "studies"
MARKERS = "<!-- scripts/study_pages.py writes the table. -->\n", "<!-- The table ends. -->\n"


def found() -> dict[str, Findings]:
    """The findings of the studies that were run, by name."""
    names = [name for name in study_names() if (FOLDER / name / RUNS).exists()]
    return {name: read_findings(load_study(name), "laptop", FOLDER / name) for name in names}


def texts() -> Iterator[tuple[Path, str]]:
    """Each page with its text."""
    findings = found()
    for name, each in findings.items():
        yield FOLDER / name / "study.md", "\n".join(page(each)) + "\n"
    table = overview([load_study(name) for name in study_names()], findings)
    lines = [*table, "", FIGURE, "", *undecided(list(findings.values()))]
    yield FOLDER / "index.md", between_markers(FOLDER / "index.md", lines)


def between_markers(path: Path, lines: Iterable[str]) -> str:
    """The text of a page with these lines between its markers."""
    head, start, rest = path.read_text("utf-8").partition(MARKERS[0])
    _, end, tail = rest.partition(MARKERS[1])
    assert start and end, f"{path} has lost its markers"
    return head + start + "\n" + "\n".join(lines) + "\n\n" + end + tail


if __name__ == "__main__":
    for path, text in list(texts()):
        path.write_text(text, "utf-8")
    with written(FOLDER / "studies.svg") as path:
        draw_overview(list(found().values())).savefig(path)
