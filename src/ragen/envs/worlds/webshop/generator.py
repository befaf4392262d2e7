"""RAGEN's own catalogue for WebShop: products and goals that follow from a seed and `shop.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import chain
from typing import NamedTuple

import numpy as np

from ragen.core.errors import RagenError
from ragen.envs.contract import Item, pick, shuffled
from ragen.envs.worlds.webshop.catalogue import Catalogue, Goal, Product, price_limit, score

GOALS = 3
"""Goals that are written for each product."""
MOST_PRODUCTS = 10_000


class Department(NamedTuple):
    """Types of products that share their attributes and options; see `shop.toml`."""

    category: str
    types: Mapping[str, int]
    adjectives: Sequence[str]
    parts: Sequence[str]
    options: Mapping[str, Sequence[str]]


TEXTS = tomllib.loads((resources.files(__package__) / "shop.toml").read_text("utf-8"))
DEPARTMENTS = [Department(**each) for each in TEXTS["departments"]]
ADJECTIVES = frozenset(each for department in DEPARTMENTS for each in department.adjectives)


def make_catalogue(num_products: int, seed: int) -> Catalogue:
    """Products of all types in turn, and about `GOALS` goals for each.

    Goals are all different, in random order, and only their own product satisfies them fully.

    Raises:
        RagenError: `num_products` is above `MOST_PRODUCTS`.
    """
    if num_products > MOST_PRODUCTS:
        raise RagenError(
            f"WebShop's own shop has at most {MOST_PRODUCTS:,} products, not {num_products:,}: "
            "give the path of the original files"
        )
    generator = np.random.Generator(np.random.PCG64([2, seed]))
    kinds = [(department, kind) for department in DEPARTMENTS for kind in department.types]
    products = [
        _product(generator, *kinds[at % len(kinds)], code)
        for at, code in enumerate(_codes(generator, num_products))
    ]
    holders: dict[str, set[int]] = {}
    for at, product in enumerate(products):
        for attribute in product.attributes:
            holders.setdefault(attribute, set()).add(at)
    goals: dict[tuple[str, frozenset[str], frozenset[str]], Goal] = {}
    for at, product in enumerate(products):
        for _ in range(GOALS):
            goal = _goal(generator, product)
            spare = [each for each in product.attributes if each not in goal.attributes]
            while (shared := _is_shared(goal, at, products, holders)) and spare:
                goal = replace(goal, attributes=(*goal.attributes, spare.pop()))
            if not shared:
                goal = replace(goal, instruction=_instruction(generator, goal))
                key = product.key, frozenset(goal.attributes), frozenset(goal.options)
                goals.setdefault(key, goal)
    return Catalogue(products, _sample(generator, list(goals.values()), len(goals)))


def _codes(generator: np.random.Generator, count: int) -> list[str]:
    """Different codes of four characters, such as K4M7: a page lists ten twice, in few tokens."""
    letters, digits = "BCDFGHJKLMNPQRSTVWXZ", "0123456789"
    codes: dict[str, None] = {}
    while len(codes) < count:
        codes["".join(pick(generator, each) for each in (letters, digits) * 2)] = None
    return list(codes)


def _product(
    generator: np.random.Generator, department: Department, kind: str, code: str
) -> Product:
    adjectives = _sample(generator, department.adjectives, 2 + int(generator.random() * 2))
    parts = _sample(generator, department.parts, 2 + int(generator.random() * 2))
    brand = pick(generator, TEXTS["brands"])
    words = {"type": kind, "brand": brand, "adjective": adjectives[0], "part": parts[0]}
    notes = [pick(generator, TEXTS["adjective_notes"]).format(each) for each in adjectives]
    notes += [pick(generator, TEXTS["part_notes"]).format(each) for each in parts]
    cents = pick(generator, (0.99, 0.49, 0.95))
    return Product(
        key=code,
        path=(department.category, kind),
        query=kind,
        title=f"{brand} {adjectives[-1].title()} {kind.title()} with {parts[-1].title()}",
        price=int(department.types[kind] * (0.5 + generator.random())) + cents,
        attributes=(*adjectives, *parts),
        options={
            name: tuple(each for each in values if each in kept)
            for name, values in department.options.items()
            for kept in [_sample(generator, values, 2 + int(generator.random() * 3))]
        },
        description=pick(generator, TEXTS["descriptions"]).format(**words),
        features=tuple(f"{note[0].upper()}{note[1:]}" for note in _sample(generator, notes, 6)),
        reviews=tuple(each.format(**words) for each in _sample(generator, TEXTS["reviews"], 2)),
    )


def _goal(generator: np.random.Generator, product: Product) -> Goal:
    """A goal without its instruction; its attributes may be too few to single out the product."""
    attributes = _sample(generator, product.attributes, 1 + int(generator.random() * 3))
    names = _sample(generator, list(product.options), 1 + int(generator.random() * 2))
    options = tuple(pick(generator, product.options[name]) for name in names)
    return Goal("", product, attributes, options, price_limit(product.price, generator))


def _is_shared(
    goal: Goal, at: int, products: Sequence[Product], holders: Mapping[str, set[int]]
) -> bool:
    """True if a product other than the one at `at` might satisfy a goal fully."""
    others = set.intersection(*(holders[each] for each in goal.attributes)) - {at}
    cheap = (products[other] for other in others if products[other].price <= goal.price_limit)
    return any(score(goal, each, chain(*each.options.values())) == 1 for each in cheap)


def _instruction(generator: np.random.Generator, goal: Goal) -> str:
    kind = goal.product.query
    plural = kind.endswith("s") and not kind.endswith("ss")
    adjectives = [each for each in goal.attributes if each in ADJECTIVES]
    parts = _and([each for each in goal.attributes if each not in ADJECTIVES])
    if adjectives and generator.random() < 0.5:
        item = f"{kind} that {'are' if plural else 'is'} {_and(adjectives)}"
        item += f" and {'come' if plural else 'comes'} with {parts}" if parts else ""
    else:
        item = f"{', '.join(adjectives)} {kind}".strip() + (f" with {parts}" if parts else "")
    if goal.product.path[0] == "food":
        item = f"some {item}"
    elif not plural:
        item = f"{'an' if item[0] in 'aeiou' else 'a'} {item}"
    named = {value: name for name, values in goal.product.options.items() for value in values}
    phrases: dict[str, str] = TEXTS["phrases"]
    options = "".join(f", {phrases[named[each]].format(each)}" for each in goal.options)
    template: str = pick(generator, TEXTS["instructions"])
    return template.format(item=item, options=options, limit=f"{goal.price_limit:.0f}")


def _and(words: Sequence[str]) -> str:
    return " and ".join(each for each in (", ".join(words[:-1]), *words[-1:]) if each)


def _sample(generator: np.random.Generator, items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """Different items in random order: `count` of them, or all if there are fewer."""
    return tuple(shuffled(generator, items)[:count])
