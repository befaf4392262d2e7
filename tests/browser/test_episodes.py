"""The list of episodes: filters, search, sorting, paging, keys; all of it in the address."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from viewer_run import log_step

from ragen.config.reading import dump, resolve
from ragen.storage.recorder import Recorder
from tests.browser.visitor import Visitor

FIRST = 50
"""Episodes that are shown before the list is scrolled."""


def listed(visitor: Visitor, query: str) -> list[dict[str, Any]]:
    """All episodes that a query of the API finds."""
    return visitor.api(f"/api/episodes?run=lake&limit=200&{query}")["episodes"]


def column(page: Any, title: str) -> list[str]:
    """What the rows show under a title."""
    titles = page.get_by_role("columnheader").all_inner_texts()
    (at,) = [i for i, each in enumerate(titles) if each.split(" ↓")[0].split(" ↑")[0] == title]
    return page.locator(f"tbody tr td:nth-child({at + 1})").all_inner_texts()


Holds = Callable[[dict[str, Any]], bool]


@pytest.mark.parametrize(
    ("label", "value", "holds"),
    [
        ("success", "yes", lambda e: e["success"]),
        ("success", "no", lambda e: not e["success"]),
        ("phase", "eval", lambda e: e["phase"] == "eval"),
        ("filter", "dropped", lambda e: not e["kept"]),
        ("ended by", "solved", lambda e: e["stop_reason"] == "solved"),
    ],
)
def test_a_choice_filters_the_list(visitor: Visitor, label: str, value: str, holds: Holds) -> None:
    page = visitor.visit("#/episodes/lake")
    everything = [*listed(visitor, "step_to=2"), *listed(visitor, "step_from=3")]
    page.get_by_role("combobox", name=label, exact=True).select_option(label=value)
    wanted = sum(map(holds, everything))
    assert 0 < wanted < len(everything)
    expect(page.locator(".pager")).to_contain_text(f"of {wanted} shown")
    page.reload()
    visitor.wait()
    expect(page.locator(".pager")).to_contain_text(f"of {wanted} shown")


def test_ranges_of_steps_and_rewards(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    page.get_by_label("step from").fill("2")
    page.get_by_label("step to").fill("3")
    expect(page).to_have_url(re.compile("step_from=2.*step_to=3"))
    expect(page.locator(".pager")).to_contain_text(
        f"of {len(listed(visitor, 'step_from=2&step_to=3'))} shown"
    )
    assert set(column(page, "step")) <= {"2", "3"}
    page.get_by_label("reward min").fill("0.5")
    wanted = len(listed(visitor, "step_from=2&step_to=3&reward_min=0.5"))
    expect(page.locator(".pager")).to_contain_text(f"of {wanted} shown")


def test_words_are_looked_for_in_thoughts(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    (some,) = visitor.api("/api/episodes?run=lake&phase=train&limit=1")["episodes"]
    detail = visitor.api(f"/api/episode?run=lake&episode={some['id']}")
    word = next(word for word in detail["turns"][0]["thought"].split() if len(word) > 3)
    page.keyboard.press("/")
    page.keyboard.type(word)
    expect(page).to_have_url(re.compile(f"q={word}"))
    wanted = len(listed(visitor, f"q={word}"))
    expect(page.locator(".pager")).to_contain_text(f"{min(FIRST, wanted)}")
    for snippet in column(page, "thought"):
        assert word.lower() in snippet.lower()


@pytest.mark.parametrize("malformed", ['"', "NEAR(", "a AND", "* OR *", "thought:x", "(((", "-"])
def test_a_search_that_is_no_query_is_no_error(visitor: Visitor, malformed: str) -> None:
    page = visitor.visit("#/episodes/lake")
    page.keyboard.press("/")
    page.keyboard.type(malformed)
    page.wait_for_url(re.compile("q="))
    expect(page.locator(".pager")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_list_without_an_episode_says_so(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake?reward_min=1000")
    main = page.get_by_role("main")
    expect(main).to_contain_text(re.compile(r"No episode fits the filters\.\s*0 of 0 shown$"))
    page.wait_for_load_state("networkidle")
    texts = "each => [...each.childNodes].filter(({ nodeType }) => nodeType === 3).length"
    assert main.evaluate(texts) == 0  # no false or 0 of ours stands between the parts


@pytest.mark.parametrize(
    ("title", "field"), [("reward", "reward"), ("tokens", "num_tokens"), ("entropy", "entropy")]
)
def test_a_press_on_a_title_sorts(visitor: Visitor, title: str, field: str) -> None:
    page = visitor.visit("#/episodes/lake?phase=train")
    head = page.get_by_role("columnheader", name=re.compile(f"^{title}"))
    sort = {"num_tokens": "length"}.get(field, field)
    for order, direction in (("desc", "descending"), ("asc", "ascending")):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", direction)
        found = listed(visitor, f"phase=train&sort={sort}&order={order}")
        values = [each[field] for each in found if each[field] is not None]
        assert values == sorted(values, reverse=order == "desc")
        first = page.locator("tbody tr").first.get_by_role("link").last
        expect(first).to_have_attribute("href", re.compile(rf"/{found[0]['id']}$"))


def test_the_list_goes_on_as_one_scrolls(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(FIRST)
    page.locator(".pager").scroll_into_view_if_needed()
    expect(rows).to_have_count(2 * FIRST)
    links = [row.get_attribute("href") for row in page.locator("tbody .snippet a").all()]
    assert len(set(links)) == len(links) == 2 * FIRST


def test_keys_open_an_episode_and_its_group(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    second = page.locator("tbody tr").nth(1).locator(".snippet a").get_attribute("href")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(re.escape(second) + "$"))
    page.go_back()
    expect(page.get_by_role("table", name="episodes")).to_be_visible()
    page.keyboard.press("o")
    page.wait_for_url(re.compile("#/group/lake"))


def test_only_steps_with_an_alarm(visitor: Visitor) -> None:
    steps = {
        event["step"]
        for event in visitor.api("/api/run?run=collapse")["events"]
        if event["kind"] == "alarm"
    }
    page = visitor.visit("#/episodes/collapse")
    page.get_by_role("checkbox", name="alarm").check()
    page.wait_for_url(re.compile("alarm=1"))
    found = visitor.api("/api/episodes?run=collapse&alarm=1&limit=200")["episodes"]
    assert {each["step"] for each in found} <= steps
    wanted = f"{min(FIRST, len(found))} of" if found else "0"
    expect(page.locator(".pager")).to_contain_text(wanted)


def look_away_and_back(page: Any) -> None:
    """As a browser hides a page and shows it again: its connection ends, and another begins."""
    for hidden in ("true", "false"):
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{value: {hidden}, configurable: true}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )


def test_news_are_offered_and_rows_stay_where_they_are(newcomer: Path, visitor: Visitor) -> None:
    newcomer.mkdir()
    with Recorder.create(newcomer, dump(resolve("frozen-lake"))) as recorder:
        log_step(recorder, 1, 0.5)
        recorder.commit()
        page = visitor.visit("#/episodes/newcomer?sort=step&order=asc")
        rows, fresh = page.locator("tbody tr"), page.get_by_test_id("fresh")
        expect(rows).to_have_count(4)
        with page.expect_response(re.compile("limit=1&")):
            look_away_and_back(page)
        expect(fresh).to_have_count(0)  # nothing is new
        log_step(recorder, 2, 0.5)
        recorder.commit()
        expect(fresh).to_be_visible()
        expect(rows).to_have_count(4)
        page.get_by_role("combobox", name="success", exact=True).select_option(label="yes")
        expect(rows).to_have_count(2)  # asked anew, both steps are there
        expect(fresh).to_have_count(0)
        log_step(recorder, 3, 0.5)
        recorder.commit()
        fresh.click()
        expect(rows).to_have_count(3)
        expect(fresh).to_have_count(0)


def test_a_server_that_was_gone_is_asked_again(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    page.route(re.compile("api/episodes"), lambda route: route.abort())
    page.get_by_role("combobox", name="success", exact=True).select_option(label="yes")
    expect(page.get_by_role("alert")).to_contain_text("Trying again every two seconds")
    expect(page.locator("tbody tr")).to_have_count(FIRST)
    visitor.complaints.clear()  # the browser itself reports what did not arrive
    page.wait_for_timeout(1_000)
    assert len(visitor.complaints) < 5  # it is asked now and then, not all the time
    page.unroute(re.compile("api/episodes"))
    expect(page.get_by_role("alert")).to_have_count(0)
    solved = visitor.api("/api/episodes?run=lake&success=1&limit=1")["total"]
    expect(page.locator(".pager")).to_contain_text(f"of {solved} shown")
    visitor.complaints.clear()
