"""The original files of WebShop: products, their attributes, and instructions that people wrote."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ragen.core.errors import RagenError
from ragen.envs.worlds.webshop.catalogue import NO_LIMIT, Catalogue, Goal, Product, price_limit

HUMAN = "items_human_ins.json"
ORDER_SEED = 233
"""The seed with which the original shuffles its goals, so that the splits are the same."""
NO_PRICE = 100.0
"""The price of a product whose record has none."""


def load_catalogue(path: str, num_products: int | None, seed: int) -> Catalogue:
    """The products and goals of the original files.

    `path` is a folder or one ``items_shuffle*.json`` in it; of several, the smallest file is taken.
    Its attributes are in the ``items_ins_v2*.json`` of the same ending, and the goals in
    ``items_human_ins.json``. The first `num_products` records are read, or all. A price within a
    range and the limits follow from `seed`; the original draws them anew each time.

    Raises:
        RagenError: A file is missing or not in the format, or there are no goals.
    """
    shop = Path(path).expanduser()
    if not shop.is_file():
        found = sorted(shop.glob("items_shuffle*.json"), key=lambda each: each.stat().st_size)
        if not found:
            raise RagenError(
                f"there is no items_shuffle*.json in {shop}: path is the folder with WebShop's "
                "files"
            )
        shop = found[0]
    try:
        products, goals = _read(shop, num_products, seed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RagenError(
            f"{shop} and the files beside it are not those of WebShop "
            f"({type(error).__name__}: {error})"
        ) from error
    if not goals:
        raise RagenError(f"{shop} has no goals: none of its products has instructions")
    random.Random(ORDER_SEED).shuffle(goals)
    return Catalogue(products, goals)


def _read(shop: Path, num_products: int | None, seed: int) -> tuple[list[Product], list[Goal]]:
    generator = np.random.Generator(np.random.PCG64([2, seed]))
    beside = (shop.with_name(shop.name.replace("shuffle", "ins_v2")), shop.with_name(HUMAN))
    records, attributes, texts = (json.loads(each.read_text("utf-8")) for each in (shop, *beside))
    products: dict[str, Product] = {}
    goals: list[Goal] = []
    for record in records[:num_products]:
        key = str(record["asin"])
        if key == "nan" or len(key) > 10 or key in products:  # as in the original
            continue
        product = products[key] = _product(record, attributes.get(key, {}), generator)
        limit = price_limit(product.price, generator)
        goals += _human_goals(product, texts.get(key, []), limit)
    return list(products.values()), goals


def _product(
    record: Mapping[str, Any], about: Mapping[str, Any], generator: np.random.Generator
) -> Product:
    points = record["small_description"]
    price, price_text = _price(record.get("pricing") or "", generator)
    return Product(
        key=record["asin"],
        path=tuple(part.strip() for part in record["product_category"].split("›")),
        query=record["query"].lower().strip(),
        title=record["name"],
        price=price,
        attributes=tuple(about.get("attributes", ())),
        options={
            name.lower(): tuple(
                each["value"].strip().replace("/", " | ").lower() for each in values
            )
            for name, values in (record["customization_options"] or {}).items()
            if values
        },
        description=record["full_description"] or "",
        features=tuple(filter(None, points if isinstance(points, list) else [points])),
        price_text=price_text,
    )


def _price(text: str, generator: np.random.Generator) -> tuple[float, str]:
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in text.split("$")[1:]][:2]
    if not prices:
        return NO_PRICE, f"${NO_PRICE}"
    if len(prices) == 1:
        return prices[0], f"${prices[0]}"
    low, high = prices
    return low + generator.random() * (high - low), f"${low} to ${high}"


def _human_goals(
    product: Product, written: list[Mapping[str, Any]], limit: float
) -> Iterator[Goal]:
    """The goals of a product that people wrote, except those without attributes."""
    limited = "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"
    for each in written:
        if each["instruction_attributes"]:
            yield Goal(
                each["instruction"].strip(".") + limited,
                product,
                tuple(each["instruction_attributes"]),
                tuple(each["instruction_options"]),
                limit,
            )
