"""Playing episodes: budgets, invalid replies, seeds, and environments that misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Prompt, StopReason
from ragen.envs.registry import make
from ragen.envs.worlds.bandit import Bandit
from ragen.rollout.episode import play_episode
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, solver
from ragen.rollout.setup import EpisodeSpec, Setup, make_setup
from tests.rogue import Rogue
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import TEMPLATES, tiny_tokenizer

RIGHT = "t</think><answer>Right</answer>"


def corridor(**more: Any) -> Setup:
    return replace(Setup("corridor", Rogue, timeout_s=5.0), **more)


def rogue(misdeed: str) -> Callable[[], Rogue]:
    return partial(Rogue, misdeed=misdeed)


def play(script: Any, setup: Setup | None = None, level: int = 0) -> Episode:
    policy = script if hasattr(script, "complete") else ScriptedPolicy(script)
    return asyncio.run(
        play_episode(policy, setup or corridor(), EpisodeSpec(level, 0, 0, (0, "test")))
    )


def reply(*actions: str) -> str:
    return f"t</think><answer>{' || '.join(actions)}</answer>"


# Budgets and stop reasons.


def test_records_of_a_solved_episode() -> None:
    episode = play([reply("Right", "Right"), reply("Right"), reply("Right", "Right")])
    assert (episode.stop_reason, episode.terminated, episode.truncated) == ("solved", True, False)
    assert episode.success and episode.error is None
    assert [turn.reward for turn in episode.turns] == [0.5, 0.25, 0.5]
    assert [turn.observation for turn in episode.turns] == ["A....", "..A..", "...A."]
    assert [turn.state_key for turn in episode.turns] == ["A....", "..A..", "...A."]
    assert episode.turns[0].info == {"success": False, "effective": 2}
    assert all(turn.valid and turn.penalty == 0 for turn in episode.turns)


def test_a_turn_ends_when_the_environment_terminates() -> None:
    episode = play([reply(*["Right"] * 4), reply(*["Right"] * 4)], corridor(actions_per_turn=4))
    assert episode.turns[1].actions_asked == ("Right",) * 4
    assert episode.turns[1].actions_executed == ("Right",)


@pytest.mark.parametrize(
    ("turns", "per_turn", "actions", "executed", "stop_reason"),
    [
        (3, 5, 50, [5, 5, 5], "max_turns"),
        (5, 3, 4, [3, 1], "max_actions"),
        (2, 3, 6, [3, 3], "max_actions"),
        (1, 1, 1, [1], "max_actions"),
    ],
)
def test_budgets_end_an_episode_and_actions_over_them_cost_nothing(
    turns: int, per_turn: int, actions: int, executed: list[int], stop_reason: StopReason
) -> None:
    setup = corridor(turns=turns, actions_per_turn=per_turn, actions=actions)
    episode = play(lambda prompt: reply(*["Left"] * 9), setup)
    assert [len(turn.actions_executed) for turn in episode.turns] == executed
    assert all(len(turn.actions_asked) == 9 and turn.penalty == 0 for turn in episode.turns)
    assert episode.stop_reason == stop_reason
    assert (episode.terminated, episode.truncated) == (False, True)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 9))
def test_no_budget_is_ever_exceeded(counts: list[int], per_turn: int, actions: int) -> None:
    setup = corridor(turns=len(counts), actions_per_turn=per_turn, actions=actions)
    episode = play([reply(*["Left"] * n) for n in counts], setup)
    executed = [len(turn.actions_executed) for turn in episode.turns]
    assert sum(executed) <= actions and max(executed) <= per_turn
    assert len(executed) == len(counts) or sum(executed) == actions
    for count, num_executed in zip(counts, executed, strict=False):
        assert num_executed <= count


def test_the_prompt_states_the_remaining_budgets() -> None:
    prompts: list[Prompt] = []

    def script(prompt: Prompt) -> str:
        prompts.append(prompt)
        return reply("Left", "Left") if len(prompts) == 1 else "nonsense"

    play(script, corridor(turns=3, actions=7))
    contents = [prompt.messages[-1]["content"] for prompt in prompts]
    assert [text.splitlines()[-1] for text in contents] == [
        "turns 3 actions 7 max 5",
        "turns 2 actions 5 max 5",
        "turns 1 actions 5 max 5",
    ]
    assert "reward 0.5" in contents[1] and "invalid" not in contents[1]
    assert "reward 0\ninvalid" in contents[2]


# Invalid replies.


@pytest.mark.parametrize("text", ["", "Right", "t</think><answer></answer>", reply("Fly")])
def test_an_invalid_turn_leaves_the_environment_unchanged(text: str) -> None:
    episode = play([text, RIGHT], corridor(turns=2))
    first, second = episode.turns
    assert (first.reward, first.penalty, first.valid) == (0.0, -0.1, False)
    assert first.actions_executed == () and first.info["effective"] == 0
    assert second.observation == first.observation and second.state_key == first.state_key
    assert (second.reward, second.penalty) == (0.25, 0.0)
    assert episode.reward == 0.25


def test_a_turn_has_at_most_one_format_penalty() -> None:
    episode = play([reply("Fly", "Swim", "Right")], corridor(turns=1, format_penalty=0.3))
    assert episode.turns[0].penalty == -0.3
    assert episode.turns[0].actions_executed == ("Right",)
    assert episode.turns[0].reward == 0.25


def test_a_cut_reply_is_invalid_even_if_it_is_well_formed() -> None:
    class Cut:
        async def complete(self, prompt: Prompt) -> Completion:
            return Completion(None, None, RIGHT, "length", 0)

    episode = play(Cut(), corridor(turns=1))
    assert episode.turns[0].actions_executed == () and episode.turns[0].penalty == -0.1
    assert episode.stop_reason == "max_turns"


# Seeds.


def play_groups(
    setup: Setup, group_size: int = 3, levels: Sequence[int] = (7, 8)
) -> list[list[Episode]]:
    policy = ScriptedPolicy(lambda prompt: reply("Right", "Left"))
    groups = asyncio.run(run_groups(policy, setup, levels, group_size, (0, "train", 4)))
    return [list(group.episodes) for group in groups]


def test_episodes_of_a_group_share_the_level_seed_but_not_the_noise_seed() -> None:
    groups = play_groups(corridor())
    assert [[e.level_seed for e in group] for group in groups] == [[7] * 3, [8] * 3]
    assert [[e.member for e in group] for group in groups] == [[0, 1, 2]] * 2
    assert len({e.noise_seed for group in groups for e in group}) == 6


def test_episodes_of_a_group_have_the_same_first_prompt() -> None:
    for env in ("bandit", "frozen-lake", "sokoban"):
        groups = play_groups(corridor(env=env, make=partial(make, env), turns=1), levels=range(4))
        prompts = [{str(episode.turns[0].prompt.messages) for episode in group} for group in groups]
        assert [len(seen) for seen in prompts] == [1] * 4
        assert len(set.union(*prompts)) > 1


def test_every_request_has_its_own_seed() -> None:
    request_seeds = [
        turn.prompt.seed for group in play_groups(corridor()) for e in group for turn in e.turns
    ]
    assert len(set(request_seeds)) == len(request_seeds) == 2 * 3 * 5


def test_rollouts_are_reproducible() -> None:
    slippery = corridor(make=partial(Rogue, slip=0.5))
    assert play_groups(slippery) == play_groups(slippery)
    # A single episode can be played again.
    policy = ScriptedPolicy(lambda prompt: reply("Right", "Left"))
    again = asyncio.run(play_episode(policy, slippery, EpisodeSpec(8, 1, 2, (0, "train", 4))))
    assert again == play_groups(slippery)[1][2]


@given(st.integers(1, 7))
def test_episodes_start_in_order_within_the_concurrency(concurrency: int) -> None:
    began: list[int] = []
    running, most = 0, 0

    class Watching:
        async def complete(self, prompt: Prompt) -> Completion:
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            began.append(prompt.seed)
            await asyncio.sleep(0)
            running -= 1
            return Completion(None, None, RIGHT, "stop", 0)

    setup, path = corridor(turns=1), (0, "train", 0)
    groups = asyncio.run(run_groups(Watching(), setup, [1, 2], 3, path, concurrency))
    order = [EpisodeSpec(0, g, m, path).request_seed(0) for g in range(2) for m in range(3)]
    assert began == order and most == min(concurrency, 6)
    assert [[e.member for e in g.episodes] for g in groups] == [[0, 1, 2]] * 2


# Environments that misbehave.

MISDEEDS: dict[str, str] = {
    "raise in init": "KeyError: 'no key'",
    "raise in reset": "LookupError: no such level",
    "raise in state_key": "RuntimeError: no key today",
    "hang": "longer than 0.1 s in step",
    "hang in reset": "longer than 0.1 s in reset",
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_an_environment_that_misbehaves_fails_the_episode(misdeed: str) -> None:
    start = time.monotonic()
    episode = play(lambda prompt: RIGHT, corridor(make=rogue(misdeed), timeout_s=0.1))
    assert time.monotonic() - start < 5
    stop_reason = "timeout" if misdeed.startswith("hang") else "error"
    assert (episode.stop_reason, episode.failed, episode.turns) == (stop_reason, True, ())
    assert episode.error is not None and MISDEEDS[misdeed] in episode.error
    assert (episode.terminated, episode.truncated, episode.success) == (False, True, False)


def test_turns_before_a_failure_are_kept() -> None:
    class Late(Rogue):
        def step(self, action: str) -> Any:
            if self.where == 2:
                raise ValueError("two")
            return super().step(action)

    episode = play(lambda prompt: RIGHT, corridor(make=Late))
    assert (episode.stop_reason, len(episode.turns), episode.reward) == ("error", 2, 0.5)


def test_a_limit_of_the_environment_itself_counts_as_a_budget() -> None:
    class Limited(Rogue):
        def step(self, action: str) -> Any:
            *answer, _, info = super().step(action)
            return *answer, self.where == 2, info

    episode = play(lambda prompt: RIGHT, corridor(make=Limited))
    assert (episode.stop_reason, episode.terminated, episode.truncated) == (
        "max_actions",
        False,
        True,
    )
    assert sum(len(turn.actions_executed) for turn in episode.turns) == 2


def test_snapshots_are_copies() -> None:
    class Shares(Rogue):
        def reset(self, **seeds: Any) -> Any:
            self.state = {"where": [0]}
            return super().reset(**seeds)

        def step(self, action: str) -> Any:
            answer = super().step(action)
            self.state["where"][0] = self.where
            return answer

        def get_state(self) -> Any:
            return self.state

    episode = play(lambda prompt: RIGHT, corridor(make=Shares))
    assert [t.snapshot for t in episode.turns[:3]] == [{"where": [n]} for n in (0, 1, 2)]


def test_a_bug_in_a_policy_is_raised() -> None:
    class Broken:
        async def complete(self, prompt: Prompt) -> Completion:
            raise ZeroDivisionError("in RAGEN")

    with pytest.raises(ZeroDivisionError, match="in RAGEN"):
        play(Broken())
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run_groups(Broken(), corridor(), [1], 2, (0, "train", 0)))
    assert caught.group_contains(ZeroDivisionError)


def test_a_solver_that_raises_fails_the_episode() -> None:
    setup = corridor(make=rogue("raise in solve"))
    episode = asyncio.run(
        play_episode(PlayerPolicy(lambda _: solver), setup, EpisodeSpec(0, 0, 0, (0, "eval")))
    )
    assert episode.stop_reason == "error" and "no plan" in (episode.error or "")


# Tokens.


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prefilled", [True, False])
def test_thought_spans_are_exact(template: str, prefilled: bool) -> None:
    """The tokens of the span spell the thought, wherever template and prefill start it."""
    chat = Chat(tiny_tokenizer(template))
    setup = corridor(chat=chat, prefilled=prefilled, turns=4, max_length=4096)
    prefill = setup.prefill
    thoughts = ["go right", " a <b> √ é🙂 ", "", "1\n2"]
    script = [
        f"<think>{thought}</think><answer>Left</answer>".removeprefix(prefill or "")
        for thought in thoughts
    ]
    if prefill.strip() != prefill:  # the template opens the thought with a line break
        script = [text.removeprefix("<think>") for text in script]
    end = min(chat.end_ids)
    policy = ScriptedPolicy(script, lambda text: (*chat.encode(text), end))
    episode = play(policy, setup)
    assert [turn.thought for turn in episode.turns if turn.thought is not None]
    for turn, thought in zip(episode.turns, thoughts, strict=True):
        assert turn.valid and turn.thought is not None
        assert turn.thought.strip() == thought.strip()
        assert turn.thought_span is not None and turn.completion.token_ids is not None
        spelled = chat.decode(turn.completion.token_ids[slice(*turn.thought_span)])
        assert thought.strip() in spelled and len(spelled) <= len(thought) + 2
        before = chat.decode(turn.completion.token_ids[: turn.thought_span[0]])
        assert prefill or (before.strip() and "<think>".startswith(before.strip()))


def token_policy(chat: Chat, text: str = RIGHT) -> ScriptedPolicy:
    end = min(chat.end_ids)
    return ScriptedPolicy(lambda _: text, lambda text: (*chat.encode(text), end))


def tokens(episode: Episode) -> list[tuple[int, ...]]:
    return [turn.prompt.token_ids or () for turn in episode.turns]


@pytest.mark.parametrize("style", ["compact", "paper"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_that_is_too_long_drops_its_oldest_turns(template: str, style: str) -> None:
    chat = Chat(tiny_tokenizer(template))
    setup = corridor(chat=chat, style=style, max_tokens=40, max_length=9999)
    unlimited = play(token_policy(chat), setup)
    assert [turn.prompt.turns_dropped for turn in unlimited.turns] == [0] * 5
    room = max(map(len, tokens(unlimited)[:3]))  # for the third prompt, not for the fourth
    episode = play(token_policy(chat), replace(setup, max_length=room + 40))
    assert (episode.stop_reason, len(episode.turns)) == (unlimited.stop_reason, 5)
    assert all(len(ids) <= room for ids in tokens(episode))
    assert tokens(episode)[:3] == tokens(unlimited)[:3]
    dropped = [turn.prompt.turns_dropped for turn in episode.turns]
    assert dropped[:3] == [0] * 3 and 0 < dropped[3] <= dropped[4]
    for number, turn in enumerate(episode.turns):
        contents = [message["content"] for message in turn.prompt.messages]
        system = [message["role"] for message in turn.prompt.messages].count("system")
        assert system == (style == "paper")
        first, last = contents[system], contents[-1]
        # The description of the environment stays on top, above the oldest turn that is left. The
        # current turn is kept.
        oldest = unlimited.turns[dropped[number]].observation
        assert first.startswith("Corridor") and oldest in first
        assert unlimited.turns[number].observation in last
        assert len(contents) - system == 2 * (number - dropped[number]) + 1


def test_turns_are_dropped_one_by_one_until_the_prompt_fits() -> None:
    """All turns have the same length: once the prompt is full, each turn replaces the oldest."""
    chat = Chat(tiny_tokenizer("chatml"))
    setup = corridor(chat=chat, turns=8, max_tokens=40, max_length=9999)
    policy = token_policy(chat, "t</think><answer>Left</answer>")
    lengths = list(map(len, tokens(play(policy, setup))))
    episode = play(policy, replace(setup, max_length=lengths[3] + 40))
    assert [turn.prompt.turns_dropped for turn in episode.turns] == [0, 0, 0, 0, 1, 2, 3, 4]
    windowed = play(policy, replace(setup, window=3, max_length=lengths[1] + 40))
    assert [turn.prompt.turns_dropped for turn in windowed.turns] == [0, 0, 1, 1, 1, 1, 1, 1]


def test_a_turn_that_is_too_long_by_itself_ends_the_episode() -> None:
    chat = Chat(tiny_tokenizer("chatml"))
    setup = corridor(chat=chat, max_tokens=40, max_length=9999)
    first = len(tokens(play(token_policy(chat), setup))[0])
    episode = play(token_policy(chat), replace(setup, max_length=first + 40))
    assert len(episode.turns) == 5, "a later turn by itself is as long as the first"
    empty = play(token_policy(chat), replace(setup, max_length=first + 39))
    assert (empty.stop_reason, empty.turns) == ("context", ())

    class Grows(Rogue):
        def _look(self) -> str:
            return super()._look() + "." * 500 * (self.where == 2)

    episode = play(token_policy(chat), replace(setup, make=Grows, max_length=first + 90))
    assert (episode.stop_reason, len(episode.turns)) == ("context", 2)
    assert (episode.truncated, episode.failed) == (True, False)


def test_make_setup_follows_the_config() -> None:
    config = merge("bandit", {"rollout.max_tokens": 33, "prompt.think": False})
    setup = make_setup(config, None)
    assert isinstance(setup.make(), Bandit)
    assert (setup.env, setup.turns, setup.max_tokens, setup.prefill) == (
        "bandit",
        1,
        33,
        "<answer>",
    )
    with pytest.raises(RagenError, match="did you mean 'bandit'"):
        make_setup(merge(None, {"env": "bandti"}), None)


def test_environment_time_is_counted() -> None:
    """The time of an environment that hangs is included: its reset is stopped after 0.05 s."""
    hangs = corridor(make=rogue("hang in reset"), timeout_s=0.05)
    started = time.perf_counter()
    assert play([], hangs).stop_reason == "timeout"
    assert 0.05 <= hangs.venue.seconds <= time.perf_counter() - started
    quick = corridor(turns=1)
    assert play([reply("Right")], quick).turns
    assert 0 < quick.venue.seconds < 0.05
