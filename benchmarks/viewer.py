"""Is the viewer fluent with 100,000 episodes? Measures what a user waits for.

    python benchmarks/viewer.py [--episodes 100000] [--runs 200] [--folder DIR] [--no-browser]

The runs are those of `fill.py`. The viewer is started as a user starts it and asked over its
socket: every order of the list of episodes under every filter, first and later pages, and what each
page asks for. With Chromium, also how long a page takes to stand, and how long after its commit in
another process a step is on the screen.

Prints a table and exits with 1 where a bound is broken. Each wording of a query is judged by its
median; the largest single time is shown, and judged by nobody: on a shared machine it is the
machine's. With `--folder` what was filled stays there, and serves the next time.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
from fill import LARGE, RARE, fill

from ragen.core.metrics import last, mean
from ragen.storage.recorder import Recorder

LIST_S, PAGE_S, LIVE_S = 0.1, 1.0, 2.0
"""What the viewer promises: a list query, the start of a page, a step on the screen."""

REPEAT = 3
LATER_PAGES = 2
LIVE_STEPS = 8

BROWSER_OPTIONS = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
"""Chromium refuses its sandbox to root, which is who works in a container."""

ORDERS = ("step", "reward", "length", "entropy", "turns", "score")
FILTERS: Mapping[str, Mapping[str, object]] = {
    "all": {},
    "phase": {"phase": "eval"},
    "steps": {"step_from": 100, "step_to": 110},
    "env": {"env": "sokoban"},
    "success": {"success": 1},
    "reward range": {"reward_min": 9.5, "reward_max": 10.5},
    "stop reason": {"stop_reason": "solved"},
    "not kept": {"kept": 0},
    "alarm": {"alarm": 1},
    "group": {"group": 3},
    "level": {"level_seed": 130},
    "no episode": {"reward_min": 1e6},
    "a frequent word": {"q": "wall"},
    "a rare word": {"q": RARE},
    "no such word": {"q": "antidisestablishmentarianism"},
    "two words": {"q": "corner push"},
    "a malformed search": {"q": 'NEAR(" AND * ('},
    "many at once": {"q": "wall", "success": 1, "phase": "train", "step_from": 50, "kept": 1},
}


@dataclass
class Row:
    """One line of the table: the times of each wording, judged by the slowest one's median."""

    name: str
    bound_s: float
    times: dict[str, list[float]] = field(default_factory=dict)

    def add(self, wording: str, seconds: float) -> None:
        self.times.setdefault(wording, []).append(seconds)

    @property
    def slowest(self) -> tuple[float, str]:
        return max((statistics.median(found), wording) for wording, found in self.times.items())

    @property
    def broken(self) -> bool:
        return self.slowest[0] > self.bound_s

    def line(self) -> str:
        every = [seconds for found in self.times.values() for seconds in found]
        worst, wording = self.slowest
        numbers = (statistics.median(every), worst, max(every))
        shown = " ".join(f"{1e3 * seconds:9.1f}" for seconds in numbers)
        verdict = "BROKEN" if self.broken else "ok"
        return f"{self.name:<26} {shown} {1e3 * self.bound_s:7.0f}  {verdict:<6} {wording}"


def chromium() -> str | None:
    """This machine's Chromium: the one that RAGEN_CHROMIUM names, or the first on the path."""
    names = ("chromium", "chromium-browser", "google-chrome")
    named = os.environ.get("RAGEN_CHROMIUM")
    return named or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[str]:
    """The viewer of `folder` as a process of its own; yields its address."""
    command = [sys.executable, "-m", "ragen", "view", str(folder), "--port", "0", "--no-browser"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"https?://[^\s,;]+", line):
                yield found[0].rstrip("/")
                return
        raise RuntimeError(f"the viewer ended with {process.wait()} before it named an address")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)


def ask(client: httpx.Client, question: str, **parameters: object) -> Any:
    answer = client.get(question, params=parameters)
    answer.raise_for_status()
    return answer.json()


