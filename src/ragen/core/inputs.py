"""How functions from a table of names are called: with the inputs that they name.

So the signature of an estimator or a loss tells the caller what has to be computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import Parameter, signature
from typing import Any, TypeVar

T = TypeVar("T")


def names_input(function: Callable[..., Any], name: str) -> bool:
    """True if a function has a parameter of this name."""
    return name in signature(function).parameters


def inputs_of(
    function: Callable[..., Any], known: Collection[str], num_positional: int = 0
) -> list[str]:
    """The inputs that a function names, after its positional parameters.

    Raises:
        ValueError: Another parameter has no default.
    """
    parameters = list(signature(function).parameters.values())[num_positional:]
    parameters = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
    for parameter in parameters:
        if parameter.name not in known and parameter.default is Parameter.empty:
            name = getattr(function, "__name__", function)
            raise ValueError(
                f"{name} has a parameter {parameter.name!r}; it may have {', '.join(known)}"
            )
    return [parameter.name for parameter in parameters if parameter.name in known]


def check_positional(function: Callable[..., Any], *names: str) -> None:
    """Raise a `ValueError` if a function cannot be called with these arguments by position."""
    try:
        signature(function).bind(*names)
    except TypeError as error:
        name = getattr(function, "__name__", function)
        raise ValueError(
            f"{name}{signature(function)} cannot be called with ({', '.join(names)}): {error}"
        ) from None


def call(function: Callable[..., T], *arguments: Any, inputs: Mapping[str, Any]) -> T:
    """Call a function with `arguments` and with the inputs that it names."""
    named = inputs_of(function, inputs, len(arguments))
    return function(*arguments, **{name: inputs[name] for name in named})
