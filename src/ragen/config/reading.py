"""From files and overrides to one `Config`: defaults < algorithm preset < recipe < command line.

Every layer is flattened to dotted keys (``update.lr``), checked by name, and laid over the one
before; the result is validated once. Whatever is wrong becomes one line that names the key, where
it was set, what was expected, and the nearest valid name.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import ValidationError

from ragen.config.config import Config
from ragen.config.keys import (
    MIX,
    PARAMS,
    TABLES,
    Flat,
    dotted,
    expected,
    in_place,
    nest,
    show,
)
from ragen.config.rules import READ_WITH
from ragen.core.errors import RagenError, nearest
from ragen.core.files import read_text

OF_ENV = ("env.", "curriculum.", "rollout.max_tokens", "model.max_length")
"""How the keys of a recipe begin that are for its environment alone."""


SAVED = "the saved config"
"""The layer of a run's own values; those that are not read fall back to the preset's."""


class Difference(NamedTuple):
    """A key whose value is not the preset's."""

    key: str
    preset: Any
    value: Any


def merge(
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    saved: Mapping[str, Any] | None = None,
    env: Flat | None = None,
) -> Config:
    """Lay all layers of values over each other, then check the result.

    If an override names another algorithm, values of the recipe that this algorithm does not read
    fall back to its preset. If it names another environment, the recipe's values in `OF_ENV` are
    left out.

    Args:
        recipe: A recipe's name (`recipes`), a path to a ``.toml``, or None for the defaults.
        overrides: Values by dotted key or in nested tables; they win over everything else.
        saved: Values of an existing run, instead of a recipe; values that are not read fall back.
        env: The settings that the environment brings, above the recipe.

    Raises:
        RagenError: Unknown recipe, preset or key, a wrong type, values that exclude each other, a
            value that would never be read (`rules.READ_WITH`), or broken TOML.
    """
    given, brought = dotted(overrides or {}), dict(env or {})
    layers: list[tuple[str, Flat]] = []  # above the preset, each with its name in messages
    if recipe is not None:
        name, values = load_recipe(recipe)
        layers.append((f"recipe {name}", {"recipe": name, **for_env(brought | given, values)}))
    layers += [(SAVED, dict(saved or {})), ("the environment", brought), ("", given)]
    preset = _preset_of(layers)
    unused = unread(_validate([preset, *layers]))
    usual = flatten(_validate([preset]))
    read = [preset]
    for where, values in layers:
        ignored = [key for key in unused if values.get(key, usual[key]) != usual[key]]
        if ignored and where != SAVED:
            if not where or not given:
                raise RagenError(
                    f"{ignored[0]} = {show(values[ignored[0]])}{in_place(where)} has no effect: it "
                    f"takes {READ_WITH[ignored[0]].words}; leave it out or set that"
                )
            merge(recipe)  # the recipe has to read it where the user changes nothing
        read.append((where, {k: v for k, v in values.items() if k not in ignored}))
    return _validate(read)


def _preset_of(layers: Iterable[tuple[str, Flat]]) -> tuple[str, Flat]:
    """The layer below all others: the preset of the algorithm that the highest of them names."""
    algorithm = Config().algorithm
    for _, values in layers:
        algorithm = values.get("algorithm", algorithm)
    if not isinstance(algorithm, str):
        raise RagenError(f"algorithm = {show(algorithm)}: expected the name of a preset as text")
    return f"preset {algorithm}", load_preset(algorithm)


def with_preset(config: Config) -> Config:
    """A config that Python built, on top of its algorithm's preset as if a recipe had said it.

    Values that were set explicitly stay; all others are the preset's. The config of a recipe, or of
    a saved run, stays as it is.
    """
    explicit = dotted(config.model_dump(exclude_unset=True))
    return _validate([_preset_of([("", {"algorithm": config.algorithm})]), ("", explicit)])


def for_env(given: Flat, recipe: Flat) -> Flat:
    """The values of a recipe, without those for its environment if another one is given.

    A mixture of the user adds to that of a recipe.
    """
    is_other = given.get("env.name") not in (None, recipe.get("env.name"))
    is_other |= len(mixed_in(given)) > 0 and not mixed_in(recipe)
    if not (is_other and names_env(recipe)):
        return recipe
    return {key: value for key, value in recipe.items() if not key.startswith(OF_ENV)}


def names_env(values: Flat) -> bool:
    """True if values by key name an environment, or those of a mixture."""
    return "env.name" in values or len(mixed_in(values)) > 0


