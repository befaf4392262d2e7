"""The contract of an advantage estimator: its inputs and its result.

Axes: **E** episodes, **S** an episode's sampled tokens in time order, **N** the tokens on the mask.
Arrays are episode-major, so full-history, windowed and single-turn contexts give the same numbers,
and group statistics count episodes, never rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen.core.errors import RagenError
from ragen.core.inputs import call, names_input
from ragen.core.statistics import all_equal

STD_FLOOR = 1e-6
"""Added to a std before dividing by it, as in GRPO's published code."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages, and returns for a critic to learn, if any: ``(E, S)``, 0 off the mask."""

    advantages_ES: Tensor
    returns_ES: Tensor | None = None


Estimator = Callable[..., Credit]
"""The signature of every estimator: it takes the `ESTIMATOR_INPUTS` that it names, and returns a
`Credit`.

    def leave_one_out(rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit: ...

`credit.credit` passes each named input by keyword. The names also say what the run has to provide:
an estimator that names ``values_ES`` gets a critic, one that names ``state_values_ES`` gets
continuations of each turn, and one that names ``group_E`` gets groups of at least two episodes.
"""


def needs_values(estimator: Estimator) -> bool:
    """True if an estimator needs a critic."""
    return names_input(estimator, "values_ES")


def needs_continuations(estimator: Estimator) -> bool:
    """True if an estimator needs the values of states by continuations."""
    return names_input(estimator, "state_values_ES")


def compares_group(estimator: Estimator) -> bool:
    """True if an estimator compares the episodes of a group, so that it needs two or more."""
    return names_input(estimator, "group_E")


def estimate(estimator: Estimator, **inputs: object) -> Credit:
    """Call an estimator with those of the `ESTIMATOR_INPUTS` that it names."""
    if needs_values(estimator) and inputs["values_ES"] is None:
        raise ValueError(f"the estimator {estimator.__name__} needs a critic's values")
    credit = call(estimator, inputs=inputs)
    if not isinstance(credit, Credit):
        raise RagenError(
            f"the estimator {getattr(estimator, '__name__', estimator)} returned a "
            f"{type(credit).__name__}: a Credit is expected"
        )
    return credit


def whiten_tokens(field_ES: Tensor, mask_ES: Tensor, magnitude: float = 1.0) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the masked tokens.

        (x − mean) / √(variance + 1e-8)

    The variance divides by n − 1. A single token gives 0. Tokens that differ only by rounding give
    0 as well, since a division by their deviation would turn rounding errors into signal. Rounding
    is a difference of at most 4 √S ε max(1, |x|, `magnitude`), as in sums of S terms; `magnitude`
    is the largest size of a term that cancelled.
    """
    tokens_N = field_ES[mask_ES]
    if len(tokens_N) < 2:
        return torch.zeros_like(field_ES)
    largest = max(1.0, magnitude, float(tokens_N.abs().max()))
    rounding = 4 * math.sqrt(field_ES.shape[1]) * torch.finfo(field_ES.dtype).eps * largest
    if tokens_N.max() - tokens_N.min() <= rounding:
        return torch.zeros_like(field_ES)
    scaled_ES = (field_ES - tokens_N.mean()) * torch.rsqrt(tokens_N.var() + 1e-8)
    return scaled_ES.masked_fill(~mask_ES, 0)


def compare_within(values_N: Tensor, class_N: Tensor) -> tuple[Tensor, Tensor]:
    """Each value minus the mean of its class, and the std of its class.

    The std divides by n − 1. Both are exactly 0 in a class of one, and in a class of equal values
    (`all_equal`).

    Example:
        >>> compare_within(torch.tensor([0.0, 2.0, 7.0]), torch.tensor([0, 0, 1]))
        (tensor([-1.,  1.,  0.]), tensor([1.4142, 1.4142, 0.0000]))
    """
    centred_N, std_N = torch.zeros_like(values_N), torch.zeros_like(values_N)
    for each in torch.unique(class_N).tolist():
        here_N = class_N == each
        values = values_N[here_N]
        if not all_equal(values.tolist()):
            centred_N[here_N] = values - values.mean()
            std_N[here_N] = values.std()
    return centred_N, std_N
