"""WebShop: search a shop, choose a product and its options, and buy it (arXiv:2207.01206).

It is one of the four environments of arXiv:2504.20073. The shop is RAGEN's own by default; the
original files can be loaded instead.
"""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from statistics import fmean
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from ragen.core.errors import RagenError
from ragen.core.seeding import TRAIN_LEVELS
from ragen.envs.contract import Baselines, Env, Info, Options, State, fresh_seed, pick
from ragen.envs.worlds.webshop.catalogue import (
    Catalogue,
    Goal,
    Product,
    same_option,
    score,
)
from ragen.envs.worlds.webshop.files import load_catalogue
from ragen.envs.worlds.webshop.generator import make_catalogue

ON_PAGE = 10
"""Products on a page of results, unless a parameter says fewer."""
TEST, VALIDATION = 500, 1000
"""Numbers of goals of the published test and validation splits; the rest is for training."""
SMALL = 1000
"""Products of the papers' small shop; in a larger one an episode has 15 turns instead of 9."""
DRAWS = 8
"""The number of random episodes behind the baselines of a level."""

SEARCH, BACK, NEXT, PREVIOUS, BUY = "search", "back to search", "next >", "< prev", "buy now"
BOUGHT = "bought"
DETAILS = ("description", "features", "reviews")
"""The pages about a product."""

ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)
SHOWN_KEYWORDS = 80
"""Maximum number of characters of a search that its results show."""


class Place(NamedTuple):
    """Where the buyer is: all that changes in an episode, except for the reward.

    `page` is search, results, item, one of `DETAILS`, or bought. `number` is the number of the page
    of results, `product` the place of a product in the catalogue, and `chosen` has the name and the
    value of each chosen option.
    """

    page: str = SEARCH
    keywords: str = ""
    number: int = 1
    product: int = 0
    chosen: tuple[tuple[str, str], ...] = ()


