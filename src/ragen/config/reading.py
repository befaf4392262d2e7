"""From files and overrides to one `Config`: defaults < algorithm preset < recipe < command line.

Every layer is flattened to dotted keys (``update.lr``), checked by name, and laid over the one
before; the result is validated once. Whatever is wrong becomes one line that names the key, where
it was set, what was expected, and the nearest valid name.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ragen.config.sections import READ_WITH, Config, Section
from ragen.core.errors import RagenError

Flat = dict[str, Any]
"""Values by dotted key; what stands in an open table is ``env.params.<name>``."""

SHORT = MappingProxyType({"model": "model.path", "env": "env.name"})
"""Sections whose bare name stands for their main key, as in ``--model base``."""

PARAMS = "env.params"
"""A table whose keys belong to the environment, which checks them itself."""

TABLES = (PARAMS, "reward.terms", "guard.responses")
"""The open tables: keys of their own choosing, which the layers merge one by one."""


class Difference(NamedTuple):
    """A key whose value is not the preset's."""

    key: str
    preset: Any
    value: Any


def resolve(
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    saved: Mapping[str, Any] | None = None,
) -> Config:
    """Settle every value of a run.

    A value that would never be read is refused (`config.READ_WITH`). What a recipe sets for its own
    algorithm, and the one that an override names leaves unread, falls back to the preset's value.

    Args:
        recipe: A recipe's name (`recipes`), a path to a ``.toml``, or None for the defaults.
        overrides: Values by dotted key or in nested tables; they win over everything else.
        saved: Values of a run that is there, in the recipe's place; those left unread fall back.

    Raises:
        RagenError: Unknown recipe, preset or key, a wrong type, values that exclude each other, a
            value that would never be read, or broken TOML; one line with the remedy.

    Example:
        >>> config = resolve("bandit", {"update.lr": 3e-4, "env.params.slip": 0.5})
        >>> config.env.name, config.update.lr, config.env.params, config.loss.clip_high
        ('bandit', 0.0003, {'slip': 0.5}, 0.28)
    """
    above: list[tuple[str, Flat]] = []
    if recipe is not None:
        name, flat = load_recipe(recipe)
        above.append((f"recipe {name}", {"recipe": name, **flat}))
    kept = dict(saved or {})
    above.append(("the saved config", kept))
    if overrides:
        above.append(("", _flatten(overrides, "")))
    algorithm = Config().algorithm
    for _, flat in above:
        algorithm = flat.get("algorithm", algorithm)
    if not isinstance(algorithm, str):
        raise RagenError(f"algorithm = {_show(algorithm)}: expected the name of a preset as text")
    preset = (f"preset {algorithm}", load_preset(algorithm))
    unused = unread(_validate([preset, *above]))
    standard = flatten(_validate([preset]))
    for where, flat in above:
        for key in unused:
            if flat.get(key, standard[key]) == standard[key]:
                continue
            if flat is not kept:
                if not (where and overrides):
                    raise RagenError(
                        f"{key} = {_show(flat[key])}{_in(where)} has no effect: it takes "
                        f"{READ_WITH[key].words}; leave it out or set that"
                    )
                resolve(recipe)  # which has to read it when it stands alone
            del flat[key]
    return _validate([preset, *above])


def unread(config: Config) -> list[str]:
    """The keys that the config's algorithm never reads.

    Example:
        >>> "advantage.gae_lambda" in unread(resolve(None, {"algorithm": "starpo/grpo"}))
        True
    """
    return [key for key, use in READ_WITH.items() if not use.holds(config)]


def read_config(path: Path) -> Config:
    """A config that was saved with a run; the preset is not consulted again.

    Raises:
        RagenError: The file is missing, no TOML, or no valid config.
    """
    return _validate([(str(path), _read_toml(path, str(path)))])