def timed(row: Row, wording: str, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    row.add(wording, time.perf_counter() - start)
    return result


def measure_lists(client: httpx.Client) -> Iterator[Row]:
    """Every filter under every order: its first page, and the ones that follow."""
    for name, parameters in FILTERS.items():
        row = Row(f"episodes: {name}", LIST_S)
        orders = itertools.product(ORDERS, ("asc", "desc"))
        for (sort, order), _ in itertools.product(orders, range(REPEAT)):
            asked = {"run": LARGE, **parameters, "sort": sort, "order": order}
            for page in range(1 + LATER_PAGES):
                found = timed(
                    row,
                    f"by {sort}, {order}, page {page + 1}",
                    lambda asked=asked: ask(client, "/api/episodes", **asked),
                )
                if not found["next"]:
                    break
                asked = asked | {"cursor": found["next"]}
        yield row


def measure_rest(client: httpx.Client) -> Iterator[Row]:
    """What the other pages ask for."""
    first = ask(client, "/api/episodes", run=LARGE, phase="train", sort="step", order="asc")
    episode = first["episodes"][0]
    group = {key: episode[key] for key in ("attempt", "step", "phase", "group")}
    names = ask(client, "/api/run", run=LARGE)["names"]
    requests: dict[str, tuple[float, dict[str, object]]] = {
        "/api/run": (PAGE_S, {}),
        "/api/metrics": (PAGE_S, {"names": ",".join(names)}),
        "/api/group": (LIST_S, group),
        "/api/episode": (LIST_S, {"episode": episode["id"]}),
        "/api/tokens": (LIST_S, {"episode": episode["id"]}),
        "/api/compare": (PAGE_S, {}),
        "/api/levels": (PAGE_S, {}),
        "/api/level": (PAGE_S, {"phase": "eval", "level_seed": 123}),
        "/api/phrases": (PAGE_S, {}),
        "/api/collapse": (PAGE_S, {}),
        "/api/matrix": (PAGE_S, {"step": 0, "path": "first"}),
    }
    for path, (bound_s, parameters) in requests.items():
        row = Row(path, bound_s)
        for _ in range(REPEAT):
            timed(row, "", lambda p=path, q=parameters: ask(client, p, run=LARGE, **q))
        yield row


def routes(client: httpx.Client) -> dict[str, str]:
    """A deep link to each page, about the large run."""
    train = {"phase": "train", "sort": "step", "order": "asc", "limit": 1}
    (episode,) = ask(client, "/api/episodes", run=LARGE, **train)["episodes"]
    group = urlencode({key: episode[key] for key in ("attempt", "step", "phase", "group")})
    run = quote(LARGE, safe="")
    return {
        "runs": "#/",
        "run": f"#/run/{run}",
        "compare": f"#/compare/{run}?other=small-0",
        "episodes": f"#/episodes/{run}",
        "search": f"#/episodes/{run}?q=wall&sort=reward",
        "group": f"#/group/{run}?{group}",
        "episode": f"#/episode/{run}/{episode['id']}",
        "tokens": f"#/episode/{run}/{episode['id']}?view=tokens",
        "levels": f"#/levels/{run}",
        "collapse": f"#/collapse/{run}",
        "evaluations": f"#/evaluations/{run}",
    }


WATCH_READY = """
new MutationObserver((_, self) => {
  if (document.body?.dataset.ready) { window.readyAt = performance.now(); self.disconnect(); }
}).observe(document, { subtree: true, childList: true, attributes: true });
"""
"""Notes when a page stands, in milliseconds since the navigation to it began."""


def measure_pages(browser: Any, address: str, pages: Mapping[str, str]) -> Iterator[Row]:
    """From navigation to a page that stands, with nothing cached."""
    for name, route in pages.items():
        row = Row(f"page: {name}", PAGE_S)
        for _ in range(REPEAT):
            context = browser.new_context()
            context.add_init_script(WATCH_READY)
            page = context.new_page()
            page.goto(f"{address}/{route}")
            page.wait_for_function("() => window.readyAt")
            row.add("", page.evaluate("window.readyAt") / 1e3)
            context.close()
        yield row


def write_steps(folder: Path, pipe: Connection) -> None:
    """A run that goes on: commits a step whenever it is told its number, and says when that was."""
    with Recorder.open(folder) as recorder:
        while (step := pipe.recv()) is not None:
            recorder.log(step, {"success/mean": mean(0.5), "progress/updates": last(4 * step)})
            recorder.commit()
            pipe.send(time.time())


def measure_live(browser: Any, address: str, folder: Path, route: str, first: int) -> Row:
    """From the commit of a step in another process to the page that shows its number."""
    row = Row("live: step on the screen", LIVE_S)
    here, there = multiprocessing.get_context("spawn").Pipe()
    writer = multiprocessing.get_context("spawn").Process(target=write_steps, args=(folder, there))
    writer.start()
    page = browser.new_page()
    page.goto(f"{address}/{route}")
    page.wait_for_selector("body[data-ready='1']")
    for step in range(first, first + LIVE_STEPS):
        here.send(step)
        committed = here.recv()
        page.wait_for_function(
            "step => document.querySelector('main').innerText.includes(step)", arg=str(step)
        )
        row.add("", time.time() - committed)
    here.send(None)
    writer.join()
    page.close()
    return row


def measure(folder: Path, with_browser: bool) -> Iterator[Row]:
    with serve(folder) as address, httpx.Client(base_url=address, timeout=60) as client:
        runs = Row("/api/runs", PAGE_S)
        timed(runs, "of a viewer that has just started", lambda: ask(client, "/api/runs"))
        for _ in range(REPEAT):
            timed(runs, "again", lambda: ask(client, "/api/runs"))
        yield runs
        yield from measure_rest(client)
        if with_browser:
            yield from measure_in_browser(folder, address, client)
        yield from measure_lists(client)


def measure_in_browser(folder: Path, address: str, client: httpx.Client) -> Iterator[Row]:
    from playwright.sync_api import sync_playwright

    pages = routes(client)
    last_step = int(ask(client, "/api/run", run=LARGE)["step"])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=BROWSER_OPTIONS)
        yield from measure_pages(browser, address, pages)
        yield measure_live(browser, address, folder / LARGE, pages["run"], last_step + 1)
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where the runs are kept [nowhere]")
    parser.add_argument("--no-browser", action="store_true", help="ask the API only")
    options = parser.parse_args()
    if not options.no_browser and chromium() is None:
        parser.error("no Chromium here: name it in RAGEN_CHROMIUM, or give --no-browser")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        fill(folder, options.episodes, options.runs)
        print(f"{'milliseconds':<26} {'median':>9} {'slowest':>9} {'maximum':>9} {'bound':>7}")
        broken = False
        for row in measure(folder, not options.no_browser):
            print(row.line(), flush=True)
            broken |= row.broken
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
