"""The checks of the answers of an environment, and answers as plain values.

An environment may return NumPy scalars, subclasses of `str` and any real number. RAGEN makes plain
values of them, which user code cannot change later, and which a worker process gives as well.

The functions call methods of the values, which are user code: call them behind the boundary. They
raise `UserCodeError` for a value that they refuse.
"""

from __future__ import annotations

import base64
import json
import math
import numbers
from reprlib import repr as shortened
from typing import Any
from unicodedata import category

import numpy as np

from ragen.core.pictures import MARK, MOST_PIXELS, PLACE, Picture, without_places
from ragen.core.user_code import UserCodeError
from ragen.envs.contract import Baselines, Reading, Schema

MAX_CHARS = 100_000
"""Maximum number of characters in a text."""
JSON_CHARS = 1_000_000
"""Maximum number of characters in an info, a snapshot or a tool as JSON."""
DRAWING_CELLS = 100_000
"""Maximum number of cells in a drawing."""
MAX_REWARD = 1e30
"""Maximum size of a reward or an expected return. Sums and squares of such numbers are finite in
double precision."""
DEPTH = 100
"""Maximum nesting depth of lists and dicts in an info, a snapshot or a tool."""


def text(value: Any, call: str, what: str) -> str:
    """A plain `str` of at most `MAX_CHARS` characters, without lone surrogates and `PLACE`s."""
    if type(value) is not str:
        if not isinstance(value, str):
            raise _unfit(call, value, what, "text is expected")
        value = str.__str__(value)
    assert type(value) is str
    if len(value) > MAX_CHARS:
        raise UserCodeError(
            f"{call} returned {len(value):,} characters as {what}: at most {MAX_CHARS:,} are "
            "allowed"
        )
    if not value.isascii():
        _require_unicode(value, call, what)
        return without_places(value)
    return value


def action_names(value: Any, call: str) -> tuple[str, ...] | None:
    """The names of the actions, or ``None`` for free text."""
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        raise _unfit(call, value, "actions", "a tuple of names, or None, is expected")
    if not value:
        raise UserCodeError(
            f"{call} returned no actions: names, or None for free text, are expected"
        )
    text("".join(each for each in value if isinstance(each, str)), call, "actions")
    return tuple(text(each, call, "an action") for each in value)


def tools(value: Any) -> tuple[Schema, ...]:
    """The tools of an environment, as `Env.tools` describes them."""
    if not isinstance(value, list | tuple):
        raise _unfit("being made", value, "tools", "a tuple is expected")
    found = tuple(json_copy(each, "being made", "a tool") for each in value)
    found = tuple(json.loads(without_places(json.dumps(found, ensure_ascii=False))))
    for each in found:
        match each:
            case {"type": "function", "function": {"name": str(), "parameters": dict()}}:
                continue
        form = '{"type": "function", "function": {"name": …, "parameters": …}}'
        raise _unfit("being made", each, "a tool", f"{form} is expected")
    return found


def reward(value: Any) -> float:
    """A reward as a float: a real number of at most `MAX_REWARD`, or an array that holds one."""
    if type(value) is float and -MAX_REWARD <= value <= MAX_REWARD:
        return value
    return _number(value, "step", "reward")


def _number(value: Any, call: str, what: str) -> float:
    number = scalar_of(value)
    if isinstance(number, numbers.Real):
        try:
            number = float(number)
        except OverflowError:
            number = math.inf
        if abs(number) <= MAX_REWARD:
            return number
    raise UserCodeError(
        f"{call} returned {shortened(number)} as {what}: a finite number is expected, at most "
        f"{MAX_REWARD:g} in size"
    )


def baselines(value: Any) -> Baselines | None:
    """Baselines as plain numbers: probabilities from 0 to 1, `random` at most `optimal`."""
    if value is None:
        return None
    if not isinstance(value, Baselines):
        raise _unfit("baselines", value, "its answer", "a Baselines or None is expected")

    def number(name: str) -> float:
        return _number(getattr(value, name), "baselines", name)

    random, random_return = number("random"), number("random_return")
    optimal = None if value.optimal is None else number("optimal")
    optimal_return = None if value.optimal_return is None else number("optimal_return")
    highest = 1.0 if optimal is None else optimal
    if not -1e-9 <= random <= highest + 1e-9 <= 1 + 2e-9:
        raise UserCodeError(
            f"baselines returned {random:g} as random and {value.optimal} as optimal: chances with "
            "0 ≤ random ≤ optimal ≤ 1 are expected"
        )
    draws = scalar_of(value.draws)
    if draws is not None:
        if not isinstance(draws, numbers.Integral) or draws < 1:
            raise _unfit("baselines", draws, "draws", "a number of episodes or None is expected")
        draws = int(draws)
    return Baselines(random, optimal, random_return, optimal_return, draws)


def flag(value: Any, call: str, what: str) -> bool:
    """A plain bool, from a bool or one of NumPy."""
    if type(value) is not bool:
        value = scalar_of(value)
        if type(value) is not bool:
            raise _unfit(call, value, what, "a bool is expected")
    return bool(value)


def info(value: Any, call: str) -> dict[str, Any]:
    """An info as JSON values. ``success`` and ``effective`` must be bools if it has them."""
    if type(value) is dict and all(
        type(key) is str and type(each) is bool and key.isascii() for key, each in value.items()
    ):
        return dict(value)  # as in most environments; the checks take 10 µs, a step of a grid 5
    if not isinstance(value, dict):
        raise _unfit(call, value, "info", "a dict is expected")
    plain: dict[str, Any] = json_copy(value, call, "info")
    for name in ("success", "effective"):
        if name in plain:
            flag(plain[name], call, f"info[{name!r}]")
    return plain


