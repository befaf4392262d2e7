"""Values of states by continuations: what they are, who shares them, and what fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from ragen.chat.chat import Chat
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Group, Prompt, fingerprint
from ragen.envs.contract import Env
from ragen.rollout.continuations import value_turns
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import NoCompletion
from ragen.rollout.setup import EpisodeSpec, Setup
from tests.pulls import Forgetful, Luck, Pulls
from tests.tiny import tiny_tokenizer

CHAT = Chat(tiny_tokenizer("chatml"), think=False)
PLAYED, AGAIN = (0, "train", 0), (0, "continue", 0)


class BySeat:
    """A policy that replies by the member and the turn of an episode, of group 0."""

    def __init__(self, reply: Callable[[int, int], str], path: tuple[int | str, ...]) -> None:
        self.replies = {
            EpisodeSpec(0, 0, member, path).request_seed(turn): reply(member, turn)
            for member in range(16)
            for turn in range(3)
        }

    async def complete(self, prompt: Prompt) -> Completion:
        text = self.replies[prompt.seed]
        if text == "lost":
            raise NoCompletion("the server is gone")
        ids = (*CHAT.encode(f"{text}</answer>"), CHAT.end)
        logprobs = (-0.5,) * len(ids)
        return Completion(ids, logprobs, f"{text}</answer>", "stop", 0, fingerprint(ids, logprobs))


def valued(
    again: Callable[[int, int], str], env: type[Env] = Pulls, count: int = 2, gamma: float = 0.5
) -> tuple[list[list[float | None]], list[Episode], int]:
    """The values by member and turn, the continuations, and their tokens.

    Of two turns with Dragon first in members 0 and 1, and Phoenix first in member 2.
    """
    setup = Setup("pulls", env, 2, 1, 2, think=False, chat=CHAT, max_tokens=64)
    found: list[Episode] = []

    async def play() -> tuple[list[Group], int]:
        first = BySeat(lambda member, turn: "Phoenix" if member + turn > 1 else "Dragon", PLAYED)
        groups = await run_groups(first, setup, [0], 3, PLAYED)
        what = BySeat(again, AGAIN), {"pulls": setup}, groups, AGAIN, count, gamma, 8
        return await value_turns(*what, found.append)

    (group,), tokens = asyncio.run(play())
    return [[turn.state_value for turn in each.turns] for each in group.episodes], found, tokens


def test_a_value_is_the_mean_return_of_the_continuations_of_its_state() -> None:
    # Even continuations are Phoenix, 1 a turn; odd ones are no action, at a penalty of .1 a turn.
    # First turn:  (1 + .5 · 1 − .1 − .5 · .1) / 2 = .675     second turn: (1 − .1) / 2 = .45
    def again(member: int, turn: int) -> str:
        return "Phoenix" if member % 2 == 0 else "what"

    values, found, tokens = valued(again)
    assert values == [[pytest.approx(0.675), pytest.approx(0.45)]] * 3
    # The first state is everyone's, and members 0 and 1 said the same: three states in all.
    assert len(found) == 6
    played = [turn for each in found for turn in each.turns[1 if each.member >= 2 else 0 :]]
    assert tokens == sum(len(turn.completion.token_ids or ()) for turn in played)


def test_continuations_meet_the_events_of_their_episode() -> None:
    values, found, _ = valued(lambda member, turn: "Phoenix", Luck, count=2)
    assert len(found) == 12, "no two members share their noise"
    for place in range(0, 12, 2):
        assert found[place].turns[-1].reward == found[place + 1].turns[-1].reward
    assert len({value for each in values for value in each}) > 1


def test_a_failed_continuation_is_left_out_unless_all_of_a_state_fail() -> None:
    one, _, _ = valued(lambda member, turn: "Phoenix" if member % 2 else "lost")
    assert one == [[1.5, 1.0]] * 3
    none, _, _ = valued(lambda member, turn: "lost")
    assert none == [[0.0, 0.0]] * 3


def test_an_environment_without_a_way_back_is_refused() -> None:
    with pytest.raises(RagenError, match=r"cannot go back to turn 0: .*run `ragen check` on it"):
        valued(lambda member, turn: "Phoenix", Forgetful)


def test_failed_episodes_get_no_values() -> None:
    lost = Episode("pulls", 0, 0, 0, 0, (), "error", False, True, False)
    setup = Setup("pulls", Pulls, 2, 1, 2, think=False, chat=CHAT)
    what = BySeat(lambda member, turn: "Phoenix", AGAIN), {"pulls": setup}
    group = Group((replace(lost, member=1),))
    found = asyncio.run(value_turns(*what, [group], AGAIN, 2, 1.0, 8, lambda _: None))
    assert found == ([group], 0)
