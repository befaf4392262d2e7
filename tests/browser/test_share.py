"""Shared files of an episode, a group or a run, opened from the disk without a server."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from ragen.viewer.share import share
from tests.browser.visitor import Visitor

Visitors = Any


@pytest.fixture(scope="module")
def files(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One shared file of each kind, of the run ``lake``."""
    folder = tmp_path_factory.mktemp("shared")
    kinds: dict[str, dict[str, int]] = {"episode": {"episode": 40}, "group": {"group": 40}}
    kinds["run"] = {}
    return {
        kind: share(runs / "lake", folder / f"{kind}.html", **selection)
        for kind, selection in kinds.items()
    }


def open_file(visitors: Visitors, file: Path) -> Visitor:
    """A visitor with the file open."""
    visitor = visitors(address=file.as_uri())
    visitor.page.goto(file.as_uri())
    visitor.wait()
    return visitor


def test_the_file_of_an_episode_shows_it_without_branches(
    visitors: Visitors, visitor: Visitor, files: dict[str, Path]
) -> None:
    original = visitor.api("/api/episode?run=lake&episode=40")
    page = open_file(visitors, files["episode"]).page
    expect(page.get_by_test_id("board").first).to_be_visible()
    expect(page.get_by_test_id("turn").first).to_contain_text(
        original["turns"][0]["thought"].strip()
    )
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Tokens").click()
    expect(page.get_by_test_id("token").first).to_be_visible()
    expect(page.get_by_test_id("branches")).to_have_count(0)  # No server can branch.
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    expect(keys).to_contain_text("next turn")
    expect(keys).not_to_contain_text("next episode")  # The file has only one episode.
    expect(keys).not_to_contain_text("group")


def test_the_files_of_a_group_and_a_run_show_their_pages(
    visitors: Visitors, files: dict[str, Path]
) -> None:
    page = open_file(visitors, files["group"]).page
    page.get_by_role("link", name="member 1", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Episode")
    page = open_file(visitors, files["run"]).page
    expect(page.get_by_role("heading", level=1)).to_have_text("lake")
    assert page.get_by_test_id("curve").count() > 10
    page.get_by_role("button", name="Tokens", exact=True).click()  # The axis.


@pytest.mark.parametrize("attribute", ["src", "srcdoc"])
def test_a_file_works_in_a_sandboxed_frame(
    visitors: Visitors, files: dict[str, Path], tmp_path: Path, attribute: str
) -> None:
    """A mail program or a notebook may use a frame without storage and origin."""
    outer, file = tmp_path / "mail.html", files["run"]
    source = file.as_uri() if attribute == "src" else escape(file.read_text("utf-8"))
    frame = f'<iframe sandbox="allow-scripts" width=1200 height=700 {attribute}="{source}">'
    outer.write_text(f'<!doctype html><meta charset="utf-8">{frame}</iframe>', "utf-8")
    reader = visitors(address="file://")
    reader.page.goto(outer.as_uri())
    page = reader.page.frame_locator("iframe")
    expect(page.get_by_role("heading", level=1)).to_have_text("lake")
    # The axis, which is in the address.
    page.get_by_role("button", name="Tokens", exact=True).click()
    pressed = page.get_by_role("button", name="Tokens", exact=True)
    expect(pressed).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name=re.compile("^Colours: auto")).click()
    expect(page.get_by_role("button", name=re.compile("^Colours: light"))).to_be_visible()
