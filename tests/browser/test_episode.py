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
from viewer_run import make_agent_run

from ragen.config.reading import dump, merge
from ragen.core.types import Completion, Episode, Group, Prompt, Turn, Usage
from ragen.envs.worlds.grid import observe
from ragen.storage.recorder import Recorder
from ragen.viewer.share import share
from tests.browser.visitor import PHONE, Visitor


@pytest.fixture
def episode(visitor: Visitor) -> dict[str, Any]:
    """A training episode of several turns that the filter kept."""
    answer = visitor.api("/api/episodes?run=lake&phase=train&kept=1&sort=turns&order=desc&limit=1")
    (first,) = answer["episodes"]
    detail = visitor.api(f"/api/episode?run=lake&episode={first['id']}")
    assert len(detail["turns"]) >= 3
    return detail


def board_pattern(drawing: list[str]) -> str:
    """A pattern of the label of a board: its size and the position of the player."""
    for y, row in enumerate(drawing):
        for x, character in enumerate(row):
            if character in "P*@S":
                return f"{len(drawing)} rows of {len(row)}.*player[^,]* at {'abcdefgh'[y]}{x}"
    raise AssertionError(drawing)


def test_an_episode_shows_board_thought_actions_and_reward_of_each_turn(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    expect(page.get_by_role("note")).to_contain_text("b0 c0 O seen from b0")
    turns = page.get_by_test_id("turn")
    expect(turns).to_have_count(len(episode["turns"]))
    board = page.get_by_test_id("board").first
    for number, turn in enumerate(episode["turns"]):
        expect(turns.nth(number)).to_contain_text((turn["thought"] or turn["reply"]).strip()[:200])
        for action in turn["actions_executed"]:
            expect(turns.nth(number)).to_contain_text(action)
        expect(board).to_have_attribute("aria-label", re.compile(board_pattern(turn["drawing"])))
        page.keyboard.press("ArrowRight")
    named = re.compile(f"{len(episode['final_drawing'])} rows of")
    expect(board).to_have_attribute("aria-label", named)
    page.keyboard.press("ArrowLeft")
    before = episode["turns"][-1]["drawing"]
    expect(board).to_have_attribute("aria-label", re.compile(board_pattern(before)))
    # Its rows and columns are named as the thoughts name them.
    assert board.locator(".coordinate").all_text_contents() == [*"abcd", *"0123"]
    goal = next(
        f"{'abcd'[y]}{row.index('G')}: goal"
        for y, row in enumerate(episode["turns"][0]["drawing"])
        if "G" in row
    )
    assert goal in board.locator("title").all_text_contents()


def test_the_board_of_bandit_names_the_pulled_arm(visitor: Visitor) -> None:
    (first,) = visitor.api("/api/episodes?run=collapse&success=1&limit=1")["episodes"]
    detail = visitor.api(f"/api/episode?run=collapse&episode={first['id']}")
    page = visitor.visit(f"#/episode/collapse/{first['id']}?turn=1")
    (pulled,) = detail["turns"][0]["actions_executed"]
    expect(page.get_by_test_id("board").first).to_have_attribute(
        "aria-label", re.compile(rf"{pulled} was pulled")
    )


def make_special_run(folder: Path) -> None:
    """Episode 1 has coordinates, 2 an invalid reply, 3 and 4 are a group with long thoughts."""
    rows = ("P_", "_G")
    words = observe(rows, {"Player": "P", "Goal": "G"}, "coord")
    bad = replace(
        make_turn(0.0, thought="hm"),
        completion=Completion(None, None, "I say <answer>", "stop", 0, usage=Usage(3, 4)),
        prompt=Prompt(({"role": "user", "content": "Where to?"},), None, 0, 8, 1.0, 0),
        valid=False,
        problem="The answer names no action.",
        completion_s=75.0,
    )
    asked = {"actions_asked": ("Up", "Down"), "actions_executed": ("Up",)}
    first = replace(make_turn(0.0, thought="hm"), observation=words, drawing=rows, **asked)
    long = replace(make_turn(0.0), thought=f"{'word ' * 300}{'x' * 300} the end")

    def played(turn: Turn, level: int, member: int = 0, **more: Any) -> Episode:
        ends: dict[str, Any] = {"terminated": False, "truncated": True, "success": False}
        name = "frozen-lake"
        return Episode(name, level, 7, 0, member, (turn,), "max_turns", **ends, **more)

    folder.mkdir()
    with Recorder.create(folder, dump(merge("frozen-lake", {"steps": 0}))) as recorder:
        coordinates = played(first, 123, final_observation=words, final_drawing=rows)
        for step, each in enumerate((coordinates, played(bad, 124))):
            recorder.episodes(step, [Group((each,))], phase="eval", timed=True)
        members = tuple(played(long, 10_000, member) for member in range(2))
        recorder.episodes(1, [Group(members)])


def test_coordinates_unexecuted_actions_an_invalid_reply_and_long_thoughts_are_shown(
    newcomer: Path, visitor: Visitor
) -> None:
    make_special_run(newcomer)
    page = visitor.visit("#/episode/newcomer/1")
    expect(page.get_by_test_id("turn").locator("s")).to_have_text("Down")  # It was not executed.
    board = page.get_by_test_id("board").first
    for _ in range(2):
        assert board.locator(".coordinate").all_text_contents() == [*"01", *"01"]
        assert "(1, 1): goal" in board.locator("title").all_text_contents()
        page.keyboard.press("ArrowRight")  # Then the board after the last turn.
        expect(page.locator(".caption")).to_contain_text("After the last turn")

    page = visitor.visit("#/episode/newcomer/2")
    card = page.get_by_test_id("turn")
    for words in ("The answer names no action.", "I say <answer>", "4 tokens in 1 min 15 s"):
        expect(card).to_contain_text(words)
    expect(page.get_by_role("note")).to_have_count(0)  # Only a notation is explained.
    page.get_by_role("button", name="Raw prompt").click()
    expect(page.get_by_test_id("prompt")).to_contain_text("user Where to?")

    page = visitor.visit("#/group/newcomer?attempt=0&step=1&phase=train&group=0")
    cells = page.locator(".beside tbody td:has(.thought)")
    expect(cells).to_have_count(2)
    expect(page.get_by_role("note")).to_have_count(0)
    expect(cells.first).not_to_contain_text("the end")
    cells.first.get_by_role("button", name=re.compile("show more")).click()
    expect(cells.first).to_contain_text("the end")
    assert cells.first.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth")


def test_an_episode_plays_and_the_address_keeps_the_turn_and_the_episode(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    page.get_by_label("speed").select_option("4")
    page.get_by_role("button", name="play").click()
    slider = page.get_by_role("slider", name="turn")
    expect(slider).to_have_value(str(len(episode["turns"])))
    page.get_by_role("button", name="first turn").click()
    expect(slider).to_have_value("0")
    page.locator("h1").click()  # Move the focus off the button, so that the page handles space.
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="pause")).to_be_visible()
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="play")).to_be_visible()
    slider.fill("2")
    expect(page).to_have_url(re.compile("turn=2"))
    page.reload()
    visitor.wait()
    expect(slider).to_have_value("2")
    page.keyboard.press("]")
    expect(page).to_have_url(re.compile(f"/{episode['next']}$"))
    expect(page.get_by_role("heading", level=1)).to_contain_text(str(episode["next"]))
    page.keyboard.press("[")
    expect(page).to_have_url(re.compile(f"/{episode['id']}$"))


