"""Write RAGEN's own sample of word problems: `src/ragen/envs/worlds/word_problems.jsonl`.

Every problem comes from one of the templates below, with numbers and names from one seed. So the
same file is written on every machine.

    python scripts/word_problems.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ragen.envs.contract import generators, pick

FILE = Path(__file__).parents[1] / "src" / "ragen" / "envs" / "worlds" / "word_problems.jsonl"
PROBLEMS = 1024
SEED = 2504
NAMES = (
    *("Ada", "Bo", "Carla", "Dmitri", "Ewa", "Femi", "Grete", "Hugo"),
    *("Ines", "Jun", "Kofi", "Lena", "Mateo", "Nadia", "Oskar", "Priya"),
)
Draw = Callable[[int, int], int]
Template = Callable[[Draw, str, str], tuple[str, str, str]]
"""Draws whole numbers and gets two names; returns question, reasoning and answer."""


def pens(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Buy, give away, count."""
    packs, each, given = draw(3, 9), draw(6, 24), draw(5, 15)
    total = packs * each
    return (
        f"{one} buys {packs} packs of {each} pens and gives {given} of the pens to {other}. "
        f"How many pens does {one} have left?",
        f"There are {packs} × {each} = {total} pens. {total} - {given} = {total - given} are left.",
        str(total - given),
    )


