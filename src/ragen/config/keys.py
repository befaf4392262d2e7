"""The keys of a config by their dotted names (``update.lr``), and what each of them takes.

The keys themselves are the fields of `ragen.config.sections`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from ragen.config.config import Config
from ragen.config.extensions import Kind
from ragen.config.sections import MixedEnv, Section
from ragen.core.errors import RagenError, nearest
from ragen.core.plugins import reference_to

Flat = dict[str, Any]
"""Values by dotted key; an entry of an open table is ``env.params.<name>``."""

SHORT = MappingProxyType({"model": "model.path", "env": "env.name"})
"""Short names of keys, as in ``--model base``."""

PARAMS = "env.params"
"""The table of the environment's own parameters, which the environment checks."""

MIX = "env.mix"
"""The table of a mixture's environments."""

TABLES = (PARAMS, MIX, "reward.terms", "guard.responses", "sources")
"""The open tables, whose keys are free; layers of settings merge them key by key."""

BUDGETS = ("max_turns", "actions_per_turn", "max_actions")
"""Attributes of an environment, and keys of the section ``env``."""

TASK = MixedEnv.model_fields.keys() - {"share"}
"""The keys that an environment of a mixture has as well as the section ``env``."""

_INSIDE = tuple(f"{table}." for table in TABLES)
"""How the keys of entries begin."""


@cache
def keys() -> Mapping[str, FieldInfo]:
    """Every key of a config, with its type, default and bounds."""
    return MappingProxyType(dict(_leaves(Config, "")))


def canonical_key(key: str, where: str = "") -> str:
    """The full dotted name of a key or of its short name."""
    key = SHORT.get(key, key)
    if key in keys() or table_of(key):
        return key
    inside = [name for name in keys() if name.startswith(key + ".")]
    if inside:
        raise RagenError(f"{key!r} is a section{in_place(where)}: set one of {', '.join(inside)}")
    hint = nearest(key, keys(), "ragen help keys lists them all")
    raise RagenError(f"unknown key {key!r}{in_place(where)}{hint}")


def parse_value(key: str, text: str) -> Any:
    """Parse a value from the command line.

    Keys of type text take it unchanged. For all others it is read as TOML (``3e-4``, ``true``,
    ``[1, 2]``). A value that is not TOML stays text, which the validation may refuse or an
    environment may accept.
    """
    if not key.startswith(TABLES) and _holds_text(keys()[key].annotation):
        return text
    literal = re.sub(r"^([+-]?)\.", r"\g<1>0.", text)  # TOML asks for a digit before the point
    try:
        parsed = tomllib.loads(f"value = {literal}")
    except (ValueError, RecursionError):  # no TOML, thousands of digits, thousands of brackets
        return text
    return parsed["value"] if len(parsed) == 1 else text


def expected(key: str) -> str:
    """Describe the values that a key accepts.

    Example:
        >>> expected("update.epochs"), expected("reward.over"), expected("reward.terms.length")
        ('a whole number ≥ 1 and ≤ 1000', 'group, env or batch', 'a number ≥ 0 and ≤ 1000000')
    """
    field = keys()[table_of(key) or key]
    if table_of(key) == MIX:
        field = MixedEnv.model_fields[name if (name := key.rpartition(".")[2]) in TASK else "share"]
    elif table_of(key):
        field = FieldInfo.from_annotation(get_args(field.annotation)[1])
    kind = field.annotation
    if named := next((each for each in field.metadata if isinstance(each, Kind)), None):
        return named.expected
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
    words: dict[object, str] = {int: "a whole number", float: "a number"}
    words |= {bool: "true or false", str: "text", list[dict[str, Any]]: "a list of tables"}
    bounds = [
        f"{sign} {_written(getattr(rule, name))}"
        for rule in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if hasattr(rule, name)
    ]
    return " ".join([words.get(kind, "a table"), " and ".join(bounds)]).strip()


def _written(bound: float) -> str:
    """A bound in words: a whole number with all of its digits, any other as it is typed."""
    return str(int(bound) if bound == int(bound) else bound)


def dotted(tree: Mapping[Any, Any], where: str = "") -> Flat:
    """Nested tables as values by dotted key; a class or function becomes its reference."""
    return {canonical_key(key, where): value for key, value in raw_values(tree).items()}


def table_of(key: str) -> str | None:
    """The open table that a key is an entry of, if it is one."""
    return next((table for table in TABLES if key.startswith(f"{table}.")), None)


def raw_values(tree: Mapping[Any, Any]) -> Flat:
    """Nested tables as values by dotted key, without checking that there are such keys.

    Raises:
        RagenError: Two functions have the same name, as two lambdas have.
    """
    values: Flat = {}
    passed: Flat = {}

    def named(value: Any, where: str) -> str:
        reference = reference_to(value)
        if passed.setdefault(reference, value) != value:
            raise RagenError(f"{where}: two functions are named {reference}; rename one of them")
        return reference

    def add(table: Mapping[Any, Any], prefix: str) -> None:
        for entry, value in table.items():
            key = f"{prefix}{named(entry, prefix[:-1]) if callable(entry) else entry}"
            if (
                isinstance(value, Mapping)
                and not key.startswith(_INSIDE)
                and _holds_keys(key, value)
            ):
                add(value, f"{key}.")
            else:
                values[key] = named(value, key) if callable(value) else value

    add(tree, "")
    return values


@cache
def _sections() -> frozenset[str]:
    parts = (name.split(".") for name in keys())
    return frozenset(".".join(each[:end]) for each in parts for end in range(1, len(each)))


def _holds_keys(key: str, table: Mapping[Any, Any]) -> bool:
    """True if a table is a section; any other is the value of a key, which will be refused."""
    if f"{key}." in _INSIDE or key in _sections():
        return True
    return "." not in key and len(table) > 0  # a section with a mistake in its name


def nest(values: Flat) -> dict[str, Any]:
    """Values by dotted key as nested tables: the inverse of `dotted`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        path, _, name = key.rpartition(".")
        if table := table_of(key):
            path, name = table, key.removeprefix(f"{table}.")
        branch = tree
        for section in filter(None, path.split(".")):
            branch = branch.setdefault(section, {})
        if not isinstance(branch, dict):
            raise RagenError(f"{path} = {show(branch)}: expected a table; set {path}.NAME only")
        branch[name] = value
    return tree


def _leaves(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _holds_text(kind: Any) -> bool:
    return kind is str or (
        get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind))
    )


def in_place(where: str) -> str:
    """Where a value was set, to append to an error message."""
    return f" in {where}" if where else ""


def show(value: Any) -> str:
    """A value as TOML writes it, shortened; a table or a list may be too deep to write."""
    if isinstance(value, Mapping | list | tuple):
        return "a table" if isinstance(value, Mapping) else "a list"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to write 4,300 digits
        return "a number of more than 60 digits"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "…"
