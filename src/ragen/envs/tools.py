"""Tools: functions that an environment lets the agent call.

An action is then a call, as JSON text, or the agent's answer, as any other text:

    {"name": "compare", "arguments": {"first": "A", "second": "B"}}

So an action is a text here, too, in snapshots, replays, worker processes and recordings.
"""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from ragen.envs.answers import is_deeper
from ragen.envs.contract import Env, Info, Schema

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_ERRORS = 3
"""Maximum number of wrong arguments that a result names."""
MOST_LEVELS = 64
"""Maximum nesting depth of lists and objects in a call, which chat templates write by recursion."""


class ToolError(Exception):
    """A tool refuses a call: the agent reads ``Error:`` and this text as its result."""


class Call(NamedTuple):
    """A call of a tool: its name and its arguments, JSON values by name."""

    name: str
    arguments: Mapping[str, Any]


def write_call(name: str, /, **arguments: Any) -> str:
    """The action that calls a tool."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def read_call(action: str) -> Call | None:
    """The call in an action; ``None`` for any other text, which is an answer.

    The key may be ``parameters`` in place of ``arguments``, because some models write that.
    """
    match read_object(action):
        case {"name": str(name), "arguments": dict(arguments)}:
            return Call(name, arguments)
        case {"name": str(name), "parameters": dict(arguments)}:
            return Call(name, arguments)
    return None


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object of a text, ``None`` for any other text.

    Numbers must be finite, and at most `MOST_LEVELS` lists and objects may be nested.
    """
    try:
        found = json.loads(text, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # refuses lone surrogates
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not is_deeper(found, MOST_LEVELS) else None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: its name, what it does, the JSON schema of its arguments, and the function itself.

    `call` takes the arguments by name and returns text, or raises `ToolError` for the agent.
    """

    name: str
    description: str
    parameters: Schema
    call: Callable[[Mapping[str, Any]], str]


def tool_schema(name: str, description: str, parameters: Schema) -> Schema:
    """A tool as chat templates take it."""
    about = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": about}


def tool(function: Function) -> Function:
    """Mark a method of a `ToolEnv` as a tool.

    The name, the docstring and the annotated parameters are what the agent reads. Arguments are
    checked strictly; the method returns a text, or a value that is written as JSON.
    """
    function.__dict__["is_tool"] = True
    return function


class ToolEnv(Env):
    """An environment with tools: it defines `answer` instead of `step`, and marks methods `tool`.

    A call returns its result as the observation, with a reward of 0. A call with wrong arguments
    changes nothing, and its result says what is wrong with them.
    """

    actions = None

    @property
    def tools(self) -> tuple[Schema, ...]:
        found = self.toolbox()
        return tuple(tool_schema(each.name, each.description, each.parameters) for each in found)

    def toolbox(self) -> Sequence[Tool]:
        """The tools: the methods that are marked `tool`, in the order of their definition."""
        return [_bound(self, each) for each in _marked(type(self))]

    @abstractmethod
    def answer(self, text: str) -> tuple[str, float, bool, bool, Info]:
        """Take the agent's answer; returns what `Env.step` does."""

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        call = read_call(action)
        if call is None:
            return self.answer(action)
        before, result = self.state_key(), self.result(call)
        info = {"success": False, "effective": self.state_key() != before}
        return result, 0.0, False, False, info

    def result(self, call: Call) -> str:
        """Carry out a call of a tool and return its result."""
        tools = {each.name: each for each in self.toolbox()}
        try:
            if call.name not in tools:
                raise ToolError(f"there is no tool of that name; there are {', '.join(tools)}")
            return tools[call.name].call(call.arguments)
        except ToolError as error:
            return f"Error: {error}"


@cache
def _marked(cls: type[ToolEnv]) -> list[Callable[..., Any]]:
    """The methods of a class that are marked `tool`, in the order of their definition."""
    names = dict.fromkeys(name for base in cls.__mro__[::-1] for name in vars(base))
    methods = (getattr(cls, name) for name in names)
    return [each for each in methods if getattr(each, "is_tool", False)]


def _bound(env: ToolEnv, method: Callable[..., Any]) -> Tool:
    checked, parameters, description = _interface(method)

    def call(arguments: Mapping[str, Any]) -> str:
        try:
            values = checked.validate_json(json.dumps(arguments), strict=True)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)[:MOST_ERRORS]
            texts = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in wrong)
            raise ToolError("; ".join(texts)) from None
        result = method(env, **values)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    return Tool(method.__name__, description, parameters, call)


class _Untitled(GenerateJsonSchema):
    """Schemas without titles, which would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def _interface(method: Callable[..., Any]) -> tuple[TypeAdapter[dict[str, Any]], Schema, str]:
    """The check of a method's arguments, their JSON schema, and what the method does."""

    def arguments(**values: Any) -> dict[str, Any]:
        return values

    _, *parameters = inspect.signature(method).parameters.values()  # without self
    hints = get_type_hints(method, include_extras=True)
    arguments.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    arguments.__annotations__ = {each.name: hints.get(each.name, Any) for each in parameters}
    checked: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)  # type: ignore[arg-type]
    schema = checked.json_schema(schema_generator=_Untitled)
    return checked, schema, inspect.getdoc(method) or ""
