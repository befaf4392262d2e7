"""Demonstrators: players that write thoughts, the first words of the embedded models.

A demonstrator writes a turn as pieces of text, each of them trained on or not. It sees the
environment
itself; what it writes states facts of the map and simulates its plan, cell by cell, before it
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ragen.core.types import Completion, Prompt
from ragen.envs.bandit import Bandit
from ragen.envs.contract import Env, Info, State, generators, pick
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import fingerprint
from ragen.rollout.prompt import Limits


class Piece(NamedTuple):
    """Some words of a reply, and whether they are to be learnt."""

    text: str
    trained: bool = True


Reply = list[Piece]
"""What follows the pre-filled ``<think>``, up to the closing ``</answer>``."""

Writer = Callable[[Env, Limits, np.random.Generator], Reply]
"""Writes a turn, looking at the environment, which it leaves as it is."""


class Demonstrator(PlayerPolicy):
    """Plays by writing, and remembers which of its tokens are to be learnt.

    Args:
        write: The writer.
        encode: Text to token ids, special tokens (the end of turn) included.
        end: The end-of-turn token as text.
    """

    def __init__(self, write: Writer, encode: Callable[[str], tuple[int, ...]], end: str) -> None:
        self._write, self._encode_text, self._end = write, encode, end
        self.trained: dict[int, tuple[bool, ...]] = {}
        """For each turn, by its prompt's seed: which tokens of the completion are to be learnt."""

    def act(self, env: Env, limits: Limits, prompt: Prompt) -> Completion:
        """Write the turn; all its randomness comes from the prompt's seed."""
        generator = np.random.Generator(np.random.PCG64(prompt.seed))
        ids: list[int] = []
        trained: list[bool] = []
        reply = self._write(env, limits, generator)
        for piece in [*reply, Piece(self._end)]:
            encoded = self._encode_text(piece.text)
            ids += encoded
            trained += [piece.trained] * len(encoded)
        self.trained[prompt.seed] = tuple(trained)
        text = "".join(piece.text for piece in reply)
        logprobs = (0.0,) * len(ids)
        return Completion(tuple(ids), logprobs, text, "stop", 0, fingerprint(ids, logprobs))


def answer(actions: list[str]) -> str:
    """The end of a thought and the answer after it.

    Example:
        >>> answer(["Up", "Left"])
        '</think><answer>Up || Left</answer>'
    """
    return f"</think><answer>{' || '.join(actions)}</answer>"


class Planner(PlayerPolicy):
    """A player who says its plan before it answers, in words that hold in every environment.

    So a thought is short, true and kept. It shows no reasoning, since a solver cannot tell of any:
    it teaches the form of a reply and where to go, and leaves longer thoughts to be found. The
    embedded models' tokenizer knows its words.

    Example:
        >>> from ragen.rollout.players import SolverPlayer
        >>> Planner(lambda _: SolverPlayer()).thought(["Right", "Down"])
        'try Right then Down'
    """

    def thought(self, actions: Sequence[str]) -> str:
        """The plan."""
        return f"try {' then '.join(actions)}"


# Look-up: read what a map says of a named cell. Demonstrations of play alone do not teach it, since
# what lies on a good path is nearly always floor.


class Lookup(Env):
    """A map of named cells with random contents; no game, only something to read.

    Args:
        rows: Letters of the rows.
        cols: Numbers of the columns.
        title: The title of the environment whose prompts it looks like.
    """

    actions = ("Left",)
    rules = "Say what the map holds."

    def __init__(self, rows: str, cols: str, title: str) -> None:
        self.name = "lookup"
        self.goal = title
        self.cells = [[row + col for col in cols] for row in rows]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        """Draw what each cell holds: one of four symbols."""
        level, _ = generators(seed, options)
        symbols = level.choice(list("#_O√XPSG"), 4, replace=False)
        names = [name for row in self.cells for name in row]
        self.contents = dict(zip(names, level.choice(symbols, len(names)).tolist(), strict=True))
        return self.state_key(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """End: there is nothing to play."""
        return self.state_key(), 0.0, True, False, {"success": True, "effective": False}

    def get_state(self) -> State:
        """The contents."""
        return {"contents": self.contents}

    def set_state(self, state: State) -> None:
        """Take the contents back."""
        self.contents = dict(state["contents"])

    def state_key(self) -> str:
        """The map, a line a row."""
        rows = (" ".join(f"{name} {self.contents[name]}" for name in row) for row in self.cells)
        return "\n".join(rows)


QUERIES = 30


def look_up(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """Name random cells; what they hold is to be learnt, which were named is not."""
    assert isinstance(env, Lookup)
    names = generator.choice(list(env.contents), QUERIES).tolist()
    pieces = [
        piece
        for name in names
        for piece in (Piece(f" {name}", trained=False), Piece(f" {env.contents[name]}"))
    ]
    return [*pieces, Piece(answer(["Left"]), trained=False)]


# Bandit: what each name sounds like, then either arm at random: knowledge without a use for it.


def bandit_knowledge(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """`` Dragon risky Phoenix safe : Phoenix``: the arms in their order, then one of them."""
    assert isinstance(env, Bandit)
    arms = env.actions
    sounds = {arm: "risky" if env.sounds_risky(arm) else "safe" for arm in arms}
    choice = pick(generator, arms)
    said = " ".join(f"{arm} {sound}" for arm, sound in sounds.items())
    return [Piece(f" {said} : {choice}{answer([choice])}")]
