"""Credit: how much better each sampled token turned out than was to be expected.

Axes: **E** episodes, **S** an episode's sampled tokens in time order (tokens of prompts and
observations take no time). Arrays are episode-major, so full-history, windowed and single-turn
contexts get the same numbers, and group statistics count episodes, never rows.

Every estimator takes the same keyword arguments and ignores those it has no use for:

- `rewards_ES`: reward at each token, penalties included, 0 off the mask;
- `mask_ES`: true on the episode's tokens, which come first in each row;
- `values_ES`: the critic's estimate of the state before each token, or ``None``;
- `bootstrap_E`: value of the state after the last token; 0 where the task itself ended the episode;
- `turn_ES`, `turn_ends_ES`: the turn of each token, and whether it is the turn's last;
- `state_ES`: a number for the state that the token's turn began in, equal for equal states;
- `group_E`: which episodes answered the same prompt;
- `gamma`, `lam`: the discount γ and GAE's λ, in [0, 1] a token;
- `turn_gamma`: the discount a turn, for the estimators that count in turns;
- `step_weight`: the weight ω of a turn's own advantage beside its episode's;
- `whiten`: whether an estimator with a critic gives its advantages mean 0 and deviation 1.

Those with a critic are in `advantages_critic`, those that compare episodes in `advantages_members`.
"""

from __future__ import annotations

from collections.abc import Callable

from ragen.algorithms.advantages_critic import Credit, bi_level_gae, gae
from ragen.algorithms.advantages_members import (
    dr_grpo,
    gigpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)

ADVANTAGES: dict[str, Callable[..., Credit]] = {
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

NEEDS_VALUES = frozenset({"gae", "bi_level_gae"})
"""Estimators that need a critic."""

COMPARES_MEMBERS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "gigpo"})
"""Estimators that refuse a group with fewer than two members."""