def dump(config: Config) -> str:
    """The config as TOML text, which `read_config` reads back to an equal one.

    Raises:
        RagenError: An environment parameter is of a type that TOML does not have.
    """
    try:
        return tomli_w.dumps(config.model_dump())
    except TypeError as error:
        raise RagenError(
            f"{PARAMS} holds a value that cannot be saved ({error}); "
            "use numbers, text, true or false, lists and tables"
        ) from None


def differences(config: Config) -> list[Difference]:
    """What a config changes of its algorithm's preset (or of the defaults), in the config's order.

    Example:
        >>> differences(resolve(None, {"update.lr": 0.5}))
        [Difference(key='update.lr', preset=1e-06, value=0.5)]
    """
    preset = flatten(resolve(None, {"algorithm": config.algorithm}))
    return [
        Difference(key, preset.get(key), value)
        for key, value in flatten(config).items()
        if key not in ("recipe", "algorithm") and preset.get(key) != value
    ]


def flatten(config: Config) -> Flat:
    """A config's values by dotted key."""
    return _flatten(config.model_dump(), "")


def load_recipe(recipe: str | Path) -> tuple[str, Flat]:
    """A recipe's name and its values by dotted key.

    Raises:
        RagenError: No such recipe or file, broken TOML, or an unknown key.
    """
    known = recipes()
    if isinstance(recipe, Path) or recipe.endswith(".toml"):
        path = Path(recipe)
        return path.stem, _read_toml(path, f"recipe {path}")
    if recipe not in known:
        raise RagenError(
            f"unknown recipe {recipe!r}{nearest(recipe, known)}; "
            f"recipes are {', '.join(known)}, or a path to a .toml"
        )
    return recipe, _read_toml(known[recipe], f"recipe {recipe}")


def load_preset(algorithm: str) -> Flat:
    """A preset's values by dotted key.

    Raises:
        RagenError: No such preset.
    """
    known = presets()
    if algorithm not in known:
        raise RagenError(
            f"unknown algorithm {algorithm!r}{nearest(algorithm, known)}; "
            f"algorithms are {', '.join(known)}"
        )
    return _read_toml(known[algorithm], f"preset {algorithm}")


@cache
def recipes() -> Mapping[str, Traversable]:
    """The recipes that come with the package, by name: ``paper/bandit`` is that folder's."""
    return MappingProxyType(dict(_toml_files(resources.files("ragen.config") / "recipes")))


@cache
def presets() -> Mapping[str, Traversable]:
    """The algorithm presets, by name: ``starpo-s/grpo`` is ``algorithms/starpo-s/grpo.toml``."""
    return MappingProxyType(dict(_toml_files(resources.files("ragen.config") / "presets")))