def json_copy(value: Any, call: str, what: str) -> Any:
    """A copy that holds JSON values only."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
        if len(written) > JSON_CHARS:
            raise UserCodeError(
                f"{call} returned {len(written):,} characters as {what}: at most {JSON_CHARS:,} "
                "are allowed"
            )
        copy = json.loads(written)
        if written.count("[") + written.count("{") > DEPTH and is_deeper(copy, DEPTH):
            raise ValueError(f"lists and dicts are in each other over {DEPTH} levels deep")
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UserCodeError(f"{call} returned {what} that is not JSON: {error}") from error
    if not written.isascii():
        _require_unicode(written, call, what)
    return copy


def pictures(value: Any) -> tuple[Picture, ...]:
    """The pictures of an observation, which have at most `MOST_PIXELS` in all."""
    if not isinstance(value, list | tuple):
        raise _unfit("pictures", value, "its answer", "a list of images or arrays is expected")
    try:
        found = tuple(map(Picture.of, value))
    except ValueError as error:
        raise UserCodeError(f"pictures returned {error}") from None
    pixels = sum(picture.pixels.size // 3 for picture in found)
    if pixels > MOST_PIXELS:
        raise UserCodeError(
            f"pictures returned {pixels:,} pixels: at most {MOST_PIXELS:,} are allowed"
        )
    return found


def with_places(observation: str, pictures: tuple[Picture, ...], call: str) -> str:
    """The observation with `PLACE`s for its `MARK`s, if there are pictures: one for each."""
    marks = observation.count(MARK)
    if pictures and marks != len(pictures):
        raise UserCodeError(
            f"{call} returned an observation with {MARK} at {marks} places, and pictures returned "
            f"{len(pictures)}: a place for each is expected"
        )
    return observation.replace(MARK, PLACE) if pictures else observation


def picture_fields(pictures: tuple[Picture, ...]) -> list[tuple[int, int, str]]:
    """Pictures as JSON values: height, width, and the bytes of the pixels in base64."""
    return [(*each.size, base64.b64encode(each.pixels.tobytes()).decode()) for each in pictures]


def pixels_of(fields: list[tuple[int, int, str]]) -> list[np.ndarray[Any, Any]]:
    """The arrays of `picture_fields`."""
    return [
        np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 3)
        for height, width, pixels in fields
    ]


def drawing(value: Any) -> tuple[str, ...] | None:
    """The rows of a drawing that the viewer can draw, or ``None``."""
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(row, str) for row in value):
        rows = tuple(str.__str__(row) for row in value)
        cells = "".join(rows)
        if len(cells) > DRAWING_CELLS:
            raise UserCodeError(
                f"drawing returned {len(cells):,} cells: at most {DRAWING_CELLS:,} are allowed"
            )
        alone = cells.isprintable() and not any(category(cell)[0] == "M" for cell in cells)
        if cells and alone and len(set(map(len, rows))) == 1:
            return rows
    raise UserCodeError(
        f"drawing returned {shortened(value)}: rows of one length are expected, of single "
        "printable characters"
    )


def reading(value: Any) -> Reading | None:
    """The reading of a thought, in plain values, or ``None``."""
    if value is None:
        return None
    if not isinstance(value, Reading):
        raise _unfit("read_thought", value, "its answer", "a Reading or None is expected")
    stated, true, f1 = map(scalar_of, (value.stated, value.true, value.f1))
    counts = isinstance(stated, numbers.Integral) and isinstance(true, numbers.Integral)
    is_share = f1 is None or (isinstance(f1, numbers.Real) and 0 <= float(f1) <= 1)
    if not (counts and 0 <= true <= stated and is_share):
        raise UserCodeError(
            f"read_thought returned {shortened(value)}: counts with true ≤ stated and an f1 from 0 "
            "to 1, or None, are expected"
        )
    plan = action_names(value.plan, "read_thought") if value.plan else None
    return Reading(int(stated), int(true), plan, None if f1 is None else float(f1))


def scalar_of(value: Any) -> Any:
    """The Python number in a NumPy scalar or an array of one element; any other value as it is."""
    item = None if isinstance(value, numbers.Real) else getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) == 1:
        return item()
    return value


def _plain(value: Any) -> Any:
    number = scalar_of(value)
    if isinstance(number, bool | int | str):
        return number
    if isinstance(number, numbers.Real):
        return float(number)
    raise TypeError(f"object of type {type(value).__name__} is not JSON serializable")


def to_json(value: Any) -> str:
    """An answer as JSON text for another process, which checks the value."""
    return json.dumps(value, default=_plain)


def _unfit(call: str, value: Any, what: str, expected: str) -> UserCodeError:
    return UserCodeError(f"{call} returned {type(value).__name__} as {what}: {expected}")


def _require_unicode(value: str, call: str, what: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserCodeError(
            f"{call} returned a lone surrogate (U+{ord(value[error.start]):04X}) in its {what}, "
            "which is not a character"
        ) from None


def is_deeper(value: Any, levels: int) -> bool:
    """True if lists and dicts are nested in a JSON value over more than so many levels."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(each, levels - 1) for each in inside)
