"""Functions from outside, each checked by a call with an example."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import torch

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.batch import TokenFields
from ragen.algorithms.estimator import Credit, compares_group, estimate, needs_continuations
from ragen.algorithms.filters import find_score
from ragen.algorithms.losses import find_loss, policy_loss
from ragen.chat.tool_calls import find_tool_parser
from ragen.config.config import Config
from ragen.config.extensions import (
    DETECTOR,
    ESTIMATOR,
    ESTIMATOR_INPUTS,
    LOSS,
    SCORE,
    TERM,
    TOOL_PARSER,
    Kind,
    judged_by,
    load,
)
from ragen.core.errors import RagenError
from ragen.core.inputs import names_input
from ragen.core.plugins import load_object
from ragen.core.types import Completion, Episode, Group, Prompt, Turn
from ragen.core.user_code import UserCodeError, boundary
from ragen.diagnostics.detectors import Detection, find_detector
from ragen.envs.adapters.agent import AgentEnv
from ragen.envs.registry import env_class
from ragen.rollout.reward_terms import find_term, term_values, weights_for

Check = Callable[[str], str | None]
"""Calls the function of a name with an example; says what is wrong with its result, if anything."""

PROMPT = Prompt((), (1, 2), 0, 8, 1.0, 0)
REPLY = Completion((5, 6), (-0.5, -1.5), "<think>left</think><answer>Left</answer>", "stop", 0)
TURN = Turn("P _ G", PROMPT, REPLY, "left", (0, 1), ("Left",), ("Left",), 1.0, 0.0, True, "0")
LOST = Episode("example", 0, 0, 0, 0, (replace(TURN, reward=0.0),), "failed", True, False, False)
WON = replace(LOST, member=1, turns=(TURN,), stop_reason="solved", success=True)
"""The records of the examples: a group of two episodes, each of one turn."""


def check_function(name: str) -> str:
    """Check a function that a config may name, and return its kind, such as ``"loss"``.

    The name is like ``path/to/file.py:name``. An entry point has the kind of its group. Otherwise
    the parameters show the kind: an estimator names some of `ESTIMATOR_INPUTS`, a loss takes
    ``(logprobs_N, tokens)``, a filter score ``(group)``, a detector ``(history)``, a tool parser
    ``(reply)``. A reward term annotates its parameter with `Turn`, `Episode` or
    ``Sequence[Episode]``. The function is then called with an example.

    Raises:
        RagenError: It cannot be loaded, it is of no kind, or its result is not what the kind asks.
    """
    load.cache_clear()  # The file may have been edited since it was loaded.
    kind, check = _kind_of(name)
    try:
        with boundary(f"the {kind.noun} {name}", timeout_s=30.0):
            complaint = check(name)
    except UserCodeError as failure:
        if isinstance(failure.__cause__, RagenError):
            raise failure.__cause__ from None
        raise RagenError(f"{name} ({kind.noun}) failed on an example: {failure.reason}") from None
    if complaint:
        raise RagenError(f"{name} ({kind.noun}) {complaint}")
    return kind.noun


def _kind_of(name: str) -> tuple[Kind, Check]:
    if ":" not in name:
        return next((kind, check) for kind, _, check in _CHECKS if kind.complaint(name) is None)
    function = load_object(name, kind="function", accepts=callable).object
    for kind, parameters, check in _CHECKS:
        if any(names_input(function, parameter) for parameter in parameters):
            return kind, check
    try:
        judged_by(function)
    except ValueError:
        raise RagenError(
            f"{name} is of no kind that RAGEN knows: its parameters are neither an estimator's "
            "(rewards_ES, mask_ES, …), a loss's (logprobs_N, tokens), a filter score's (group), a "
            "detector's (history), a tool parser's (reply) nor a reward term's (annotated with "
            "Turn, Episode or Sequence[Episode])"
        ) from None
    return TERM, _check_term


def _check_estimator(name: str) -> str | None:
    mask_ES = torch.tensor([[True, True, True], [True, True, False]] * 2)
    turn_ES = torch.tensor([[0, 0, 1]] * 4).where(mask_ES, -1)
    rewards_ES = torch.tensor([[0.0, 0, 1], [0, 0.5, 0], [0, 0, 0], [1, 0, 0]]) * mask_ES
    credit = estimate(
        find_estimator(name),
        rewards_ES=rewards_ES,
        mask_ES=mask_ES,
        values_ES=0.5 * mask_ES,
        turn_ES=turn_ES,
        turn_ends_ES=torch.tensor([[False, True, True]] * 4) & mask_ES,
        state_ES=turn_ES,
        thought_ES=turn_ES == 0,
        state_values_ES=0.5 * mask_ES,
        success_E=torch.tensor([True, False, False, True]),
        group_E=torch.tensor([0, 0, 1, 1]),
        gamma=0.95,
        gae_lambda=1.0,
        step_weight=1.0,
        whiten=False,
    )
    if not isinstance(credit, Credit):
        return f"returned a {type(credit).__name__}: a Credit is expected"
    for field in (credit.advantages_ES, credit.returns_ES):
        if field is None:
            continue
        if field.shape != mask_ES.shape or not bool(field.isfinite().all()):
            return "returned advantages that are not finite and (E, S), as rewards_ES is"
        if bool((field != 0)[~mask_ES].any()):
            return "returned advantages that are not 0 off the mask"
    return None


def _check_loss(name: str) -> str | None:
    count = 4
    logprobs_N = torch.linspace(-2.0, -0.5, count, requires_grad=True)
    tokens = TokenFields(
        token_ids_N=torch.arange(count),
        mask_N=torch.ones(count, dtype=torch.bool),
        weights_N=torch.full((count,), 1 / count),
        episode_N=torch.tensor([0, 0, 1, 1]),
        sampled_logprobs_N=logprobs_N.detach(),
        old_logprobs_N=logprobs_N.detach() - 0.1,
        reference_logprobs_N=logprobs_N.detach(),
        advantages_N=torch.tensor([1.0, -1.0, 0.5, -0.5]),
    )
    loss = policy_loss(
        find_loss(name), logprobs_N, tokens, clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    if loss.value.ndim or not bool(loss.value.isfinite()):
        return f"returned the value {loss.value}: a finite scalar is expected"
    loss.value.backward()  # type: ignore[no-untyped-call]
    if logprobs_N.grad is None or not bool(logprobs_N.grad.isfinite().all()):
        return "has no finite gradient with respect to logprobs_N"
    return None


def _check_score(name: str) -> str | None:
    return _refuse_infinite(find_score(name)(Group((LOST, WON))))


def _check_term(name: str) -> str | None:
    term = find_term(name)
    examples: dict[str, Turn | Episode | tuple[Episode, ...]]
    examples = {"turn": TURN, "episode": WON, "episodes": (LOST, WON)}
    asyncio.run(term_values(f"the reward term {name}", term, examples[judged_by(term)]))
    return None


def _refuse_infinite(number: float) -> str | None:
    value = float(number)
    return None if math.isfinite(value) else f"returned {value}: a finite number is expected"


def _check_detector(name: str) -> str | None:
    history = {"reward/mean": {step: 1 / step for step in range(1, 21)}}
    for example in ({}, history):
        detection = find_detector(name)(example)
        if not isinstance(detection, Detection | None):
            return f"returned a {type(detection).__name__}: a Detection or None is expected"
    return None


def _check_parser(name: str) -> str | None:
    for example in ("B A C", '<call>{"name": "compare", "arguments": {}}</call>'):
        with suppress(ValueError):  # its way to refuse a reply
            find_tool_parser(name)(example)
    return None


_CHECKS: tuple[tuple[Kind, Iterable[str], Check], ...] = (
    (LOSS, ["logprobs_N"], _check_loss),
    (ESTIMATOR, ESTIMATOR_INPUTS, _check_estimator),
    (SCORE, ["group"], _check_score),
    (TERM, [], _check_term),
    (DETECTOR, ["history"], _check_detector),
    (TOOL_PARSER, ["reply"], _check_parser),
)
"""Each kind with the parameters that it is known by, any one of them, and its check. An annotation
shows a reward term."""


def refuse_unfit(config: Config) -> None:
    """Refuse an estimator whose inputs the run cannot provide."""
    name, estimator = config.advantage.name, find_estimator(config.advantage.name)
    if config.rollout.group_size < 2 and compares_group(estimator):
        raise RagenError(
            f"advantage.name = {name!r} compares the episodes of a group (group_E): set "
            "rollout.group_size to 2 or more"
        )
    terms, has_k1 = config.reward.terms, config.may_use_kl and config.loss.kl_kind == "k1"
    others = has_k1 or config.reward.normalise != "identity" or terms != weights_for("turn", terms)
    old = config.engine.max_staleness > 0 or config.diagnose.gradients_every > 0
    is_agent = any(issubclass(env_class(env), AgentEnv) for env in config.by_env())
    if needs_continuations(estimator) and (others or old or is_agent):
        raise RagenError(
            f"advantage.name = {name!r} compares rewards with those of continuations, which the "
            "present weights play from snapshots: it takes an environment and no agent, "
            'reward.normalise = "identity", no KL penalty of the kind "k1", no reward term of '
            "whole episodes, engine.max_staleness = 0 and diagnose.gradients_every = 0"
        )