def test_tokens_are_shown_in_order_with_their_numbers_and_colours(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}?view=tokens")
    samples = visitor.api(f"/api/tokens?run=lake&episode={episode['id']}")["samples"]
    tokens = page.get_by_test_id("token")
    expect(tokens).to_have_count(sum(len(sample["ids"]) for sample in samples))
    trained = page.locator("[data-testid=token].trained")
    expect(trained).to_have_count(sum(sum(sample["mask"]) for sample in samples))
    shown = "".join(tokens.all_text_contents())
    expected = "".join(text for sample in samples for text in sample["texts"])
    assert shown.replace("·", " ").replace("↵", "\n") == expected.replace("\t", "⇥")

    position = samples[0]["mask"].index(1)
    tokens.nth(position).hover()
    facts = page.get_by_test_id("token-facts")
    expect(facts).to_contain_text(f"id {samples[0]['ids'][position]}")
    for name in ("logprob", "entropy", "advantage"):
        number = facts.locator("div", has=page.locator(f"dt:text-is('{name}')")).locator("dd")
        assert float(number.inner_text().replace("−", "-")) == pytest.approx(
            samples[0][name][position], rel=1e-3
        )

    grey = page.locator("[data-testid=token]:not(.trained)").first

    def paints() -> set[str]:
        script = "all => all.map(each => getComputedStyle(each).backgroundColor)"
        return set(trained.evaluate_all(script))

    assert len(paints()) == 1  # By mask, all trained tokens have one colour.
    plain = grey.evaluate("each => getComputedStyle(each).backgroundColor")
    for colour in ("logprob", "entropy", "advantage", "importance ratio"):
        button = page.get_by_role("button", name=colour, exact=True)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        if colour in ("logprob", "entropy"):  # GRPO has one advantage per episode.
            assert len(paints()) > 1
        assert grey.evaluate("each => getComputedStyle(each).backgroundColor") == plain
    expect(page).to_have_url(re.compile("colour=ratio"))