class WebShop(Env):
    """Buy what an instruction asks for: search, look at products, choose options, buy.

    Observation:
        The instruction and the page: the search, a page of results, a product, its
        description, features or reviews. The last line lists the elements that can be clicked.

    Actions:
        Free text: ``search[keywords]`` (on every page) or ``click[element]``, in any case.
        Anything else does nothing. Random play searches for the beginning of the instruction, up
        to a random word, or clicks something on the page.

    Reward:
        For a purchase, from 0 to 1: the share of the attributes, options and price limit that it
        meets, times a factor for its type (`catalogue.score`). Nothing else pays.

    Ends when:
        Something is bought. The episode is a success if the reward is exactly 1.

    Parameters:
        products: Number of products; by default 1,000, or all with `path`. With more than 1,000,
            an episode has 15 turns.
        catalogue_seed: The seed of RAGEN's own products and goals, and with `path` of the prices
            and limits that the files leave open.
        split: The goals of the levels. The published splits are test (500 goals), validation
            (1,000) and train (the rest). ``auto`` takes test in evaluations and train in training,
            by the level; ``all`` takes all goals.
        path: The folder with the original files, or one ``items_shuffle*.json`` in it.
        on_page: Products on a page of results; fewer make shorter prompts for small models.
        numbered: A page calls its products, or the values of its options, 1, 2, 3 and so on, since
            a small model cannot copy codes and values.

    Example:
        >>> env = WebShop()
        >>> print(env.reset(seed=123)[0].splitlines()[1])
        Page: search
        >>> env.step("Search[hiking boots]")[0].splitlines()[1]
        'Page: results for hiking boots: 1 to 10 of 26'
    """

    goal = "WebShop"
    max_turns = max_actions = 9
    actions_per_turn = 1
    prompt_style = "paper"
    actions = None

    def __init__(
        self,
        products: Annotated[int, Field(ge=1, le=2_000_000)] | None = None,
        catalogue_seed: Annotated[int, Field(ge=0)] = 0,
        split: Literal["auto", "train", "validation", "test", "all"] = "auto",
        path: str = "",
        on_page: Annotated[int, Field(ge=1, le=ON_PAGE)] = ON_PAGE,
        numbered: bool = False,
    ) -> None:
        self.name = "webshop"
        self._on_page, self._numbered = on_page, numbered
        self._source = (products, catalogue_seed, path)
        self._split = split
        if products or path:  # the default shop takes half a second: the first episode makes it
            if len(self.catalogue.products) > SMALL:
                self.max_turns = self.max_actions = 15
            self.reset(seed=0)

    @property
    def rules(self) -> str:
        names = "code of a product, the value of an option"
        if self._numbered:
            names = "number of a product, the number of the value of an option"
        return (
            "You are shopping in a web shop. Find a product that fits the instruction, choose its "
            "options and buy it.\n"
            "An action is search[keywords], which lists the best products for your keywords, or "
            "click[element], where element is one of those that the page lists as clickable: the "
            f"{names}, or a button. Click the value of every option that the instruction names "
            "before you click buy now.\n"
            "When you buy, your reward is the share of what the instruction asks for that you got: "
            "attributes, options and the price limit. It is lower for a product of another type. "
            "Buying ends the episode; only a reward of 1 is a success."
        )

    @property
    def catalogue(self) -> Catalogue:
        """The products and goals, which all instances with the same parameters share."""
        return _open_catalogue(*self._source)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        self._goal = self._goal_index(fresh_seed() if seed is None else seed)
        self._enter(Place(), 0.0)
        return self._text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        before, reward = self._text, 0.0
        place = self._follow(action)
        if place is not None:
            if place.page == BOUGHT:
                reward = score(self._wanted, self._product, dict(place.chosen).values())
            self._enter(place, reward)
        bought = self._place.page == BOUGHT
        info = {
            "success": bought and self._reward == 1,
            "effective": self._text != before,
            "possible": place is not None,
        }
        return self._text, reward, bought, False, info

    def get_state(self) -> State:
        place = self._place._asdict()
        place["chosen"] = [list(each) for each in self._place.chosen]
        return {"goal": self._goal, "reward": self._reward, **place}

    def set_state(self, state: State) -> None:
        self._goal = state["goal"]
        place = {name: state[name] for name in Place._fields}
        place["chosen"] = tuple((name, value) for name, value in state["chosen"])
        self._enter(Place(**place), state["reward"])

    def state_key(self) -> str:
        return self._text

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        place, wanted = self._place, self._wanted.product
        if place.page in ("item", *DETAILS) and self._product is wanted:
            missing = sorted(_choices(self._wanted) - set(place.chosen))
            if place.page != "item":
                return [f"click[{PREVIOUS}]"]
            if missing and min(turns_left, actions_left) > 1:
                value = plain(missing[0][1])
                called = (name for name, each in self._values().items() if plain(each) == value)
                return [f"click[{next(called)}]"]
            return [f"click[{BUY}]"]
        at, on_results = self.catalogue.places[plain(wanted.key)], place.page == "results"
        for name, product in self._shown().items() if on_results else ():
            if product == at:
                return [f"click[{name}]"]
        keywords = _keywords(self.catalogue, self._goal, self._on_page)
        later = self._results()[self._on_page * place.number :] if on_results else ()
        if place.keywords == keywords and at in later:
            return [f"click[{NEXT}]"]  # no search has it among the first results
        return [f"search[{keywords}]"]

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        budget = min(turns, actions)  # an answer is one action
        success, paid = self._play(budget, None)
        played = [self._play(budget, draw) for draw in range(DRAWS)]
        random, random_return = (fmean(each) for each in zip(*played, strict=True))
        return Baselines(random, max(success, random), random_return, paid, DRAWS)

    def random_action(self, generator: np.random.Generator) -> str:
        element = pick(generator, [SEARCH, *self._elements])
        if element != SEARCH:
            return f"click[{element}]"
        words = self._wanted.instruction.split() or [""]
        count = 1 + int(generator.random() * len(words))
        return f"search[{' '.join(words[:count]).rstrip('.,;?')}]"

    def _play(self, budget: int, draw: int | None) -> tuple[float, float]:
        """Success and reward from here of random play, or of `solve` if `draw` is ``None``."""
        twin = copy.copy(self)
        generator = np.random.Generator(np.random.PCG64([3, self._goal, draw or 0]))
        for left in range(budget, 0, -1):
            random = draw is not None
            action = twin.random_action(generator) if random else twin.solve(left, left, 1)[0]
            _, reward, terminated, _, info = twin.step(action)
            if terminated:
                return float(info["success"]), reward
        return 0.0, 0.0

    @property
    def _wanted(self) -> Goal:
        return self.catalogue.goals[self._goal]

    @property
    def _product(self) -> Product:
        return self.catalogue.products[self._place.product]

    def _results(self) -> tuple[int, ...]:
        return self.catalogue.search(self._place.keywords)

    def _shown(self) -> dict[str, int]:
        """The products on the page of results, by what they are called there."""
        last = self._on_page * self._place.number
        shown = self._results()[last - self._on_page : last]
        if self._numbered:
            return {str(number): product for number, product in enumerate(shown, 1)}
        return {plain(self.catalogue.products[product].key): product for product in shown}

    def _values(self) -> dict[str, str]:
        """The values of the product's options, by what they are called on its page."""
        options = self._product.options.values()
        values = dict.fromkeys(value for values in options for value in values)
        named: dict[str, str] = {}
        for number, value in enumerate(values, 1):
            named.setdefault(str(number) if self._numbered else plain(value), value)
        return named

    def _goal_index(self, seed: int) -> int:
        split, number = self._split, len(self.catalogue.goals)
        if split == "auto":
            split = "test" if seed < TRAIN_LEVELS else "train"
        first, last = {
            "test": (0, TEST),
            "validation": (TEST, TEST + VALIDATION),
            "train": (TEST + VALIDATION, max(number, TEST + VALIDATION + 1)),
            "all": (0, max(number, 1)),
        }[split]
        if last > number:
            raise RagenError(
                f"WebShop's split {split!r} needs {last} goals, and the catalogue has {number}: "
                'give it more products, or take split = "all"'
            )
        return first + seed % (last - first)

    def _enter(self, place: Place, reward: float) -> None:
        self._place, self._reward = place, reward
        self._elements = self._links()
        lines = [f"Instruction: {self._wanted.instruction}", *self._lines()]
        lines.append(f"Clickable: {', '.join(self._elements) or 'nothing'}")
        self._text = "\n".join(lines)

    def _follow(self, action: str) -> Place | None:
        """The place to which an action leads; ``None`` if it is not possible here."""
        name, argument = parse_action(action)
        if name == SEARCH and argument and self._place.page != BOUGHT:
            return Place("results", argument)
        return self._elements.get(argument) if name == "click" else None

    def _links(self) -> dict[str, Place]:
        """The elements of the page by name, and the place to which each leads."""
        place = self._place
        if place.page in (SEARCH, BOUGHT):
            return {}
        found = {BACK: Place()}
        if place.page == "results":
            if place.number > 1:
                found[PREVIOUS] = place._replace(number=place.number - 1)
            if self._on_page * place.number < len(self._results()):
                found[NEXT] = place._replace(number=place.number + 1)
            for name, product in self._shown().items():
                found[name] = place._replace(page="item", product=product)
            return found
        if place.page != "item":
            return found | {PREVIOUS: place._replace(page="item")}
        found[PREVIOUS] = place._replace(page="results", product=0, chosen=())
        found |= {page: place._replace(page=page) for page in DETAILS}
        found[BUY] = place._replace(page=BOUGHT)
        for name, value in self._values().items():
            chosen = dict(place.chosen) | {
                o: value for o, values in self._product.options.items() if value in values
            }
            found.setdefault(name, place._replace(chosen=tuple(sorted(chosen.items()))))
        return found

    def _lines(self) -> list[str]:
        place = self._place
        if place.page == SEARCH:
            return ["Page: search"]
        if place.page == "results":
            found, on_page = self._results(), self._shown()
            start = self._on_page * (place.number - 1)
            which = f"{start + 1} to {start + len(on_page)} of {len(found)}" if on_page else "none"
            keywords = place.keywords[:SHOWN_KEYWORDS]
            products = ((name, self.catalogue.products[at]) for name, at in on_page.items())
            lines = [f"[{name}] {each.title}, {_price(each)}" for name, each in products]
            return [f"Page: results for {keywords}: {which}", *lines]
        product, chosen = self._product, dict(place.chosen)
        named = ", ".join(f"{name}: {value}" for name, value in place.chosen)
        if place.page == BOUGHT:
            bought = f"You bought {product.title} for {_price(product)}"
            return [
                f"Page: bought\n{bought}{f' ({named})' if named else ''}. Score: {self._reward:.3g}"
            ]
        if place.page == "item":
            lines = [f"Page: {product.title}", f"Price: {_price(product)}"]
            called = {value: f"[{name}] " for name, value in self._values().items()}
            for name, values in product.options.items():
                choice = f" (chosen: {chosen[name]})" if name in chosen else ""
                shown = (f"{called[each] if self._numbered else ''}{each}" for each in values)
                lines.append(f"{name}{choice}: {', '.join(shown)}")
            return lines
        texts = {
            "description": [product.description],
            "features": product.features,
            "reviews": product.reviews,
        }[place.page]
        return [
            f"Page: {place.page} of {product.title}",
            *filter(None, texts),
            *([] if any(texts) else ["None."]),
        ]


