"""The prompts that an agent reads: one builder, two styles, the same in rollout and training.

``compact`` is for the embedded models, whose tokens are whole words: few, regular lines and no
system message. ``paper`` has the contents of the papers' prompts (arXiv:2504.20073): role, rules,
actions, limits, reply format and length; then for each turn the reward, what was wrong with the
reply, the state, and the remaining budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragen.chat.actions import SEPARATOR

SUMMARY = "Your earlier turns in short:"
"""The line above the summary in the paper style."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets left before a turn, this turn included, and the turn's number from 1."""

    turn: int
    turns_left: int
    actions_left: int
    actions_per_turn: int


def prefill(think: bool) -> str:
    """The start of a reply that is given to the policy instead of sampled."""
    return "<think>" if think else "<answer>"


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    r"""Writes the system message and the user message of each turn.

    With `think` a reply must have a thought before the answer. With `tools` it has calls of tools
    or an answer in plain text. The paper style states `max_tokens`, the longest reply.

    Example:
        >>> builder = PromptBuilder("compact")
        >>> print(builder.first("", "FrozenLake", ("Left",), "P _\n_ G", Limits(1, 5, 10, 5)))
        FrozenLake
        P _
        _ G
        turns 5 actions 10 max 5
        >>> print(builder.following("_ P\n_ G", -0.1, "no", Limits(2, 4, 8, 5)))
        reward -0.1
        invalid
        _ P
        _ G
        turns 4 actions 8 max 5
    """

    style: Literal["compact", "paper"] = "compact"
    think: bool = True
    max_tokens: int | None = None
    tools: bool = False

    def system(self) -> str | None:
        """The system message, if the style has one."""
        if self.style == "compact":
            return None
        return "You are a helpful assistant that acts in a world, turn by turn, to reach a goal."

    def first(
        self,
        rules: str,
        goal: str,
        actions: tuple[str, ...] | None,
        observation: str,
        limits: Limits,
        summary: str = "",
    ) -> str:
        """The user message that opens a conversation: the environment and its observation.

        Where a window cuts the history, it opens the prompts of later turns too, with their
        `limits` and a `summary` of the turns left out. `actions` is ``None`` for free text.
        """
        if self.style == "compact":
            shown = f"{summary}\n{observation}" if summary else observation
            return f"{goal}\n{shown}\n{_budget(limits)}"
        parts = (
            f"{goal}\n\n{rules.strip()}",
            self._actions(actions, limits),
            self._form(actions, limits),
            *([f"{SUMMARY}\n{summary}"] if summary else []),
            self._turn(observation, limits),
        )
        return "\n\n".join(parts)

    def following(
        self, observation: str, reward: float, problem: str | None, limits: Limits
    ) -> str:
        """The user message of a later turn; `reward` is the environment's, without penalties."""
        if self.style == "compact":
            invalid = "" if problem is None else "invalid\n"
            return f"reward {plain_number(reward)}\n{invalid}{observation}\n{_budget(limits)}"
        text = f"Reward of your last turn: {plain_number(reward)}."
        if problem is not None:
            text += f"\nYour last reply was not valid. {problem}"
        return f"{text}\n\n{self._turn(observation, limits)}"

    def result(self, result: str, reward: float, limits: Limits) -> str:
        """The message with the last result of a turn's calls."""
        if self.style == "compact":
            return f"{result}\nreward {plain_number(reward)}\n{_budget(limits)}"
        return f"{result}\n\nReward of your last turn: {plain_number(reward)}.\n{_left(limits)}"

    def summary_request(self) -> str:
        """The end of a message that asks for a summary in place of an action."""
        if self.style == "compact":
            return "summary ?"
        place = "as plain text" if self.tools else "between <answer> and </answer>"
        return (
            "\nDo not act now, but sum up all turns so far: what happened, what you have learned "
            "and what is left to do. Your next prompts show this summary in place of these turns. "
            f"Write it {place}."
        )

    def _actions(self, actions: tuple[str, ...] | None, limits: Limits) -> str:
        if self.tools:
            names = "An action is a call of a tool, or your answer, which the rules describe."
        elif actions is None:
            names = "Your answer is one action, written as the rules say."
        else:
            names = f"Available actions: {', '.join(actions)}."
        return (
            f"{names}\n"
            f"Limits: {_count(limits.turns_left, 'turn')}, "
            f"{_count(limits.actions_left, 'action')} in all, "
            f"at most {_count(limits.actions_per_turn, 'action')} a turn."
        )

    def _form(self, actions: tuple[str, ...] | None, limits: Limits) -> str:
        several = actions is not None and limits.actions_per_turn > 1
        answer = f"action {SEPARATOR} action" if several else "action"
        thought = "<think> your reasoning </think>" if self.think else ""
        if self.tools:
            begun = f"Begin your reply with {thought} and then" if thought else "In a reply,"
            lines = [f"{begun} either call tools or write your answer as plain text."]
        else:
            lines = [f"Reply in exactly this form: {thought}<answer> {answer} </answer>"]
            if several:
                lines.append(f"Put {SEPARATOR} between actions; they are carried out in order.")
            lines.append("Write nothing before, between or after.")
        if self.max_tokens is not None:
            lines.append(f"Keep the whole reply below {self.max_tokens} tokens.")
        return "\n".join(lines)

    def _turn(self, observation: str, limits: Limits) -> str:
        return f"Turn {limits.turn}\nState:\n{observation}\n{_left(limits)}"


def _left(limits: Limits) -> str:
    return (
        f"You have {_count(limits.turns_left, 'turn')} and "
        f"{_count(limits.actions_left, 'action')} left, this turn included."
    )


def _budget(limits: Limits) -> str:
    return f"turns {limits.turns_left} actions {limits.actions_left} max {limits.actions_per_turn}"


def plain_number(value: float) -> str:
    """The number with at most two decimals and without a minus zero."""
    return f"{round(value, 2) + 0.0:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
