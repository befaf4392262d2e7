"""The pages of one group and of one episode: boards, turns, tokens, and what the model saw."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import expect
from records import turn as make_turn
from viewer_run import make_run

from ragen.config.reading import dump, resolve
from ragen.core.types import Completion, Episode, Group, Prompt, Usage
from ragen.envs.grid import observe
from ragen.storage.recorder import Recorder
from tests.browser.visitor import Visitor


@pytest.fixture
def episode(visitor: Visitor) -> dict[str, Any]:
    """A training episode of several turns that the filter kept."""
    answer = visitor.api("/api/episodes?run=lake&phase=train&kept=1&sort=turns&order=desc&limit=1")
    (first,) = answer["episodes"]
    detail = visitor.api(f"/api/episode?run=lake&episode={first['id']}")
    assert len(detail["turns"]) >= 3
    return detail


def board_pattern(picture: list[str]) -> str:
    """A pattern of the label of a board: its size and the position of the player."""
    for y, row in enumerate(picture):
        for x, character in enumerate(row):
            if character in "P*@S":
                return f"{len(picture)} rows of {len(row)}.*player[^,]* at {'abcdefgh'[y]}{x}"
    raise AssertionError(picture)


def test_the_board_follows_the_turn(visitor: Visitor, episode: dict[str, Any]) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    board = page.get_by_test_id("board").first
    for turn in episode["turns"]:
        expect(board).to_have_attribute("aria-label", re.compile(board_pattern(turn["picture"])))
        page.keyboard.press("ArrowRight")
    named = re.compile(f"{len(episode['final_picture'])} rows of")
    expect(board).to_have_attribute("aria-label", named)
    page.keyboard.press("ArrowLeft")
    before = episode["turns"][-1]["picture"]
    expect(board).to_have_attribute("aria-label", re.compile(board_pattern(before)))


def test_a_board_names_its_rows_and_columns_as_the_thoughts_do(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    board = page.get_by_test_id("board").first
    assert board.locator(".coordinate").all_text_contents() == [*"abcd", *"0123"]
    goal = next(
        f"{'abcd'[y]}{row.index('G')}: goal"
        for y, row in enumerate(episode["turns"][0]["picture"])
        if "G" in row
    )
    assert goal in board.locator("title").all_text_contents()


def test_a_board_has_numbered_rows_where_observations_give_coordinates(
    newcomer: Path, visitor: Visitor
) -> None:
    rows = ("P_", "_G")
    words = observe(rows, {"Player": "P", "Goal": "G"}, "coord")
    newcomer.mkdir()
    with Recorder.create(newcomer, dump(resolve("frozen-lake", {"steps": 0}))) as recorder:
        first = replace(make_turn(0.0, thought="hm"), observation=words, picture=rows)
        ends = {"final_observation": words, "final_picture": rows}
        played = Episode(
            "frozen-lake", 1, 7, 0, 0, (first,), "max_turns", False, True, False, **ends
        )
        recorder.episodes(0, [Group((played,))], phase="eval", timed=True)
    page = visitor.visit("#/episode/newcomer/1")
    board = page.get_by_test_id("board").first
    for _ in range(2):
        assert board.locator(".coordinate").all_text_contents() == [*"01", *"01"]
        assert "(1, 1): goal" in board.locator("title").all_text_contents()
        page.keyboard.press("ArrowRight")  # Then the board after the last turn.
        expect(page.locator(".caption")).to_contain_text("After the last turn")


def test_the_notation_of_the_embedded_models_is_explained_and_a_language_is_not(
    newcomer: Path, visitor: Visitor, episode: dict[str, Any]
) -> None:
    make_run(newcomer)
    group = {name: episode[name] for name in ("attempt", "step", "phase", "group")}
    for route in (f"episode/lake/{episode['id']}", f"group/lake?{urlencode(group)}"):
        page = visitor.visit(f"#/{route}")
        expect(page.get_by_role("note")).to_contain_text("b0 c0 O seen from b0")
    for route in ("episode/newcomer/1", "group/newcomer?attempt=0&step=1&phase=train&group=0"):
        page = visitor.visit(f"#/{route}")
        expect(page.get_by_text("the box is left").first).to_be_visible()
        expect(page.get_by_role("note")).to_have_count(0)


def test_an_invalid_reply_is_shown_with_what_was_wrong(newcomer: Path, visitor: Visitor) -> None:
    bad = replace(
        make_turn(0.0, thought="hm"),
        completion=Completion(None, None, "I say <answer>", "stop", 0, usage=Usage(3, 4)),
        prompt=Prompt(({"role": "user", "content": "Where to?"},), None, 0, 8, 1.0, 0),
        well_formed=False,
        problem="The answer names no action.",
        completion_s=75.0,
    )
    ends = {"terminated": False, "truncated": True, "success": False}
    newcomer.mkdir()
    with Recorder.create(newcomer, dump(resolve("frozen-lake", {"steps": 0}))) as recorder:
        played = Episode("frozen-lake", 123, 7, 0, 0, (bad,), "max_turns", **ends)
        recorder.episodes(0, [Group((played,))], phase="eval", timed=True)
    page = visitor.visit("#/episode/newcomer/1")
    card = page.get_by_test_id("turn")
    for words in ("The answer names no action.", "I say <answer>", "4 tokens in 1 min 15 s"):
        expect(card).to_contain_text(words)
    page.get_by_role("button", name="Raw prompt").click()
    expect(page.get_by_test_id("prompt")).to_contain_text("user Where to?")


def test_long_thoughts_side_by_side_are_cut_and_stay_in_their_columns(
    newcomer: Path, visitor: Visitor
) -> None:
    long = replace(make_turn(0.0), thought=f"{'word ' * 300}{'x' * 300} the end")
    ends = {"terminated": False, "truncated": True, "success": False}
    newcomer.mkdir()
    with Recorder.create(newcomer, dump(resolve("frozen-lake"))) as recorder:
        members = tuple(
            Episode("frozen-lake", 10000, 7, 0, member, (long,), "max_turns", **ends)
            for member in range(2)
        )
        recorder.episodes(1, [Group(members)])
    page = visitor.visit("#/group/newcomer?attempt=0&step=1&phase=train&group=0")
    cells = page.locator(".beside tbody td:has(.thought)")
    expect(cells).to_have_count(2)
    expect(cells.first).not_to_contain_text("the end")
    cells.first.get_by_role("button", name=re.compile("show more")).click()
    expect(cells.first).to_contain_text("the end")
    assert cells.first.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth")


def test_each_turn_shows_thought_actions_and_reward(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    turns = page.get_by_test_id("turn")
    expect(turns).to_have_count(len(episode["turns"]))
    for number, turn in enumerate(episode["turns"]):
        expect(turns.nth(number)).to_contain_text((turn["thought"] or turn["reply"]).strip()[:200])
        for action in turn["actions_executed"]:
            expect(turns.nth(number)).to_contain_text(action)


def test_actions_that_were_not_executed_are_struck_through(visitor: Visitor) -> None:
    episodes = visitor.api("/api/episodes?run=lake&stop_reason=max_actions&limit=200")["episodes"]
    for each in episodes:
        detail = visitor.api(f"/api/episode?run=lake&episode={each['id']}")
        for turn in detail["turns"]:
            if len(turn["actions_asked"]) > len(turn["actions_executed"]):
                page = visitor.visit(f"#/episode/lake/{each['id']}?turn={turn['turn']}")
                struck = page.get_by_test_id("turn").nth(turn["turn"]).locator("s")
                expect(struck).to_have_count(
                    len(turn["actions_asked"]) - len(turn["actions_executed"])
                )
                return
    pytest.fail("no episode was cut off in the middle of its actions")


def test_an_episode_plays_and_pauses(visitor: Visitor, episode: dict[str, Any]) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    page.get_by_label("speed").select_option("4")
    page.get_by_role("button", name="play").click()
    end = len(episode["turns"])
    expect(page.get_by_role("slider", name="turn")).to_have_value(str(end))
    page.get_by_role("button", name="first turn").click()
    expect(page.get_by_role("slider", name="turn")).to_have_value("0")
    page.locator("h1").click()  # Move the focus off the button, so that the page handles space.
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="pause")).to_be_visible()
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="play")).to_be_visible()


def test_the_turn_is_in_the_address_and_is_kept_on_reload(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    page.get_by_role("slider", name="turn").fill("2")
    expect(page).to_have_url(re.compile("turn=2"))
    page.reload()
    visitor.wait()
    expect(page.get_by_role("slider", name="turn")).to_have_value("2")


def test_brackets_open_the_next_and_the_previous_episode(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    page.keyboard.press("]")
    expect(page).to_have_url(re.compile(f"/{episode['next']}$"))
    expect(page.get_by_role("heading", level=1)).to_contain_text(str(episode["next"]))
    page.keyboard.press("[")
    expect(page).to_have_url(re.compile(f"/{episode['id']}$"))


def test_all_tokens_are_shown_in_order(visitor: Visitor, episode: dict[str, Any]) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}?view=tokens")
    samples = visitor.api(f"/api/tokens?run=lake&episode={episode['id']}")["samples"]
    tokens = page.get_by_test_id("token")
    expect(tokens).to_have_count(sum(len(sample["ids"]) for sample in samples))
    trained = page.locator("[data-testid=token].trained")
    expect(trained).to_have_count(sum(sum(sample["mask"]) for sample in samples))
    shown = "".join(tokens.all_text_contents())
    expected = "".join(text for sample in samples for text in sample["texts"])
    assert shown.replace("·", " ").replace("↵", "\n") == expected.replace("\t", "⇥")


@pytest.mark.parametrize("colour", ["logprob", "entropy", "advantage", "importance ratio"])
def test_tokens_are_coloured_by_the_chosen_series(
    visitor: Visitor, episode: dict[str, Any], colour: str
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}?view=tokens")
    trained = page.locator("[data-testid=token].trained")
    grey = page.locator("[data-testid=token]:not(.trained)").first

    def paints() -> set[str]:
        script = "all => all.map(each => getComputedStyle(each).backgroundColor)"
        return set(trained.evaluate_all(script))

    expect(trained.first).to_be_visible()
    assert len(paints()) == 1  # By mask, all trained tokens have one colour.
    plain = grey.evaluate("each => getComputedStyle(each).backgroundColor")
    page.get_by_role("button", name=colour, exact=True).click()
    expect(page).to_have_url(re.compile("colour="))
    if colour in ("logprob", "entropy"):  # GRPO has one advantage per episode.
        assert len(paints()) > 1
    assert grey.evaluate("each => getComputedStyle(each).backgroundColor") == plain


def test_a_token_shows_its_numbers(visitor: Visitor, episode: dict[str, Any]) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}?view=tokens")
    sample = visitor.api(f"/api/tokens?run=lake&episode={episode['id']}")["samples"][0]
    position = sample["mask"].index(1)
    page.get_by_test_id("token").nth(position).hover()
    facts = page.get_by_test_id("token-facts")
    expect(facts).to_contain_text(f"id {sample['ids'][position]}")
    for name in ("logprob", "entropy", "advantage"):
        shown = facts.locator("div", has=page.locator(f"dt:text-is('{name}')")).locator("dd")
        assert float(shown.inner_text().replace("−", "-")) == pytest.approx(
            sample[name][position], rel=1e-3
        )


def test_the_prompt_view_equals_the_prompt_of_the_model(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}?view=prompt&turn=1")
    (sample, *_) = visitor.api(f"/api/tokens?run=lake&episode={episode['id']}")["samples"]
    before = "".join(sample["texts"][: sample["turn"].index(1)])
    prompt = page.get_by_test_id("prompt")
    assert prompt.text_content() == before
    assert episode["turns"][0]["thought"] in before and episode["turns"][1]["observation"] in before


def test_the_board_of_bandit_names_the_pulled_arm(visitor: Visitor) -> None:
    (first,) = visitor.api("/api/episodes?run=collapse&phase=train&limit=1")["episodes"]
    detail = visitor.api(f"/api/episode?run=collapse&episode={first['id']}")
    page = visitor.visit(f"#/episode/collapse/{first['id']}?turn=1")
    (pulled,) = detail["turns"][0]["actions_executed"]
    expect(page.get_by_test_id("board").first).to_have_attribute(
        "aria-label", re.compile(rf"{pulled} was pulled")
    )


def test_a_group_shows_its_episodes_and_whether_it_was_kept(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    group = {key: episode[key] for key in ("attempt", "step", "phase", "group")}
    page = visitor.visit(f"#/group/lake?{urlencode(group)}")
    detail = visitor.api(f"/api/group?run=lake&{urlencode(group)}")
    assert len(detail["episodes"]) == 4
    main = page.get_by_role("main")
    expect(main).to_contain_text(re.compile("kept", re.IGNORECASE))
    expect(main).to_contain_text(f"{detail['group_score']:.3g}")
    for member in detail["episodes"]:
        link = main.get_by_role("link", name=f"member {member['member']}", exact=True)
        expect(link).to_have_attribute("href", re.compile(f"/{member['id']}$"))
    firsts = {tuple(member["turns"][0]["actions_executed"]) for member in detail["episodes"]}
    if len(firsts) > 1:
        expect(page.get_by_test_id("parting")).to_have_count(1)


def test_a_dropped_group_is_labelled_dropped(visitor: Visitor) -> None:
    episodes = visitor.api("/api/episodes?run=lake&phase=train&kept=0&limit=1")["episodes"]
    group = {key: episodes[0][key] for key in ("attempt", "step", "phase", "group")}
    page = visitor.visit(f"#/group/lake?{urlencode(group)}")
    expect(page.get_by_role("main")).to_contain_text(re.compile("dropped", re.IGNORECASE))


@pytest.mark.parametrize(
    ("members", "played", "explanation"),
    [
        (4, 4, "All episodes earned the same reward"),
        (4, 1, "Only 1 of its 4 episodes could be played to the end."),
        (4, 0, "None of its 4 episodes could be played to the end."),
        (1, 1, None),  # As with PPO: there is nothing to compare it with.
    ],
)
def test_a_group_explains_why_its_episodes_are_not_compared(
    visitor: Visitor, episode: dict[str, Any], members: int, played: int, explanation: str | None
) -> None:
    group = urlencode({key: episode[key] for key in ("attempt", "step", "phase", "group")})
    answer = visitor.api(f"/api/group?run=lake&{group}")
    answer |= {"episodes": answer["episodes"][:members], "num_played": played, "reward_std": 0.0}
    visitor.page.route("**/api/group?*", lambda route: route.fulfill(json=answer))
    ruling = visitor.visit(f"#/group/lake?{group}").locator(".lead")
    expect(ruling).to_contain_text("by the filter")
    for line in ("All episodes earned", "could be played"):
        if explanation and line in explanation:
            expect(ruling).to_contain_text(explanation)
        else:
            expect(ruling).not_to_contain_text(line)