def test_the_prompt_view_equals_the_prompt_of_the_model(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}?view=prompt&turn=1")
    (sample, *_) = visitor.api(f"/api/tokens?run=lake&episode={episode['id']}")["samples"]
    before = "".join(sample["texts"][: sample["turn"].index(1)])
    assert page.get_by_test_id("prompt").text_content() == before
    assert episode["turns"][0]["thought"] in before and episode["turns"][1]["observation"] in before


def group_of(episode: dict[str, Any]) -> str:
    return urlencode({key: episode[key] for key in ("attempt", "step", "phase", "group")})


def test_a_group_shows_its_episodes_and_whether_it_was_kept(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/group/lake?{group_of(episode)}")
    detail = visitor.api(f"/api/group?run=lake&{group_of(episode)}")
    assert len(detail["episodes"]) == 4
    main = page.get_by_role("main")
    expect(main).to_contain_text(re.compile("kept", re.IGNORECASE))
    expect(main).to_contain_text(f"{detail['group_score']:.3g}")
    expect(page.get_by_role("note")).to_contain_text("b0 c0 O seen from b0")
    for member in detail["episodes"]:
        link = main.get_by_role("link", name=f"member {member['member']}", exact=True)
        expect(link).to_have_attribute("href", re.compile(f"/{member['id']}$"))
    firsts = {tuple(member["turns"][0]["actions_executed"]) for member in detail["episodes"]}
    if len(firsts) > 1:
        expect(page.get_by_test_id("parting")).to_have_count(1)
    (dropped,) = visitor.api("/api/episodes?run=lake&phase=train&kept=0&limit=1")["episodes"]
    page = visitor.visit(f"#/group/lake?{group_of(dropped)}")
    expect(page.get_by_role("main")).to_contain_text(re.compile("dropped", re.IGNORECASE))


def test_a_group_explains_why_its_episodes_are_not_compared(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    group = group_of(episode)
    answer = visitor.api(f"/api/group?run=lake&{group}")
    everyone = answer["episodes"]
    visitor.page.route("**/api/group?*", lambda route: route.fulfill(json=answer))
    for members, played, explanation in (
        (4, 4, "All episodes earned the same reward"),
        (4, 1, "Only 1 of its 4 episodes could be played to the end."),
        (4, 0, "None of its 4 episodes could be played to the end."),
        (1, 1, None),  # As with PPO: there is nothing to compare it with.
    ):
        answer |= {"episodes": everyone[:members], "num_played": played, "reward_std": 0.0}
        ruling = visitor.visit(f"#/group/lake?{group}").locator(".lead")
        expect(ruling).to_contain_text("by the filter")
        for line in ("All episodes earned", "could be played"):
            if explanation and line in explanation:
                expect(ruling).to_contain_text(explanation)
            else:
                expect(ruling).not_to_contain_text(line)


def test_an_agents_calls_are_drawn_as_a_tree_that_leads_to_each_turn(
    newcomer: Path, visitor: Visitor, visitors: Any, tmp_path: Path
) -> None:
    make_agent_run(newcomer)
    page = visitor.visit("#/episode/newcomer/1")
    tree = page.get_by_role("navigation", name="Calls of the agent")
    nodes = tree.get_by_role("button")
    expect(nodes).to_have_count(9)
    labels = nodes.evaluate_all("all => all.map((each) => each.getAttribute('aria-label'))")
    assert labels[:4] == [
        "turn 1 begins a conversation",
        "turn 2 continues turn 1",
        "turn 3 continues turn 1",
        "turn 4 begins a conversation",
    ]
    assert labels[7] == "turn 8 continues turn 2, not trained on"
    rows = nodes.evaluate_all("all => all.map((each) => each.getBoundingClientRect().y)")
    lanes = [sorted({*rows}).index(row) for row in rows]
    assert lanes == [0, 0, 1, 1, 0, 0, 0, 2, 0]
    cards = page.get_by_test_id("turn")
    for number, words in (
        (0, "begins a conversation: first call"),
        (2, "continues turn 1, JSON written anew"),
        (3, "begins a conversation: message 1 (system) is new: <b>You help.</b>"),
        (5, "auxiliary"),
        (8, "the budget is used up"),
    ):
        expect(cards.nth(number)).to_contain_text(words)
    expect(cards.nth(5)).not_to_contain_text("reward")  # It earns nothing and costs nothing.
    assert cards.nth(7).get_by_text("discarded").get_attribute("title").startswith("not trained on")

    nodes.nth(2).focus()
    page.keyboard.press("Enter")
    expect(cards.nth(2)).to_have_attribute("aria-current", "true")
    expect(nodes.nth(2)).to_have_attribute("aria-current", "true")
    nodes.nth(7).click()  # A call that is not trained on: the player stays at the end.
    expect(page).to_have_url(re.compile("turn=8$"))
    expect(cards.nth(7)).to_be_in_viewport()
    expect(page.locator(".caption")).to_have_text("Before turn 8, which is not trained on")
    expect(page.get_by_role("slider", name="turn")).to_have_value("5")
    expect(page.locator(".returns")).to_contain_text("Return so far 1 of 1")
    page.get_by_role("button", name="Raw prompt").click()
    expect(page.get_by_test_id("prompt")).to_have_text("<1><2><7><3><8><5>")
    nodes.nth(4).click()
    expect(page.get_by_test_id("prompt")).to_have_text("<1><2><7><3><8><3>")
    assert page.locator(".prompt .sampled").all_text_contents() == ["<7>", "<8>"]
    nodes.nth(8).click()
    expect(page.get_by_role("main")).to_contain_text("The model was not asked")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".caption")).to_contain_text("After the last turn")

    page = visitor.visit("#/group/newcomer?attempt=0&step=1&phase=train&group=0")
    expect(page.locator(".beside tbody th")).to_have_count(5)
    expect(page.get_by_test_id("parting")).to_contain_text("the agent went on in 2 different ways")

    file = share(newcomer, tmp_path / "episode.html", episode=1)
    reader = visitors(address=file.as_uri(), size=PHONE)
    reader.page.goto(file.as_uri())
    reader.wait()
    nodes = reader.page.get_by_role("navigation", name="Calls of the agent").get_by_role("button")
    nodes.nth(8).click()
    expect(reader.page.get_by_test_id("turn").nth(8)).to_be_in_viewport()
    assert reader.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    sizes = nodes.evaluate_all("all => all.map((each) => each.getBoundingClientRect().height)")
    assert min(sizes) >= 24  # A finger hits it.


def test_an_episode_of_an_environment_has_no_drawing_of_calls(
    visitor: Visitor, episode: dict[str, Any]
) -> None:
    page = visitor.visit(f"#/episode/lake/{episode['id']}")
    expect(page.get_by_test_id("turn").first).to_be_visible()
    expect(page.get_by_role("navigation", name="Calls of the agent")).to_have_count(0)
    expect(page.get_by_role("main")).not_to_contain_text("conversation")
