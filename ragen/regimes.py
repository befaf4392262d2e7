"""The four regimes of arXiv:2604.06268, from the two axes H(Z|X) and I(X;Z), and their thresholds.

`ragen.information` measures the axes; whoever only reads them needs no torch.
"""

from __future__ import annotations

import math
from typing import Literal

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
