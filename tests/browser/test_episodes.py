"""The list of episodes: filters, search, sorting, paging, keys, and the address that holds them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from viewer_run import log_step

from ragen.config.reading import dump, merge
from ragen.storage.recorder import Recorder
from tests.browser.visitor import Visitor

PAGE_SIZE = 50
"""The number of episodes that are shown before the list is scrolled."""


def query_episodes(visitor: Visitor, query: str) -> list[dict[str, Any]]:
    """The episodes that match a query of the API; without a phase, those of training."""
    phase = "" if "phase=" in query else "&phase=train"
    return visitor.api(f"/api/episodes?run=lake&limit=200&{query}{phase}")["episodes"]


def column(page: Any, title: str) -> list[str]:
    """The texts of a column, given its title."""
    titles = page.get_by_role("columnheader").all_inner_texts()
    (position,) = [
        i for i, each in enumerate(titles) if each.split(" ↓")[0].split(" ↑")[0] == title
    ]
    return page.locator(f"tbody tr td:nth-child({position + 1})").all_inner_texts()


def shown(page: Any) -> Any:
    return expect(page.locator(".pager"))


FILTERS: list[tuple[str, str, Callable[[dict[str, Any]], bool]]] = [
    ("success", "yes", lambda e: e["success"]),
    ("success", "no", lambda e: not e["success"]),
    ("filter", "dropped", lambda e: not e["kept"]),
    ("ended by", "solved", lambda e: e["stop_reason"] == "solved"),
    ("phase", "eval", lambda e: e["phase"] == "eval"),
]


def test_a_selected_value_filters_the_list(visitor: Visitor) -> None:
    """The list opens on training, with the numbers that `ragen branch` takes."""
    page = visitor.visit("#/episodes/lake")
    expect(page.get_by_role("combobox", name="phase")).to_have_value("train")
    first = query_episodes(visitor, "sort=step&order=desc")[0]
    assert column(page, "episode")[0].split()[-1] == str(first["id"])
    for label, value, matches in FILTERS:
        phase = "phase=" if label == "phase" else ""
        parts = (f"step_to=2&{phase}", f"step_from=3&{phase}")
        everything = [each for part in parts for each in query_episodes(visitor, part)]
        box = page.get_by_role("combobox", name=label, exact=True)
        before = box.input_value()
        box.select_option(label=value)
        num_matching = sum(map(matches, everything))
        assert 0 < num_matching < len(everything)
        shown(page).to_contain_text(f"of {num_matching} shown")
        if label != "phase":
            box.select_option(before)
            shown(page).to_contain_text(f"of {len(everything)} shown")
    page.reload()
    visitor.wait()
    shown(page).to_contain_text(f"of {num_matching} shown")
    page.get_by_role("combobox", name="phase").select_option(label="any")
    total = visitor.api("/api/episodes?run=lake&limit=1")["total"]
    shown(page).to_contain_text(f"of {total} shown")
    assert set(column(page, "phase")) <= {"train", "eval", "eval greedy"}


def test_ranges_of_steps_and_rewards_filter_the_list(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    page.get_by_label("step from").fill("2")
    page.get_by_label("step to").fill("3")
    expect(page).to_have_url(re.compile("step_from=2.*step_to=3"))
    shown(page).to_contain_text(f"of {len(query_episodes(visitor, 'step_from=2&step_to=3'))} shown")
    assert set(column(page, "step")) <= {"2", "3"}
    page.get_by_label("reward min").fill("0.5")
    num_matching = len(query_episodes(visitor, "step_from=2&step_to=3&reward_min=0.5"))
    shown(page).to_contain_text(f"of {num_matching} shown")


def test_the_search_finds_words_in_thoughts(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    (first,) = visitor.api("/api/episodes?run=lake&phase=train&limit=1")["episodes"]
    detail = visitor.api(f"/api/episode?run=lake&episode={first['id']}")
    word = next(word for word in detail["turns"][0]["thought"].split() if len(word) > 3)
    page.keyboard.press("/")
    page.keyboard.type(word)
    expect(page).to_have_url(re.compile(f"q={word}"))
    num_matching = len(query_episodes(visitor, f"q={word}"))
    shown(page).to_contain_text(f"{min(PAGE_SIZE, num_matching)}")
    for snippet in column(page, "thought"):
        assert word.lower() in snippet.lower()


def test_an_empty_list_says_that_no_episode_fits(visitor: Visitor) -> None:
    """Where no episode of training fits, those of evaluations are shown."""
    page = visitor.visit("#/episodes/lake?step_from=0&step_to=0")
    num_evaluated = len(query_episodes(visitor, "phase=&step_to=0"))
    shown(page).to_contain_text(f"of {num_evaluated} shown")
    expect(page.get_by_role("combobox", name="phase")).to_have_value("all")
    page = visitor.visit("#/episodes/lake?reward_min=1000")
    main = page.get_by_role("main")
    expect(main).to_contain_text(re.compile(r"No episode fits the filters\.\s*0 of 0 shown$"))
    page.wait_for_load_state("networkidle")
    texts = "each => [...each.childNodes].filter(({ nodeType }) => nodeType === 3).length"
    assert main.evaluate(texts) == 0  # No stray false or 0 is rendered between the elements.


def test_a_click_on_a_column_header_sorts(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    for title, field in (("reward", "reward"), ("tokens", "num_tokens"), ("entropy", "entropy")):
        head = page.get_by_role("columnheader", name=re.compile(f"^{title}"))
        sort = {"num_tokens": "length"}.get(field, field)
        for order, direction in (("desc", "descending"), ("asc", "ascending")):
            head.get_by_role("button").click()
            expect(head).to_have_attribute("aria-sort", direction)
            episodes = query_episodes(visitor, f"sort={sort}&order={order}")
            values = [each[field] for each in episodes if each[field] is not None]
            assert values == sorted(values, reverse=order == "desc")
            first = page.locator("tbody tr").first.get_by_role("link").last
            expect(first).to_have_attribute("href", re.compile(rf"/{episodes[0]['id']}$"))


def test_scrolling_loads_more_rows_and_keys_open_an_episode_and_its_group(
    visitor: Visitor,
) -> None:
    page = visitor.visit("#/episodes/lake")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(PAGE_SIZE)
    page.locator(".pager").scroll_into_view_if_needed()
    expect(rows).to_have_count(2 * PAGE_SIZE)
    links = [row.get_attribute("href") for row in page.locator("tbody .snippet a").all()]
    assert len(set(links)) == len(links) == 2 * PAGE_SIZE
    second = links[1]
    assert second is not None
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(re.escape(second) + "$"))
    page.go_back()
    expect(page.get_by_role("table", name="episodes")).to_be_visible()
    page.keyboard.press("o")
    page.wait_for_url(re.compile("#/group/lake"))


def test_the_alarm_filter_keeps_only_steps_with_an_alarm(visitor: Visitor) -> None:
    steps = {
        event["step"]
        for event in visitor.api("/api/run?run=collapse")["events"]
        if event["kind"] == "alarm"
    }
    page = visitor.visit("#/episodes/collapse")
    page.get_by_role("checkbox", name="alarm").check()
    page.wait_for_url(re.compile("alarm=1"))
    query = "run=collapse&alarm=1&limit=200&phase=train"
    episodes = visitor.api(f"/api/episodes?{query}")["episodes"]
    assert {each["step"] for each in episodes} <= steps
    number = f"{min(PAGE_SIZE, len(episodes))} of" if episodes else "0"
    shown(page).to_contain_text(number)


def hide_and_show(page: Any) -> None:
    """Hide and show the page, as a browser does: its connection closes, and another opens."""
    for hidden in ("true", "false"):
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{value: {hidden}, configurable: true}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )


def test_new_episodes_are_offered_and_rows_stay_in_place(newcomer: Path, visitor: Visitor) -> None:
    newcomer.mkdir()
    with Recorder.create(newcomer, dump(merge("frozen-lake"))) as recorder:
        log_step(recorder, 1, 0.5)
        recorder.commit()
        page = visitor.visit("#/episodes/newcomer?sort=step&order=asc")
        rows, notice = page.locator("tbody tr"), page.get_by_test_id("fresh")
        expect(rows).to_have_count(4)
        with page.expect_response(re.compile("limit=1&")):
            hide_and_show(page)
        expect(notice).to_have_count(0)  # Nothing is new.
        log_step(recorder, 2, 0.5)
        recorder.commit()
        expect(notice).to_be_visible()
        expect(rows).to_have_count(4)
        page.get_by_role("combobox", name="success", exact=True).select_option(label="yes")
        expect(rows).to_have_count(2)  # A new query includes both steps.
        expect(notice).to_have_count(0)
        log_step(recorder, 3, 0.5)
        recorder.commit()
        notice.click()
        expect(rows).to_have_count(3)
        expect(notice).to_have_count(0)


def test_a_failed_request_is_retried_until_the_server_answers(visitor: Visitor) -> None:
    page = visitor.visit("#/episodes/lake")
    page.route(re.compile("api/episodes"), lambda route: route.abort())
    page.get_by_role("combobox", name="success", exact=True).select_option(label="yes")
    expect(page.get_by_role("alert")).to_contain_text("Trying again every two seconds")
    expect(page.locator("tbody tr")).to_have_count(PAGE_SIZE)
    visitor.complaints.clear()  # The browser itself reports failed requests.
    page.wait_for_timeout(1_000)
    assert len(visitor.complaints) < 5  # Requests are repeated at intervals, not constantly.
    page.unroute(re.compile("api/episodes"))
    expect(page.get_by_role("alert")).to_have_count(0)
    solved = visitor.api("/api/episodes?run=lake&phase=train&success=1&limit=1")["total"]
    shown(page).to_contain_text(f"of {solved} shown")
    visitor.complaints.clear()
