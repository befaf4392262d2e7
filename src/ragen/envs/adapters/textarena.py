"""TextArena's games for one player, and those for two against a scripted opponent.

The games draw from global generators, so each environment has a `GlobalRandomness`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from string import ascii_uppercase
from typing import Any

import numpy as np

from ragen.core.errors import RagenError, nearest
from ragen.core.plugins import load_object
from ragen.envs.adapters.adapted import Adapted, Played, version_of
from ragen.envs.contract import generators, pick

MOST_TURNS = 30
"""Maximum number of turns in an episode; games without a limit get this many."""
IN_A_ROW = 100
"""Maximum number of moves of an opponent before the player's next one."""
MOVES = re.compile(r"(?:available|valid) (?:moves?|actions?): *(.+)", re.IGNORECASE)

Opponent = Callable[[str, np.random.Generator], str]
"""A function from what the opponent is shown to its move; random choices use the generator."""


class GlobalRandomness:
    """An environment's own states of Python's and NumPy's global generators.

    They are in place only inside `placed`: episodes that take turns draw from separate streams.
    """

    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin new streams. Python's generator takes the number itself, as `random.seed` does."""
        numpys = np.random.RandomState(seed % 2**32)
        self._states = random.Random(seed).getstate(), numpys.get_state()

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Put these states into the global generators, and at the end put back those before."""
        outside = random.getstate(), np.random.get_state()  # noqa: NPY002 - environments use it
        _place(*self._states)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()  # noqa: NPY002
            _place(*outside)


def _place(pythons: object, numpys: object) -> None:
    random.setstate(pythons)  # type: ignore[arg-type]
    np.random.set_state(numpys)  # type: ignore[arg-type]  # noqa: NPY002


class TextArenaEnv(Adapted):
    """A game of TextArena; the player has seat 0.

    Observation: the game's messages since the last action, with the last board only; its prompt is
    the rules. Actions: free text; missing square brackets are added, as in TextArena's own wrapper.
    Reward: the game's at its end, 0 before. Ends when: the game ends. Success is a reward of at
    least 1. Random play is uniform over the moves that the game lists, or over `GUESSES`. Other
    games have no random play.

    Parameters: `opponent` is ``"random"`` or ``path/to/file.py:function`` (`Opponent`); any other
    keyword goes to the game.
    """

    actions_per_turn = 1

    def __init__(self, opponent: str = "random", **params: Any) -> None:
        self._randomness = GlobalRandomness(0)
        with self._randomness.placed():
            self._game, self._brackets = _game(self.name, self.target, params)
            self._seats = _seats(self.name, self._game)
        self._rival: Opponent | None = None
        if opponent != "random":
            self._rival = load_object(opponent, kind="opponent", accepts=callable).object
        self.goal = f"Play {self.target}"
        self.reset(seed=0, options={"noise_seed": 0})
        limit = getattr(self._game.state, "max_turns", None) or MOST_TURNS * self._seats
        # Games look at their limit before they count a turn, so they end one turn later.
        self.max_turns = min(MOST_TURNS, limit // self._seats + 1)
        self.max_actions = self.max_turns
        is_playable = self._seats == 1 or self._rival is not None
        if not is_playable and self.random_action(generators(0, None)[0]) is None:
            raise RagenError(
                f"{self.name} lists no moves, so nobody plays it at random: name the opponent, "
                "env.params.opponent = path/to/file.py:function"
            )

    @classmethod
    def find(cls, target: str) -> tuple[str, ...]:
        import textarena

        known = textarena.envs.registration.ENV_REGISTRY
        if target not in known:
            raise RagenError(f"textarena has no game {target!r}{nearest(target, known)}")
        return (version_of("textarena"),)

    def begin(self, level_seed: int, noise_seed: int) -> str:
        level, noise = generators(level_seed, {"noise_seed": noise_seed})
        self._heard: list[list[str]] = [[] for _ in range(self._seats)]
        self._board, self._rules, self._generator = "", "", level
        self._randomness.seed(level_seed)
        with self._randomness.placed():
            self._game.reset(num_players=self._seats, seed=level_seed)
            shown = self._let_rival_move(self._listen())
        self._randomness.seed(noise_seed)
        self._generator = noise
        return shown

    def play(self, action: str) -> Played:
        with self._randomness.placed():
            done, _ = self._game.step(self._written(action))
            shown = self._listen()
            if not done:
                shown = self._let_rival_move(shown)
        done = bool(self._game.state.done)
        if not done:
            return Played(shown, 0.0, False, False, False)
        rewards, about = self._game.close()
        reward = float(rewards[0])
        shown = f"{shown}\n{about[0].get('reason') or 'The game is over.'}".strip()
        return Played(shown, reward, True, False, reward >= 1)

    def random_action(self, generator: np.random.Generator) -> str | None:
        return self._random_move(0, generator)

    def state_key(self) -> str:
        if self._board:
            return self._board
        return hashlib.blake2b("\n".join(self._heard[0]).encode(), digest_size=16).hexdigest()

    def _listen(self) -> str:
        """Read the game's new messages to the player; returns them as one text."""
        import textarena

        kinds = textarena.ObservationType
        messages, said = self._take_messages(0), list[str]()
        boards = [text for _, text, kind in messages if kind is kinds.GAME_BOARD]
        for sender, text, kind in messages:
            if kind is kinds.PROMPT:
                self._rules = f"{self._rules}\n{text}".strip()
            elif kind is kinds.PLAYER_ACTION:
                said += [] if sender == 0 else [f"The other player: {text}"]
            elif kind is not kinds.GAME_BOARD:
                said.append(text)
        self._heard[0] += said + boards
        self._board = boards[-1] if boards else self._board
        return "\n".join((*said, *boards[-1:])).strip() or "Your turn."

    def _take_messages(self, seat: int) -> list[tuple[int, str, Any]]:
        waiting: dict[int, list[tuple[int, str, Any]]] = self._game.state.observations
        messages, waiting[seat] = waiting[seat], []
        return messages

    def _let_rival_move(self, shown: str) -> str:
        """Let the opponent move until it is the player's turn; returns what the player sees."""
        state = self._game.state
        for _ in range(IN_A_ROW):
            if state.done or state.current_player_id == 0:
                break
            seat = state.current_player_id
            self._heard[seat] += [text for _, text, _ in self._take_messages(seat)]
            if self._rival is None:
                move = self._random_move(seat, self._generator)
            else:
                move = self._rival("\n".join(self._heard[seat]), self._generator)
            self._game.step(self._written(move or ""))
            shown = f"{shown}\n{self._listen()}"
        return shown

    def _random_move(self, seat: int, generator: np.random.Generator) -> str | None:
        """A move that the game lists or that `GUESSES` knows; ``None`` if there is none."""
        if guess := GUESSES.get(type(self._game).__name__):
            return guess(self._game, generator)
        for text in (*reversed(self._heard[seat]), self._rules):
            if found := MOVES.findall(text):
                listed: list[str] = re.findall(r"\[[^\[\]]+\]", found[-1])
                moves = listed or str(found[-1]).split(",")
                return pick(generator, moves).strip(" '\"")
        return None

    def _written(self, action: str) -> str:
        bare = self._brackets and not {"[", "]"} & set(action)
        return f"[{action}]" if bare else action


