"""Playing one task by an existing agent: its calls go through the gateway to the policy."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Prompt
from ragen.gateway.endpoint_chat import EndpointChat
from ragen.gateway.messages import Refused
from ragen.gateway.session import Budget, Session
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.playing import Playing
from ragen.rollout.policies import NoCompletion, Policy
from ragen.rollout.reward_terms import apply_reward_terms, weights_for
from ragen.rollout.setup import EpisodeSpec, Setup


async def play_task(
    policy: Policy | PlayerPolicy, seat: Policy | PlayerPolicy, setup: Setup, spec: EpisodeSpec
) -> Episode:
    """Let the agent work on one task, and return its calls as an episode.

    `seat` is the `policy` for one request after the other (`Seating`). An agent that fails before
    its first call, or passes its time limit, gives a failed episode. One that fails later has
    earned nothing: it is often the policy that misled it.

    Raises:
        RagenError: The agent cannot be loaded, or the policy is a player.
    """
    if isinstance(policy, PlayerPolicy) or isinstance(seat, PlayerPolicy):
        raise RagenError("an agent calls a language model: name a model, a run or an endpoint")
    task = _Task(policy, seat, setup, spec)
    return await task.run(task.play)


class _Task(Playing):
    """A task while the agent works on it.

    A seat answers an episode's requests one after the other, so the first conversation of the agent
    has it, up to a fork. Other calls do without: then no reply depends on which came first.
    """

    def __init__(self, policy: Policy, seat: Policy, setup: Setup, spec: EpisodeSpec) -> None:
        super().__init__(setup, spec, "failed")
        budget = Budget(
            setup.turns,
            setup.max_tokens,
            setup.max_length,
            setup.temperature,
            setup.think,
            setup.prefilled,
            setup.format_penalty,
            setup.params.get("max_tokens") or sys.maxsize,
        )
        self._policy, self._seat = policy, seat
        self._session = Session(
            setup.chat or EndpointChat(), budget, self._complete, spec.call_seed
        )
        self._failure: NoCompletion | None = None

    async def play(self, env: GuardedEnv) -> None:
        agent, session = self.setup.agent, self._session
        assert agent is not None
        task = json.loads(await env.call(env.reset, self.spec.level_seed, self.spec.noise_seed))
        outcome = await agent.work(task, session, self.setup.timeout_s)
        turns, self.others = session.turns()
        self.turns = [*turns]
        if session.failure is not None:
            raise session.failure
        failure = self._failure
        if failure is not None:
            self.stop_reason, self.error = failure.stop_reason, str(failure)
        elif outcome.timed_out:
            self.stop_reason, self.error = "timeout", outcome.error
        elif outcome.error is not None:
            self.stop_reason = "failed" if session.made else "error"
            self.stop_reason = "context" if session.is_full else self.stop_reason
            self.error = outcome.error
        elif not session.made:
            self.stop_reason, self.error = "error", "the agent has returned without a call"
        else:
            reward = await env.call(env.step, json.dumps(outcome.value))
            self.turns[-1:] = [replace(turn, reward=reward) for turn in self.turns[-1:]]
            self.success = bool(env.info["success"])
            self.stop_reason = "solved" if self.success else "failed"
            self.final = env.observation, None, ()
        terms = weights_for("turn", self.setup.reward_terms)
        self.turns = [await apply_reward_terms(turn, terms) for turn in self.turns]

    async def _complete(self, prompt: Prompt, is_first: bool) -> Completion:
        try:
            return await (self._seat if is_first else self._policy).complete(prompt)
        except NoCompletion as failure:
            if failure.stop_reason == "context":  # agents shorten their messages then
                self._session.is_full = True
                raise Refused(400, "context_length_exceeded", str(failure)) from failure
            self._failure = failure
            raise Refused(400, "no_completion", str(failure)) from failure
