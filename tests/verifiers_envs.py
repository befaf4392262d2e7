"""Small environments of the verifiers package, for the tests of its adapter."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

vf = pytest.importorskip("verifiers", reason="needs the extra verifiers")
Dataset = pytest.importorskip("datasets").Dataset

PARSERS = {
    "plain": vf.Parser,
    "think": vf.ThinkParser,
    "xml": lambda: vf.XMLParser(["think", "number"], answer_field="number"),
}


def examples(size: int, plus: int) -> Dataset:
    """Sums: example `i` asks for i + plus."""
    rows = [{"question": f"{i} + {plus}", "answer": str(i + plus)} for i in range(size)]
    return Dataset.from_list(rows)


def load_environment(
    kind: str = "sums", size: int = 8, evaluated: int = 0, parser: str = "plain", **params: Any
) -> vf.Environment:
    """One of the environments below."""
    reads = PARSERS[parser]()
    return KINDS[kind](
        dataset=examples(size, 5),
        eval_dataset=examples(evaluated, 50) if evaluated else None,
        parser=reads,
        rubric=vf.Rubric(funcs=[REWARDS.get(kind, right)], parser=reads),
        **params,
    )


async def right(completion: Any, answer: str, parser: vf.Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


async def half(completion: Any, answer: str, parser: vf.Parser) -> float:
    return 1 - 0.5 * abs(int(parser.parse_answer(completion)) - int(answer))


async def unreachable(**_: Any) -> float:
    raise RuntimeError("Judge model API error. Check model availability and API key.")


async def found(state: vf.State) -> float:
    return float(state["final_env_response"] is not None) / len(state["trajectory"])


class Guess(vf.MultiTurnEnv):
    """Find a number from 1 to 7: the environment cheers and says higher or lower."""

    cleaned = 0

    async def setup_state(self, state: vf.State) -> None:
        state["number"] = random.randint(1, 7)

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        guess = int(messages[-1]["content"])
        if guess == state["number"]:
            state["final_env_response"] = [{"role": "user", "content": "Yes!"}]
            return state["final_env_response"]
        cheer = await asyncio.to_thread(random.choice, ["Well", "Hm", "No"])
        way = "higher" if guess < state["number"] else "lower"
        return [{"role": "user", "content": f"{cheer}, {way}."}]

    @vf.cleanup
    async def count(self, state: vf.State) -> None:
        type(self).cleaned += 1


class Unending(Guess):
    """Its last answer, or an error, does not end the episode."""

    @vf.stop
    async def has_final_env_response(self, state: vf.State) -> bool:
        return False


class Restless(Guess):
    """Its number does not follow from any seed."""

    drawn = 0

    async def setup_state(self, state: vf.State) -> None:
        type(self).drawn += 1
        state["number"] = self.drawn


PRICES = {"apples": 250, "pears": 310}


async def price(fruit: str) -> int:
    """The price of one kilo of a fruit in cents.

    Args:
        fruit: Its name.
    """
    return PRICES[fruit]


def times(first: int, second: int) -> int:
    """The product of two whole numbers."""
    return first * second


def with_tools(rubric: vf.Rubric, **params: Any) -> vf.Environment:
    """Fruit and its price; the reward wants the answer after at least one call."""

    async def bought(completion: Any, answer: str) -> float:
        called = any(getattr(message, "tool_calls", None) for message in completion)
        return float(called and completion[-1].content == str(250 * int(answer)))

    return vf.ToolEnv(tools=[price, times], rubric=vf.Rubric(funcs=[bought]), **params)


def strict(**params: Any) -> vf.Environment:
    """A call that fails ends the episode."""
    return with_tools(stop_errors=[Exception], **params)


def mcp(**params: Any) -> vf.Environment:
    from verifiers.envs.experimental.mcp_env import MCPEnv

    return MCPEnv(mcp_servers=[], **params)


def comparing(rubric: vf.Rubric, **params: Any) -> vf.Environment:
    def best(completions: list[Any]) -> list[float]:
        return [0.0] * len(completions)

    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[best]), **params)


KINDS = {
    "sums": vf.SingleTurnEnv,
    "half": vf.SingleTurnEnv,
    "judged": vf.SingleTurnEnv,
    "guess": Guess,
    "unending": Unending,
    "restless": Restless,
    "tools": with_tools,
    "strict": strict,
    "mcp": mcp,
    "comparing": comparing,
}
REWARDS = {"half": half, "judged": unreachable, "guess": found, "restless": found}
