"""Sections of text and tables, rendered as Markdown or in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: a title, lines of text, a table, and the name of its plot.

    Example:
        >>> print(markdown([Section("Time", ("All of it.",), ("phase", "s"), (("update", "3"),))]))
        # Time
        <BLANKLINE>
        All of it.
        <BLANKLINE>
        | phase | s |
        |---|---:|
        | update | 3 |
        <BLANKLINE>
    """

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    plot: str | None = None

    def holds_numbers(self, column: int) -> bool:
        """Whether a column holds numbers, which are aligned to the right."""
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
