"""Write the gallery of recipes into `docs/recipes.md`, below its marker.

What a recipe says of itself is its first comment. Its numbers are those of gallery.csv, and each
must occur in the section of a page that is named there. Its curve is the figure of a study with an
arm that only adds the study's own settings to the recipe, which are named.

    python scripts/gallery.py
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ragen.config.reading import first_comment, recipes
from ragen.studies.study import load_study

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "recipes.md"
MARKER = "<!-- scripts/gallery.py writes what follows. -->\n"
ROWS = {
    "play": "random / optimal play",
    "before": "before",
    "after": "after RL, by seed",
    "cost": "time with evaluations",
    "memory": "memory",
}
MEASURES = re.compile("eval|diagnose|checkpoint|record")
NUMBER = re.compile(r"(?<![\d.])\.?\d[\d.]*(?: \[[\d., ]+\])?")


def renewed(page: str) -> str:
    """The page with the recipes and their numbers as they are now."""
    head, marker, _ = page.partition(MARKER)
    assert marker, f"{PAGE} has lost its marker"
    table = Path(__file__).with_suffix(".csv").read_text("utf-8").splitlines()
    recorded = {facts["recipe"]: facts for facts in csv.DictReader(table, delimiter="|")}
    assert recorded.keys() <= recipes().keys()
    names = [*recorded, *sorted(recipes().keys() - recorded.keys())]
    lines = (line for name in names for line in ("", *card(name, recorded.get(name))))
    return head + marker + "\n".join(lines) + "\n"


def card(name: str, facts: Mapping[str, str] | None) -> Iterator[str]:
    """The lines of a recipe."""
    words = re.sub(r"(ragen (?:base|sft) .+)$", r"`\1`", first_comment(recipes()[name]))
    yield f"## {name}\n\n{words}\n"
    if facts is None:
        yield f"`ragen train {name}`: no figures are recorded."
        return
    text = section(facts["from"])
    yield f"| command | `ragen train {name}` |\n|---|---|"
    for key, title in ROWS.items():
        for number in NUMBER.findall(facts[key]):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text), (name, number)
        if facts[key]:
            yield f"| {title} | {facts[key]} |"
    yield f"\nMeasured as in [{facts['from'].partition('.')[0]}]({facts['from']})."
    if study := facts["study"]:
        page, settings = f"studies/{study}/study.md", load_study(study).laptop
        own = [f"`{key} = {value}`" for key, value in settings.items() if not MEASURES.match(key)]
        yield f"\n![Success by step](studies/{study}/study.svg)\n"
        yield f"The arm “{facts['arm']}” of [a study]({page}) is the recipe"
        yield f"with {', '.join(own)}." if own else "itself, with more seeds."


def section(target: str) -> str:
    """The text of a page below a heading, up to the next one of its level, without bold type."""
    page, _, anchor = target.partition("#")
    text = (DOCS / page).read_text("utf-8").replace("*", "")
    for title, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE):
        if re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            return " ".join(body.split())
    raise AssertionError(f"{page} has no section {anchor}")


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")
