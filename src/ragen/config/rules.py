"""The rules between sections, as a table, and the keys that some settings leave unread.

A `Rule` says when a config breaks it and, in one line, what to set instead. `Config` refuses the
first that is broken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ragen.config.extensions import ESTIMATOR, JUDGE, LOSS, THOUGHT_TERMS
from ragen.config.sections import MOST_EPISODES, TRACKERS, Sections
from ragen.core.seeding import MAX_REFILLS, REFILL_LEVELS

EPISODE_CLIP = 0.05
"""Largest clip bound for GSPO. An episode's mean log-ratio stays within some thousandths of 0, and
the paper (arXiv:2507.18071) clips at 3e-4 and 4e-4: PPO's .2 would clip nothing."""

TEMPERATURES = (0.001, 100.0)
"""Range of the temperatures above 0. Below it, a model is as good as greedy, and logits divided by
much less overflow; above it, all tokens are about equally likely."""

VLLM_TEMPERATURES = (0.01, 2.0)
"""Range of the temperatures above 0 that vLLM uses unchanged (``vllm.sampling_params``)."""

CRITIC = ("gae", "bi_level_gae")
"""Estimators that use a critic."""

COMPARE_NOTHING = ("reinforce_pp", "raft", "vine")
"""Estimators without a critic that need no groups; all others compare the episodes of a group."""

STD_DIVIDES = ("grpo", "act_focus", "gigpo")
"""Estimators that divide by a group's std. The division gives any difference within a group full
size, even a difference that only the KL penalty makes."""


Test = Callable[[Sections], bool]


class Rule(NamedTuple):
    """A demand of the sections on each other; `message` is formatted with the config as ``c``."""

    broken: Test
    message: str


def _writes_prompts(c: Sections) -> bool:
    """True if RAGEN writes the prompts, and not an agent or the harness of a library."""
    return not c.env.name.startswith(("agent:", "verifiers:"))


def _estimator_in(c: Sections, *names: str) -> bool:
    """True for an estimator of these names, or from outside, where it may work like them."""
    return c.advantage.name in names or c.advantage.name not in ESTIMATOR.names


def _compares(c: Sections) -> bool:
    """True if the estimator is one of RAGEN's that compare the episodes of a group."""
    own = c.advantage.name in ESTIMATOR.names
    return own and c.advantage.name not in (*CRITIC, *COMPARE_NOTHING)


def _for_groups(setting: str, is_set: Test) -> Rule:
    """A setting that compares the episodes of a group, which must be more than one."""
    return Rule(
        lambda c: c.rollout.group_size < 2 and is_set(c),
        f"{setting} compares the episodes of a group: set rollout.group_size to 2 or more",
    )


def _normalises_twice(c: Sections) -> bool:
    """True if the estimator repeats or undoes the normalisation of the rewards."""
    name, how, over = c.advantage.name, c.reward.normalise, c.reward.over
    if how == "identity":
        return False
    if over == "group":
        return _compares(c)
    if how == "mean":
        return _compares(c) or name == "reinforce_pp"
    rescales = name in (*STD_DIVIDES, "reinforce_pp", "reinforce_pp_baseline")
    return how == "mean_std" and rescales


def vllm_refuses(temperature: float) -> str | None:
    """Why vLLM cannot sample at a temperature, if so."""
    low, high = VLLM_TEMPERATURES
    return None if temperature == 0 or low <= temperature <= high else _VLLM_RANGE


_VLLM_RANGE = f"vLLM samples at {VLLM_TEMPERATURES[0]:g} to {VLLM_TEMPERATURES[1]:g}"

RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: len(c.env.mix) == 1,
        "env.mix = {c.env.name}: a mixture has two environments or more; set env.name to one",
    ),
    Rule(
        lambda c: len(c.env.mix) > 0 and len(c.env.params) > 0,
        "env.params are for one environment: in a mixture, put them into env.mix, as in "
        "env.mix.NAME = {{share = 0.5, params = {{…}}}}",
    ),
    Rule(
        lambda c: c.prompt.summary == "learned" and c.prompt.window > 0,
        "prompt.window = {c.prompt.window} leaves turns out before a learned summary could tell "
        "them: set it to 0",
    ),
    Rule(
        lambda c: c.rollout.levels > 0 and c.rollout.refill > 0,
        "rollout.levels = {c.rollout.levels}, and rollout.refill plays other levels: set one "
        "of them to 0",
    ),
    Rule(
        lambda c: (
            c.engine.name == "local"
            and (max(c.engine.learners, c.engine.samplers) > 1 or c.engine.max_staleness > 0)
        ),
        "engine.learners, samplers and max_staleness are of processes beside this one: set "
        'engine.name = "ray", or leave them out',
    ),
    Rule(
        lambda c: c.engine.name == "ray" and c.rollout.sampler not in ("local", "vllm"),
        "rollout.sampler = {c.rollout.sampler}: with engine.name = ray it is local or vllm, and "
        "Ray starts the samplers",
    ),
    Rule(
        lambda c: (
            c.engine.processes != 1 and (c.engine.name == "ray" or c.rollout.sampler != "local")
        ),
        "engine.processes = {c.engine.processes}: processes are of the local engine, and sample by "
        'themselves: set it to 1, or engine.name and rollout.sampler to "local"',
    ),
    Rule(
        lambda c: c.engine.tensor_parallel > 1 and c.rollout.sampler != "vllm",
        'engine.tensor_parallel = {c.engine.tensor_parallel} needs rollout.sampler = "vllm"',
    ),
    Rule(
        lambda c: len(c.env.mix) > 0 and len(c.curriculum.stages) > 0,
        "curriculum.stages are for one environment: leave env.mix or the stages out",
    ),
    Rule(
        lambda c: c.rollout.num_groups * c.rollout.group_size > MOST_EPISODES,
        "rollout.num_groups · rollout.group_size = {c.rollout.num_groups} · {c.rollout.group_size} "
        f"episodes a step: expected at most {MOST_EPISODES}",
    ),
    Rule(
        lambda c: c.steps * c.rollout.num_groups * MAX_REFILLS >= REFILL_LEVELS,
        "steps · rollout.num_groups = {c.steps} · {c.rollout.num_groups} levels, and no level is "
        f"trained on twice: expected fewer than {REFILL_LEVELS // MAX_REFILLS}",
    ),
    Rule(
        lambda c: 0 < c.eval.temperature < 0.001,
        "eval.temperature = {c.eval.temperature:g}: expected at least 0.001, or 0 for greedy",
    ),
    Rule(
        lambda c: c.loss.name == "nll",
        'loss.name = "nll" learns from demonstrations (`ragen base`): set it to "ppo_clip"',
    ),
    _for_groups('advantage.name = "{c.advantage.name}"', _compares),
    _for_groups(
        'reward.over = "group"',
        lambda c: c.reward.normalise != "identity" and c.reward.over == "group",
    ),
    _for_groups(
        "a filter on spread", lambda c: c.filter.rule != "all" or not c.filter.include_zero
    ),
    _for_groups('guard.remedy = "filter"', lambda c: c.guard.remedy == "filter"),
    Rule(
        lambda c: c.advantage.name in ("bi_level_gae", "vine") and c.reward.placement != "turn",
        'advantage.name = "{c.advantage.name}" credits each turn with its own reward: '
        'set reward.placement to "turn"',
    ),
    Rule(
        _normalises_twice,
        'advantage.name = "{c.advantage.name}" normalises rewards itself, which repeats or undoes '
        'reward.normalise = "{c.reward.normalise}" over the {c.reward.over}: '
        'set reward.normalise to "identity"',
    ),
    Rule(
        lambda c: c.may_use_kl and c.loss.kl_kind == "k1" and c.advantage.name in STD_DIVIDES,
        'advantage.name = "{c.advantage.name}" divides by a std of rewards, and loss.kl_kind = '
        '"k1" puts the KL penalty into them: use "k3" or "k2", or loss.kl = 0 and no '
        'guard.remedy = "kl"',
    ),
    Rule(
        lambda c: not re.fullmatch(r"local|vllm|https?://\S+", c.rollout.sampler),
        "rollout.sampler = {c.rollout.sampler!r}: expected local, vllm, or the URL of a vLLM "
        "server, such as http://127.0.0.1:8000",
    ),
    Rule(
        lambda c: c.rollout.sampler != "local" and vllm_refuses(c.rollout.temperature) is not None,
        f"rollout.temperature = {{c.rollout.temperature:g}}: {_VLLM_RANGE}",
    ),
    Rule(
        lambda c: c.rollout.sampler != "local" and vllm_refuses(c.eval.temperature) is not None,
        f"eval.temperature = {{c.eval.temperature:g}}: {_VLLM_RANGE}, or greedily at 0",
    ),
    Rule(
        lambda c: not {name.strip() for name in c.record.trackers.split(",")} <= {"", *TRACKERS},
        "record.trackers = {c.record.trackers!r}: expected nothing, or names separated by commas "
        f"from {', '.join(TRACKERS)}",
    ),
    Rule(
        lambda c: c.rollout.max_tokens >= c.model.max_length,
        "rollout.max_tokens must be below model.max_length",
    ),
    Rule(
        lambda c: c.filter.value > 1 and (c.filter.rule != "top_k" or c.filter.value % 1 > 0),
        "filter.value = {c.filter.value:g}: expected a share up to 1, or a whole number of groups "
        'with filter.rule = "top_k"',
    ),
    Rule(
        lambda c: c.filter.value > c.rollout.num_groups,
        "filter.value = {c.filter.value:g}: a step has {c.rollout.num_groups} groups "
        "(rollout.num_groups), so all would be kept; set a smaller number, or a share",
    ),
    Rule(
        lambda c: c.rollout.refill > 0 and c.filter.include_zero,
        "rollout.refill replaces groups of equal rewards, so the filter must drop them: "
        "set filter.include_zero = false",
    ),
    Rule(
        lambda c: c.loss.name == "gspo" and max(c.loss.clip_low, c.loss.clip_high) > EPISODE_CLIP,
        'loss.name = "gspo" clips the mean ratio of an episode, which hardly moves: '
        f"set loss.clip_low = 3e-4 and loss.clip_high = 4e-4, {EPISODE_CLIP:g} at most",
    ),
    Rule(
        lambda c: 0 < c.loss.dual_clip <= 1,
        "loss.dual_clip = {c.loss.dual_clip:g}: expected a bound above 1, or 0 for none",
    ),
    Rule(
        lambda c: not c.reward.terms.keys().isdisjoint(THOUGHT_TERMS) and not c.prompt.think,
        f"the reward.terms {', '.join(THOUGHT_TERMS)} are about thoughts: set prompt.think = true",
    ),
    Rule(
        lambda c: (
            JUDGE in c.reward.terms and not (c.judge.model.strip() and c.judge.rubric.strip())
        ),
        "reward.terms.judge asks a language model: set judge.model and judge.rubric, and judge.url "
        "for a model behind a server",
    ),
    Rule(
        lambda c: "reward_drop" in c.guard.responses and not (c.eval.every and c.eval.episodes),
        "guard.responses.reward_drop compares evaluations: set eval.every",
    ),
    Rule(
        lambda c: (
            "mi_drop" in c.guard.responses and not (c.diagnose.information_every and c.prompt.think)
        ),
        "guard.responses.mi_drop compares measures of thoughts: set diagnose.information_every "
        "above 0 and prompt.think = true",
    ),
    Rule(
        lambda c: c.budget == "updates" and c.guard.response("empty_filter") in ("off", "log"),
        'budget = "updates" has no end while the filter keeps nothing: set '
        'guard.responses.empty_filter to "stop" or "rollback"',
    ),
    Rule(
        lambda c: c.guard.responses.get("stalled") == "rollback",
        "a run that hangs cannot go back by itself: set guard.responses.stalled to "
        '"stop" and resume it',
    ),
)
"""The rules in the order in which they are checked."""


