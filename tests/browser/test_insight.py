"""The pages of levels, collapse and evaluations."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from viewer_run import evaluation, groups, log_step, make_run, steps

from ragen.config.reading import dump, merge
from ragen.storage.recorder import Recorder
from tests.browser.visitor import Visitor


def test_a_level_is_shown_side_by_side_at_two_steps(visitor: Visitor) -> None:
    page = visitor.visit("#/levels/lake?phase=eval&level_seed=125")
    level = visitor.api("/api/level?run=lake&phase=eval&level_seed=125")["episodes"]
    assert [each["step"] for each in level] == [0, 2, 4]
    beside = page.get_by_role("region", name="side by side")
    for episode in (level[0], level[-1]):
        thought = episode["turns"][0]["thought"].split()
        expect(beside).to_contain_text(thought[0])
        expect(beside).to_contain_text(f"step {episode['step']}")
    page.get_by_label("then: step").select_option("2")
    expect(page).to_have_url(re.compile(r"steps=2,4"))
    page.reload()
    visitor.wait()
    expect(page.get_by_label("then: step")).to_have_value("2")
    rows = page.get_by_role("table", name="Levels by step").locator("tbody tr")
    page.keyboard.press("j")
    expect(page).to_have_url(re.compile("level_seed=126"))
    rows.filter(has_text="130").get_by_role("button").click()
    expect(page).to_have_url(re.compile("level_seed=130"))


def test_the_collapse_page_has_regime_plane_and_gradients(visitor: Visitor) -> None:
    page = visitor.visit("#/collapse/lake")
    answer = visitor.api("/api/collapse?run=lake")
    expect(page.get_by_role("main")).to_contain_text(answer["paths"]["first"]["regime"][-1])
    plane = page.get_by_test_id("plane")
    for regime in ("diverse", "compressed", "template collapse", "low-entropy collapse"):
        expect(plane).to_contain_text(regime)
    expect(page.get_by_role("heading", name=re.compile("^Gradient"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^task"))).to_be_visible()
    points = plane.get_by_role("button")
    for place, key in ((0, " "), (1, "Enter")):
        point = points.nth(place)
        step = point.get_attribute("aria-label").split()[1].rstrip(",")
        point.focus()
        top = page.evaluate("scrollY")
        page.keyboard.press(key)
        expect(page).to_have_url(re.compile(rf"step={step}\b"))
        assert page.evaluate("scrollY") == top
    page = visitor.visit("#/collapse/collapse")  # It was not measured: the setting is named.
    expect(page.get_by_role("main")).to_contain_text("--diagnose.gradients_every")


def test_a_selected_cell_of_the_matrix_shows_its_log_probability(visitor: Visitor) -> None:
    page = visitor.visit("#/collapse/lake")
    matrix_element = page.get_by_test_id("matrix")
    matrix_element.scroll_into_view_if_needed()
    box = matrix_element.bounding_box()
    matrix_element.click(position={"x": 2, "y": 2})
    page.mouse.move(0, 0)
    readout = page.locator(".matrix-said")
    expect(readout).to_contain_text("log p(thought | prompt)")
    answer = visitor.api("/api/collapse?run=lake")
    steps = [each["step"] for each in answer["matrix_steps"]]
    matrix = visitor.api(f"/api/matrix?run=lake&step={steps[-1]}&path=first")
    thought = next(each for each in matrix["thoughts"] if each.strip())
    assert box["height"] > 100 and len(matrix["scores"][0]) == len(matrix["prompts"])
    assert len(matrix["thoughts"]) == len(matrix["own"]) and thought
    retrieval = math.floor(100 * answer["paths"]["first"]["retrieval"][-1] + 0.5)
    expect(page.get_by_role("main")).to_contain_text(f"For {retrieval} % of the thoughts")


def test_evaluations_are_shown_with_both_baselines(visitor: Visitor) -> None:
    page = visitor.visit("#/evaluations/lake")
    run = visitor.api("/api/run?run=lake")
    main = page.get_by_role("main")
    assert run["optimal"] == 1
    shares = [run["random"], run["optimal"]]
    for share in (*shares, *(each["success"]["value"] for each in run["evaluations"])):
        expect(main).to_contain_text(f"{100 * share:.1f} %")
    gains = page.get_by_role("region", name="Before and after").get_by_test_id("comparison")
    expect(gains.first).to_contain_text("points")


def test_a_missing_group_shows_nothing_of_the_previous_one(visitor: Visitor) -> None:
    group = visitor.api("/api/episodes?run=lake&phase=train&limit=1")["episodes"][0]
    address = f"#/group/lake?step={group['step']}&group="
    page = visitor.visit(address + str(group["group"]))
    expect(page.get_by_text("member 0", exact=True)).to_have_count(1)
    page.evaluate("(address) => (location.hash = address)", address + "99")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Group 99")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_text("member 0", exact=True)).to_have_count(0)
    visitor.complaints.clear()  # The browser itself reports missing resources.


def test_a_new_evaluation_updates_open_pages(newcomer: Path, visitors: Any) -> None:
    make_run(newcomer / "a")
    (newcomer / "b").mkdir()
    config = dump(merge("frozen-lake", {"steps": 6}))
    with Recorder.create(newcomer / "b", config) as recorder:
        progress = steps(recorder)
        for _ in range(4):
            next(progress)
        names = {"a": "newcomer%2Fa", "b": "newcomer%2Fb"}
        levels_page, compare_page = (
            visitors().visit(route.format(**names))
            for route in ("#/levels/{b}", "#/compare/{a}?other=newcomer/b")
        )
        main = levels_page.get_by_role("main")
        expect(main).to_contain_text("No level was played at two steps")
        expect(compare_page.get_by_test_id("comparison").first).to_contain_text("On 2 levels")
        log_step(recorder, 5, 0.5)
        recorder.episodes(5, groups(5, (123, 124))[:1], phase="eval")
        recorder.evaluation(5, evaluation(0.5).record() | {"env": "frozen-lake"})
        with levels_page.expect_response(re.compile("api/phrases")):
            recorder.commit()
        levels = levels_page.get_by_role("table", name="Levels by step")
        expect(levels.locator("tbody tr")).to_have_count(1)
        expect(compare_page.get_by_test_id("comparison").first).to_contain_text("On 1 level")
