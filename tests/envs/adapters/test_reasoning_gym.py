"""Tasks of reasoning-gym through RAGEN: its questions and its scores."""

import asyncio
import re
import sys

import pytest

from ragen.config.extensions import ENV, load
from ragen.core.errors import RagenError
from ragen.core.types import Completion
from ragen.envs.adapters.adapted import version_of
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.evaluation.baselines import Budget, compute_baselines
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup

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


def test_levels_differ_and_follow_from_their_seed():
    env = make("reasoning-gym:chain_sum")
    first = [env.reset(seed=level)[0] for level in range(10_490, 10_510)]
    again = [env.reset(seed=level)[0] for level in reversed(range(10_490, 10_510))]
    assert first == again[::-1] and len(set(first)) > 15


@pytest.mark.parametrize("task", TASKS)
def test_task_keeps_the_contract(task):
    check(make(f"reasoning-gym:{task}"), levels=2)


def test_episodes_through_the_rollout_have_the_scores_of_the_library():
    class Half:
        """Answers right on even levels."""

        async def complete(self, prompt):
            question = prompt.messages[-1]["content"]
            level = next(each for each in LEVELS if item_of("gcd", each)[1]["question"] in question)
            answer = item_of("gcd", level)[1]["answer"] if level % 2 == 0 else "0"
            return Completion(None, None, f"<answer>{answer}</answer>", "stop", 0)

    setup = Setup(
        "reasoning-gym:gcd",
        lambda: make("reasoning-gym:gcd"),
        turns=1,
        actions_per_turn=1,
        actions=1,
        style="paper",
        think=False,
        prefilled=False,
    )
    groups = asyncio.run(run_groups(Half(), setup, LEVELS, 1, (0, "eval")))
    episodes = [group.episodes[0] for group in groups]
    assert [episode.success for episode in episodes] == [level % 2 == 0 for level in LEVELS]
    for level, episode in zip(LEVELS, episodes, strict=True):
        dataset, item = item_of("gcd", level)
        assert episode.total_reward == dataset.score_answer(
            item["answer"] if level % 2 == 0 else "0", item
        )


def test_there_is_no_random_play():
    floor = compute_baselines(make("reasoning-gym:gcd"), Budget(1, 1, 1), [123], draws=2)
    assert (floor.random, floor.random_return, floor.optimal) == (0.0, 0.0, None)


def test_an_answer_that_the_scorer_cannot_read_is_wrong():
    env = make("reasoning-gym:prime_factorization")
    env.reset(seed=123)
    assert env.step("no number at all")[1:4] == (0.0, True, False)


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


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RagenError, match=re.escape("pip install 'ragen-rl[reasoning-gym]'")):
        make("reasoning-gym:no_such_task")


def test_the_version_of_the_package_identifies_the_code():
    assert load("reasoning-gym:gcd", ENV).source == version_of("reasoning_gym")
