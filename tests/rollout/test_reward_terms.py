"""Readings of thoughts, their metrics, and the reward terms based on them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import episode, group, turn

from ragen.bases.demonstrations_lake import careful_turn, lake_turns, slippery_turn
from ragen.bases.demonstrations_sokoban import sokoban_plan
from ragen.chat.actions import parse
from ragen.chat.prompt import Limits
from ragen.config.extensions import THOUGHT_TERMS
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.metrics import values
from ragen.core.types import Episode, Group, Turn
from ragen.diagnostics.step_metrics import summarize
from ragen.envs.checker import check
from ragen.envs.contract import Env, Reading
from ragen.envs.isolation import Workers
from ragen.envs.registry import make
from ragen.envs.worlds.frozen_lake import FrozenLake
from ragen.rollout.episode import play_episode
from ragen.rollout.reward_terms import (
    TERMS,
    apply_reward_terms,
    consistency,
    grounding,
    length,
    part_info,
    repetition,
    reward_term_metrics,
    thought_info,
    thought_metrics,
)
from ragen.rollout.setup import EpisodeSpec, Setup, make_setup
from ragen.rollout.venue import Venue
from ragen.storage.reader import read_metrics
from tests.scripted_policy import ScriptedPolicy

FULL = Limits(turn=1, turns_left=5, actions_left=10, actions_per_turn=5)


def lake() -> Env:
    r"""Level 123: "___P\n__O_\n___O\n_G_O"."""
    env = make("frozen-lake-still", observation="named")
    env.reset(seed=123)
    return env


def read(env: Env, thought: str) -> Reading | None:
    """The reading without its F1."""
    reading = env.read_thought(thought)
    return reading and replace(reading, f1=None)


# Readings by the environments.


@pytest.mark.parametrize(
    ("thought", "stated", "true", "plan"),
    [
        (" P a3 G d1 : a3 a2 _ a3 b3 _ Left", 4, 4, ("Left",)),
        (" P a3 G d2 : a3 a2 _ Left", 3, 2, ("Left",)),  # the goal is at d1
        (" P a2 : a3 a2 O Left Down", 2, 0, ("Left", "Down")),
        (" P a3 : a3 a2 _ Left a2 b2 _ Down", 3, 2, ("Left", "Down")),  # b2 is a hole
        (" P a3 : a3 a4 _ Right", 2, 1, ("Right",)),  # there is no a4
        (" P a3 O b2 O d3 :", 3, 3, None),  # locates symbols, but plans nothing
        (" P a3 : a3 a2 a1 Left", 1, 1, ("Left",)),  # cells without a symbol state nothing
        (" P a3 Left b3 O a1", 1, 1, None),  # without a colon, nothing after the symbols is a check
    ],
)
def test_frozen_lake_reads_its_own_notation(
    thought: str, stated: int, true: int, plan: tuple[str, ...] | None
) -> None:
    assert read(lake(), thought) == Reading(stated, true, plan)


@pytest.mark.parametrize(
    "thought",
    ["", "I stand at a3, so Left.", ": a3 a2 _ Left", " P : Left", " Q a3 :"],
)
def test_prose_has_no_reading(thought: str) -> None:
    assert lake().read_thought(thought) is None
    assert make("bandit").read_thought(thought) is None


def test_a_thought_is_compared_with_the_state_before_the_turn() -> None:
    env = lake()
    thought = " P a3 : a3 b3 _ Down"
    assert read(env, thought) == Reading(2, 2, ("Down",))
    env.step("Down")
    assert read(env, thought) == Reading(2, 0, ("Down",))


@pytest.mark.parametrize("symbols", ["standard", "new"])
def test_sokoban_reads_its_own_notation(symbols: str) -> None:
    env = make("sokoban", symbols=symbols)
    env.set_state({"floor": [7, 8, 9, 10, 14], "targets": [10], "player": 7, "boxes": [8]})
    floor, target = "._"[symbols == "standard"], "GO"[symbols == "standard"]
    # ######
    # #PX_O#   P b1, X b2, O b4, floor b3 and c2
    thought = f" P b1 X b2 O b4 push Right b1 b4 : b2 b3 {floor} Right b3 b4 {target} Right"
    assert env.read_thought(thought) == Reading(5, 5, ("Right", "Right"), 1.0)
    wrong = f" P b1 X b3 O b4 push Right b1 b4 : b2 c2 # Right b3 b4 {floor} Right"
    assert env.read_thought(wrong) == Reading(5, 2, ("Right", "Right"), 2 / 3)


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("frozen-lake-still", lake_turns(careful_turn, 0.5)),
        ("frozen-lake", lake_turns(slippery_turn, 0.5)),
        ("sokoban", sokoban_plan(0.5)),
    ],
)
def test_demonstrations_state_true_facts_and_follow_their_plans(name: str, writer: Any) -> None:
    env = make(name, observation="named")
    assert env.actions is not None
    for level in range(20):
        env.reset(seed=level)
        reply = "".join(
            p.text for p in writer(env, FULL, np.random.Generator(np.random.PCG64(level)))
        )
        parsed = parse("<think>" + reply, think=True, actions=env.actions, max_actions=5)
        assert parsed.thought is not None
        before = env.get_state()
        reading = env.read_thought(parsed.thought)
        assert reading is not None and reading.true == reading.stated >= 2
        assert reading.plan == parsed.actions
        assert env.get_state() == before


@pytest.mark.parametrize(
    ("thought", "f1"),
    [
        ("P a3 G d1 O b2 O c3 O d3", 1.0),
        ("P a3 G d1", 4 / 7),  # two of five, and both are true
        ("P a3 P a3 P a3 P a3", 2 / 6),  # each fact counts once
        (" ".join(f"P {row}{column}" for row in "abcd" for column in range(4)), 2 / 21),
    ],
)
def test_f1_compares_positions_with_all_that_hold(thought: str, f1: float) -> None:
    reading = lake().read_thought(thought)
    assert reading is not None and reading.f1 == pytest.approx(f1)


@pytest.mark.parametrize("name", ["frozen-lake", "sokoban"])
def test_rules_ask_for_the_parts_of_a_thought(name: str) -> None:
    free, state, transition, world = (
        make(name, observation="picture", thoughts=form).rules
        for form in ("free", "state", "transition", "world")
    )
    assert free == make(name, observation="picture").rules and "<" not in free
    assert "<observation> … </observation><reasoning> … </reasoning>. Say" in state
    assert "<reasoning> … </reasoning><prediction> … </prediction>. Say" in transition
    assert "in <observation> before your actions and in <prediction> after your actions" in world
    (example,) = re.findall(r", as (.+?): a letter", world)
    reading = make(name, thoughts="world").read_thought(example)
    assert reading is not None and reading.stated == 3


# Info of a turn, and metrics over turns.


def play(*replies: str, setup: Setup | None = None) -> Episode:
    setup = setup or make_setup(merge("frozen-lake-still"), None)
    return asyncio.run(
        play_episode(ScriptedPolicy(replies), setup, EpisodeSpec(123, 0, 0, (0, "test")))
    )


TRUE = " P a3 : a3 a2 _ Left</think><answer>Left</answer>"
FALSE = " P a2 : a2 a1 O Left</think><answer>Up</answer>"
"""The next turn: the player is at a2, but there is no hole at a1, and the plan was not Up."""
PROSE = " so Down it is</think><answer>Down</answer>"


def test_turn_info_is_written_when_the_turn_is_played() -> None:
    first, second, third = play(TRUE, FALSE, PROSE).turns[:3]
    read = {"thought_read": True, "facts_stated": 2}
    assert first.info.items() >= (read | {"facts_true": 2, "plan_kept": True}).items()
    assert second.info.items() >= (read | {"facts_true": 1, "plan_kept": False}).items()
    assert third.info["thought_read"] is False
    assert third.info.keys().isdisjoint({"facts_stated", "plan_kept", "reward_terms"})


WORLD = (
    "<observation>P a3 G d1 O b2 O c3 O d3</observation><reasoning>Left</reasoning>"
    "<prediction>P a2 G d1 O b2 O c3 O d3</prediction></think><answer>Left</answer>",
    "<observation>P a2 G d1</observation>"
    "<prediction>P b2 G d1</prediction></think><answer>Down</answer>",
)
"""The second turn leaves out the holes, and moves into one of them."""


def test_parts_of_a_thought_are_compared_with_the_states_before_and_after_the_actions() -> None:
    setup = resolve_setup(
        "frozen-lake-still", **{"reward.terms": {"observation": 0.5, "prediction": 0.5}}
    )
    first, second = play(*WORLD, setup=setup).turns
    assert first.info.items() >= {"observation_f1": 1.0, "prediction_f1": 1.0}.items()
    assert first.info.items() >= {"facts_stated": 5, "facts_true": 5}.items()
    assert second.info["observation_f1"] == second.info["prediction_f1"] == pytest.approx(4 / 7)
    assert [first.penalty, second.penalty] == pytest.approx([0, -3 / 7])
    assert (
        values(thought_metrics([first, second])).items()
        >= {
            "thought/observation_f1": pytest.approx(11 / 14),
            "thought/prediction_f1": pytest.approx(11 / 14),
        }.items()
    )


@pytest.mark.parametrize(
    ("reply", "costs"),
    [
        (TRUE, (1, 1)),  # no parts
        ("<observation>all of it</observation></think><answer>Left</answer>", (1, 1)),
        ("<observation>P a3</observation></think><answer>Left</answer>", (2 / 3, 1)),
        ("<prediction>P a2</prediction></think><answer>Left</answer>", (1, 2 / 3)),
        ("<prediction>P a3</prediction></think><answer>Left</answer>", (1, 1)),  # it moved
        ("<observation>P a3</observation></think><answer>Fly</answer>", (1, 1)),  # invalid
        ("<observation>P a3</prediction></think><answer>Left</answer>", (1, 1)),
    ],
)
def test_a_part_that_is_missing_or_unreadable_costs_its_whole_weight(
    reply: str, costs: tuple[float, float]
) -> None:
    (turn, *_) = play(*[reply] * 5).turns
    charged = with_terms(turn, {"observation": 1.0, "prediction": 1.0})
    terms = charged.info["reward_terms"]
    assert (-terms["observation"], -terms["prediction"]) == pytest.approx(costs)


def test_without_f1_a_part_is_as_good_as_its_facts() -> None:
    assert part_info("observation", Reading(4, 3, None)) == {"observation_f1": 3 / 4}
    assert part_info("prediction", Reading(0, 0, None)) == {"prediction_f1": 0.0}


def test_an_invalid_reply_does_not_keep_its_plan() -> None:
    (turn, *_) = play(*[" P a3 : Left</think>"] * 5).turns
    assert (turn.valid, turn.info["plan_kept"]) == (False, False)


def test_thoughts_have_no_metrics_if_the_environment_cannot_read_them() -> None:
    (turn,) = play("P a3</think><answer>Dragon</answer>", setup=resolve_setup("bandit")).turns
    assert "thought_read" not in turn.info
    assert thought_metrics([turn]) == {}


def resolve_setup(recipe: str, **overrides: Any) -> Setup:
    return make_setup(merge(recipe, overrides), None)


def turn_with_reading(stated: int, true: int, plan: tuple[str, ...] | None = None) -> Turn:
    """A turn with this reading of its thought, whose reply asked for the single action Up."""
    return turn(thought="t", executed=1, info=thought_info(Reading(stated, true, plan), ("Up",)))


def test_thought_metrics_golden() -> None:
    turns = [
        turn_with_reading(4, 4, ("Up",)),
        turn_with_reading(2, 1, ("Down",)),
        turn_with_reading(4, 2),
        turn(info=thought_info(None, ())),
    ]
    assert values(thought_metrics(turns)) == {
        "thought/read_fraction": 3 / 4,
        "thought/hallucinated_fraction": pytest.approx(3 / 10),  # 1 of 2 and 2 of 4, of 10 facts
        "thought/consistent_fraction": 1 / 2,  # the third plans nothing
    }
    assert thought_metrics([]) == {} == thought_metrics([turn()])


def test_isolated_environments_read_thoughts_identically() -> None:
    replies = (" prose</think><answer>Up</answer>", FALSE, *WORLD)
    setup, workers = resolve_setup("frozen-lake-still"), Workers("frozen-lake-still", {}, 10.0)
    try:
        isolated = play(*replies, setup=replace(setup, venue=Venue("workers", workers)))
    finally:
        workers.close()
    plain = play(*replies, setup=setup)
    assert [each.info for each in isolated.turns] == [each.info for each in plain.turns]


# Environments that break the rules of reading.


class Misreader(FrozenLake):
    """Returns the given reading of any thought; with "moves", moves the player."""

    def __init__(self, reading: object) -> None:
        super().__init__()
        self.reading = reading

    def read_thought(self, thought: str) -> Reading | None:
        if self.reading == "moves":
            self.player = (self.player + 1) % 16
            return None
        return self.reading  # type: ignore[return-value]


def test_a_reading_of_the_wrong_type_fails_the_episode() -> None:
    failed = play(TRUE, setup=Setup("lake", lambda: Misreader("much")))
    assert failed.stop_reason == "error"
    assert "read_thought returned str" in (failed.error or "")


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ("moves", "must not change the environment"),
        ("much", "a Reading or None is expected"),
        (Reading(1, 2, None), "true ≤ stated"),
        (Reading(2, 1, None, 1.5), "f1 from 0 to 1"),
    ],
)
def test_checker_names_the_rule_that_a_reading_breaks(reading: object, words: str) -> None:
    check(Misreader(Reading(2, 1, None)))
    with pytest.raises(RagenError, match=words):
        check(Misreader(reading))


# Reward terms.


def with_terms(turn: Turn, weights: dict[str, float]) -> Turn:
    return asyncio.run(apply_reward_terms(turn, weights))


def test_config_names_the_reward_terms() -> None:
    assert tuple(TERMS) == THOUGHT_TERMS


def test_reward_terms_golden() -> None:
    assert (
        grounding(turn_with_reading(4, 1)),
        grounding(turn_with_reading(4, 4)),
        grounding(turn()),
    ) == (3 / 4, 0, 0)
    assert consistency(turn_with_reading(1, 1, ("Down",))) == 1
    assert (
        consistency(turn_with_reading(1, 1, ("Up",)))
        == consistency(turn_with_reading(1, 1))
        == consistency(turn())
        == 0
    )
    assert repetition(turn(thought="a b c d a b c d")) == pytest.approx(1 / 5)  # runs of four words
    assert repetition(turn(thought="a b c")) == repetition(turn()) == 0


def test_length_term_golden() -> None:
    # A reply may have 80 tokens: the band is 4 to 60. Below it the fault is 1 − n/4; above it,
    # it grows to 1 over 20 tokens.
    def fault(num_tokens: int) -> float:
        made_turn = turn(thought="t")
        prompt = replace(made_turn.prompt, max_tokens=80)
        return length(replace(made_turn, prompt=prompt, thought_span=(3, 3 + num_tokens)))

    assert [fault(n) for n in (0, 1, 3, 4, 60, 65, 80)] == [1, 3 / 4, 1 / 4, 0, 0, 1 / 4, 1]
    assert fault(200) == 1
    assert length(turn()) == 0  # without a token span, the length is unknown


def test_reward_terms_change_the_penalty_and_not_the_reward() -> None:
    before = replace(turn_with_reading(4, 1, ("Down",)), reward=1.0, penalty=-0.1)
    after = with_terms(before, {"grounding": 0.2, "consistency": 0.5, "length": 0.0})
    # −.1 for the format, −.2 · 3/4, −.5 · 1
    assert (after.reward, after.penalty) == (1.0, pytest.approx(-0.75))
    assert after.info["reward_terms"] == pytest.approx(
        {"grounding": -0.15, "consistency": -0.5, "length": 0.0}
    )
    assert with_terms(before, {}) is before


def test_a_run_applies_its_reward_terms() -> None:
    setup = resolve_setup("frozen-lake-still", **{"reward.terms": {"grounding": 0.2}})
    costly, free = play(TRUE, FALSE, PROSE, setup=setup), play(TRUE, FALSE, PROSE)
    assert [t.penalty for t in costly.turns[:3]] == pytest.approx([0, -0.1, 0])
    assert [t.penalty for t in free.turns[:3]] == [0, 0, 0]
    assert costly.reward == free.reward


def test_reward_term_metrics_golden() -> None:
    weights = {"grounding": 1.0, "consistency": 0.5}
    one = episode(
        with_terms(turn_with_reading(4, 1), weights),
        with_terms(turn_with_reading(2, 1, ("Down",)), weights),
    )
    other = episode(with_terms(turn_with_reading(1, 1), weights))
    # Grounding −3/4 and −1/2, consistency −1/2, of two episodes.
    assert values(reward_term_metrics([one, other])) == {
        "reward_terms/grounding": -0.625,
        "reward_terms/consistency": -0.25,
    }
    assert reward_term_metrics(group(1.0, 0.0).episodes) == {}
    metrics = values(summarize([Group((one, other))], [0]))
    assert metrics["reward_terms/grounding"] == -0.625
    assert metrics["reward/mean"] == 0  # the reward of the environment alone


def test_a_reward_term_that_the_environment_cannot_support_is_refused() -> None:
    for name in ("grounding", "consistency", "observation", "prediction"):
        with pytest.raises(
            RagenError, match=f"reward.terms.{name}: the environment bandit cannot read"
        ):
            resolve_setup("bandit", **{f"reward.terms.{name}": 0.1})
    resolve_setup("bandit", **{"reward.terms.repetition": 0.1})
    with pytest.raises(RagenError, match="cannot read thoughts"):
        resolve_setup("bandit", **{"reward.terms.grounding": 0.1, "env.isolate": True})


def test_prompts_ask_for_the_parts_of_a_thought() -> None:
    env = make("sokoban", thoughts="world")
    assert env.goal == "Sokoban : world" and "<prediction>" in env.rules


def test_a_training_step_logs_thought_metrics(lake_run: Path) -> None:
    metrics = read_metrics(lake_run)
    for name in ("read", "hallucinated", "consistent"):
        assert 0 <= metrics[f"thought/{name}_fraction"][1] <= 1
