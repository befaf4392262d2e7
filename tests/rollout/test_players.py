"""Players: random, solver and human play."""

from collections import Counter

import pytest

from ragen.core.errors import RagenError
from ragen.envs.registry import make
from ragen.rollout.players import human, random_player, read_actions, solver
from tests.free_text import WORDS, Echo


def test_random_play_is_uniform_and_uses_the_whole_budget():
    env, player = make("sokoban"), random_player(0)
    assert [len(player(env, 5, left, 5)) for left in (10, 5, 3)] == [5, 5, 3]
    counts = Counter(action for _ in range(400) for action in player(env, 5, 10, 10))
    assert set(counts) == set(env.actions)
    # Standard deviation √(4000·¼·¾) = 27.4; four of them.
    assert all(abs(count - 1000) < 110 for count in counts.values())


def test_solver_solves_a_frozen_lake_level():
    env = make("frozen-lake-still")
    env.reset(seed=123)
    for action in solver(env, 1, 6, 6):
        *_, info = env.step(action)
    assert info["success"]


class Unknown:
    name, actions = "unknown", None

    def random_action(self, generator):
        return None

    def solve(self, turns_left, actions_left, actions_per_turn):
        return None


def test_players_refuse_environments_without_actions_or_solver():
    with pytest.raises(RagenError, match="no solver"):
        solver(Unknown(), 1, 1, 1)
    with pytest.raises(RagenError, match="has no random player: give it a random_action"):
        random_player(0)(Unknown(), 1, 1, 1)
    assert human(Unknown(), 1, 1, 1, lambda text: "any words") == ["any words"]


def test_an_environment_of_free_text_brings_its_own_random_play():
    said = [random_player(seed)(Echo(), 2, 2, 1) for seed in range(40)]
    assert {word for (word,) in said} == set(WORDS)
    assert random_player(3)(Echo(), 2, 2, 1) == said[3]


def test_human_player_is_asked_again_with_the_reason():
    lines, questions = iter(["", "fly", "u u u", "u d"]), []

    def answer(question):
        questions.append(question)
        return next(lines)

    assert human(make("sokoban"), 5, 10, 2, answer) == ["Up", "Down"]
    assert questions == [
        "Up Down Left Right (up to 2) > ",
        "type 1 to 2 of: Up Down Left Right > ",
        "'fly' is none of Up Down Left Right > ",
        "type 1 to 2 of: Up Down Left Right > ",
    ]


@pytest.mark.parametrize("line", ["up right", "UP||Right", " u, r ", "Up  ||  r"])
def test_typed_actions_may_be_prefixes_in_any_case_with_any_separator(line):
    assert read_actions(line, ("Up", "Down", "Left", "Right"), 5) == ["Up", "Right"]


def test_typed_actions_of_several_words_and_ambiguous_prefixes():
    names = ("go north", "go south", "go")
    assert read_actions("Go North", names, 1) == ["go north"]
    assert read_actions("go", names, 1) == ["go"]
    with pytest.raises(ValueError, match="could be go north or go south or go"):
        read_actions("g", names, 1)
