"""The records: what flows from a prompt to a training sample.

A policy reads a `Prompt` and returns a `Completion`. The parsed completion and the environment's
answer are a `Turn`; the turns of one playthrough are an `Episode`; the episodes of one prompt are a
`Group`. Episodes become `Sample`s, flat token sequences that the learner trains on. All are frozen;
a field is written once, at the moment it becomes known, and never inferred later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, str]
"""One chat message: ``{"role": "user", "content": "…"}``."""

FinishReason = Literal["stop", "length"]
"""Why sampling ended: the end-of-turn token was drawn, or `Prompt.max_tokens` was reached."""

StopReason = Literal[
    "solved", "failed", "max_turns", "max_actions", "context", "error", "timeout", "request"
]
"""Why an episode ended: the first two are the environment's own end, the next two the task's
budgets (a
limit of the environment's own counts as the second), the others cuts from outside: no room for a
prompt, an environment that raised or hung, a server that gave no completion."""

FAILED: tuple[StopReason, ...] = ("error", "timeout", "request")
"""Stop reasons of episodes in which an environment or a server failed."""

Role = Literal["policy", "reference", "critic"]
"""What a model is asked as: who acts, what it is measured from, who says what a state is worth."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything the policy conditions on for one completion, and how to sample it.

    `token_ids` is the whole sequence, `num_prefill` of its last tokens being the pre-filled start
    of the reply (``<think>``): part of the prompt, never sampled, never trained. It is ``None`` for
    policies that take messages only (chat endpoints). `seed` decides this completion's random
    numbers. `turns_dropped` earlier turns, which the context window would show, are left out
    because there was no room for them.

    Example:
        >>> question = {"role": "user", "content": "a0 P a1 G"}
        >>> prompt = Prompt((question,), (3, 10, 11, 12, 13, 4, 5), 1, 64, 1.0, 7)
        >>> prompt.token_ids[-prompt.num_prefill :]
        (5,)
    """

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...] | None
    num_prefill: int
    max_tokens: int
    temperature: float
    seed: int
    turns_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server counted for one completion: tokens of the prompt, and tokens it wrote.

    The latter include those of a thought that the server does not show.

    Example:
        >>> Usage(120, 30).prompt_tokens
        120
    """

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy said: its tokens with their logprobs, and the same as text.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was drawn from
    (after temperature). The end-of-turn token, if drawn, is the last of `token_ids`, no part of
    `text`. Both are ``None`` where the server gives none; such completions can be read, not trained
    on. `fingerprint` is the hash of ids and logprobs that whoever sampled them took there and then
    (`ragen.rollout.policies.fingerprint`); the learner takes it again from the batch it is about
    to train on
    (`ragen.engines.exactness`). ``None`` where there are no ids. `usage` is what a server counted
    where there are none.

    Example:
        >>> Completion((8, 9, 2), (-0.1, -0.7, -0.01), "Right</think>", "stop", 3).finish_reason
        'stop'
    """

    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    policy_version: int
    fingerprint: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: observation and prompt, completion, what it says, and the environment's answer.

    `thought_span` is the half-open range of `completion.token_ids` that spells the thought.
    `well_formed` says that the whole reply was valid; otherwise the format penalty is due. It and
    the reward terms are the `penalty`, which is kept apart from the environment's `reward`.
    `state_key`
    is the observable state before the turn. `info` holds the environment's last info, in
    ``effective``
    how many actions changed the state, and what `ragen.rollout.reasoning` notes of the thought.
    `snapshot` is the environment before the turn, from which it can be played on, and `picture`
    the rows of what it draws of itself (`Env.picture`), ``None`` where it draws nothing.

    Example:
        >>> p = Prompt((), (1, 2), 0, 8, 1.0, 0)
        >>> c = Completion((5, 6), (-0.1, -0.2), "go</think><answer>Up</answer>", "stop", 0)
        >>> turn = Turn("P _", p, c, "go", (0, 1), ("Up",), ("Up",), 1.0, 0.0, True, "P _")
        >>> turn.reward + turn.penalty
        1.0
    """

    observation: str
    prompt: Prompt
    completion: Completion
    thought: str | None
    thought_span: tuple[int, int] | None
    actions_asked: tuple[str, ...]
    actions_executed: tuple[str, ...]
    reward: float
    penalty: float
    well_formed: bool
    state_key: str
    info: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Mapping[str, Any] | None = None
    picture: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One environment played once.

    Running out of turns or actions ends the return without a bootstrap value: both are budgets of
    the task. A failed environment's episode is not trained on.
    `error` is the traceback of an environment that failed, or the last complaint of a server.
    `final_observation` and `final_picture` are what the environment showed after the last action,
    and ``None`` where the environment failed.

    Example:
        >>> ends = {"terminated": False, "truncated": True, "success": False}
        >>> lost = Episode("x", 10000, 17, 0, 3, (), "error", **ends, error="KeyError: 1")
        >>> lost.total_reward, lost.failed
        (0.0, True)
    """

    env: str
    level_seed: int
    noise_seed: int
    group: int
    member: int
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    terminated: bool
    truncated: bool
    success: bool
    error: str | None = None
    final_observation: str | None = None
    final_picture: tuple[str, ...] | None = None

    @property
    def total_reward(self) -> float:
        """Sum of the environment's rewards, format penalties left out."""
        return sum((turn.reward for turn in self.turns), 0.0)

    @property
    def failed(self) -> bool:
        """True where the environment raised or hung, or a server failed: nothing to learn from."""
        return self.stop_reason in FAILED


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one prompt: same environment, same level, different members.

    Example:
        >>> e = Episode("bandit", 10000, 17, 0, 0, (), "failed", True, False, False)
        >>> len(Group((e, e)).episodes)
        2
    """

    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One flat token sequence to train on, all fields of one length.

    `loss_mask` is true exactly on sampled tokens; `sampled_logprobs` is 0 elsewhere; `turn_index`
    is the episode's turn that a token belongs to as completion, −1 elsewhere; `turn_ends` marks the
    last sampled token of each turn. `episode` and `group` index the step's episodes and groups.

    Example:
        >>> mask, ends = (False, False, True, True), (False, False, False, True)
        >>> s = Sample((1, 2, 8, 9), mask, (0.0, 0.0, -0.5, -0.1), (-1, -1, 0, 0), ends, 0, 0)
        >>> [token for token, sampled in zip(s.token_ids, s.loss_mask, strict=True) if sampled]
        [8, 9]
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    sampled_logprobs: tuple[float, ...]
    turn_index: tuple[int, ...]
    turn_ends: tuple[bool, ...]
    episode: int
    group: int
