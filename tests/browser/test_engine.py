"""The part of a run's page about its engine."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect
from viewer_run import make_engine_run

from tests.browser.visitor import Visitor


def test_the_engine_shows_processes_queue_staleness_speed_and_idle_shares(
    newcomer: Path, visitor: Visitor
) -> None:
    """A run in one process has no such part."""
    make_engine_run(newcomer)
    page = visitor.visit("#/run/newcomer")
    engine = page.get_by_role("region", name="Engine")
    rows = engine.get_by_role("table", name="Processes").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("running")
    expect(rows.nth(1)).to_contain_text("sampler 0 is lost")
    titles = engine.get_by_test_id("curve").locator(".curve-title").all_inner_texts()
    assert titles == [
        "tokens a second",
        "steps in the queue",
        "staleness: mean, largest",
        "idle: learners, samplers",
        "publication, s",
        "samplers",
        "set aside",
    ]
    label = engine.get_by_test_id("curve").nth(3).get_by_role("img").get_attribute("aria-label")
    assert label is not None and "learners from 25 % to 25 %" in label
    events = page.get_by_role("region", name="Alarms and actions")
    expect(events).to_contain_text("sampler 1 is lost")
    page = visitor.visit("#/run/lake")
    expect(page.get_by_role("region", name="Exactness")).to_be_visible()
    expect(page.get_by_role("region", name="Engine")).to_have_count(0)
