"""Pictures that an agent saw, in the pages of the viewer and in a shared file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from viewer import serve

from ragen.core.types import Group
from ragen.storage.recorder import Recorder
from ragen.viewer.share import share
from tests.browser.visitor import PHONE, WIDE
from tests.pictured import picture_run, seeing_chat, seen_episodes

Visitors = Any
LOADED = "[...document.images].map((each) => each.complete && each.naturalWidth > 0)"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose agents see, evaluated twice."""
    with ThreadPoolExecutor(1) as thread:  # Playwright's event loop runs in this one
        episodes = thread.submit(seen_episodes).result()
    run = picture_run(tmp_path_factory.mktemp("pictures") / "seen", episodes)
    with Recorder.open(run, 0, seeing_chat().text_of) as recorder:
        for step in (2, 3):
            recorder.episodes(step, [Group((episodes[0],))], phase="eval")
    return run


@pytest.fixture(scope="module")
def address(seen: Path) -> Iterator[str]:
    """The address of its viewer."""
    with serve(seen.parent) as address:
        yield address


def num_pictures(page: Any) -> int:
    """The number of pictures, all of which are loaded."""
    page.wait_for_load_state("networkidle")
    loaded = page.evaluate(LOADED)
    assert all(loaded)
    return len(loaded)


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_pictures_are_at_their_places(
    visitors: Visitors, address: str, size: tuple[int, int]
) -> None:
    visitor = visitors(address, size)
    page = visitor.visit("#/episode/seen/1?turn=3")
    assert num_pictures(page) == 2 + 2  # the observation's, and those of the last words
    page = visitor.visit("#/episode/seen/3")
    assert num_pictures(page) == 1 + 3 + 1  # the observation's, those of results, the last one
    assert page.locator("[data-testid=results] img").count() == 3
    page = visitor.visit("#/group/seen?attempt=0&step=1&phase=train&group=0")
    assert num_pictures(page) == 8
    page = visitor.visit("#/levels/seen")
    assert num_pictures(page) == 16
    wide = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert wide and not visitor.complaints


def test_the_tokens_of_a_picture_are_one_element(visitors: Visitors, address: str) -> None:
    visitor = visitors(address)
    page = visitor.visit("#/episode/seen/1?view=tokens")
    expect(page.locator(".token img")).to_have_count(8)
    assert num_pictures(page) == 1 + 8
    page.locator(".token:has(img)").first.hover()
    assert "4 tokens of the picture" in page.locator("[data-testid=token-facts]").inner_text()
    page = visitor.visit("#/episode/seen/1?view=prompt&turn=2")
    expect(page.locator("[data-testid=prompt] img")).to_have_count(4)
    page = visitor.visit("#/episode/seen/4?view=prompt&turn=2")  # of an endpoint
    expect(page.locator("[data-testid=prompt]")).to_contain_text("You see <image>.")
    assert not visitor.complaints


def test_a_shared_file_shows_pictures(visitors: Visitors, seen: Path, tmp_path: Path) -> None:
    file = share(seen, tmp_path / "shared.html", episode=3)
    visitor = visitors("file://")
    visitor.page.goto(file.as_uri())
    visitor.wait()
    assert num_pictures(visitor.page) == 5 and not visitor.complaints
