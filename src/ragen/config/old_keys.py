"""Keys of earlier versions: their present names, and those that were removed.

A recipe or a command line with such a key is refused with one line (`refusal`). The saved config of
a run is read with the present names (`present_values`), so runs of the previous version can be
viewed, evaluated and resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ragen.core.errors import RagenError

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "world": "env",
        "world.name": "env.name",
        "world.params": "env.params",
        "world.turns": "env.max_turns",
        "world.actions_per_turn": "env.actions_per_turn",
        "world.actions": "env.max_actions",
        "world.timeout_s": "env.timeout_s",
        "world.isolate": "env.isolate",
        "rollout.prompts": "rollout.num_groups",
        "rollout.members": "rollout.group_size",
        "advantage.lam": "advantage.gae_lambda",
        "update.passes": "update.epochs",
    }
)
"""Old names of keys, and their present ones."""


class Removed(NamedTuple):
    """A removed key: the value that holds now, and the line for the user."""

    value: Any
    reason: str


REMOVED: Mapping[str, Removed] = MappingProxyType(
    {
        "world.common_noise": Removed(False, "every episode has its own random events"),
        "model.device": Removed(
            None, "a GPU is used if there is one; CUDA_VISIBLE_DEVICES= hides it"
        ),
        "model.attention": Removed(None, "transformers chooses the implementation"),
        "rollout.min_tokens": Removed(0, "a reply may end at any token"),
        "filter.keep": Removed("largest", "the groups of the largest score are kept"),
        "filter.scale": Removed("none", "the loss is not scaled by the kept share"),
        "filter.reweight": Removed(False, 'set filter.rule = "reweight"'),
        "filter.max_empty": Removed(5, "five steps without a kept group stop a run"),
        "advantage.step_weight": Removed(1.0, "it is 1, as published"),
        "advantage.whiten": Removed(True, "gae and bi_level_gae whiten their advantages"),
        "loss.importance_cap": Removed(2.0, "it is 2"),
        "loss.value_clip": Removed(0.5, "it is 0.5, as published"),
        "update.critic_warmup_steps": Removed(0, "policy and critic learn from the first step on"),
        "update.muon_lr": Removed(0.0, "AdamW trains all weights"),
        "update.weight_decay": Removed(0.01, "it is 0.01, as published"),
        "update.max_grad_norm": Removed(1.0, "it is 1, as published"),
        "diagnose.thoughts": Removed(64, "64 thoughts are scored"),
        "guard.rollbacks": Removed(2, "a run may be rolled back twice"),
        "guard.stalled_s": Removed(1800.0, "it is half an hour; guard.responses.stalled responds"),
    }
)
"""Removed keys. A value of None means that the key never changed what a run computes."""


def refusal(key: str) -> str | None:
    """The line for a recipe or a command line that uses a key of an earlier version.

    Example:
        >>> refusal("world.turns")
        'world.turns is now env.max_turns'
        >>> refusal("update.weight_decay")
        'update.weight_decay was removed: it is 0.01, as published'
        >>> refusal("update.lr") is None
        True
    """
    if key.startswith("world.params."):
        return f"{key} is now {key.replace('world', 'env', 1)}"
    if key in RENAMED:
        return f"{key} is now {RENAMED[key]}"
    if key in REMOVED:
        return f"{key} was removed: {REMOVED[key].reason}"
    return None


def present_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key of any version, with the present names and without removed keys.

    Example:
        >>> present_values({"world.turns": 5, "filter.reweight": True, "update.muon_lr": 0.0})
        {'env.max_turns': 5, 'filter.rule': 'reweight'}
    """
    present: dict[str, Any] = {}
    for key, value in values.items():
        if key == "filter.reweight" and value:
            present["filter.rule"] = "reweight"
        elif key == "reward.over" and value in ("world", "env"):
            present[key] = "batch"  # A run has one environment.
        elif key.startswith("world.params."):
            present[key.replace("world", "env", 1)] = value
        elif key not in REMOVED:
            present.setdefault(RENAMED.get(key, key), value)
    return present


def refuse_to_resume(values: Mapping[str, Any], where: str) -> None:
    """Refuse to resume a run that set a removed key to a value other than the one that holds now.

    Raises:
        RagenError: The resumed run would have other settings.
    """
    for key, value in values.items():
        if key in REMOVED and key != "filter.reweight":
            left = REMOVED[key].value
            if left is not None and value != left:
                raise RagenError(
                    f"{key} = {value} in {where} was removed: {REMOVED[key].reason}; resume this "
                    "run with the version that wrote it"
                )
