"""The page of a run: success, curves, alarms, times and settings, also during training."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from viewer_run import log_step

from ragen.config.reading import dump, merge
from ragen.reports.facts import SIGNALS
from ragen.storage.recorder import Recorder
from tests.browser.visitor import Visitor, ragen, succeed

START_MS = 120_000
"""How long the process of a run may take to import torch on a busy machine."""


def curve(page: Any, label: str) -> Any:
    """The chart of a signal."""
    title = page.locator(".curve-title", has_text=re.compile(f"^{re.escape(label)}$"))
    return page.get_by_test_id("curve").filter(has=title)


def test_the_headline_shows_success_baselines_and_gain(visitor: Visitor) -> None:
    page = visitor.visit("#/run/lake")
    run = visitor.api("/api/run?run=lake")
    expect(page.get_by_role("heading", level=1)).to_have_text("lake")
    expect(page.get_by_role("main")).to_contain_text("finished")
    tile = page.get_by_role("region", name="Success")
    expect(tile).to_contain_text(f"{100 * run['success']['value']:.1f} %")
    expect(tile).to_contain_text(f"random {100 * run['random']:.0f} %")
    expect(tile).to_contain_text("optimal 100 %")
    gain = 100 * (run["success"]["value"] - run["before"]["value"])
    expect(page.get_by_role("region", name="Gain")).to_contain_text(f"{abs(gain):.1f}")


def test_main_settings_are_shown_at_a_glance(newcomer: Path, visitor: Visitor) -> None:
    """A value that the run does not read is left out."""
    config: dict[str, Any] = {"update.lr": 3e-4, "filter.rule": "all"}
    for name, said in (("a", "all"), ("b", "top_k 0.5")):
        (newcomer / name).mkdir(parents=True)
        with Recorder.create(newcomer / name, dump(merge("frozen-lake", config))) as recorder:
            log_step(recorder, 1, 0.5)
        glance = visitor.visit(f"#/run/newcomer%2F{name}").locator(".glance")
        for figure, value in (
            ("learning rate", "3.0e−4"),
            ("filter", said),
            ("turns, actions", "5, 10"),
        ):
            shown = glance.locator("div", has=visitor.page.get_by_text(figure, exact=True)).last
            expect(shown.locator("dd")).to_have_text(value)
        config |= {"filter.rule": "top_k", "filter.value": 0.5}


def test_every_signal_has_its_curve_with_the_recorded_numbers(visitor: Visitor) -> None:
    page = visitor.visit("#/run/lake")
    run = visitor.api("/api/run?run=lake")
    expected = [SIGNALS[name] for name in SIGNALS if name in run["names"]]
    assert len(expected) > 10
    titles = page.get_by_test_id("curve").locator(".curve-title").all_inner_texts()
    assert titles == expected
    recorded = visitor.api("/api/metrics?run=lake&names=entropy/mean")["names"]["entropy/mean"]
    label = curve(page, "entropy, nats").get_by_role("img").first.get_attribute("aria-label")
    assert f"from {recorded['values'][0]:.3g} to {recorded['values'][-1]:.3g}" in label
    assert curve(page, "reward").locator("canvas").count() == 1


def test_axis_smoothing_and_search_are_in_the_address(visitor: Visitor) -> None:
    page = visitor.visit("#/run/lake")
    for axis, key in {"Updates": "updates", "Tokens": "tokens", "Time": "seconds"}.items():
        page.get_by_role("button", name=axis, exact=True).click()
        expect(page).to_have_url(re.compile(f"axis={key}"))
    page.get_by_role("slider", name=re.compile("^Smooth")).fill("0.9")
    expect(page).to_have_url(re.compile(r"smooth=0\.9"))
    page.reload()
    visitor.wait()
    pressed = page.get_by_role("button", name="Time", exact=True)
    expect(pressed).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("/")
    page.keyboard.type("mismatch")
    expect(page.get_by_test_id("curve")).to_have_count(3)  # mismatch/kl, max_abs and bound


def test_a_run_leads_to_the_episodes_of_a_step_and_to_a_comparison(visitor: Visitor) -> None:
    page = visitor.visit("#/run/lake?m=reward/mean")
    curve(page, "reward").locator(".u-over").click(position={"x": 3, "y": 40})
    expect(page).to_have_url(re.compile(r"#/episodes/lake\?step_from=1&step_to=1"))
    visitor.visit("#/run/lake")
    page.get_by_label("Compare with another run").select_option("lake-again")
    expect(page).to_have_url(re.compile(r"#/compare/lake\?other=lake-again"))


def test_alarms_are_listed_and_counted(visitor: Visitor) -> None:
    page = visitor.visit("#/run/collapse")
    events = visitor.api("/api/run?run=collapse")["events"]
    listed = page.get_by_role("region", name="Alarms and actions")
    expect(listed.get_by_role("listitem")).to_have_count(len(events))
    for event in events:
        expect(listed).to_contain_text(event["text"])


def test_times_exactness_and_settings_are_shown(visitor: Visitor) -> None:
    page = visitor.visit("#/run/lake")
    run = visitor.api("/api/run?run=lake")
    times = page.get_by_role("region", name="Time by phase")
    for phase in run["phases"]:
        expect(times).to_contain_text(phase)
    exact = page.get_by_role("region", name="Exactness")
    expect(exact).to_contain_text(run["exactness"][0]["name"])
    settings = page.get_by_role("region", name="Settings")
    expect(settings).to_contain_text("rollout.group_size")
    settings.get_by_role("button", name="All").click()
    settings.get_by_role("searchbox").fill("minibatch_episodes")
    expect(settings.locator("tbody tr")).to_have_count(1)


def test_curves_stay_while_other_metrics_are_loading(visitor: Visitor) -> None:
    page = visitor.visit("#/run/lake?m=reward/mean")
    curve(page, "reward").locator("canvas").evaluate("each => (window.drawn = each)")
    page.route(re.compile("api/metrics"), lambda route: None)  # No request is answered.
    page.get_by_role("searchbox", name="Find a metric").fill("reward")
    expect(page.get_by_test_id("curve").nth(1)).to_be_visible()
    assert page.evaluate("window.drawn.isConnected")


def test_a_missing_run_and_one_of_another_schema_are_reported(
    newcomer: Path, visitor: Visitor
) -> None:
    page = visitor.visit("#/run/no-such-run")
    expect(page.get_by_role("alert")).to_contain_text("no-such-run")
    shutil.copytree(newcomer.parent / "lake-again", newcomer)
    with closing(sqlite3.connect(newcomer / "run.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    page = visitor.visit()
    row = page.get_by_role("row", name=re.compile("newcomer"))
    expect(row).to_contain_text("unreadable")
    expect(row).to_contain_text("schema 99")
    visitor.visit("#/run/newcomer")
    expect(page.get_by_role("alert")).to_contain_text("schema 99")
    assert all("409" in each or "404" in each for each in visitor.complaints)
    visitor.complaints.clear()  # The browser itself reports missing resources.


def test_a_run_and_its_steps_appear_while_it_trains(newcomer: Path, visitor: Visitor) -> None:
    """End to end: a run in a separate process, its database, the server, the open page."""
    options = ["--steps", "6", "--eval.episodes", "4", "--rollout.num_groups", "4"]
    process = ragen("train", "collapse", *options, "--out", newcomer, "--json", "--quiet")
    page = visitor.visit()
    row = page.get_by_role("row", name=re.compile("newcomer"))
    expect(row).to_be_visible(timeout=START_MS)
    row.get_by_role("link", name="newcomer").click()
    progress = page.get_by_role("region", name="Progress")
    page.evaluate("window.sameDocument = true")
    for step in (2, 4):
        expect(progress).to_contain_text(re.compile(rf"\b[{step}-6]\b.*of 6"), timeout=60_000)
    expect(page.get_by_role("main")).to_contain_text("finished", timeout=60_000)
    assert page.evaluate("window.sameDocument")  # The document was not reloaded.
    assert json.loads(succeed(process).splitlines()[-1])["env"] == "bandit"
    expect(progress).to_contain_text(re.compile(r"6\s*of 6"))


def test_an_open_page_follows_a_resumed_run(newcomer: Path, visitor: Visitor) -> None:
    newcomer.mkdir()
    with Recorder.create(newcomer, dump(merge("bandit", {"steps": 6}))) as recorder:
        log_step(recorder, 1, 0.5)
        recorder.commit()
        page = visitor.visit("#/run/newcomer")
        state, progress = page.locator(".state"), page.get_by_role("region", name="Progress")
        expect(state).to_contain_text("running")
    expect(state).to_contain_text("interrupted")
    with Recorder.open(newcomer) as recorder:
        expect(state).to_contain_text("running")
        log_step(recorder, 2, 0.6)
        recorder.commit()
        expect(progress).to_contain_text(re.compile(r"2\s*of 6"))
    expect(state).to_contain_text("interrupted")