def mixed_in(values: Flat) -> list[str]:
    """The environments of the mixture in values by key."""
    return [key.removeprefix(f"{MIX}.") for key in values if key.startswith(f"{MIX}.")]


def unread(config: Config) -> list[str]:
    """The keys that the config's algorithm never reads."""
    return [key for key, use in READ_WITH.items() if not use.holds(config)]


def read_config(path: Path) -> Config:
    """A config that was saved with a run; the preset is not consulted again."""
    return parse_config(read_text(path), str(path))


def parse_config(text: str, where: str) -> Config:
    """The config of a saved text; `where` names it in messages."""
    return _validate([(where, _dotted_toml(text, where))])


def dump(config: Config) -> str:
    """The config as TOML text, which `read_config` reads back to an equal one."""
    try:
        return tomli_w.dumps(config.model_dump())
    except TypeError as error:
        raise RagenError(
            f"{PARAMS} holds a value that cannot be saved ({error}); "
            "use numbers, text, true or false, lists and tables"
        ) from None


def differences(config: Config) -> list[Difference]:
    """The settings that differ from the algorithm's preset, in the config's order."""
    preset = flatten(merge(None, {"algorithm": config.algorithm}))
    return [
        Difference(key, preset.get(key), value)
        for key, value in flatten(config).items()
        if key not in ("recipe", "algorithm") and preset.get(key) != value
    ]


def flatten(config: Config) -> Flat:
    """A config's values by dotted key."""
    return dotted(config.model_dump())


def load_recipe(recipe: str | Path) -> tuple[str, Flat]:
    """A recipe's name and its values by dotted key."""
    if isinstance(recipe, Path) or recipe.endswith(".toml"):
        path = Path(recipe)
        return path.stem, _read_toml(path, f"recipe {path}")
    return recipe, _read_toml(_named(recipe, recipes(), "recipe"), f"recipe {recipe}")


def load_preset(algorithm: str) -> Flat:
    """A preset's values by dotted key."""
    return _read_toml(_named(algorithm, presets(), "algorithm"), f"preset {algorithm}")


def _named(name: str, known: Mapping[str, Path], kind: str) -> Path:
    if name not in known:
        also = ", or a path to a .toml" if kind == "recipe" else ""
        hint = nearest(name, known, f"{kind}s are {', '.join(known)}{also}")
        raise RagenError(f"unknown {kind} {name!r}{hint}")
    return known[name]


@cache
def recipes() -> Mapping[str, Path]:
    """The recipes that come with the package, by name: ``paper/bandit`` is that folder's."""
    return _toml_files("recipes")


@cache
def presets() -> Mapping[str, Path]:
    """The algorithm presets, by name: ``starpo-s/grpo`` is ``presets/starpo-s/grpo.toml``."""
    return _toml_files("presets")


def first_comment(file: Path) -> str:
    """The comment at the start of a recipe or preset, which describes it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


def _validate(layers: Iterable[tuple[str, Flat]]) -> Config:
    merged: Flat = {}
    source: dict[str, str] = {}
    for where, values in layers:
        for key, value in values.items():
            merged[key], source[key] = value, where
    try:
        return Config.model_validate(nest(merged))
    except ValidationError as error:
        raise RagenError(_one_line(error, source)) from None


def _one_line(error: ValidationError, source: Mapping[str, str]) -> str:
    """The first complaint in the house's words; pydantic's own name neither file nor bounds."""
    first = error.errors(include_url=False)[0]
    reason = first.get("ctx", {}).get("error")
    key = ".".join(p for p in first["loc"] if isinstance(p, str) and p != "[key]")
    if not key:  # A rule about several keys: a sentence of its own.
        return str(reason)
    wrong = key if "[key]" in first["loc"] else f"{key} = {show(first['input'])}"
    entries = f"; set {key}.NAME" if key in TABLES else ""
    reason = reason or f"expected {expected(key)}{entries}"
    return f"{wrong}{in_place(source.get(key, ''))}: {reason}"


def _toml_files(folder: str) -> Mapping[str, Path]:
    root = Path(__file__).parent / folder
    paths = sorted(root.rglob("*.toml"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}


def _read_toml(file: Path, where: str) -> Flat:
    return _dotted_toml(read_text(file), where)


def _dotted_toml(text: str, where: str) -> Flat:
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 4,300 digits, or 1,000 brackets
        raise RagenError(f"{where} is not valid TOML: {error}") from None
    return dotted(tree, where)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with some keys' values replaced, checked as a whole."""
    try:
        return _validate([("", {**flatten(config), **changes})])
    except RagenError as error:
        raise RagenError(f"cannot change {', '.join(changes)}: {error}") from None
