"""WebShop's catalogue: products, goals, the search for products, and the score of a purchase."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ragen.core.errors import RagenError
from ragen.envs.contract import pick

RESULTS = 50
"""Maximum number of products that a search finds."""
QUERY_WORDS = 20
"""Maximum number of words of a search that count; the others are ignored."""
SIMILAR = 85
"""Two phrases match if their similarity is above this."""
NO_LIMIT = 1_000_000.0
"""The price limit of a goal that has none."""

WORD = re.compile(r"\w+")
FUNCTION_WORDS = frozenset(WORD.findall("a an and at by for from in of on or the to with your"))
COLORS = WORD.findall(
    "amber aqua beige black blue bronze brown burgundy champagne charcoal chocolate clear copper "
    "coral cream crimson cyan emerald fuchsia gold gray green grey indigo ivory khaki lavender "
    "lilac magenta maroon mint multicolor mustard navy nude olive orange peach pink plum purple "
    "red rose ruby rust salmon sand silver tan taupe teal turquoise violet white wine yellow"
)
"""Words for colors: an option that contains one counts as that color."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product on sale. `attributes` are what the score asks for; no page lists them as such."""

    key: str
    path: tuple[str, ...]
    query: str
    title: str
    price: float
    attributes: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    description: str = ""
    features: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()
    price_text: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal: an instruction in words, and the demands of the score.

    `product` is the one that the goal was written for. `options` are values, whatever their names.
    """

    instruction: str
    product: Product
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_limit: float


def score(goal: Goal, bought: Product, chosen: Iterable[str]) -> float:
    """The reward of a purchase, from 0 to 1 (arXiv:2207.01206, equation 1).

    reward = type · (attributes + options + price) / (attributes asked + options asked + 1)

    `type` is `type_factor`. `attributes` counts the attributes asked for that the product has, and
    `options` the options asked for that were chosen. `price` is 1 if the price is at most the
    limit, else 0.

    Example:
        >>> pillow = Product("B1", ("home", "bedding"), "pillow", "Soft Pillow", 30, ("soft",))
        >>> goal = Goal("", pillow, ("soft",), ("queen",), 20)
        >>> round(score(goal, pillow, ["queen"]), 3)  # 1 · (1 + 1 + 0) / 3
        0.667
    """
    chosen = list(chosen)
    attributes = sum(has_attribute(bought, asked) for asked in goal.attributes)
    options = sum(any(same_option(each, asked) for each in chosen) for asked in goal.options)
    matched = attributes + options + (bought.price <= goal.price_limit)
    asked = len(goal.attributes) + len(goal.options) + 1
    return type_factor(bought, goal.product) * matched / asked


def type_factor(bought: Product, wanted: Product) -> float:
    """How similar the types of two products are: 1, 0.5, 0.1 or 0.

    It depends on the share of the wanted title's words that the bought title has: 0 if none, 0.1 if
    below 10 %. Otherwise it is 1 if the products have the same query, share two levels of their
    categories, or share more than 20 % of the words, and 0.5 if not. The original counts nouns
    found by a tagger. Here, all words except function words count.

    Example:
        >>> pillow = Product("B1", ("home", "bedding"), "pillow", "Soft Pillow", 9)
        >>> blanket = Product("B2", ("home", "bedding"), "blanket", "Soft Blanket", 9)
        >>> lamp = Product("B3", ("home", "lamps"), "lamp", "Lamp", 9)
        >>> type_factor(blanket, pillow), type_factor(lamp, pillow)
        (1.0, 0.0)
    """
    words = title_words(wanted.title)
    share = len(words & title_words(bought.title)) / len(words) if words else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    related = len(set(bought.path) & set(wanted.path)) >= 2
    return 1.0 if bought.query == wanted.query or related or share > 0.2 else 0.5


@lru_cache(maxsize=65_536)
def title_words(title: str) -> frozenset[str]:
    """The words of a title that `type_factor` compares."""
    return frozenset(content_words(title))


def content_words(text: str) -> tuple[str, ...]:
    """The words of a text, in lower case, without function words and repetitions."""
    words = dict.fromkeys(WORD.findall(text.lower()))
    return tuple(word for word in words if word not in FUNCTION_WORDS)


def has_attribute(product: Product, asked: str) -> bool:
    """True if a product has an attribute: a similar one in its list, or the same in its texts."""
    if any(similarity(own, asked) > SIMILAR for own in product.attributes):
        return True
    texts = (product.title, " ".join(product.features), product.description)
    return any(asked in text.lower() for text in texts)


def same_option(chosen: str, asked: str) -> bool:
    """True if a chosen value is the one asked for: the same color, or a similar phrase."""
    return similarity(_color(chosen), _color(asked)) > SIMILAR


@lru_cache(maxsize=65_536)
def _color(option: str) -> str:
    return next((color for color in COLORS if color in option), option)


@lru_cache(maxsize=262_144)
def similarity(one: str, other: str) -> int:
    """The token set ratio of two phrases, from 0 to 100, as fuzzy matching libraries define it.

    The words that both have are compared with each phrase, and the phrases with each other, by
    insertions and deletions; the best of the three counts. A phrase is fully similar to one that
    only adds words.

    Example:
        >>> similarity("cotton", "Cotton blend"), similarity("pack of 2", "pack of 3")
        (100, 89)
    """
    left, right = ({*re.sub(r"[\W_]", " ", each).lower().split()} for each in (one, other))
    both, left, right = left & right, left - right, right - left
    if not both | left or not both | right:
        return 0
    if both and not (left and right):
        return 100
    a, b = " ".join(sorted(left)), " ".join(sorted(right))
    shared = len(" ".join(both))
    gap = 1 if both else 0
    whole_a, whole_b = shared + gap + len(a), shared + gap + len(b)
    best = 1 - (len(a) + len(b) - 2 * _common(a, b)) / (whole_a + whole_b)
    if both:
        best = max(best, *(2 * shared / (shared + whole) for whole in (whole_a, whole_b)))
    return round(100 * best)


def _common(a: str, b: str) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for char in a:
        above = 0
        for at, other in enumerate(b, 1):
            above, row[at] = row[at], above + 1 if char == other else max(row[at], row[at - 1])
    return row[-1]


def price_limit(price: float, generator: np.random.Generator) -> float:
    """A round price limit above a price; `NO_LIMIT` for a price of 980 or more.

    Two of the next four multiples of ten are drawn, and the higher one is taken.
    """
    steps = [10.0 * step for step in range(1, 100) if 10 * step > price][:4]
    if len(steps) < 2:
        return NO_LIMIT
    one = steps.pop(int(generator.random() * len(steps)))
    return max(one, pick(generator, steps))


class Catalogue:
    """Products in a full-text index, and the goals written for them. Nothing in it changes.

    Raises:
        RagenError: This Python's SQLite has no full-text search.
    """

    def __init__(self, products: Sequence[Product], goals: Sequence[Goal]) -> None:
        self.products, self.goals = products, goals
        self.places = {
            " ".join(product.key.lower().split()): at for at, product in enumerate(products)
        }
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._index.execute(
                "CREATE VIRTUAL TABLE page USING fts5(text, content='', tokenize='porter')"
            )
        except sqlite3.OperationalError as error:
            raise RagenError(f"WebShop needs SQLite with FTS5: {error}") from error
        rows = ((at, _searchable(product)) for at, product in enumerate(products))
        self._index.executemany("INSERT INTO page(rowid, text) VALUES (?, ?)", rows)
        self.search = lru_cache(maxsize=4096)(self._search)

    def _search(self, keywords: str) -> tuple[int, ...]:
        """The places of at most `RESULTS` products with any of the words, ranked by BM25."""
        words = content_words(keywords)[:QUERY_WORDS]
        if not words:
            return ()
        found = self._index.execute(
            "SELECT rowid FROM page WHERE page MATCH ? ORDER BY rank, rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), RESULTS),
        )
        return tuple(place for (place,) in found)


def _searchable(product: Product) -> str:
    options = (value for values in product.options.values() for value in values)
    return " ".join((product.title, *product.features, product.description, *options))
