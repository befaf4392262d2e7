"""Numbers as short text for people: rates, durations and curves of one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"
"""The levels of a sparkline."""


def format_rate(number: float) -> str:
    """A number with about three digits; thousands become ``k``.

    Example:
        >>> format_rate(512.3), format_rate(24690.0)
        ('512', '24.7k')
    """
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def sparkline(numbers: Sequence[float], width: int) -> str:
    """A curve in one line of text, from its lowest number to its highest.

    If there are more numbers than `width`, each character stands for the mean of several. Numbers
    that are not finite are left out.

    Example:
        >>> sparkline([0, 1, 2, 3], 4), sparkline([0, 0, 1, 1, 7, 7], 3), sparkline([5, 5], 4)
        ('▁▃▆█', '▁▂█', '▁▁')
    """
    finite = [number for number in numbers if math.isfinite(number)]
    if not finite:
        return ""
    means = np.array([part.mean() for part in np.array_split(finite, min(width, len(finite)))])
    heights = means - means.min()
    # Rounded, not cut, so that the levels have equal height and the highest is reached.
    levels = heights / (heights.max() or 1.0) * (len(BLOCKS) - 1) + 0.5
    return "".join(BLOCKS[level] for level in levels.astype(int))


def format_duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any.

    Example:
        >>> format_duration(9.4), format_duration(3723)
        ('0:09', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
