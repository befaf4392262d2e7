"""The records, from a prompt to a training sample.

A policy reads a `Prompt` and returns a `Completion`. The parsed completion and the environment's
answer are a `Turn`; the turns of one playthrough are an `Episode`; the episodes of one prompt are a
`Group`. Episodes become `Sample`s, flat token sequences for the learner. All records are frozen: a
field is written when its value becomes known, and never inferred later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ragen.core.pictures import Picture

Message = Mapping[str, str]
"""One chat message: ``{"role": "user", "content": "…"}``. One in the role ``tool`` has the ``name``
of the tool and the ``tool_call_id``, too. Pictures stand at the `ragen.core.pictures.PLACE`s."""

TokenRows = Sequence[Sequence[int]]
"""Several sequences of token ids."""

FinishReason = Literal["stop", "length", "control"]
"""Why sampling ended: the end-of-turn token was drawn, `Prompt.max_tokens` was reached, or another
control token of the chat was drawn, such as ``<|user|>``."""

StopReason = Literal[
    "solved", "failed", "max_turns", "max_actions", "context", "error", "timeout", "request"
]
"""Why an episode ended. ``solved`` and ``failed``: the environment ended it. ``max_turns`` and
``max_actions``: a budget of the task ran out (the latter also for a limit of the environment's
own). ``context``: no room for a prompt. ``error`` and ``timeout``: the environment raised or hung.
``request``: a server gave no completion."""

FAILED: tuple[StopReason, ...] = ("error", "timeout", "request")
"""Stop reasons of episodes in which an environment or a server failed."""

Role = Literal["policy", "reference", "critic"]
"""The role of a model: the policy acts, the reference is the origin of the KL divergence, and the
critic estimates values."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything the policy conditions on for one completion, and how to sample it.

    `token_ids` is the whole sequence, or ``None`` for policies that take only messages (chat
    endpoints). Its last `num_prefill` tokens are the pre-filled start of the reply (``<think>``),
    which is never sampled or trained. `seed` determines the completion's random numbers.
    `turns_dropped` is the number of earlier turns that the prompt omits for lack of room, although
    the context window includes them. `sent` has replies as the server sent them
    (`Completion.message`), by their index in `messages`: they go back to it unchanged. `pictures`
    are those of all places in `messages`, in their order; in `token_ids` each is its picture tokens
    (`ragen.core.pictures`). A prompt without ids may offer `tools` of its own.
    """

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...] | None
    num_prefill: int
    max_tokens: int
    temperature: float
    seed: int
    turns_dropped: int = 0
    pictures: tuple[Picture, ...] = ()
    sent: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, compare=False)
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """A server's token counts for one completion, including tokens of a hidden thought."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A policy's reply: its tokens with their logprobs, and its text.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was drawn from
    (after temperature). The end-of-turn token, if drawn, is the last of `token_ids` and not part of
    `text`; another control token is the last, too, and `text` spells it. If a server gives no
    tokens, both are ``None``, `usage` is its count of them, and no training is possible.
    `fingerprint` is the hash of ids and logprobs at sampling, ``None`` without ids
    (`fingerprint`); `ragen.learning.exactness` compares it with the batch. `message` is the whole
    message of a server, with signatures, ids and fields that only it knows. It is not recorded.
    """

    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    policy_version: int
    fingerprint: int | None = None
    usage: Usage | None = None
    message: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


def fingerprint(token_ids: ArrayLike, logprobs: ArrayLike) -> int:
    """A hash of sampled ids and their logprobs, below 2⁶³, so that it fits into a tensor.

    Ids are hashed as 64 bits, logprobs as float32, their precision in a batch.
    """
    ids, floats = np.asarray(token_ids, dtype="<i8"), np.asarray(logprobs, dtype="<f4")
    assert ids.shape == floats.shape, "every sampled token has one logprob"
    digest = hashlib.blake2b(ids.tobytes() + floats.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


CallRole = Literal["agent", "compaction", "auxiliary", "discarded", "budget"]
"""The role of an agent's call. ``compaction``: a summary, as the agent says, or as its messages
tell earlier replies and later ones tell its own. ``auxiliary``: the agent says so, or the call
offers no tools where others do and nothing continues it. ``discarded``: the reply was never used.
``budget``: the fixed reply after the last call that an episode may make."""

TRAINED_ROLES: tuple[CallRole, ...] = ("agent", "compaction")
"""The roles of calls that are trained on."""


@dataclass(frozen=True, slots=True)
class Call:
    """How an agent's call of the gateway belongs to its episode (`ragen.gateway`).

    `parent` is the index of the turn whose reply the call's history ends with, −1 for none; in an
    episode, `others` are numbered after `turns`. `link` says how the history matched that reply, or
    why it matched none.
    """

    parent: int
    link: str
    role: CallRole = "agent"


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: observation, prompt, parsed completion, and the environment's answer.

    `thought_span` is the half-open range of `completion.token_ids` that spells the thought. If the
    whole reply was not `valid`, `problem` says why, and the format penalty applies. The `penalty`,
    at most 0, is the sum of the format penalty and the turn's reward terms, apart from the
    `reward`: the environment's, and in a last turn what reward terms give the whole episode.
    `state_key` is the observable state before the turn, and `snapshot` the environment's state
    there, from which a branch can start. `info` holds the environment's last info, the number of
    actions that changed the state (``effective``), and facts about the thought
    (`ragen.rollout.reward_terms`). `drawing` is the environment's drawing by rows (`Env.drawing`),
    if it has one. `results` are what the calls of tools in the reply returned, one for each of
    `actions_asked`; ``None`` without calls. `completion_s` are the seconds from the prompt to its
    completion, with the wait for a free slot or server; ``None`` for players, which are no model.
    `call` is how an agent made the turn. In environments, where a turn follows the last, it is
    ``None``, but for a summary that the policy was asked for.
    `pictures` are those of the observation, in the order of their places; after calls of tools
    those of all `results` of the turn before, of which the last carried out is the observation.
    `state_value` is the mean return of continuations from before the turn, where an estimator needs
    it (`ragen.rollout.continuations`).
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
    valid: bool
    state_key: str
    info: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Mapping[str, Any] | None = None
    drawing: tuple[str, ...] | None = None
    problem: str | None = None
    results: tuple[str, ...] | None = None
    completion_s: float | None = field(default=None, compare=False)
    call: Call | None = None
    pictures: tuple[Picture, ...] = ()
    state_value: float | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One environment played once, or one task of an agent.

    Turns and actions are budgets of the task, so an episode that exhausts them gets no bootstrap
    value. Failed episodes are not trained on. `error` is the traceback of a failed environment, or
    the last error of a server. `final_observation` and `final_drawing` follow the last action, and
    are ``None`` if the environment failed. `final_pictures` are those of the final observation, or
    of the last turn's results, as in `Turn.pictures`.
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
    final_drawing: tuple[str, ...] | None = None
    final_pictures: tuple[Picture, ...] = ()
    others: tuple[Turn, ...] = ()

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards, without penalties."""
        return sum((turn.reward for turn in self.turns), 0.0)

    @property
    def failed(self) -> bool:
        """True if the environment raised or hung, or a server failed."""
        return self.stop_reason in FAILED


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one prompt: the same environment and level, sampled several times."""

    episodes: tuple[Episode, ...]

    @property
    def env(self) -> str:
        """The environment of its episodes."""
        return self.episodes[0].env


@dataclass(frozen=True, slots=True)
class Sample:
    """One flat token sequence to train on; its sequences have equal length.

    `loss_mask` is true exactly on sampled tokens; `sampled_logprobs` is 0 elsewhere. `turn_index`
    is the turn of a sampled token, and −1 elsewhere. `turn_ends` marks the last sampled token of
    each turn. `episode` and `group` are indices into the step's episodes and groups. `pictures` are
    the distinct pictures that `token_ids` show, in order of appearance.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    sampled_logprobs: tuple[float, ...]
    turn_index: tuple[int, ...]
    turn_ends: tuple[bool, ...]
    episode: int
    group: int
    pictures: tuple[Picture, ...] = ()
