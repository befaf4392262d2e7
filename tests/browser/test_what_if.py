"""Branches from a turn of a stored episode, played by a real process."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.visitor import Visitor

JOB_MS = 60_000
"""How long a branch may take, in milliseconds; it loads torch and a model first."""


def test_branches_appear_beside_the_original(visitor: Visitor, runs: Path) -> None:
    longest = "/api/episodes?run=lake&phase=train&sort=turns&order=desc&limit=1"
    (first,) = visitor.api(longest)["episodes"]
    assert first["num_turns"] > 1
    page = visitor.visit(f"#/episode/lake/{first['id']}?turn=1")
    panel = page.get_by_test_id("branches")
    page.keyboard.press("End")
    expect(panel.get_by_role("button", name=re.compile("^Branch"))).to_be_disabled()
    expect(panel).to_contain_text("Not possible")  # After the last turn.
    page.get_by_role("slider", name="turn").fill("1")
    panel.get_by_label("branches").fill("2")
    panel.get_by_role("button", name=re.compile("^Branch")).click()
    expect(panel.get_by_role("status")).to_be_visible()
    expect(panel.get_by_role("columnheader", name=re.compile("^branch 2"))).to_be_visible(
        timeout=JOB_MS
    )
    expect(panel.get_by_role("columnheader", name=re.compile("^original"))).to_be_visible()
    expect(panel).to_contain_text(re.compile(r"\d of 2 succeed"))

    answer = visitor.api(f"/api/branches?run=lake&episode={first['id']}")
    (job,) = answer["jobs"]
    original = visitor.api(f"/api/episode?run=lake&episode={first['id']}")
    for branch in job["episodes"]:
        assert branch["turns"][0]["reply"] == original["turns"][0]["reply"]
        assert branch["turns"][1]["observation"] == original["turns"][1]["observation"]
    with closing(sqlite3.connect(runs / "lake" / "branches.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM episodes").fetchone() == (2,)

    page.reload()  # Branches are stored, not kept in the page.
    visitor.wait()
    expect(panel.get_by_role("columnheader", name=re.compile("^branch 2"))).to_be_visible()


def test_a_branch_is_cancelled(visitor: Visitor) -> None:
    (first,) = visitor.api("/api/episodes?run=lake-again&phase=train&limit=1")["episodes"]
    page = visitor.visit(f"#/episode/lake-again/{first['id']}?turn=0")
    panel = page.get_by_test_id("branches")
    panel.get_by_role("button", name=re.compile("^Branch")).click()
    cancel = panel.get_by_role("button", name="Cancel")
    expect(panel.get_by_role("status")).to_be_visible()
    cancel.click()
    expect(cancel).to_have_count(0)
    expect(panel.get_by_role("status")).to_have_count(0)
    branches = f"/api/branches?run=lake-again&episode={first['id']}"
    assert visitor.api(branches)["jobs"] == []
