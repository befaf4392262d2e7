"""The rules between sections, as a table, and the keys that some settings leave unread.

A `Rule` says when a config breaks it and, in one line, what to set instead. `Config` evaluates the
rules in their order and refuses the first that is broken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, get_args

from ragen.config.kinds import DETECTOR, ESTIMATOR, LOSS, TERM
from ragen.config.sections import TRACKERS, Response, Sections

LARGEST_EPISODE_CLIP = 0.05
"""Largest clip bound for GSPO. An episode's mean log-ratio stays within some thousandths of 0, and
the paper (arXiv:2507.18071) clips at 3e-4 and 4e-4: PPO's .2 would clip nothing."""

VLLM_TEMPERATURES = (0.01, 2.0)
"""Range of the temperatures above 0 that vLLM uses unchanged (``vllm.sampling_params``)."""

CRITIC = ("gae", "bi_level_gae")
"""Estimators that use a critic. All others but `reinforce_pp` compare the episodes of a group."""

STD_DIVIDES = ("grpo", "gigpo")
"""Estimators that divide by a group's std. The division gives any difference within a group full
size, even a difference that only the KL penalty makes."""


class Rule(NamedTuple):
    """What the sections demand of each other.

    `message` is one line with the remedy, formatted with the config as ``c``.
    """

    broken: Callable[[Sections], bool]
    message: str


def _estimator_in(c: Sections, *names: str) -> bool:
    """Whether the estimator is one of `names` or from outside, where it may work like them."""
    return c.advantage.name in names or c.advantage.name not in ESTIMATOR.names


def _compares(c: Sections) -> bool:
    """Whether the estimator is one of RAGEN's that compare the episodes of a group."""
    own = c.advantage.name in ESTIMATOR.names
    return own and c.advantage.name not in (*CRITIC, "reinforce_pp")


def _alone(c: Sections) -> bool:
    """Whether a group is a single episode, which cannot be compared with others."""
    return c.rollout.group_size < 2


def _normalises_twice(c: Sections) -> bool:
    """Whether the estimator repeats or undoes the normalisation of the rewards."""
    name, how, over = c.advantage.name, c.reward.normalise, c.reward.over
    if how == "identity":
        return False
    if over == "group":
        return _compares(c)
    if how == "mean":
        return _compares(c) or name == "reinforce_pp"
    rescales = name in (*STD_DIVIDES, "reinforce_pp", "reinforce_pp_baseline")
    return how == "mean_std" and rescales


def _filters(c: Sections) -> bool:
    return c.filter.rule != "all" or not c.filter.include_zero


def _unknown_trackers(c: Sections) -> bool:
    return not {name.strip() for name in c.record.trackers.split(",")} <= {"", *TRACKERS}


RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: c.loss.name == "nll",
        'loss.name = "nll" learns from demonstrations (`ragen base`), not from episodes of its '
        'own; train with "ppo_clip"',
    ),
    Rule(
        lambda c: _compares(c) and _alone(c),
        'advantage.name = "{c.advantage.name}" compares the episodes of a group: '
        "set rollout.group_size to 2 or more",
    ),
    Rule(
        lambda c: c.advantage.name == "bi_level_gae" and c.reward.placement != "turn",
        'advantage.name = "bi_level_gae" credits turns with their own rewards: '
        'set reward.placement to "turn"',
    ),
    Rule(
        lambda c: c.reward.normalise != "identity" and c.reward.over == "group" and _alone(c),
        'reward.over = "group" compares the episodes of a group: '
        "set rollout.group_size to 2 or more",
    ),
    Rule(
        _normalises_twice,
        'advantage.name = "{c.advantage.name}" normalises rewards itself, so reward.normalise = '
        '"{c.reward.normalise}" over the {c.reward.over} would be done twice or undone: '
        'set reward.normalise to "identity"',
    ),
    Rule(
        lambda c: c.loss.kl > 0 and c.loss.kl_kind == "k1" and c.advantage.name in STD_DIVIDES,
        'advantage.name = "{c.advantage.name}" divides by a std of rewards, which a KL penalty in '
        'the reward (loss.kl_kind = "k1") would enter; use "k3" or "k2", or loss.kl = 0',
    ),
    Rule(
        lambda c: not re.fullmatch(r"local|vllm|https?://\S+", c.rollout.sampler),
        "rollout.sampler = {c.rollout.sampler!r}: expected local, vllm, or the URL of a vLLM "
        "server, such as http://127.0.0.1:8000",
    ),
    Rule(
        lambda c: not all(name.strip() for name in c.lora.targets.split(",")),
        "lora.targets = {c.lora.targets!r}: expected all-linear, or names of layers separated by "
        "commas, such as q_proj,v_proj",
    ),
    Rule(
        _unknown_trackers,
        "record.trackers = {c.record.trackers!r}: expected nothing, or names separated by commas "
        f"from {', '.join(TRACKERS)}",
    ),
    Rule(
        lambda c: c.rollout.max_tokens >= c.model.max_length,
        "rollout.max_tokens must be below model.max_length",
    ),
    Rule(
        lambda c: _filters(c) and _alone(c),
        "a filter on spread compares the episodes of a group: set rollout.group_size to 2 or more",
    ),
    Rule(
        lambda c: (
            c.filter.value > 1 and not (c.filter.rule == "top_k" and c.filter.value.is_integer())
        ),
        "filter.value = {c.filter.value:g}: expected a share up to 1, or a whole number of groups "
        'with filter.rule = "top_k"',
    ),
    Rule(
        lambda c: c.filter.value > c.rollout.num_groups,
        "filter.value = {c.filter.value:g}: a step has {c.rollout.num_groups} groups "
        "(rollout.num_groups), so that nothing would be filtered; set fewer, or a share",
    ),
    Rule(
        lambda c: c.rollout.refill > 0 and c.filter.include_zero,
        "rollout.refill replaces groups without spread of reward, which the filter must then leave "
        "out: set filter.include_zero = false",
    ),
    Rule(
        lambda c: (
            c.loss.name == "gspo" and max(c.loss.clip_low, c.loss.clip_high) > LARGEST_EPISODE_CLIP
        ),
        'loss.name = "gspo" clips the mean ratio of a whole episode, which hardly moves: '
        "set loss.clip_low = 3e-4 and loss.clip_high = 4e-4, "
        f"{LARGEST_EPISODE_CLIP:g} at most",
    ),
    Rule(
        lambda c: 0 < c.loss.dual_clip <= 1,
        "loss.dual_clip = {c.loss.dual_clip:g}: expected a bound above 1, or 0 for none",
    ),
    Rule(
        lambda c: not c.reward.terms.keys().isdisjoint(TERM.names) and not c.prompt.think,
        "reward.terms are about thoughts: set prompt.think = true",
    ),
    Rule(
        lambda c: (
            "reward_drop" in c.guard.responses and not (c.eval.every > 0 and c.eval.episodes > 0)
        ),
        "guard.responses.reward_drop compares evaluations: set eval.every",
    ),
    Rule(
        lambda c: (
            "mi_drop" in c.guard.responses
            and not (c.diagnose.information_every > 0 and c.prompt.think)
        ),
        "guard.responses.mi_drop compares measures of thoughts: set diagnose.information_every "
        "above 0 and prompt.think = true",
    ),
    Rule(
        lambda c: c.budget == "updates" and c.guard.response("empty_filter") in ("off", "log"),
        'budget = "updates" has no end where the filter keeps nothing: set '
        'guard.responses.empty_filter to "stop" or "rollback"',
    ),
    Rule(
        lambda c: c.guard.responses.get("stalled") == "rollback",
        "a run that hangs cannot go back by itself: set guard.responses.stalled to "
        '"stop" and resume it',
    ),
    Rule(
        lambda c: c.guard.remedy == "filter" and _alone(c),
        'guard.remedy = "filter" compares the episodes of a group: '
        "set rollout.group_size to 2 or more",
    ),
)
"""The rules in the order in which they are checked."""


def first_broken(config: Sections) -> str | None:
    """The message of the first rule that a config breaks, if there is one.

    Example:
        >>> first_broken(Sections()) is None
        True
        >>> first_broken(Sections.model_validate({"rollout": {"max_tokens": 2000}}))
        'rollout.max_tokens must be below model.max_length'
    """
    if wrong := next(_wrong_entries(config), None):
        return wrong
    for rule in RULES:
        if rule.broken(config):
            return rule.message.format(c=config)
    return None


