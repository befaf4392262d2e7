"""Build the site of `docs` into the folder `site`. A link or an anchor that leads nowhere ends it.

    python3 -m venv /tmp/site && /tmp/site/bin/pip install -r scripts/requirements-site.txt
    /tmp/site/bin/python scripts/site.py
    /tmp/site/bin/python -m http.server -d site    # look at http://localhost:8000

For language models, each page is there as its Markdown too, and `llms.txt` lists the pages
(https://llmstxt.org).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "site"
NOTEBOOKS = DOCS / "notebooks"


def main() -> None:
    """Build the pages, then what is for language models."""
    convert = [sys.executable, "-m", "nbconvert", "--to", "markdown", "--log-level", "WARN"]
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        subprocess.run([*convert, notebook], check=True)
        page = notebook.with_suffix(".md")
        text = page.read_text("utf-8").replace(".ipynb)", ".md)")
        page.write_text(f"{text}\n[This page as a notebook]({notebook.name})\n", "utf-8")
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(build, cwd=ROOT, check=True)
    for built in SITE.rglob("*.html"):  # in the repository, pages lead to the notebooks themselves
        text = built.read_text("utf-8")
        built.write_text(re.sub(r"(notebooks/\w+)\.ipynb\"", r'\1/"', text), "utf-8")
    project = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]
    for page in DOCS.rglob("*.md"):
        shutil.copyfile(page, SITE / page.relative_to(DOCS))
    head = f"# {project['site_name']}\n\n> {project['site_description']}\n"
    (SITE / "llms.txt").write_text(head + "".join(contents(project["nav"])), "utf-8")


def contents(nav: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of `llms.txt`: a heading for each door, a link with a sentence for each page."""
    for entry in nav:
        for title, target in entry.items():
            if isinstance(target, str):
                yield f"- [{title}]({target}): {first_sentence(DOCS / target)}\n"
            else:
                yield f"\n## {title}\n\n"
                yield from contents(target)


def first_sentence(page: Path) -> str:
    """The first sentence of a page's text, without its links."""
    paragraphs = page.read_text("utf-8").split("\n\n")
    text = next(each for each in paragraphs if re.match(r"`?\w", each))
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    return re.split(r"(?<=\.) ", text)[0].rstrip(":")


if __name__ == "__main__":
    main()
