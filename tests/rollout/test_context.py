"""What a prompt says of the turns that it does not show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Literal, get_args

import pytest

from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.chat.prompt import Limits, PromptBuilder
from ragen.core.metrics import values
from ragen.core.types import Call, Completion, Episode, Group, Prompt
from ragen.diagnostics.step_metrics import summarize
from ragen.envs.worlds.manor import Manor
from ragen.rollout.context import Conversation, View
from ragen.rollout.episode import NEARLY_FULL, play_episode, require_unchanged
from ragen.rollout.setup import BranchSpec, EpisodeSpec, Setup
from ragen.settings.model import suited
from ragen.settings.resolve import resolve
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import tiny_tokenizer

SPEC = EpisodeSpec(123, 0, 0, (0, "test"))
Summary = Literal["none", "actions", "observations", "learned"]
ACTIONS = ("take iron key", "dance", "west", "west", "pull lever", "east", "unlock vault")


def house() -> Manor:
    return Manor(rooms=5, levers=1, delay=5)


def setup_of(window: int, summary: Summary, **more: Any) -> Setup:
    chat = Chat(tiny_tokenizer("chatml"))
    given = {"turns": 7, "actions_per_turn": 1, "actions": 7, "max_tokens": 40, "max_length": 9999}
    return Setup("manor", house, window=window, summary=summary, chat=chat, **{**given, **more})


def play(setup: Setup, sum_up: Callable[[int], str] = lambda number: "") -> Episode:
    chat = setup.chat
    assert chat is not None

    def encode(text: str) -> tuple[int, ...]:
        return (*chat.encode_text(text), chat.end)

    actions, numbers = iter(ACTIONS), count()

    def reply(prompt: Prompt) -> str:
        if prompt.messages[-1]["content"].endswith(ASKED):
            return sum_up(next(numbers))
        return f"</think><answer>{next(actions)}</answer>"

    policy = ScriptedPolicy(reply, encode)
    return asyncio.run(play_episode(policy, setup, SPEC))


ASKED = PromptBuilder().summary_request()


def prompt_of(episode: Episode, turn: int) -> str:
    return "\n".join(message["content"] for message in episode.turns[turn].prompt.messages)


def test_a_line_says_what_was_done_and_what_it_paid() -> None:
    episode = play(setup_of(1, "actions"))
    assert episode.success
    assert prompt_of(episode, 5) == "\n".join(
        [
            "Manor",
            "1: take iron key",
            "2: nothing",
            "3: west",
            "4: west",
            "5: pull lever (reward 0.1)",
            episode.turns[5].observation,
            "turns 2 actions 3 max 1",
        ]
    ), "a reply without an action spends a turn and no action"
    assert prompt_of(play(setup_of(0, "actions")), 5) == prompt_of(play(setup_of(0, "none")), 5), (
        "a prompt that shows all turns has no summary"
    )
    shown = [
        message["content"] for message in play(setup_of(2, "actions")).turns[2].prompt.messages
    ]
    assert shown[0].startswith("Manor\n1: take iron key\nYou take iron key")
    assert len(shown) == 3, "the turn before and its reply are shown as they were"


def test_with_observations_the_first_one_stays_and_a_line_says_what_followed() -> None:
    episode = play(setup_of(1, "observations"))
    first = episode.turns[0].observation
    assert "plan of the house" in first
    assert prompt_of(episode, 4).startswith(
        f"Manor\n{first}\n1: take iron key -> You take iron key, and a bar drops over the other "
        "hooks.\n2: nothing\n3: west -> You go west.\n4: west -> You are in the music room. Doors: "
    ), "the first line that the observation before did not have"


def test_the_paper_style_says_what_the_lines_are() -> None:
    prompt = prompt_of(play(setup_of(1, "actions", style="paper")), 2)
    assert "\n\nYour earlier turns in short:\n1: take iron key\n2: nothing\n\nTurn 3\n" in prompt


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("summary", ["actions", "observations"])
def test_a_summary_gives_way_before_the_present_turn_does(summary: Summary, window: int) -> None:
    """Its oldest lines go first; what is left of it is the latest."""
    limits = Limits(1, 9, 9, 1)

    def ask(conversation: Conversation) -> tuple[str, int]:
        conversation.ask(View("Speak.", limits))
        for word in "abcdef":
            conversation.reply(Completion((), (), f"{word}</think>", "stop", 0))
            view = View(word * 30, limits, 0.0, actions=(word,))
            messages, ids, _ = conversation.ask(view)
        return messages[0]["content"], len(ids or ())

    lengths = {"max_length": 9999, "max_tokens": 1}
    whole, longest = ask(Conversation(setup_of(1, summary, **lengths), ("", "Talk", None)))
    _, shortest = ask(Conversation(setup_of(1, "none", **lengths), ("", "Talk", None)))
    assert "1: a" in whole and "6: f" in whole
    lengths["max_length"] = (shortest + longest) // 2
    cut, length = ask(Conversation(setup_of(window, summary, **lengths), ("", "Talk", None)))
    assert shortest < length < lengths["max_length"]
    assert "1: a" not in cut and "6: f" in cut
    lengths["max_length"] = shortest + 1
    alone, length = ask(Conversation(setup_of(window, summary, **lengths), ("", "Talk", None)))
    assert length == shortest and "6: f" not in alone


def test_turns_without_room_are_summed_up() -> None:
    first = len(play(setup_of(0, "none")).turns[0].prompt.token_ids or ())
    episode = play(setup_of(0, "actions", max_length=first + 250))
    assert episode.success and episode.turns[6].prompt.turns_dropped > 0
    assert "4: west" in prompt_of(episode, 6)


@pytest.mark.parametrize("summary", ["actions", "observations"])
def test_a_recorded_episode_can_be_branched(summary: Summary) -> None:
    """Rebuilding checks every prompt, token by token."""
    setup = setup_of(2, summary)
    episode = play(setup)
    spec = BranchSpec(123, 0, 0, (1, "branch"), noise=episode.noise_seed, turns=episode.turns[:6])
    require_unchanged(setup, spec)


def test_a_summary_gets_its_room() -> None:
    """In the lengths that follow from the environment's texts, and in the papers' prompts."""
    given = {"env": "manor", "model": "a/b", "prompt.window": 2}
    recipe = {"env.max_turns": 40, "model": "a/b", "prompt.window": 2}
    for resolved in (
        lambda kind: resolve(None, {**given, "prompt.summary": kind}),
        lambda kind: suited(None, {**recipe, "prompt.summary": kind}),
    ):
        lengths = [resolved(kind).model.max_length for kind in get_args(Summary)[:3]]
        assert lengths == sorted(lengths) and len(set(lengths)) == 3


def learned(number: int) -> str:
    return f"</think><answer>summary {number}</answer>"


TIGHT = 1000
"""Tokens of a context that the seven turns outgrow."""


def test_a_nearly_full_context_asks_for_a_summary() -> None:
    """It is a sampled turn without actions, and the next prompt shows it in place of the turns."""
    episode = play(setup_of(0, "learned", max_length=TIGHT), learned)
    assert episode.success and not episode.others
    asked = [number for number, turn in enumerate(episode.turns) if turn.call is not None]
    assert len(episode.turns) == len(ACTIONS) + len(asked), "a summary costs no turn"
    assert len(asked) > 1
    for told, number in enumerate(asked):
        before, turn, after = episode.turns[number - 1 : number + 2]
        assert turn.call == Call(number - 1, NEARLY_FULL, "compaction")
        assert (turn.reward, turn.penalty, turn.actions_executed) == (0, 0, ())
        end = (before.prompt.token_ids or ()) + (before.completion.token_ids or ())
        assert (turn.prompt.token_ids or ())[: len(end)] == end, "it continues the conversation"
        assert len(turn.prompt.token_ids or ()) + 40 <= TIGHT
        shown = f"Manor\nsummary {told}\n{after.observation}\nturns {7 - (number - told)} "
        assert prompt_of(episode, number + 1).startswith(shown)
        assert after.prompt.turns_dropped == 0, "the turns are told"
    samples, _ = to_samples([Group((episode,))])
    assert len(samples) == len(asked) + 1
    assert sum(map(sum, (sample.loss_mask for sample in samples))) == sum(
        len(turn.completion.token_ids or ()) for turn in episode.turns
    )


@pytest.mark.parametrize(
    "rejected", ["</think><answer></answer>", "all is well", "x" * 40], ids=["empty", "form", "cut"]
)
def test_a_rejected_summary_is_kept_and_not_trained(rejected: str) -> None:
    """The prompts go on with the summary before."""
    setup = setup_of(0, "learned", max_length=TIGHT)
    episode = play(setup, lambda number: learned(number) if number == 0 else rejected)
    assert episode.success
    roles = [turn.call and turn.call.role for turn in (*episode.turns, *episode.others)]
    assert roles.count("compaction") == 1 and roles.count("discarded") == len(episode.others) > 0
    assert prompt_of(episode, len(episode.turns) - 1).startswith("Manor\nsummary 0\n")
    assert episode.turns[-1].prompt.turns_dropped > 0, "turns that no summary tells"
    found = values(summarize([Group((episode,))], [0]))
    made = 1 + len(episode.others)
    assert found["summary/per_episode"] == made
    assert found["summary/rejected_fraction"] == len(episode.others) / made
    assert "agent/calls" not in found
    for last in range(1, len(episode.turns) + 1):
        spec = BranchSpec(123, 0, 0, (1, "b"), episode.noise_seed, episode.turns[:last])
        require_unchanged(setup, spec)


def test_tools_and_the_paper_style_name_the_place_of_a_summary() -> None:
    paper = PromptBuilder("paper", think=False)
    assert paper.summary_request().endswith("Write it between <answer> and </answer>.")
    assert replace(paper, tools=True).summary_request().endswith("Write it as plain text.")