def _wrong_entries(config: Sections) -> Iterator[str]:
    """The messages about wrong entries of the open tables and wrong temperatures for vLLM."""
    for name, weight in config.reward.terms.items():
        if complaint := TERM.complaint(name):
            yield f"reward.terms.{name}: {complaint}"
        if type(weight) not in (int, float) or not 0 <= weight < math.inf:
            yield f"reward.terms.{name} = {weight!r}: expected a number ≥ 0"
    for name, response in config.guard.responses.items():
        if complaint := DETECTOR.complaint(name):
            yield f"guard.responses.{name}: {complaint}"
        if response not in get_args(Response):
            yield f"guard.responses.{name} = {response!r}: expected off, log, stop or rollback"
    if config.rollout.sampler == "local":
        return
    both = {"rollout": config.rollout.temperature, "eval": config.eval.temperature}
    for section, temperature in both.items():
        if reason := vllm_refuses(temperature):
            greedy = ", or greedily at 0" if section == "eval" else ""
            yield f"{section}.temperature = {temperature:g}: {reason}{greedy}"


def vllm_refuses(temperature: float) -> str | None:
    """Why vLLM cannot sample at a temperature, if so.

    Example:
        >>> vllm_refuses(0.0) is vllm_refuses(0.5) is None
        True
        >>> vllm_refuses(3.0)
        'vLLM samples at 0.01 to 2'
    """
    low, high = VLLM_TEMPERATURES
    if temperature == 0 or low <= temperature <= high:
        return None
    return f"vLLM samples at {low:g} to {high:g}"


class Use(NamedTuple):
    """When a key is read: as a test of the config, and in words."""

    holds: Callable[[Sections], bool]
    words: str


_RANKS = Use(lambda c: c.filter.rule in ("top_k", "top_p"), 'filter.rule = "top_k" or "top_p"')
_CRITIC = Use(
    lambda c: _estimator_in(c, *CRITIC),
    'an advantage.name that uses a critic, "gae" or "bi_level_gae"',
)

_LORA = Use(lambda c: c.lora.rank > 0, "lora.rank above 0")

_EVALUATES = Use(lambda c: c.eval.episodes > 0, "eval.episodes above 0")

READ_WITH: Mapping[str, Use] = MappingProxyType(
    {
        "prompt.history_thoughts": Use(
            lambda c: c.prompt.think and c.prompt.window != 1,
            "prompt.think = true and prompts that show earlier turns (prompt.window)",
        ),
        "model.critic": _CRITIC,
        "lora.alpha": _LORA,
        "lora.targets": _LORA,
        "rollout.gpu_memory": Use(
            lambda c: c.rollout.sampler == "vllm", 'rollout.sampler = "vllm"'
        ),
        "reward.placement": Use(
            lambda c: _estimator_in(c, *CRITIC, "reinforce_pp", "gigpo"),
            "an advantage.name that looks inside an episode: "
            '"gae", "bi_level_gae", "reinforce_pp" or "gigpo"',
        ),
        "reward.over": Use(
            lambda c: c.reward.normalise != "identity", 'a reward.normalise other than "identity"'
        ),
        "filter.score": _RANKS,
        "filter.value": _RANKS,
        "advantage.gamma": Use(
            lambda c: _estimator_in(c, "gae", "reinforce_pp"),
            'advantage.name = "gae" or "reinforce_pp"',
        ),
        "advantage.gae_lambda": _CRITIC,
        "advantage.turn_gamma": Use(
            lambda c: _estimator_in(c, "bi_level_gae", "gigpo"),
            'advantage.name = "bi_level_gae" or "gigpo"',
        ),
        "loss.dual_clip": Use(
            lambda c: c.loss.name == "ppo_clip" or c.loss.name not in LOSS.names,
            'loss.name = "ppo_clip"',
        ),
        "loss.kl_kind": Use(lambda c: c.loss.kl > 0, "loss.kl above 0"),
        "update.critic_lr": _CRITIC,
        "eval.every": _EVALUATES,
        "eval.temperature": _EVALUATES,
        "diagnose.information_every": Use(lambda c: c.prompt.think, "prompt.think = true"),
        "guard.remedy": Use(
            lambda c: "rollback" in c.guard.responses.values(), 'a "rollback" among guard.responses'
        ),
    }
)
"""Keys that are read only with certain settings; `reading.resolve` refuses them otherwise. All
other keys are always read."""
