"""What the information of a step is called: samplings, regimes, and the limits between them.

`ragen.diagnostics.information` measures by these; whoever only names what was measured loads no
torch.
"""

from __future__ import annotations

import math
from typing import Literal

Sampling = Literal["first", "any"]

SAMPLINGS: tuple[Sampling, ...] = ("first", "any")
"""Which turn of an episode speaks: its first (prompts are levels), or one drawn uniformly."""

Regime = Literal[
    "undecidable", "diverse", "template collapse", "compressed", "low-entropy collapse"
]
REGIMES: tuple[Regime, ...] = (
    "undecidable",
    "diverse",
    "template collapse",
    "compressed",
    "low-entropy collapse",
)
"""The labels; a metric holds a label's place in this row."""

MIN_PROMPTS = 4
"""Prompts below which no regime is told: of fewer, H(w) is at most log 3, one lucky word."""
INFORMED = 0.5
"""Share of H(w) from which on I counts as high: with less, a thought leaves more than √M of M
equally likely prompts possible."""
UNDECIDED = math.log(2)
"""H(Z|X) in nats a thought from which on it counts as high: less is less than two equally likely
thoughts a prompt."""


WINDOW = 5
"""Steps of the baseline at the start, and of the trailing mean that is compared with it."""
