"""Playing one episode: prompt, completion, parsed actions, the environment's answer, turn by turn.

The frame around the turns, with the environment's failures, is `ragen.rollout.playing`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from ragen.chat.actions import Parsed, parse
from ragen.chat.prompt import Limits
from ragen.chat.tool_calls import parse_tools, results_of, tool_messages
from ragen.core.errors import RagenError
from ragen.core.pictures import Picture, without_places
from ragen.core.types import Call, CallRole, Completion, Episode, Prompt, Turn
from ragen.core.user_code import UserCodeError
from ragen.rollout.context import Conversation, View
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.playing import Playing
from ragen.rollout.policies import NoCompletion, Policy, written_completion
from ragen.rollout.reward_terms import (
    apply_reward_terms,
    part_info,
    thought_info,
    thought_parts,
    weights_for,
)
from ragen.rollout.setup import FIRST, BranchSpec, EpisodeSpec, Setup, Start

NEARLY_FULL = "which nearly fills the context"
"""The link of a summary to the turn before it."""


async def play_episode(policy: Policy | PlayerPolicy, setup: Setup, spec: EpisodeSpec) -> Episode:
    """Play one episode to its end.

    Raises:
        RagenError: The player cannot play this environment, or a recorded turn of a branch cannot
            be rebuilt.
    """
    playthrough = _Playthrough(setup, spec)
    return await playthrough.run(lambda env: playthrough.play(env, policy))


def require_room(setup: Setup) -> None:
    """Refuse a set-up whose first prompt leaves no room for a reply.

    Raises:
        RagenError: The prompt of the first level is too long; others are at most a little shorter.
    """
    if setup.start is None or setup.agent is not None:  # which writes its prompts from the task
        return
    playthrough = _Playthrough(setup, FIRST)
    token_ids = playthrough.prompt(*playthrough.first(setup.start)).token_ids
    if token_ids is not None and not setup.has_room(token_ids):
        setup.close()
        raise RagenError(
            f"the first prompt of the environment {setup.env!r} has {len(token_ids)} tokens, which "
            f"leaves no room for a reply of rollout.max_tokens = {setup.max_tokens}: "
            f"raise model.max_length from {setup.max_length}, or lower rollout.max_tokens"
        )


def opening(setup: Setup, spec: EpisodeSpec) -> tuple[Prompt, tuple[str, ...] | None]:
    """The first prompt of an episode, and the names of the environment's actions, if it has any."""
    with closing(setup.make_env()) as env:
        playthrough = _Playthrough(setup, spec)
        prompt = playthrough.prompt(*playthrough.begin(env))
        return prompt, env.actions


def read_reply(
    setup: Setup, completion: Completion, actions: tuple[str, ...] | None, most: int
) -> Parsed:
    """The thought and at most `most` actions of a completion; one that was cut has no actions."""
    reply = setup.prefill + without_places(completion.text)
    if setup.tools:
        think = setup.think or setup.prefill != ""  # some templates always open a thought
        parsed = parse_tools(reply, setup.calls.parse, think=think, max_actions=most)
    else:
        parsed = parse(reply, think=setup.think, actions=actions, max_actions=most)
    if completion.finish_reason == "length":
        problem = f"It was cut off after {setup.max_tokens} tokens, so nothing of it was done."
        return replace(parsed, actions=(), valid=False, problem=problem, calls=())
    return parsed


def require_unchanged(setup: Setup, branch: BranchSpec) -> None:
    """Check that a recorded turn can be rebuilt as it was."""
    playthrough = _Playthrough(setup, branch)
    try:
        with closing(setup.make_env()) as env:
            playthrough.prompt(*playthrough.begin(env))
    except UserCodeError as failure:
        raise RagenError(
            f"the environment {setup.env!r} cannot go back to turn {len(branch.turns) - 1}: "
            f"{failure.reason}; run `ragen check` on it"
        ) from failure


class _Acted(NamedTuple):
    """A turn's part of the environment: the state before its actions, and what these did.

    `shown` has the observation after each of the `executed` actions, `reward` is their sum, and
    `info` is of the last one.
    """

    key: str
    snapshot: dict[str, Any]
    drawing: tuple[str, ...] | None
    executed: tuple[str, ...]
    shown: list[str]
    reward: float
    info: dict[str, Any]


