"""Prompts: word for word in the compact style, by their contents in the paper style."""

from __future__ import annotations

from ragen.chat.prompt import Limits, PromptBuilder

FIRST = Limits(turn=1, turns_left=5, actions_left=10, actions_per_turn=5)
LAST = Limits(turn=5, turns_left=1, actions_left=3, actions_per_turn=5)
MOVES = ("Left", "Down", "Right", "Up")


def test_compact_prompts_golden() -> None:
    builder = PromptBuilder("compact")
    assert builder.system() is None
    assert (
        builder.first("long rules", "FrozenLake", MOVES, "a0 P a1 _\nb0 O b1 G", FIRST)
        == "FrozenLake\na0 P a1 _\nb0 O b1 G\nturns 5 actions 10 max 5"
    )
    assert (
        builder.following("a0 _ a1 P\nb0 O b1 G", 0.0, None, LAST)
        == "reward 0\na0 _ a1 P\nb0 O b1 G\nturns 1 actions 3 max 5"
    )
    assert (
        builder.following("a0 P", -0.1, "The answer names no action.", LAST)
        == "reward -0.1\ninvalid\na0 P\nturns 1 actions 3 max 5"
    )


def test_compact_prompt_rounds_the_reward() -> None:
    rewards = (10.9, 1.0, -0.3, 0.1 + 0.2, -0.001, 1 / 3)
    texts = [PromptBuilder("compact").following("P", each, None, LAST) for each in rewards]
    assert [text.splitlines()[0].removeprefix("reward ") for text in texts] == [
        *("10.9", "1", "-0.3", "0.3", "0", "0.33")
    ]


def test_paper_prompts_contain_all_parts_in_order() -> None:
    builder = PromptBuilder("paper", max_tokens=200)
    assert "helpful assistant" in str(builder.system())
    text = builder.first("Rules of it.\n# wall", "Sokoban", MOVES, "#P_", FIRST)
    for part in (
        "Sokoban",
        "Rules of it.\n# wall",
        "Left, Down, Right, Up",
        "<think> your reasoning </think><answer> action || action </answer>",
        "200 tokens",
        "5 turns, 10 actions in all, at most 5 actions a turn",
        "Turn 1\nState:\n#P_\n",
        "You have 5 turns and 10 actions left",
    ):
        assert part in text
    later = builder.following("#_P", -0.1, '"Fly" is not an action.', LAST)
    # The reward comes first, then the problem of the last reply, then the state.
    order = [
        "-0.1",
        '"Fly" is not an action.',
        "Turn 5\nState:\n#_P\n",
        "1 turn and 3 actions left",
    ]
    assert [later.index(part) for part in order] == sorted(later.index(part) for part in order)
    assert "not valid" not in builder.following("#_P", -0.1, None, LAST)


def test_paper_prompt_for_one_free_text_action_per_turn_without_thought() -> None:
    builder = PromptBuilder("paper", think=False)
    one = Limits(turn=1, turns_left=9, actions_left=9, actions_per_turn=1)
    text = builder.first("Rules.", "WebShop", None, "page", one)
    assert "<think>" not in text
    assert "<answer> action </answer>" in text
    assert "||" not in text
    assert "tokens" not in text
