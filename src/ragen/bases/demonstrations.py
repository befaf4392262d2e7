"""Demonstrators: players whose thoughts the embedded models learn first.

A teacher writes a turn as pieces of text, and each piece is trained or not. It reads the state of
the environment itself. On a map, it states facts and simulates its plan cell by cell before it
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ragen.chat.chat import Chat
from ragen.chat.prompt import Limits
from ragen.core.seeding import derive
from ragen.core.types import Completion, Prompt, Sample
from ragen.envs.contract import Env, Info, State, generators, pick
from ragen.envs.worlds.bandit import Bandit
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import written_completion


class Piece(NamedTuple):
    """A part of a reply, and whether its tokens are trained."""

    text: str
    trained: bool = True


Reply = list[Piece]
"""The text from the pre-filled ``<think>`` to the closing ``</answer>``."""

Teacher = Callable[[Env, Limits, np.random.Generator], Reply]
"""Writes a turn from the environment's state, without changing the environment."""


class Demonstrator(PlayerPolicy):
    """Plays a teacher's turns and records which of their tokens are trained."""

    def __init__(self, teacher: Teacher, chat: Chat) -> None:
        self._teacher, self._chat = teacher, chat
        self.trained: dict[int, tuple[bool, ...]] = {}
        """For each turn, by its prompt's seed: which tokens of the completion are trained."""

    def act(self, env: Env, limits: Limits, prompt: Prompt) -> Completion:
        """Write the turn with randomness from the prompt's seed only."""
        generator = np.random.Generator(np.random.PCG64(prompt.seed))
        reply = self._teacher(env, limits, generator)
        encoded = [(self._chat.encode_text(text), trained) for text, trained in reply]
        encoded.append(((self._chat.end,), True))
        ids = tuple(token for tokens, _ in encoded for token in tokens)
        self.trained[prompt.seed] = tuple(trained for tokens, trained in encoded for _ in tokens)
        return written_completion("".join(piece.text for piece in reply), lambda _: ids)


def mask_untrained(
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[Prompt]],
    trained: Mapping[int, Sequence[bool]],
) -> list[Sample]:
    """Remove from the loss mask the tokens that a teacher marks as not trained.

    `prompts` are those of each episode's turns. `trained` is that of `Demonstrator`.
    """
    masked = []
    for sample in samples:
        numbers = sorted({number for number in sample.turn_index if number >= 0})
        turns = prompts[sample.episode]
        flags = [flag for number in numbers for flag in trained[turns[number].seed]]
        assert len(flags) == sum(sample.loss_mask), "a completion is in one sample as a whole"
        remaining = iter(flags)
        mask = tuple(sampled and next(remaining) for sampled in sample.loss_mask)
        masked.append(replace(sample, loss_mask=mask))
    return masked


def answer(actions: list[str]) -> str:
    """The end of a thought and the answer.

    Example:
        >>> answer(["Up", "Left"])
        '</think><answer>Up || Left</answer>'
    """
    return f"</think><answer>{' || '.join(actions)}</answer>"


def plan_in_words(actions: Sequence[str], seed: int = 0) -> str:
    """The thought of a solver that states its plan, in words that fit every environment.

    The thought is short, and the answer carries it out. It shows no reasoning, since a solver has
    none to show: it teaches the form of a reply and the plan, and leaves longer thoughts to
    reinforcement learning. The embedded models' tokenizer knows the words.
    """
    return f"try {' then '.join(actions)}"


NEUTRAL = (
    "I will try something and see what happens.",
    "I do not know yet what is best, so I just pick.",
    "Any of these could be right. I choose one.",
    "Let me try this and look at the result.",
    "I have no reason to prefer one of them.",
    "It is not clear to me. I will take a guess.",
    "I simply choose, and learn from what follows.",
    "Nothing here decides it for me, so I try.",
)
"""Thoughts that fit every environment and lean to no action."""


def neutral_thought(actions: Sequence[str], seed: int) -> str:
    """The thought of random play: one of `NEUTRAL`, whatever the actions are."""
    return pick(np.random.Generator(np.random.PCG64(derive(seed, "thought"))), NEUTRAL)


# Look-up: read the contents of a named cell from a map. Demonstrations of play do not teach it:
# the cells on a good path nearly always hold floor.


class Lookup(Env):
    """A map of named cells with random contents, for reading only.

    It imitates the prompts of the environment with this `title`; `rows` are letters, `cols` digits.
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
        """Draw one of four symbols for each cell."""
        level, _ = generators(seed, options)
        symbols = level.choice(list("#_O√XPSG"), 4, replace=False)
        names = [name for row in self.cells for name in row]
        self.contents = dict(zip(names, level.choice(symbols, len(names)).tolist(), strict=True))
        return self.state_key(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """End the episode."""
        return self.state_key(), 0.0, True, False, {"success": True, "effective": False}

    def get_state(self) -> State:
        """The contents."""
        return {"contents": self.contents}

    def set_state(self, state: State) -> None:
        """Restore the contents."""
        self.contents = dict(state["contents"])

    def state_key(self) -> str:
        """The map, one line per row."""
        rows = (" ".join(f"{name} {self.contents[name]}" for name in row) for row in self.cells)
        return "\n".join(rows)


QUERIES = 30


def look_up(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """Name random cells and their contents; only the contents are trained."""
    assert isinstance(env, Lookup)
    names = generator.choice(list(env.contents), QUERIES).tolist()
    pieces = [
        piece
        for name in names
        for piece in (Piece(f" {name}", trained=False), Piece(f" {env.contents[name]}"))
    ]
    return [*pieces, Piece(answer(["Left"]), trained=False)]


# Bandit: say how each name sounds, then choose either arm at random. The knowledge is not used.


def bandit_knowledge(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """`` Dragon risky Phoenix safe : Phoenix``: the arms in order, then one of them."""
    assert isinstance(env, Bandit)
    arms = env.actions
    sounds = {arm: "risky" if env.sounds_risky(arm) else "safe" for arm in arms}
    choice = pick(generator, arms)
    said = " ".join(f"{arm} {sound}" for arm, sound in sounds.items())
    return [Piece(f" {said} : {choice}{answer([choice])}")]