def first_comment(file: Traversable) -> str:
    """What a recipe or preset says about itself: the comment that it begins with."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


@cache
def keys() -> Mapping[str, FieldInfo]:
    """Every key a config has, with its type, default and bounds."""
    return MappingProxyType(dict(_leaves(Config, "")))


def canonical_key(key: str, where: str = "") -> str:
    """The full dotted name of a key that may be short for it.

    Raises:
        RagenError: There is no such key; names the nearest one.

    Example:
        >>> canonical_key("model")
        'model.path'
        >>> canonical_key("update.lrr")
        Traceback (most recent call last):
        ragen.core.errors.RagenError: unknown key 'update.lrr'; did you mean 'update.lr'?
    """
    key = SHORT.get(key, key)
    if key in keys() or _in_table(key):
        return key
    inside = [name for name in keys() if name.startswith(key + ".")]
    if inside:
        raise RagenError(f"{key!r} is a section{_in(where)}: set one of {', '.join(inside)}")
    hint = nearest(key, keys()) or "; ragen train --help lists them all"
    raise RagenError(f"unknown key {key!r}{_in(where)}{hint}")


def parse_value(key: str, text: str) -> Any:
    """The value that a text from the command line stands for.

    Keys that hold text take it as it is; for all others it is read as TOML (``3e-4``, ``true``,
    ``[1, 2]``), and what TOML cannot read stays text, for the validation to refuse or an
    environment to accept.

    Example:
        >>> parse_value("update.lr", "3e-4"), parse_value("model.path", "7")
        (0.0003, '7')
        >>> parse_value("env.params.names", "pairs"), parse_value("env.params.slip", ".5")
        ('pairs', 0.5)
    """
    if not key.startswith(TABLES) and _holds_text(keys()[key].annotation):
        return text
    # TOML asks for a digit before the point.
    literal = f"0{text}" if text.startswith(".") else text
    try:
        parsed = tomllib.loads(f"value = {literal}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def expected(field: FieldInfo) -> str:
    """In words, what a key takes.

    Example:
        >>> expected(keys()["update.epochs"]), expected(keys()["filter.scale"])
        ('a whole number ≥ 1', 'none, linear or sqrt')
    """
    kind = field.annotation
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
    words: dict[object, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
    }
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if hasattr(rule, name)
    ]
    return " ".join([words.get(kind, "a table"), " and ".join(bounds)]).strip()


def _validate(layers: Iterable[tuple[str, Flat]]) -> Config:
    merged: Flat = {}
    source: dict[str, str] = {}
    for where, flat in layers:
        for key, value in flat.items():
            merged[key], source[key] = value, where
    try:
        return Config.model_validate(_nest(merged))
    except ValidationError as error:
        raise RagenError(_one_line(error, source)) from None


def _one_line(error: ValidationError, source: Mapping[str, str]) -> str:
    """The first complaint in the house's words; pydantic's own name neither file nor bounds."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if key not in keys():  # A rule about several keys, stated in config.py as a sentence.
        return str(first["ctx"]["error"]) if "ctx" in first else f"{key}: {first['msg']}"
    where = _in(source.get(key, ""))
    entries = f"; set {key}.NAME" if key in TABLES else ""
    return f"{key} = {_show(first['input'])}{where}: expected {expected(keys()[key])}{entries}"


def _flatten(tree: Mapping[str, Any], where: str, prefix: str = "") -> Flat:
    flat: Flat = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not _in_table(key):
            flat |= _flatten(value, where, f"{key}.")
        else:
            flat[canonical_key(key, where)] = value
    return flat


def _in_table(key: str) -> bool:
    return any(key.startswith(f"{table}.") for table in TABLES)


def _nest(flat: Flat) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".", 2) if _in_table(key) else key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return tree


def _leaves(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _toml_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.is_dir():
            yield from _toml_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".toml"):
            yield prefix + entry.name.removesuffix(".toml"), entry


def _read_toml(file: Traversable, where: str) -> Flat:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RagenError(f"cannot read {file}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise RagenError(f"{file} is not UTF-8 text, so it is no TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise RagenError(f"{where} is not valid TOML: {error}") from None
    return _flatten(tree, where)


def _holds_text(kind: Any) -> bool:
    return kind is str or (
        get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind))
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion or nothing: near as a whole, or in its last part (``lr``, ``ppo``)."""
    names = list(known)
    last_parts = {_last_part(full): full for full in reversed(names)}
    whole = difflib.get_close_matches(name, names, 1, 0.75)
    part = difflib.get_close_matches(_last_part(name), list(last_parts), 1, 0.75)
    loose: Sequence[str] = difflib.get_close_matches(name, names, 1, 0.5)
    for match in (whole, [last_parts[found] for found in part], loose):
        if match:
            return f"; did you mean {match[0]!r}?"
    return ""


def _last_part(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]


def _in(where: str) -> str:
    return f" in {where}" if where else ""


def _show(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "…"


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with some keys' values replaced, checked as a whole.

    Raises:
        RagenError: The values exclude each other.

    Example:
        >>> changed(Config(), {"update.lr": 0.5, "seed": 3}).update.lr
        0.5
    """
    tree = config.model_dump()
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first.get("ctx", {}).get("error", first["msg"])
        raise RagenError(f"guard.remedy cannot change {', '.join(changes)}: {reason}") from None
