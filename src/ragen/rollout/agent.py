"""Playing one task by an existing agent: its calls go through the gateway to the policy."""

from __future__ import annotations

import json
from dataclasses import replace

from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Prompt, StopReason, Turn
from ragen.core.user_code import UserCodeError
from ragen.gateway.messages import Refused
from ragen.gateway.session import Budget, Session
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import PlayerPolicy
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
        RagenError: The agent cannot be loaded, or the policy gives no token ids.
    """
    if isinstance(policy, PlayerPolicy) or isinstance(seat, PlayerPolicy) or setup.chat is None:
        raise RagenError(
            "an agent needs a policy whose tokens are known: a model, a folder or a run"
        )
    played = _Played(setup, spec, _Calls(policy, seat))
    try:
        env = await setup.open_env()
        try:
            await played.play(env)
            await played.apply_terms()
        finally:
            await env.call(env.close)
    except UserCodeError as failure:
        played.stop_reason = "timeout" if failure.timed_out else "error"
        played.error, played.success = str(failure), False
    setup.venue.ended()
    return played.episode()


class _Played:
    """A task while the agent works on it."""

    def __init__(self, setup: Setup, spec: EpisodeSpec, calls: _Calls) -> None:
        assert setup.chat is not None
        budget = Budget(
            setup.turns,
            setup.max_tokens,
            setup.max_length,
            setup.temperature,
            setup.think,
            setup.prefilled,
            setup.format_penalty,
        )
        self.setup, self.spec, self.calls = setup, spec, calls
        self.session = Session(setup.chat, budget, calls.complete, spec.call_seed)
        self.stop_reason: StopReason = "failed"
        self.reward, self.success = 0.0, False
        self.error: str | None = None
        self.shown: str | None = None
        self.turns: tuple[Turn, ...] = ()
        self.others: tuple[Turn, ...] = ()

    async def play(self, env: GuardedEnv) -> None:
        agent = self.setup.agent
        assert agent is not None
        task = json.loads(await env.call(env.reset, self.spec.level_seed, self.spec.noise_seed))
        outcome = await agent.work(task, self.session, self.setup.timeout_s)
        self.turns, self.others = self.session.turns()
        if self.session.failure is not None:
            raise self.session.failure
        failure = self.calls.failure
        if failure is not None:
            self.stop_reason, self.error = failure.stop_reason, str(failure)
        elif outcome.timed_out:
            self.stop_reason, self.error = "timeout", outcome.error
        elif outcome.error is not None:
            self.stop_reason = "failed" if self.session.made else "error"
            self.stop_reason = "context" if self.session.is_full else self.stop_reason
            self.error = outcome.error
        elif not self.session.made:
            self.stop_reason, self.error = "error", "the agent has returned without a call"
        else:
            self.reward = await env.call(env.step, json.dumps(outcome.value))
            self.success = bool(env.info["success"])
            self.stop_reason = "solved" if self.success else "failed"
            self.shown = env.observation

    async def apply_terms(self) -> None:
        """Give the last turn the reward, and every turn its reward terms."""
        terms = weights_for("turn", self.setup.reward_terms)
        made = [*self.turns]
        if made:
            made[-1] = replace(made[-1], reward=self.reward)
        self.turns = tuple([await apply_reward_terms(turn, terms) for turn in made])

    def episode(self) -> Episode:
        terminated = self.stop_reason in ("solved", "failed")
        return Episode(
            self.setup.env,
            self.spec.level_seed,
            self.spec.noise_seed,
            self.spec.group,
            self.spec.member,
            self.turns,
            self.stop_reason,
            terminated,
            not terminated,
            self.success,
            self.error,
            self.shown,
            others=self.others,
        )


class _Calls:
    """The policy of one episode.

    A seat answers an episode's requests one after the other, so the first conversation of the agent
    has it, up to a fork. Other calls do without: then no reply depends on which came first.
    """

    def __init__(self, policy: Policy, seat: Policy) -> None:
        self._policy, self._seat = policy, seat
        self._count = 0
        self._last_in_seat = -1
        self.failure: NoCompletion | None = None

    async def complete(self, prompt: Prompt, parent: int) -> Completion:
        """Sample the completion of a call that continues another one (−1: none)."""
        in_seat = parent == self._last_in_seat
        self._last_in_seat = -2 if in_seat else self._last_in_seat  # it is taken
        try:
            completion = await (self._seat if in_seat else self._policy).complete(prompt)
        except NoCompletion as failure:
            self.failure = failure
            raise Refused(400, "no_completion", str(failure)) from failure
        if in_seat:
            self._last_in_seat = self._count
        self._count += 1
        return completion
