"""Remedies: the settings that a rollback changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragen.config.config import Config
from ragen.core.seeding import derive

LR_FACTOR = 1 / 3
"""Two rollbacks lower a learning rate by about an order of magnitude."""

Remedy = Callable[[Config, int], dict[str, Any]]
"""The signature of every remedy: from the run's config and the number of the attempt that begins,
to new values by config key."""


def lower_learning_rate(config: Config, attempt: int) -> dict[str, Any]:
    """A third of every learning rate."""
    update = config.update
    rates = {"lr": update.lr, "critic_lr": update.critic_lr}
    return {f"update.{name}": rate * LR_FACTOR for name, rate in rates.items() if rate}


def tighten_filter(config: Config, attempt: int) -> dict[str, Any]:
    """The filter of StarPO-S, or half of what the present filter keeps."""
    rule, value = config.filter.rule, config.filter.value
    if rule in ("all", "reweight"):
        return {"filter.rule": "top_k", "filter.value": 0.25}
    if value >= 4:
        return {"filter.value": value // 2}
    if value > 1:  # One group, which cannot be given as a number: 1.0 is the share of all.
        rollout = config.rollout
        return {"filter.value": 1 / (rollout.num_groups * (1 + rollout.refill))}
    return {"filter.value": value / 2}


def raise_kl(config: Config, attempt: int) -> dict[str, Any]:
    """Ten times the weight of the KL divergence, and at least 0.01."""
    return {"loss.kl": max(0.01, 10 * config.loss.kl)}


def change_seed(config: Config, attempt: int) -> dict[str, Any]:
    """Other random numbers on the same levels. Evaluations keep theirs."""
    return {"seed": derive(config.seed, "attempt", attempt)}


REMEDIES: dict[str, Remedy] = {
    "lr": lower_learning_rate,
    "filter": tighten_filter,
    "kl": raise_kl,
    "seeds": change_seed,
}
"""Remedies by their name in the config."""
