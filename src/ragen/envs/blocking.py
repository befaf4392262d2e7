"""Environments with asynchronous methods, as `ragen.Env` promises them: calls that return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, wraps
from inspect import iscoroutinefunction
from typing import Any

from ragen.core import waiting
from ragen.envs.contract import Env

METHODS = ("reset", "step", "set_state", "pictures", "close", "answer", "begin", "play")
"""The methods that may be ``async``, besides tools: those of the contract, and those that
`ragen.envs.tools` and `ragen.envs.adapters.adapted` put in their place."""


@cache
def blocking(cls: type[Env]) -> type[Env]:
    """The class itself, or, if it has asynchronous methods, a subclass in which these block.

    They run in the process's loop for asynchronous code, where they find each other as they were
    written. The thread that has called one waits for it, at most as long as the call's time limit.
    """
    methods = {
        name: method
        for name in dir(cls)
        if iscoroutinefunction(method := getattr(cls, name))
        and (name in METHODS or getattr(method, "is_tool", False))
    }
    if not methods:
        return cls

    def interrupt(env: Any) -> None:
        if env._work is not None:
            env._work.cancel()

    made = {name: _blocking(method) for name, method in methods.items()}
    about = {"_work": None, "interrupt": interrupt, "waits": "threads"}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **made, **about})


def _blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(env: Any, *arguments: Any, **named: Any) -> Any:
        coroutine = method(env, *arguments, **named)
        if waiting.in_loop():
            return coroutine
        work: Future[Any] = waiting.begin(coroutine)
        env._work = work
        try:
            return waiting.wait(work)
        finally:
            env._work = None

    return call