class Use(NamedTuple):
    """When a key is read: as a test of the config, and in words."""

    holds: Test
    words: str


_USES: Mapping[tuple[str, ...], Use] = {
    ("env.max_turns", "env.actions_per_turn", "env.max_actions"): Use(
        lambda c: not c.env.mix, "one environment; in env.mix, its own table has it"
    ),
    ("curriculum.success",): Use(lambda c: len(c.curriculum.stages) > 0, "curriculum.stages"),
    ("prompt.window", "prompt.summary"): Use(
        _writes_prompts, "an environment: an agent of your own writes its prompts"
    ),
    ("prompt.history_thoughts",): Use(
        lambda c: c.prompt.think and c.prompt.window != 1 and _writes_prompts(c),
        "prompt.think = true and prompts of RAGEN that show earlier turns (prompt.window)",
    ),
    ("model.critic", "advantage.gae_lambda", "update.critic_lr"): Use(
        lambda c: _estimator_in(c, *CRITIC),
        'an advantage.name that uses a critic, "gae" or "bi_level_gae"',
    ),
    ("lora.alpha", "lora.targets"): Use(lambda c: c.lora.rank > 0, "lora.rank above 0"),
    ("rollout.gpu_memory",): Use(lambda c: c.rollout.sampler == "vllm", 'rollout.sampler = "vllm"'),
    ("reward.placement",): Use(
        lambda c: _estimator_in(c, *CRITIC, "reinforce_pp", "gigpo", "vine"),
        "an advantage.name that looks inside an episode: "
        '"gae", "bi_level_gae", "reinforce_pp", "gigpo" or "vine"',
    ),
    ("judge.url", "judge.model", "judge.rubric"): Use(
        lambda c: JUDGE in c.reward.terms, "reward.terms.judge"
    ),
    ("reward.over",): Use(
        lambda c: c.reward.normalise != "identity", 'a reward.normalise other than "identity"'
    ),
    ("filter.score", "filter.value"): Use(
        lambda c: c.filter.rule in ("top_k", "top_p"), 'filter.rule = "top_k" or "top_p"'
    ),
    ("advantage.gamma",): Use(
        lambda c: _estimator_in(c, *CRITIC, "reinforce_pp", "gigpo", "vine"),
        'advantage.name = "gae", "bi_level_gae", "reinforce_pp", "gigpo" or "vine"',
    ),
    ("advantage.continuations",): Use(
        lambda c: _estimator_in(c, "vine"), 'advantage.name = "vine"'
    ),
    ("loss.dual_clip",): Use(
        lambda c: c.loss.name == "ppo_clip" or c.loss.name not in LOSS.names,
        'loss.name = "ppo_clip"',
    ),
    ("loss.kl_kind",): Use(
        lambda c: c.may_use_kl, 'loss.kl above 0, or a rollback with guard.remedy = "kl"'
    ),
    ("eval.every", "eval.temperature"): Use(lambda c: c.eval.episodes > 0, "eval.episodes above 0"),
    ("diagnose.information_every",): Use(lambda c: c.prompt.think, "prompt.think = true"),
    ("guard.remedy",): Use(
        lambda c: "rollback" in c.guard.responses.values(), 'a "rollback" among guard.responses'
    ),
}

READ_WITH: Mapping[str, Use] = {key: use for keys, use in _USES.items() for key in keys}
"""Keys that are read only with certain settings; `reading.merge` refuses them otherwise. All
other keys are always read."""
