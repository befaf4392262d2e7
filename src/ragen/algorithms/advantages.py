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
from ragen.algorithms.estimator import INPUTS, Estimator
from ragen.config.kinds import ESTIMATOR
from ragen.core.inputs import inputs_of

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
"""RAGEN's own estimators by their name in the config."""


def find_estimator(name: str) -> Estimator:
    """The estimator of a name in the config, RAGEN's own or from outside.

    Raises:
        RagenError: It cannot be loaded, or it names an input that does not exist.

    Example:
        >>> find_estimator("rloo") is rloo
        True
    """
    return ESTIMATOR.find(name, ADVANTAGES, lambda function: inputs_of(function, INPUTS))
