"""Bounds on the rounding difference of two computations of the same number.

The order of the terms of a sum depends on the machine: its vector width, fused multiply-add, the
number of threads, and the kernel that a library chooses for a shape. A number that is computed in
two ways (in another batch, by another code path, in other parts) therefore differs in its last
bits. A bound on the difference follows from what all machines share: the number format, the
magnitude of the terms, and how many are added one after another.

A bound that is computed here holds on every machine. Results that must be equal bit for bit are
compared with ``==`` or ``torch.equal``. Exact arithmetic and float64 need no such bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SAFETY_FACTOR = 4
"""The factor before √terms · eps · magnitude in `rounding`."""


def rounding(terms: int, magnitude: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """The largest rounding difference to expect between two computations of one number.

    One rounding changes a number of magnitude m by at most eps · m / 2 (eps = 2⁻²³ for float32).
    The signs of n roundings are independent, so their sum grows with √n and not with n: it exceeds
    λ √n · eps · m / 2 with probability below 2 exp(−λ²/2) (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019). The difference of two computations is √2 times
    that, and λ = 4 √2 leaves a probability of 2e-7: the bound is 4 √n · eps · m.

    Args:
        terms: Number of consecutive sums and products in one computation.
        magnitude: Largest intermediate value (not the result, since terms may cancel).
        dtype: The format to which each is rounded.

    Returns:
        The bound on the absolute difference; ``rounding(1)`` is 4.8e-7.
    """
    return SAFETY_FACTOR * math.sqrt(terms) * torch.finfo(dtype).eps * magnitude


MODEL = 5000
"""Roundings on the longest path through a model of these tests, from a token to a logprob.

The embedded models are the largest: three layers of width 128 and inner width 256. A layer has sums
of 128 (norm), 128 (queries), 32 (scores), 300 twice (the softmax over positions and its weighted
sum of values), 128, 128 (norm), 128 and 256. After the layers come 128 (norm), 128 (logits) and 564
(the softmax over the vocabulary).
"""

GRADIENT = 4 * MODEL
"""Roundings on the path to a weight's gradient: forward, backward, and the sum over tokens."""

LOGPROB = rounding(MODEL, 8.0)
"""The bound on the difference of two logprobs of a token: 2.7e-4.

The embedded models' logits are at most 12 and mostly below 8, like those of the random models in
tests (or they are below 1, with logprobs near −log of the vocabulary size, −6). Real errors are far
larger: a missing or extra token in the context, a wrong temperature or mask, or a product in
bfloat16 changes logprobs by 1e-2 or more, and a product in TF32 by 1e-3.
"""


def leaves(actual: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(actual, Tensor):
        yield actual.detach()
    else:
        for each in actual.values() if isinstance(actual, dict) else actual:
            yield from leaves(each)


def assert_close(actual: Any, expected: Any, terms: int = MODEL) -> None:
    """Assert that nested tensors are equal up to rounding at the largest magnitude among them all.

    A bound per tensor would be too strict: a gradient that is zero in exact arithmetic, such as
    that of the attention keys' bias, is the remainder of terms with the others' magnitude.
    """
    magnitude = max(float(each.abs().max()) for each in leaves(expected))
    bound = rounding(terms, magnitude)
    torch.testing.assert_close(actual, expected, atol=bound, rtol=0)