def parse_action(action: str) -> tuple[str, str]:
    """The name and the argument of an action, in lower case; both are empty for any other text."""
    match = ACTION.fullmatch(action)
    return (match[1].lower(), plain(match[2])) if match else ("", "")


def plain(text: str) -> str:
    """A text in lower case, with single spaces."""
    return " ".join(text.lower().split())


def _price(product: Product) -> str:
    return product.price_text or f"${product.price:.2f}"


def _choices(goal: Goal) -> set[tuple[str, str]]:
    """The options of a goal's product that the goal asks for, by name and value."""
    offered = [(name, value) for name, values in goal.product.options.items() for value in values]
    choices: dict[str, str] = {}
    for asked in goal.options:
        exact = [each for each in offered if each[1] == asked]
        similar = [each for each in offered if same_option(each[1], asked)]
        for name, value in (exact or similar)[:1]:
            choices.setdefault(name, value)
    return set(choices.items())


@lru_cache(maxsize=65_536)
def _keywords(catalogue: Catalogue, index: int, on_page: int) -> str:
    """A search with a goal's product on its first page, or the product's title if none has it."""
    goal = catalogue.goals[index]
    product = goal.product
    tries = (" ".join((*goal.attributes, product.query)), goal.instruction, product.title)
    found = (plain(each) for each in tries)
    place = catalogue.places[plain(product.key)]
    return next(
        (each for each in found if place in catalogue.search(each)[:on_page]), plain(product.title)
    )


@lru_cache(maxsize=4)
def _open_catalogue(products: int | None, seed: int, path: str) -> Catalogue:
    if path:
        return load_catalogue(path, products, seed)
    return make_catalogue(products or SMALL, seed)