def _game(name: str, target: str, params: dict[str, Any]) -> tuple[Any, bool]:
    """The game without wrappers, and whether its wrappers put square brackets around actions."""
    import textarena

    try:
        game: Any = textarena.make(target, **params)
    except LookupError as error:
        if type(error) is not LookupError:
            raise
        raise RagenError(
            f"{name} needs word lists: "
            "python -m nltk.downloader words averaged_perceptron_tagger_eng"
        ) from None
    brackets = False
    while isinstance(game, textarena.Wrapper):
        brackets |= type(game).__name__ == "ActionFormattingWrapper"
        game = game.env
    return game, brackets


def _seats(name: str, game: Any) -> int:
    import textarena

    for seats, state in ((1, textarena.SinglePlayerState), (2, textarena.TwoPlayerState)):
        try:
            game.reset(num_players=seats, seed=0)
        except AssertionError:  # it is for another number of players
            continue
        if isinstance(game.state, state):
            return seats
    raise RagenError(f"{name} is neither for one nor for two players: RAGEN does not play it")


def _guess_number(game: Any, generator: np.random.Generator) -> str:
    numbers = range(game.min_number, game.max_number + 1)
    return f"[{pick(generator, [n for n in numbers if n not in game.guessed_numbers] or numbers)}]"


def _guess_code(game: Any, generator: np.random.Generator) -> str:
    left, code = list(range(1, game.num_numbers + 1)), []
    for _ in range(game.code_length):
        code.append(pick(generator, left))
        if not game.duplicate_numbers:
            left.remove(code[-1])
    return f"[{' '.join(map(str, code))}]"


GUESSES: dict[str, Callable[[Any, np.random.Generator], str]] = {
    "GuessTheNumberEnv": _guess_number,
    "MastermindEnv": _guess_code,
    "WordleEnv": lambda game, generator: f"[{pick(generator, game.word_list)}]",
    "HangmanEnv": lambda _, generator: f"[{pick(generator, ascii_uppercase)}]",
}
"""Random play of games that list no moves: uniform over the guesses that the rules allow."""
