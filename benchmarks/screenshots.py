"""The pictures of docs/viewer.md: each page of the viewer, of runs that were really trained.

    python benchmarks/screenshots.py [--runs FOLDER] [--out docs/viewer]

Trains the runs first, where they are not in FOLDER already: a Bandit that collapses, a frozen lake
and Sokoban with everything measured; some minutes on two cores. A picture is a PNG of at most 256
colours, so that the whole set stays small enough for a repository.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from viewer import BROWSER_OPTIONS, chromium, serve

LARGEST = 150_000
"""Bytes of a picture."""

MEASURED = [
    *[
        "--rollout.num_groups",
        "8",
        "--rollout.group_size",
        "8",
        "--update.minibatch_episodes",
        "16",
    ],
    *["--eval.episodes", "64", "--eval.every", "5", "--record.tokens_every", "5"],
    *["--diagnose.information_every", "1", "--diagnose.gradients_every", "5"],
]
RUNS = {
    "collapse": ["collapse", "--eval.every", "10", "--eval.episodes", "64"],
    "collapse-s": ["collapse-s", "--eval.every", "10", "--eval.episodes", "64"],
    "frozen-lake-still": ["frozen-lake-still", "--steps", "20", *MEASURED],
    "sokoban": ["sokoban", "--steps", "20", *MEASURED],
}
WIDE, PHONE = (1280, 800), (390, 844)


def train(folder: Path) -> None:
    for name, arguments in RUNS.items():
        if not (folder / name).exists():
            out = ["--out", str(folder / name), "--quiet"]
            subprocess.run([sys.executable, "-m", "ragen", "train", *arguments, *out], check=True)


def shots(api: Any) -> dict[str, tuple[str, tuple[int, int], str]]:
    """A picture's name to its route, size and colour scheme."""

    def some(query: str) -> dict[str, Any]:
        return api(f"/api/episodes?limit=1&{query}")["episodes"][0]

    long = "sort=turns&order=desc&phase=train&success=1"
    puzzle = some(f"run=sokoban&{long}")
    step = api("/api/run?run=sokoban")["step"]  # the last one has tokens
    trained = some(f"run=sokoban&step_from={step}&step_to={step}&kept=1&{long}")
    group = "&".join(f"{key}={trained[key]}" for key in ("attempt", "step", "phase", "group"))
    token = f"#/episode/sokoban/{trained['id']}?view=tokens&turn=1&colour"
    return {
        "runs": ("#/", WIDE, "light"),
        "run": ("#/run/collapse?smooth=0.6", WIDE, "light"),
        "run-dark": ("#/run/frozen-lake-still?smooth=0.6", WIDE, "dark"),
        "compare": ("#/compare/collapse?other=collapse-s&smooth=0.6", WIDE, "light"),
        "episodes": ("#/episodes/sokoban?phase=train&sort=reward", WIDE, "light"),
        "group": (f"#/group/sokoban?{group}", WIDE, "light"),
        "episode": (f"#/episode/sokoban/{puzzle['id']}?turn=1", WIDE, "light"),
        "tokens": (f"{token}=entropy", WIDE, "dark"),
        "prompt": (f"#/episode/sokoban/{trained['id']}?view=prompt&turn=1", WIDE, "light"),
        "then-and-now": ("#/levels/collapse?level_seed=124&steps=0,50", WIDE, "light"),
        "collapse": ("#/collapse/frozen-lake-still", WIDE, "light"),
        "evaluations": ("#/evaluations/frozen-lake-still", WIDE, "light"),
        "phone": (f"#/episode/sokoban/{puzzle['id']}?turn=1", PHONE, "dark"),
    }


def small(png: bytes) -> bytes:
    """The same picture in at most 256 colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    out = io.BytesIO()
    reduced = picture.quantize(255, dither=Image.Dither.NONE)
    reduced.save(out, "PNG", optimize=True)
    return out.getvalue()


def take(browser: Any, address: str, out: Path) -> None:
    first = browser.new_page()
    pictures = shots(lambda path: first.request.get(address + path).json())
    for name, (route, (width, height), scheme) in pictures.items():
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        page = context.new_page()
        page.goto(f"{address}/{route}")
        page.wait_for_selector("body[data-ready='1']")
        page.wait_for_timeout(500)  # curves are drawn in the frames after
        png = small(page.screenshot())
        (out / f"{name}.png").write_bytes(png)
        print(f"{name:<14} {len(png) / 1e3:5.0f} kB")
        assert len(png) <= LARGEST, name
        context.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, help="where the runs are, or are put [nowhere]")
    parser.add_argument("--out", type=Path, default=Path("docs/viewer"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        train(folder)
        with serve(folder) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=BROWSER_OPTIONS)
            take(browser, address, options.out)
            browser.close()


if __name__ == "__main__":
    main()