def train(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Add up two parts of a way."""
    first, fast, second, slow = draw(2, 5), draw(80, 140), draw(1, 4), draw(30, 70)
    total = first * fast + second * slow
    return (
        f"A train runs for {first} hours at {fast} km per hour, and then for {second} hours at "
        f"{slow} km per hour. How many kilometres does it cover?",
        f"{first} × {fast} = {first * fast} and {second} × {slow} = {second * slow}. "
        f"Together {total}.",
        f"{total:,}",
    )


def savings(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Weeks until a price is reached."""
    weekly, weeks, start = draw(6, 30), draw(4, 20), draw(10, 90)
    price = start + weekly * weeks
    return (
        f"{one} has ${start} and saves ${weekly} every week. After how many weeks can {one} buy a "
        f"bicycle for ${price}?",
        f"${price - start} are missing. {price - start} / {weekly} = {weeks}.",
        str(weeks),
    )


def bakery(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Takings of two goods, in cents."""
    rolls, loaves = draw(10, 60), draw(4, 20)
    roll, loaf = draw(3, 18) * 5, draw(20, 60) * 10
    cents = rolls * roll + loaves * loaf
    return (
        f"A bakery sells {rolls} rolls for ${roll / 100:.2f} each and {loaves} loaves of bread for "
        f"${loaf / 100:.2f} each. How many dollars does it take in?",
        f"The rolls bring {rolls * roll} cents and the loaves {loaves * loaf} cents, together "
        f"{cents}.",
        f"${cents / 100:,.2f}",
    )


def ages(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """A multiple in the past."""
    young, times, later = draw(4, 12), draw(2, 5), draw(3, 15)
    total = young + times * young + 2 * later
    return (
        f"{one} is {young} years old, and {other} is {times} times as old. What will the sum of "
        f"their ages be in {later} years?",
        f"{other} is {times * young}. In {later} years they are {young + later} and "
        f"{times * young + later}.",
        str(total),
    )


def temperature(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """An answer below zero."""
    start, hours, fall = draw(1, 9), draw(4, 9), draw(2, 5)
    return (
        f"At sunset it is {start} degrees. Then it gets colder by {fall} degrees every hour. How "
        f"many degrees is it {hours} hours after sunset?",
        f"It falls by {hours} × {fall} = {hours * fall}. {start} - {hours * fall} = "
        f"{start - hours * fall}.",
        str(start - hours * fall),
    )


def discount(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """A percentage off, for several."""
    price, percent, count = draw(2, 12) * 20, draw(1, 12) * 5, draw(2, 6)
    reduced = price * (100 - percent) // 100
    return (
        f"A coat costs ${price}. In the sale it is {percent}% cheaper. How many dollars do {count} "
        f"coats cost in the sale?",
        f"One costs {price} × {100 - percent} / 100 = {reduced}. {count} × {reduced} = "
        f"{count * reduced}.",
        f"{count * reduced:,}",
    )


def orchard(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Crates to fill, the last one partly."""
    trees, each, crate = draw(5, 20), draw(20, 60), draw(11, 30)
    apples = trees * each
    crates = -(-apples // crate)
    return (
        f"{one} picks {each} apples from each of {trees} trees. A crate holds {crate} apples. How "
        "many crates are needed for all apples?",
        f"There are {trees} × {each} = {apples} apples. {apples} / {crate}, rounded up, is "
        f"{crates}.",
        str(crates),
    )


def recipe(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """A half as the answer."""
    cups, batches = 2 * draw(0, 3) + 1, 2 * draw(1, 4) + 1
    return (
        f"A cake needs {cups}/2 cups of flour. How many cups does {one} need for {batches} cakes?",
        f"{batches} × {cups}/2 = {batches * cups}/2.",
        f"{batches * cups}/2",
    )


def tank(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Inflow against outflow."""
    inflow, minutes, start = draw(9, 30), draw(6, 40), draw(50, 400)
    outflow = draw(2, 8)
    left = start + (inflow - outflow) * minutes
    return (
        f"A tank holds {start} litres. Every minute {inflow} litres flow in and {outflow} litres "
        f"flow out. How many litres does it hold after {minutes} minutes?",
        f"It gains {inflow - outflow} litres a minute, {(inflow - outflow) * minutes} in all.",
        f"{left:,}",
    )


def seats(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Empty seats of a hall."""
    rows, each = draw(8, 30), draw(10, 40)
    taken = draw(2, rows - 3)
    extra = draw(1, each - 1)
    free = (rows - taken) * each - extra
    return (
        f"A hall has {rows} rows of {each} seats. {taken} rows are full, and in the other rows "
        f"{extra} people sit. How many seats are free?",
        f"The other {rows - taken} rows have {(rows - taken) * each} seats. Without {extra} that "
        f"is {free}.",
        str(free),
    )


def wages(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Overtime at one and a half times the rate."""
    rate, hours, over = 2 * draw(5, 15), draw(20, 40), draw(2, 10)
    pay = rate * hours + rate * 3 // 2 * over
    return (
        f"{one} earns ${rate} an hour, and one and a half times as much for overtime. How many "
        f"dollars does {one} earn with {hours} ordinary hours and {over} hours of overtime?",
        f"{hours} × {rate} = {hours * rate}. Overtime pays {rate * 3 // 2} an hour, "
        f"{over * rate * 3 // 2} in all.",
        f"{pay:,}",
    )


def share(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Shares of different size."""
    small, times, kept = draw(5, 40), draw(2, 6), draw(3, 20)
    total = small * (times + 1) + kept
    return (
        f"{one} and {other} share {total} marbles. They put {kept} aside for later, and of the "
        f"rest {other} gets {times} times as many as {one}. How many marbles does {one} get?",
        f"{total} - {kept} = {total - kept} marbles are {times + 1} equal parts of {small}.",
        str(small),
    )


def pages(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """What is missing to an average."""
    first, second, mean = draw(12, 35), draw(12, 35), draw(25, 40)
    last = 3 * mean - first - second
    return (
        f"{one} reads {first} pages on Monday and {second} pages on Tuesday. How many pages does "
        f"{one} have to read on Wednesday, so that it is {mean} pages a day on average?",
        f"Three days need 3 × {mean} = {3 * mean} pages. {3 * mean} - {first} - {second} = {last}.",
        str(last),
    )


def fence(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Posts around a field: an area does not help."""
    width, length, apart = draw(3, 12), draw(13, 30), draw(2, 6)
    posts = 2 * (width + length)
    return (
        f"A field is {width * apart} metres wide and {length * apart} metres long. {one} puts a "
        f"post every {apart} metres all around it. How many posts are needed?",
        f"The way around is {posts * apart} metres. {posts * apart} / {apart} = {posts}.",
        str(posts),
    )


def change(draw: Draw, one: str, other: str) -> tuple[str, str, str]:
    """Change in dollars and cents."""
    count, cents = draw(3, 9), draw(11, 99) * 5
    paid = 5000
    rest = paid - count * cents
    return (
        f"{one} buys {count} notebooks for ${cents / 100:.2f} each and pays with $50. How many "
        f"dollars of change does {one} get?",
        f"They cost {count} × {cents} = {count * cents} cents. {paid} - {count * cents} = {rest}.",
        f"{rest / 100:.2f}",
    )


TEMPLATES: tuple[Template, ...] = (
    *(pens, train, savings, bakery, ages, temperature, discount, orchard),
    *(recipe, tank, seats, wages, share, pages, fence, change),
)


def sample() -> str:
    """The file's text: one problem per line, all different."""
    generator: np.random.Generator = generators(SEED, None)[0]

    def draw(low: int, high: int) -> int:
        return pick(generator, range(low, high + 1))

    lines: dict[str, str] = {}
    while len(lines) < PROBLEMS:
        one = pick(generator, NAMES)
        other = pick(generator, [name for name in NAMES if name != one])
        question, reasoning, answer = pick(generator, TEMPLATES)(draw, one, other)
        problem = {"question": question, "answer": f"{reasoning}\n#### {answer}"}
        lines.setdefault(question, json.dumps(problem, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines.values())


if __name__ == "__main__":
    FILE.write_text(sample(), encoding="utf-8")
