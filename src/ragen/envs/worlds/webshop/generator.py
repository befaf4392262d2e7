"""RAGEN's own catalogue for WebShop: products and goals that follow from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    """Types of products that share their attributes and options.

    `types` has the usual price of each type. `adjectives` say what a product is, `parts` what it
    has, and `options` what the buyer chooses. The score takes no two of these phrases for the same.
    """

    category: str
    types: Mapping[str, int]
    adjectives: tuple[str, ...]
    parts: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


def _department(
    category: str, types: str, adjectives: str, parts: str, *options: str
) -> Department:
    prices = (each.rsplit(" ", 1) for each in _list(types))
    choices = (each.split(": ") for each in options)
    return Department(
        category,
        {kind: int(price) for kind, price in prices},
        _list(adjectives),
        _list(parts),
        {option: _list(values) for option, values in choices},
    )


DEPARTMENTS = (
    _department(
        "clothing",
        "running shoes 70, hiking boots 90, sandals 35, loafers 60, rain boots 45",
        "waterproof, slip resistant, vegan, wide fit, orthotic, ankle high",
        "rubber sole, cushioned insole, steel toe, leather lining, reflective strips, side zipper",
        "color: black, brown, white, navy, red",
        "size: 6, 7, 8, 9, 10, 11",
    ),
    _department(
        "clothing",
        "t-shirt 20, hoodie 40, sweater 50, polo shirt 30, blouse 35",
        "machine washable, long sleeve, slim fit, moisture wicking, wrinkle free, hand knitted",
        "crew neck, chest pocket, ribbed cuffs, button placket, contrast stitching, logo print",
        "color: black, white, green, purple, yellow",
        "size: small, medium, large, tall",
    ),
    _department(
        "beauty",
        "face cream 25, body lotion 15, sunscreen 18, lip balm 8, face serum 30",
        "fragrance free, cruelty free, oil free, paraben free, hypoallergenic, lab tested",
        "hyaluronic acid, shea butter, vitamin c, aloe vera, retinol, jojoba beads",
        "scent: unscented, lavender, rose, citrus",
        "container: travel tube, glass jar, pump bottle",
    ),
    _department(
        "beauty",
        "shampoo 14, conditioner 14, hair mask 20, hair oil 18, styling gel 12",
        "sulfate free, color safe, anti dandruff, quick absorbing, silicone free, salon grade",
        "argan extract, tea tree, biotin, keratin, coconut milk, rosemary",
        "hair type: curly, straight, fine, thick",
        "pack: single, duo, trio",
    ),
    _department(
        "food",
        "granola bars 12, potato chips 9, trail mix 15, crackers 8, popcorn 10",
        "gluten free, dairy free, low sodium, non gmo, high protein, keto friendly",
        "sea salt, dark cocoa, dried cranberries, roasted almonds, chia seeds, maple syrup",
        "flavor: original, barbecue, honey, spicy",
        "pack: single, six bag, variety",
    ),
    _department(
        "food",
        "ground coffee 16, herbal tea 10, cocoa powder 12, lemonade mix 9, iced tea 14",
        "caffeine free, sugar free, fair trade, organic, shade grown, low acid",
        "resealable pouch, natural stevia, ginger root, cinnamon bark, real fruit, electrolytes",
        "flavor: vanilla, hazelnut, mocha, peach",
        "container: tin, carton, bulk bag",
    ),
    _department(
        "electronics",
        "headphones 80, earbuds 60, bluetooth speaker 50, soundbar 120, clock radio 40",
        "noise cancelling, sweat proof, foldable, fast charging, voice controlled, low latency",
        "usb c port, carrying case, built in microphone, deep bass, touch controls, aux input",
        "color: black, white, blue, pink",
        "plug: american, british, european",
    ),
    _department(
        "electronics",
        "phone case 18, screen protector 12, charging cable 10, power bank 35, car mount 22",
        "shockproof, scratch resistant, heavy duty, ultra slim, tangle free, quick release",
        "magnetic ring, kickstand, card holder, aluminum frame, led indicator, camera cover",
        "color: black, clear, green, silver",
        "model: galaxy, iphone, pixel, xperia",
    ),
    _department(
        "home",
        "duvet cover 60, pillow 30, bed sheets 50, throw blanket 40, mattress topper 110",
        "breathable, fade proof, temperature regulating, stain resistant, easy care, mite proof",
        "memory foam, bamboo fabric, egyptian cotton, zipper closure, deep pockets, goose down",
        "color: white, gray, navy, beige, green",
        "size: twin, full, queen, king",
    ),
    _department(
        "home",
        "frying pan 40, chef knife 50, cutting board 25, mixing bowl 20, water bottle 22",
        "dishwasher safe, nonstick, bpa free, heat tolerant, rust proof, leak proof",
        "stainless steel, wooden handle, glass lid, silicone grip, measuring marks, pouring spout",
        "color: black, red, silver, teal",
        "size: small, medium, large",
    ),
    _department(
        "home",
        "office chair 150, bookshelf 90, coffee table 130, bar stool 70, nightstand 80",
        "height adjustable, space saving, ready assembled, weather resistant, hand carved, padded",
        "solid wood, metal legs, storage drawer, lumbar support, tempered glass, locking wheels",
        "finish: oak, walnut, white, black",
    ),
    _department(
        "sports",
        "yoga mat 30, dumbbells 50, resistance bands 20, jump rope 15, foam roller 25",
        "anti skid, extra thick, sweat absorbing, odor free, latex free, portable",
        "shoulder strap, ergonomic handles, exercise guide, mesh bag, grooved surface, "
        "neoprene coating",
        "color: black, purple, orange, teal",
        "level: beginner, intermediate, advanced",
    ),
    _department(
        "sports",
        "family tent 140, sleeping bag 60, camping lantern 30, backpack 75, picnic cooler 55",
        "windproof, sun protected, rechargeable, tear resistant, collapsible, insulated",
        "mosquito net, compression sack, side pouches, fiberglass poles, rain cover, hip belt",
        "color: green, orange, gray, blue",
        "capacity: solo, double, group",
    ),
    _department(
        "toys",
        "building blocks 35, board game 28, jigsaw puzzle 18, plush animal 20, dollhouse 80",
        "screen free, battery operated, hand painted, non toxic, award winning, glow in the dark",
        "keepsake box, picture book, wooden pieces, sound effects, extra cards, velvet bag",
        "theme: dinosaur, space, ocean, farm",
        "age: toddler, child, teen",
    ),
    _department(
        "pets",
        "dog bed 45, dog leash 18, dog harness 28, chew toy 12, food bowl 16",
        "chew proof, odor resistant, orthopedic, machine dryable, vet approved, night visible",
        "soft grip, plush lining, safety buckle, name tag, squeaker, nonslip feet",
        "color: red, blue, brown, pink",
        "size: small, medium, large",
    ),
    _department(
        "office",
        "notebook 14, gel pens 12, desk organizer 26, day planner 18, sticky notes 8",
        "acid free, smudge proof, refillable, spiral bound, quick drying, recycled",
        "dotted pages, elastic band, pen loop, inner folder, monthly tabs, hard cover",
        "color: black, mint, gold, blue",
        "pack: single, duo, classroom",
    ),
)

BRANDS = _list(
    "Norvale, Quillo, Brantmoor, Sundrift, Larkby, Ostrello, Pellwick, Tavira, Hexley, Morrow, "
    "Fennick, Dunmere, Alvaro, Cresta, Wrenfield, Jasperly, Kivo, Maplin, Orrin, Velden, Yarrow, "
    "Zephra, Belmora, Corvin, Eastling, Galloway, Halden, Ivorra, Lumenor, Nestrel"
)
DESCRIPTIONS = (
    "{brand} {type}, made for every day. You asked for {adjective}: here it is.",
    "{brand} has sold {type} for ten years, and people come back for more.",
    "The {type} that our customers talk about: {adjective}, and with {part}.",
    "For people who look twice: {type} with {part}.",
)
ADJECTIVE_NOTES = ("{} design", "{}, as promised", "Truly {}")
PART_NOTES = ("Comes with {}", "{} included", "Made with {}")
REVIEWS = (
    "5 stars. Better than I had hoped; would buy it again.",
    "4 stars. Does what it should. The parcel took a week.",
    "3 stars. Fine for the price, though the box was dented.",
    "2 stars. For {type} I had expected more from {brand}.",
    "5 stars. My sister wanted one too, so now we own two.",
    "4 stars. Looks like the photo.",
)

PHRASES = {
    "color": "in {}",
    "size": "in size {}",
    "scent": "with {} scent",
    "container": "in the {}",
    "hair type": "for {} hair",
    "pack": "as a {} pack",
    "flavor": "with {} flavor",
    "plug": "with {} plug",
    "model": "for {}",
    "finish": "with {} finish",
    "level": "for {} level",
    "capacity": "with {} capacity",
    "theme": "with {} theme",
    "age": "for age group {}",
}
"""How an instruction names the chosen value of an option."""
ADJECTIVES = frozenset(each for place in DEPARTMENTS for each in place.adjectives)
INSTRUCTIONS = (
    "I am looking for {item}{options}, and price lower than {limit} dollars.",
    "Find me {item}{options}, with a price below {limit} dollars.",
    "I need {item}{options}. Please spend less than {limit} dollars.",
    "Can you get me {item}{options}? My limit is {limit} dollars.",
    "Buy {item}{options} for under {limit} dollars.",
    "I want to order {item}{options}; it must not cost more than {limit} dollars.",
    "My friend would like {item}{options}. Keep it under {limit} dollars.",
    "Please shop for {item}{options}, priced at {limit} dollars or less.",
)


def make_catalogue(num_products: int, seed: int) -> Catalogue:
    """Products of all types in turn, and about `GOALS` goals for each.

    Only the product that a goal was written for satisfies it fully. Goals are in random order and
    all different.

    Raises:
        RagenError: `num_products` is above `MOST_PRODUCTS`.
    """
    if num_products > MOST_PRODUCTS:
        raise RagenError(
            f"WebShop's own shop has at most {MOST_PRODUCTS:,} products, not {num_products:,}: "
            "give the path of the original files"
        )
    generator = np.random.Generator(np.random.PCG64([2, seed]))
    kinds = [(place, kind) for place in DEPARTMENTS for kind in place.types]
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


def _product(generator: np.random.Generator, place: Department, kind: str, code: str) -> Product:
    adjectives = _sample(generator, place.adjectives, 2 + int(generator.random() * 2))
    parts = _sample(generator, place.parts, 2 + int(generator.random() * 2))
    brand = pick(generator, BRANDS)
    words = {"type": kind, "brand": brand, "adjective": adjectives[0], "part": parts[0]}
    notes = [pick(generator, ADJECTIVE_NOTES).format(each) for each in adjectives]
    notes += [pick(generator, PART_NOTES).format(each) for each in parts]
    cents = pick(generator, (0.99, 0.49, 0.95))
    return Product(
        key=code,
        path=(place.category, kind),
        query=kind,
        title=f"{brand} {adjectives[-1].title()} {kind.title()} with {parts[-1].title()}",
        price=int(place.types[kind] * (0.5 + generator.random())) + cents,
        attributes=(*adjectives, *parts),
        options={
            name: tuple(each for each in values if each in kept)
            for name, values in place.options.items()
            for kept in [_sample(generator, values, 2 + int(generator.random() * 3))]
        },
        description=pick(generator, DESCRIPTIONS).format(**words),
        features=tuple(f"{note[0].upper()}{note[1:]}" for note in _sample(generator, notes, 6)),
        reviews=tuple(each.format(**words) for each in _sample(generator, REVIEWS, 2)),
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
    options = "".join(f", {PHRASES[named[each]].format(each)}" for each in goal.options)
    template = pick(generator, INSTRUCTIONS)
    return template.format(item=item, options=options, limit=f"{goal.price_limit:.0f}")


def _and(words: Sequence[str]) -> str:
    return " and ".join(each for each in (", ".join(words[:-1]), *words[-1:]) if each)


def _sample(generator: np.random.Generator, items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """Different items in random order: `count` of them, or all if there are fewer."""
    return tuple(shuffled(generator, items)[:count])
