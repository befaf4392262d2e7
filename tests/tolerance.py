"""How far two computations of one number may lie apart by rounding: from the arithmetic alone.

The order in which a sum is added up is the machine's own: the width of its vectors, whether a
product and a sum are one rounding or two, the number of threads, the library's choice for a shape.
So a number that is computed twice in two ways (in another batch, by another path, in other parts)
has two sets of last bits. How far those may be apart follows from what is the same everywhere: the
format of the numbers, their size, and how many are added up one after another.

A bound that is computed here holds on every machine. What is promised bit for bit is compared with
``==`` or ``torch.equal``, and numbers in exact arithmetic or in float64 need nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SURE = 4
"""How many times √terms · eps · magnitude two computations may be apart, see `rounding`."""


def rounding(terms: int, magnitude: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """How far two computations of one number may be apart.

    A rounding moves a number of size m by at most eps · m / 2 (eps = 2⁻²³ for float32). Roundings
    have no sign in common, so n of them, one after another, add up to √n of one and not to n: they
    exceed λ √n · eps · m / 2 with a chance below 2 exp(−λ²/2) (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019). Two computations differ by √2 of that, and a λ of
    4 √2 leaves a chance of 2e-7: the bound is 4 √n · eps · m.

    Args:
        terms: How many sums and products one computation does one after another.
        magnitude: The largest number on the way (not of the result: terms may cancel).
        dtype: The format in which each of them is rounded.

    Returns:
        The bound on the absolute difference; ``rounding(1)`` is 4.8e-7.
    """
    return SURE * math.sqrt(terms) * torch.finfo(dtype).eps * magnitude


MODEL = 5000
"""Roundings on the longest way through a model of these tests, from a token to a logprob.

The largest are the embedded ones: three layers, of width 128 with 256 inside. In a layer that is
sums of 128 (norm), 128 (queries), 32 (scores), 300 twice (the softmax over the positions, and the
values that it weighs), 128, 128 (norm), 128 and 256; behind them 128 (norm), 128 (logits) and 564
(the softmax over the vocabulary).
"""

GRADIENT = 4 * MODEL
"""Roundings on the way to a weight's gradient: there and back, and over the tokens added up."""

LOGPROB = rounding(MODEL, 8.0)
"""How far a token's logprob may be off: 2.7e-4.

The embedded models' logits are up to 12 and mostly below 8, as are those of the tests' random ones
(or they are below 1, and the logprobs near −log of the vocabulary, −6). What a comparison is there
to find is far larger: one token of the past lost or added, a temperature or a mask that is wrong,
or a product in bfloat16 moves logprobs by 1e-2 and more, one in TF32 by 1e-3.
"""


def leaves(found: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(found, Tensor):
        yield found.detach()
    else:
        for each in found.values() if isinstance(found, dict) else found:
            yield from leaves(each)


def assert_close(found: Any, expected: Any, terms: int = MODEL) -> None:
    """Tensors (nested alike) are equal but for rounding, at the size of the largest number in all.

    Not each at its own size: a gradient that is zero in exact arithmetic, such as that of the bias
    of attention's keys, is what is left where numbers of the others' size cancel.
    """
    magnitude = max(float(each.abs().max()) for each in leaves(expected))
    bound = rounding(terms, magnitude)
    torch.testing.assert_close(found, expected, atol=bound, rtol=0)
