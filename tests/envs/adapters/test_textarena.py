"""TextArena's games through RAGEN: their messages and rewards, with random states of their own."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from ragen.core.errors import RagenError
from ragen.envs.checker import check
from ragen.envs.registry import make
from tests.adapted import noise_of, random_episodes

textarena = pytest.importorskip("textarena", reason="needs the extra textarena")
SINGLE = ("GuessTheNumber-v0", "Mastermind-v0", "2048-v0-ultra-easy", "FrozenLake-v0")
OPPONENT = f"{Path(__file__).parents[2] / 'textarena_opponent.py'}:first_free"


def bare(target, level, noise, players=1):
    """The library's own game at the start of an episode."""
    game = textarena.make(f"{target}-raw")
    random.seed(level)
    np.random.seed(level % 2**32)  # noqa: NPY002 - some games use it
    game.reset(num_players=players, seed=level)
    random.seed(noise)
    np.random.seed(noise % 2**32)  # noqa: NPY002
    return game


def heard(game):
    """What the game says to the player whose turn it is, without what players have said."""
    _, messages = game.get_observation()
    own = textarena.ObservationType.PLAYER_ACTION
    return [text for _, text, kind in messages if kind is not own]


@pytest.mark.parametrize("target", SINGLE)
def test_a_game_says_and_pays_what_the_library_does(target):
    for episode in random_episodes(f"textarena:{target}"):
        game = bare(target, episode.level_seed, episode.noise_seed)
        _, *said = heard(game)
        done = False
        for turn in episode.turns:
            assert not done
            if said:
                assert said[-1].strip() in turn.observation
            (action,) = turn.actions_executed
            done, _ = game.step(action if "[" in action else f"[{action}]")
            said = heard(game)
            assert turn.reward == (game.close()[0][0] if done else 0)
        assert episode.terminated == done
        assert episode.success == (done and game.close()[0][0] >= 1)


def moves_of(game):
    """The squares that the board of noughts and crosses lists."""
    board = game.state.game_state["board"]
    return [f"[{3 * r + c}]" for r in range(3) for c in range(3) if board[r][c] == ""]


@pytest.mark.parametrize("opponent", ["random", OPPONENT])
def test_a_scripted_opponent_answers_in_a_game_for_two(opponent):
    for episode in random_episodes("textarena:TicTacToe-v0", opponent=opponent):
        game = bare("TicTacToe-v0", episode.level_seed, episode.noise_seed, players=2)
        generator = noise_of(episode.noise_seed)
        done = False
        for turn in episode.turns:
            (action,) = turn.actions_executed
            done, _ = game.step(action)
            if not done:
                moves = moves_of(game)
                index = int(generator.random() * len(moves)) if opponent == "random" else 0
                done, _ = game.step(moves[index])
            assert turn.reward == (game.close()[0][0] if done else 0)
        assert done and episode.success == (game.close()[0][0] == 1)


@pytest.mark.parametrize("target", [*SINGLE, "TicTacToe-v0"])
def test_game_keeps_the_contract(target):
    check(make(f"textarena:{target}"), levels=2)


def test_global_generators_are_the_callers_own():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    env = make("textarena:Sokoban-v0")
    env.reset(seed=5)
    env.step("[up]")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected  # noqa: NPY002


@pytest.mark.parametrize(
    ("target", "params", "message"),
    [
        ("GuesTheNumber-v0", {}, "did you mean 'GuessTheNumber-v0'"),
        ("ConnectFour-v0", {}, "env.params.opponent = path/to/file.py:function"),
        ("ThreePlayerTicTacToe-v0", {}, "neither for one nor for two players"),
        ("TicTacToe-v0", {"opponent": "nowhere.py:play"}, "no file nowhere.py"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(target, params, message):
    with pytest.raises(RagenError, match=re.escape(message)) as error:
        make(f"textarena:{target}", **params)
    assert "\n" not in str(error.value)
