"""The page of all runs, and the comparison of runs."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import expect

from ragen.config.reading import dump, merge
from ragen.storage.recorder import Recorder
from tests.browser.visitor import Visitor

PERCENT = re.compile(r"\d+\.\d %")


def test_each_run_has_a_row_with_state_success_and_curve(visitor: Visitor) -> None:
    page = visitor.visit()
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    for name in ("lake", "lake-again", "collapse"):
        row = page.get_by_role("row", name=re.compile(rf"{name}\b"))
        expect(row.first).to_contain_text("finished")
        expect(row.first).to_contain_text(PERCENT)
    lake = page.get_by_role("row").filter(has=page.get_by_role("link", name="lake", exact=True))
    label = lake.get_by_role("img").first.get_attribute("aria-label")
    success = visitor.api("/api/run?run=lake")["success"]
    for number in (success["value"], success["low"], success["high"]):
        assert f"{100 * number:.1f} %" in label
    assert "random play" in label and "optimal play 100.0 %" in label
    expect(lake.locator("svg.spark polyline")).to_have_count(1)
    expect(lake).to_contain_text("frozen-lake-still")


def test_keys_filter_the_list_select_a_row_and_open_its_run(visitor: Visitor) -> None:
    page = visitor.visit()
    rows = page.locator("tbody tr")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(rows.first).to_have_attribute("aria-current", "true")
    page.keyboard.press("/")
    page.keyboard.type("bandit")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("collapse")
    page.keyboard.press("Escape")  # Leave the field, so that the page handles keys again.
    assert page.evaluate("document.activeElement.tagName") == "BODY"
    page.reload()
    visitor.wait()
    expect(rows).to_have_count(1)  # The address has the filter.
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#/run/collapse$"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("collapse")


def test_the_question_mark_lists_the_keys_and_other_keys_wait(visitor: Visitor) -> None:
    page = visitor.visit()
    rows, keys = page.locator("tbody tr"), page.get_by_role("dialog", name="Keys")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(rows.first.get_by_role("checkbox")).to_be_checked()
    page.keyboard.press("?")
    expect(keys).to_contain_text("next row")
    for key in ("j", "x", "c"):
        page.keyboard.press(key)
    for _ in range(3):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('main, header') === null")
    page.keyboard.press("Escape")
    expect(keys).to_have_count(0)
    # The selection is unchanged.
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)
    expect(rows.first).to_have_attribute("aria-current", "true")
    page.keyboard.press("?")
    expect(keys).to_be_visible()
    page.mouse.click(5, 300)  # Outside the dialog.
    expect(keys).to_have_count(0)


def test_the_selected_row_stays_the_same_run_when_a_run_appears(
    newcomer: Path, visitor: Visitor
) -> None:
    page = visitor.visit()
    page.keyboard.press("j")
    selected = page.locator("tbody tr[aria-current]")
    name = selected.get_by_role("link").first.inner_text()
    newcomer.mkdir()
    with Recorder.create(newcomer, dump(merge("bandit"))):
        expect(page.locator("tbody tr").first).to_contain_text("newcomer")
        expect(selected).to_contain_text(name)
        page.keyboard.press("x")
        expect(page.get_by_role("checkbox", name=f"compare {name}", exact=True)).to_be_checked()
        expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)


def test_two_runs_are_selected_and_compared(visitor: Visitor) -> None:
    page = visitor.visit()
    button = page.get_by_role("button", name=re.compile("^Compare"))
    expect(button).to_be_disabled()
    page.get_by_role("checkbox", name="compare lake", exact=True).check()
    page.get_by_role("checkbox", name="compare lake-again").check()
    button.click()
    expect(page).to_have_url(re.compile(r"#/compare/lake\?other=lake-again"))
    visitor.wait()
    main = page.get_by_role("main")
    expect(main.get_by_test_id("curve").first).to_be_visible()
    expect(main).to_contain_text("lake-again")
    one, other = (visitor.api(f"/api/run?run={run}")["config"] for run in ("lake", "lake-again"))
    differences = {key for key in one if one[key] != other[key]}
    assert {"seed", "steps"} <= differences
    for key in differences:
        expect(main).to_contain_text(key)
    (comparison, *_) = visitor.api("/api/compare?run=lake&other=lake-again")["comparisons"]
    difference = comparison["difference"]
    assert difference["low"] <= difference["value"] <= difference["high"]
    expect(main).to_contain_text(re.compile(r"four of\s+five cases is \d+\.\d points"))
    expect(main).to_contain_text(comparison["env"])
