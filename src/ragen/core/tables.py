"""Text for people: sections with tables, in Markdown or in a terminal, and short numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Section:
    r"""A part of a page: a title, lines of text, a table, and the name of its plot.

    Example:
        >>> markdown([Section("Time", ("All of it.",), ("phase", "s"), (("update", "3"),))])
        '# Time\n\nAll of it.\n\n| phase | s |\n|---|---:|\n| update | 3 |\n'
    """

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    plot: str | None = None

    def holds_numbers(self, column: int) -> bool:
        """True if a column holds numbers, which are aligned to the right."""
        return all(not row[column] or row[column][0] in "+-0123456789" for row in self.rows)


def markdown(sections: Iterable[Section], figures: Collection[str] = ()) -> str:
    """Render a page as Markdown with those of its plots that are in `figures`."""
    blocks: list[str] = []
    for section in sections:
        blocks.append(f"{'##' if blocks else '#'} {section.title}")
        if section.lines:
            blocks.append("  \n".join(map(_escaped, section.lines)))
        if section.rows:
            head = f"| {' | '.join(section.columns)} |"
            right = map(section.holds_numbers, range(len(section.columns)))
            rule = f"|{'|'.join('---:' if numbers else '---' for numbers in right)}|"
            body = [f"| {' | '.join(map(_escaped, row))} |" for row in section.rows]
            blocks.append("\n".join([head, rule, *body]))
        if section.plot is not None and section.plot in figures:
            blocks.append(f"![{section.title}](report-{section.plot}.png)")
    return "\n\n".join(blocks) + "\n"


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def show(console: Console, sections: Iterable[Section]) -> None:
    """Print a page to a terminal."""
    for section in sections:
        console.print(Text(f"\n{section.title}", "bold"))
        for line in section.lines:
            console.print(Text(line))
        if section.rows:
            table = Table(box=None, pad_edge=False, header_style="dim")
            for number, column in enumerate(section.columns):
                justify: JustifyMethod = "right" if section.holds_numbers(number) else "left"
                table.add_column(column, justify=justify, no_wrap=number == 0)
            for row in section.rows:
                table.add_row(*map(Text, row))
            console.print(table)


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
