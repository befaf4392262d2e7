"""The advantage estimators by name: how much better each sampled token was than expected.

Estimators with a critic are in `advantages_critic`, estimators that compare rewards in
`advantages_group`, and their common signature is in `estimator`.
"""

from __future__ import annotations

from ragen.algorithms.advantages_critic import bi_level_gae, gae
from ragen.algorithms.advantages_group import (
    dr_grpo,
    gigpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from ragen.algorithms.estimator import Estimator

ADVANTAGES: dict[str, Estimator] = {
    "gae": gae,
    "bi_level_gae": bi_level_gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gigpo": gigpo,
}
"""Estimators by their name in the config."""