class _Playthrough(Playing):
    """An episode in an environment: its turns so far and the rest of its budgets."""

    def __init__(self, setup: Setup, spec: EpisodeSpec) -> None:
        super().__init__(setup, spec, "max_turns")
        self.actions_left = setup.actions
        self.turn_terms = weights_for("turn", setup.reward_terms)
        self.pictures: tuple[Picture, ...] = ()  # of the next view

    async def play(self, env: GuardedEnv, policy: Policy | PlayerPolicy) -> None:
        try:
            await self._play_turns(env, policy)
        except NoCompletion as failure:
            self.stop_reason = failure.stop_reason
            self.error = str(failure) if failure.stop_reason == "request" else None
        self.final = env.observation, await env.call(env.drawing), self.pictures

    async def _play_turns(self, env: GuardedEnv, policy: Policy | PlayerPolicy) -> None:
        setup = self.setup
        await env.call(self.reset, env)
        conversation, view = self.opened(env)
        await env.call(self.restore, env)
        while self.num_played < setup.turns:
            prompt = self.prompt(conversation, view)
            if not setup.has_room(prompt.token_ids):
                self.stop_reason = "context"
                return
            if isinstance(policy, PlayerPolicy):
                await asyncio.sleep(0)  # a player never waits: let a request to stop be seen
                if conversation.asks_summary:
                    completion = await env.call(policy.sum_up, env.env, prompt)
                else:
                    completion = await env.call(policy.act, env.env, view.limits, prompt)
                completion_s = None
            else:
                start = time.monotonic()
                completion = await policy.complete(prompt)
                completion_s = time.monotonic() - start
            if conversation.asks_summary:
                conversation.sum_up(await self._sum_up(env, view, prompt, completion, completion_s))
                continue
            conversation.reply(completion)
            parsed = self._parse(env, completion)
            acted = await env.call(self._act, env, parsed)
            played = self._turn(view, prompt, completion, completion_s, parsed, acted)
            turn = await apply_reward_terms(played, self.turn_terms)
            self.turns.append(turn)
            if env.terminated:
                self.success = env.info["success"]
                self.stop_reason = "solved" if self.success else "failed"
                return
            # An environment's own limit counts as a budget, too.
            if env.truncated or self.actions_left == 0:
                self.stop_reason = "max_actions"
                return
            view = self._following(turn, parsed, env.observation)

    async def _sum_up(
        self,
        env: GuardedEnv,
        view: View,
        prompt: Prompt,
        completion: Completion,
        completion_s: float | None,
    ) -> str | None:
        """Record a summary as a turn without actions; ``None`` rejects it: it is not trained on."""
        parsed = read_reply(self.setup, completion, None, 1)
        if parsed.calls:
            wrong = "A summary calls no tool."
            parsed = replace(parsed, valid=False, problem=wrong, calls=())
        acted = await env.call(self._act, env, replace(parsed, thought=None, actions=()))
        role: CallRole = "compaction" if parsed.valid else "discarded"
        call = Call(len(self.turns) - 1, NEARLY_FULL, role)
        played = self._turn(view, prompt, completion, completion_s, parsed, acted)
        turn = await apply_reward_terms(replace(played, call=call), self.turn_terms)
        if not parsed.valid:
            self.others = (*self.others, turn)
            return None
        self.turns.append(turn)
        return turn.actions_asked[0]

    @property
    def num_played(self) -> int:
        """The number of turns so far; a summary costs none of the budget."""
        return sum(turn.call is None for turn in self.turns)

    def begin(self, env: GuardedEnv) -> tuple[Conversation, View]:
        """Reset the environment; returns the conversation so far and the view to play from."""
        self.reset(env)
        begun = self.opened(env)
        self.restore(env)
        return begun

    def reset(self, env: GuardedEnv) -> None:
        env.reset(self.spec.level_seed, self.spec.noise_seed)

    def opened(self, env: GuardedEnv) -> tuple[Conversation, View]:
        """The conversation and the view after a reset; those of a branch after its turns."""
        self.pictures = env.pictures
        shown = env.observation, env.pictures
        conversation, view = self.first(Start(env.rules, env.goal, env.actions, *shown))
        if isinstance(self.spec, BranchSpec):
            view = self._replay(env, conversation, self.spec)
        return conversation, view

    def first(self, start: Start) -> tuple[Conversation, View]:
        view = View(start.observation, self._limits(0), pictures=start.pictures)
        return Conversation(self.setup, start[:3]), view

    def _replay(self, env: GuardedEnv, conversation: Conversation, branch: BranchSpec) -> View:
        first = branch.turns[0]
        view = View(first.observation, self._limits(0), pictures=first.pictures)
        for turn, following in pairwise(branch.turns):
            prompt = self.prompt(conversation, view)
            self.turns.append(replace(turn, prompt=prompt))
            if turn.call is not None:
                conversation.sum_up(turn.actions_asked[0])
                continue
            conversation.reply(self._with_ids(turn.completion))
            parsed = self._parse(env, turn.completion)
            self.actions_left -= len(turn.actions_executed)
            self.pictures = following.pictures
            view = self._following(turn, parsed, following.observation)
        return view

    def restore(self, env: GuardedEnv) -> None:
        """Put the environment of a branch into its recorded state."""
        if not isinstance(self.spec, BranchSpec):
            return
        present = self.spec.turns[-1]
        assert present.snapshot is not None
        env.restore(present.snapshot, present.observation)
        if env.state()[0] != present.state_key:
            raise RagenError(
                f"the environment {self.setup.env!r} comes back to turn "
                f"{len(self.spec.turns) - 1} in another state than was recorded: its code or its "
                "parameters have changed since"
            )

    def _with_ids(self, completion: Completion) -> Completion:
        """A recorded completion with token ids; if none were recorded, ids of its text."""
        chat = self.setup.chat
        if completion.token_ids is not None or chat is None:
            return completion
        end = (chat.end,) if completion.finish_reason == "stop" else ()
        return written_completion(completion.text, lambda text: (*chat.encode_text(text), *end))

    def _following(self, turn: Turn, parsed: Parsed, observation: str) -> View:
        results = () if turn.results is None else tool_messages(parsed.calls, turn.results)
        limits = self._limits(self.num_played)
        executed = turn.actions_executed
        problem, shown = parsed.problem, self.pictures
        return View(observation, limits, turn.reward, problem, results, executed, shown)

    def _limits(self, number: int) -> Limits:
        setup = self.setup
        return Limits(number + 1, setup.turns - number, self.actions_left, setup.actions_per_turn)

    def prompt(self, conversation: Conversation, view: View) -> Prompt:
        setup, number = self.setup, len(self.turns)
        messages, token_ids, num_prefill = conversation.ask(view)
        if isinstance(self.spec, BranchSpec) and number < len(self.spec.turns):
            recorded = self.spec.turns[number]
            if conversation.asks_summary and recorded.call is None:  # the summary was rejected
                conversation.sum_up(None)
                messages, token_ids, num_prefill = conversation.ask(view)
            _require_same(token_ids, recorded.prompt.token_ids, number)
        return Prompt(
            messages,
            token_ids,
            num_prefill,
            setup.max_tokens,
            setup.temperature,
            self.spec.request_seed(number + len(self.others)),
            turns_dropped=conversation.turns_dropped,
            pictures=conversation.pictures,
            sent=conversation.sent,
        )

    def _act(self, env: GuardedEnv, parsed: Parsed) -> _Acted:
        """Carry out the actions of a reply: all that a turn asks of its environment."""
        (key, snapshot), drawing = env.state(), env.drawing()
        read: dict[str, Any] = {}
        parts: dict[str, str] = {}
        if parsed.thought is not None and env.reads_thoughts:
            parts = thought_parts(parsed.thought) if parsed.valid else {}
            reading = env.read_thought(parts.get("observation", parsed.thought))
            read = thought_info(reading, parsed.actions_asked)
            if "observation" in parts:
                read |= part_info("observation", reading)
        executed: list[str] = []
        shown: list[str] = []
        pictures: list[Picture] = []
        reward, effective = 0.0, 0
        for action in parsed.actions:
            reward += env.step(action)
            executed.append(action)
            shown.append(env.observation)
            pictures += env.pictures
            effective += bool(env.info.get("effective", True))
            self.actions_left -= 1
            if env.terminated or env.truncated:
                break
        if executed and "prediction" in parts:
            read |= part_info("prediction", env.read_thought(parts["prediction"]))
        if executed:  # every call has a result; other actions have one observation
            self.pictures = tuple(pictures) if parsed.calls else env.pictures
        info = {**(env.info if executed else {}), "effective": effective, **read}
        return _Acted(key, snapshot, drawing, tuple(executed), shown, reward, info)

    def _turn(
        self,
        view: View,
        prompt: Prompt,
        completion: Completion,
        completion_s: float | None,
        parsed: Parsed,
        acted: _Acted,
    ) -> Turn:
        setup, chat = self.setup, self.setup.chat
        chars = parsed.thought_chars
        span = chat.thought_span(completion, chars, setup.prefill) if chat is not None else None
        return Turn(
            view.observation,
            prompt,
            completion,
            parsed.thought,
            span,
            parsed.actions_asked,
            acted.executed,
            acted.reward,
            0.0 if parsed.valid else -setup.format_penalty,
            parsed.valid,
            acted.key,
            acted.info,
            acted.snapshot,
            acted.drawing,
            parsed.problem,
            results_of(parsed.calls, acted.shown) if parsed.calls else None,
            completion_s,
            pictures=view.pictures,
        )

    def _parse(self, env: GuardedEnv, completion: Completion) -> Parsed:
        most = min(self.setup.actions_per_turn, self.actions_left)
        return read_reply(self.setup, completion, env.actions, most)


def _require_same(
    rebuilt: tuple[int, ...] | None, recorded: tuple[int, ...] | None, number: int
) -> None:
    """Check that a rebuilt prompt has the recorded token ids, where ids were recorded."""
    if recorded is None or rebuilt is None or rebuilt == recorded:
        return
    raise RagenError(
        f"the prompt of turn {number} cannot be rebuilt: its tokens differ from those that the "
        "model saw; the tokenizer, its chat template, the environment or RAGEN has changed since"
    )
