"""Tools of environments: schemas from typed functions, calls, errors, the documented example."""

from __future__ import annotations

import json
import re
from itertools import permutations
from pathlib import Path

import pytest

from ragen.core.errors import RagenError
from ragen.core.user_code import UserCodeError
from ragen.envs.checker import check
from ragen.envs.isolation import Workers
from ragen.envs.registry import make
from ragen.envs.tools import read_call, write_call
from ragen.envs.worlds.sorting import Sorting, best
from ragen.rollout.guarded import GuardedEnv

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def shop(tmp_path: Path) -> str:
    """The environment of the documentation, as it names it."""
    (code,) = re.findall(
        r"`my_shop.py`:\n\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    (tmp_path / "my_shop.py").write_text(code, "utf-8")
    return f"{tmp_path / 'my_shop.py'}:Shop"


def test_the_documented_environment_keeps_the_contract_and_can_be_solved(shop: str) -> None:
    check(make(shop))
    env = make(shop)
    kilos = re.findall(r"\d+", env.reset(seed=123)[0])[0]
    price, *paid = env.step(write_call("price", fruit="apples"))
    assert paid == [0.0, False, False, {"success": False, "effective": False}]
    product = env.step(write_call("multiply", first=int(kilos), second=int(price)))[0]
    assert env.step(product)[1:3] == (1.0, True)
    schema = env.tools[1]["function"]
    assert schema["name"] == "multiply" and schema["description"].startswith("The product")
    assert schema["parameters"] == {
        "type": "object",
        "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
        "required": ["first", "second"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (write_call("price", fruit="plums"), "Error: there are apples and pears"),
        (write_call("price", fruit=3), "Error: fruit: Input should be a valid string"),
        (write_call("price"), "Error: fruit: Missing required argument"),
        (write_call("price", fruit="pears", to=1), "Error: to: Unexpected keyword argument"),
        (write_call("cost"), "Error: there is no tool of that name; there are price, multiply"),
    ],
)
def test_a_wrong_call_has_a_result_and_changes_nothing(shop: str, call: str, result: str) -> None:
    env = make(shop)
    env.reset(seed=0)
    before = env.get_state()
    assert env.step(call) == (result, 0.0, False, False, {"success": False, "effective": False})
    assert env.get_state() == before


def test_texts_that_are_no_calls_are_none_and_an_argument_may_have_any_name() -> None:
    start = '{"name": "f", "arguments": '
    for arguments in ("[1]}", '{"x": NaN}}', '{"x": 1e999}}', '{"x": "\\ud800"}}', "[" * 100_000):
        assert read_call(start + arguments) is None
    for text in ("", "[]", '{"name": "f"}', '{"name": 1, "arguments": {}}'):
        assert read_call(text) is None
    assert read_call(write_call("greet", name="Ann")) == ("greet", {"name": "Ann"})


def test_a_worker_process_offers_the_same_tools() -> None:
    workers = Workers("sorting", {}, timeout_s=30.0)
    env = workers.make()
    try:
        assert env.tools == tuple(json.loads(json.dumps(make("sorting").tools)))
        env.reset(seed=123)
        assert env.step(write_call("compare", first="A", second="B"))[0] == "A is lighter than B."
    finally:
        env.close()
        workers.close()


def test_tools_of_another_form_are_refused() -> None:
    closed = []

    class Wrong(Sorting):
        tools = None  # type: ignore[assignment]

        def close(self) -> None:
            closed.append(self)

    for tools in ("x", [1], [{"name": "f"}]):
        Wrong.tools = tools  # type: ignore[assignment]
        with pytest.raises(UserCodeError, match="expected"):
            GuardedEnv(Wrong, None)
        with pytest.raises(RagenError, match="expected"):
            check(Wrong())
    assert len(closed) == 6


def test_optimal_sorting_golden() -> None:
    """Each comparison halves the 24 orders at best, so four of them tell 16 orders apart."""
    env = Sorting()
    env.reset(seed=123)
    for comparisons, named in ((0, 1), (1, 2), (2, 4), (3, 8), (4, 16), (5, 24)):
        known = env.baselines(comparisons + 1, 1, comparisons + 1)
        assert known.optimal == named / 24
    assert env.baselines(4, 2, 6).optimal == 1  # two, two and one at once
    assert env.baselines(3, 2, 6).optimal == 16 / 24  # two turns of two comparisons
    assert env.baselines(2, 1, 2).random == (1 - 0.25) / 24  # answers in one of two turns


@pytest.mark.parametrize("budgets", [(4, 2, 6), (4, 2, 5), (2, 2, 4), (3, 3, 6), (1, 1, 1)])
def test_the_solver_of_sorting_names_as_many_orders_as_its_baselines_say(
    budgets: tuple[int, int, int],
) -> None:
    """Played on every order of the balls, of which it is told nothing."""
    turns, per_turn, actions = budgets
    solved, env = 0.0, Sorting()
    for order in map("".join, permutations("ABCD")):
        env.set_state({"order": order, "compared": [], "answer": ""})
        expected = env.baselines(*budgets).optimal
        left, ended = actions, False
        for turns_left in range(turns, 0, -1):
            for action in env.solve(turns_left, left, per_turn) if left and not ended else ():
                _, reward, ended, *_ = env.step(action)
                solved, left = solved + reward, left - 1
    assert solved / 24 == expected


def test_the_balls_of_a_level_are_all_that_can_be_compared() -> None:
    env = make("sorting", balls=2)
    env.reset(seed=0)
    result = env.step(write_call("compare", first="A", second="D"))[0]
    assert result == "Error: name two different balls of A, B"
    assert env.step("A B C")[:3] == ("That is not an order of the balls A B.", 0.0, False)
    assert best(frozenset({"AB", "BA"}), 0, 0, 1) == (0, ())
