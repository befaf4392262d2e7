"""Tasks of reasoning-gym through RAGEN: its questions and its scores."""

import re

import pytest

from ragen.core.errors import RagenError
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.evaluation.baselines import Budget, compute_baselines

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")
TASKS = ("chain_sum", "number_sorting", "gsm_symbolic", "propositional_logic")
LEVELS = (123, 10_000, 10_499, 10_500, 2**31 + 1)


def item_of(task, level):
    """The item in a dataset of its own."""
    start = level - level % 500
    dataset = reasoning_gym.create_dataset(task, seed=start, size=500)
    return dataset, dataset[level - start]


@pytest.mark.parametrize("task", TASKS)
def test_a_level_asks_the_question_of_its_item_and_has_its_score(task):
    env = make(f"reasoning-gym:{task}")
    for level in LEVELS:
        dataset, item = item_of(task, level)
        assert env.reset(seed=level)[0] == item["question"]
        for answer in (str(item["answer"]), "17", "none of these"):
            env.reset(seed=level)
            _, reward, terminated, truncated, info = env.step(answer)
            try:
                score = dataset.score_answer(answer, item)
            except Exception:  # noqa: BLE001 - which RAGEN counts as a wrong answer
                score = 0.0
            assert (reward, info["success"]) == (score, score >= 1)
            assert terminated and not truncated


@pytest.mark.parametrize("task", TASKS)
def test_task_keeps_the_contract(task):
    check(make(f"reasoning-gym:{task}"), levels=2)


def test_there_is_no_random_play():
    floor = compute_baselines(make("reasoning-gym:gcd"), Budget(1, 1, 1), [123], draws=2)
    assert (floor.random, floor.random_return, floor.optimal) == (0.0, 0.0, None)


def test_parameters_reach_the_dataset():
    env = make("reasoning-gym:chain_sum", min_terms=6, max_terms=6)
    assert len(re.findall(r"\d+", env.reset(seed=123)[0])) == 6


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("chain_summ", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"seed": 1}, "seed follows from the level"),
        ("chain_sum", {"no_such": 1}, "no_such"),
        ("chain_sum", {"min_terms": 0}, "min_terms must be positive"),
    ],
)
def test_unknown_tasks_and_parameters_are_refused_in_one_line(task, params, message):
    with pytest.raises(RagenError, match=re.escape(message)) as error:
        make(f"reasoning-gym:{task}", **params)
    assert "\n" not in str(error.value)
