"""Demonstrators: players whose thoughts the embedded models learn first.

A teacher writes a turn as pieces of text, and each piece is trained or not. It reads the state of
the environment itself. On a map, it states facts and simulates its plan cell by cell before it
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from ragen.chat.chat import Chat
from ragen.chat.prompt import Limits
from ragen.core.errors import RagenError, last_line
from ragen.core.pictures import MARK
from ragen.core.seeding import derive
from ragen.core.types import Completion, Episode, Group, Prompt, Sample
from ragen.envs.contract import Env, Info, Options, State, generators, pick
from ragen.envs.worlds import tiles
from ragen.envs.worlds.bandit import Bandit
from ragen.envs.worlds.grid import GridEnv, cell_name
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import written_completion


class Piece(NamedTuple):
    """A part of a reply; its tokens are trained or not."""

    text: str
    trained: bool = True


Reply = list[Piece]
"""The text from the pre-filled ``<think>`` to the closing ``</answer>``."""

Teacher = Callable[[Env, Limits, np.random.Generator], Reply]
"""Writes a turn from the environment's state, without changing the environment."""

SummaryTeacher = Callable[[Env, np.random.Generator], Reply]
"""Writes a summary of the turns so far in the same way."""


def no_summary(env: Env, generator: np.random.Generator) -> Reply:
    """A summary that is rejected, for teachers whose prompts show all turns."""
    return []


class Demonstrator(PlayerPolicy):
    """Plays a teacher's turns and records which of their tokens are trained."""

    def __init__(
        self, teacher: Teacher, chat: Chat, summary_teacher: SummaryTeacher = no_summary
    ) -> None:
        self._teacher, self._chat, self._summary_teacher = teacher, chat, summary_teacher
        self.trained: dict[int, tuple[bool, ...]] = {}
        """For each turn, by the seed of its prompt: for each token of the completion, True if it is
        trained."""

    def act(self, env: Env, limits: Limits, prompt: Prompt) -> Completion:
        """Write the turn with randomness from the prompt's seed only."""
        return self._written(prompt, partial(self._teacher, env, limits))

    def sum_up(self, env: Env, prompt: Prompt) -> Completion:
        """Write a summary, likewise."""
        return self._written(prompt, partial(self._summary_teacher, env))

    def _written(self, prompt: Prompt, write: Callable[[np.random.Generator], Reply]) -> Completion:
        reply = write(np.random.Generator(np.random.PCG64(prompt.seed)))
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

    `prompts` holds the prompts of each episode's turns, and `trained` is `Demonstrator.trained`.
    """
    masked = []
    for sample in samples:
        seeds = [prompt.seed for prompt in prompts[sample.episode]]
        numbers = sorted({number for number in sample.turn_index if number >= 0})
        flags = [flag for number in numbers for flag in trained[seeds[number]]]
        assert len(flags) == sum(sample.loss_mask), "a completion is in one sample as a whole"
        remaining = iter(flags)
        mask = tuple(sampled and next(remaining) for sampled in sample.loss_mask)
        masked.append(replace(sample, loss_mask=mask))
    return masked


def answer(actions: list[str]) -> str:
    """The end of a thought and the answer: ``</think><answer>Up || Left</answer>``."""
    return f"</think><answer>{' || '.join(actions)}</answer>"


def unfailing(groups: Sequence[Group]) -> list[Episode]:
    """The episodes of the groups; `RagenError` if the environment fails in one of them."""
    episodes = [episode for group in groups for episode in group.episodes]
    for episode in episodes:
        if episode.error is not None:
            reason = last_line(episode.error)
            raise RagenError(
                f"the environment {episode.env!r} fails: {reason}; run `ragen check` on it"
            )
    return episodes


class Chart:
    """A map as thoughts write it: the names of its cells, and what they hold."""

    def __init__(self, env: GridEnv) -> None:
        rows = env.rows()
        self._cols, self._symbols = len(rows[0]), "".join(rows)

    def name(self, cell: int) -> str:
        """The name of a cell; cells are numbered row by row."""
        return cell_name(*divmod(cell, self._cols))

    def fact(self, cell: int) -> str:
        """`` c0 O``: there is a hole at c0."""
        return f" {self.name(cell)} {self._symbols[cell]}"

    def looks(self, here: int, cells: Iterable[int]) -> str:
        """`` b0 c0 O b0 b1 _``: from b0, there is a hole at c0, and b1 is frozen."""
        return "".join(f" {self.name(here)}{self.fact(cell)}" for cell in cells)


def plan_in_words(actions: Sequence[str], seed: int = 0) -> str:
    """A solver's thought: its plan, without reasons, in words that the embedded models know."""
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
    """The thought of random play: one of `NEUTRAL`."""
    return pick(np.random.Generator(np.random.PCG64(derive(seed, "thought"))), NEUTRAL)


class Lookup(Env):
    """A map of named cells with random contents, for reading only.

    Demonstrations of play do not teach to read a map, since the cells on a good path nearly always
    hold floor. Prompts are like the prompts of the environment with this `title`; `rows` are
    letters, `cols` digits.
    """

    name = "lookup"
    actions = ("Left",)
    rules = "Say what the map holds."
    symbols = "#_O√XPSG"

    def __init__(self, rows: str, cols: str, title: str) -> None:
        self.goal = title
        self.cells = [[row + col for col in cols] for row in rows]

    @override
    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        level, _ = generators(seed, options)
        symbols = level.choice(list(self.symbols), 4, replace=False)
        names = [name for row in self.cells for name in row]
        self.contents = dict(zip(names, level.choice(symbols, len(names)).tolist(), strict=True))
        return self.state_key(), {}

    @override
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return self.state_key(), 0.0, True, False, {"success": True, "effective": False}

    @override
    def get_state(self) -> State:
        return {"contents": self.contents}

    @override
    def set_state(self, state: State) -> None:
        self.contents = dict(state["contents"])

    @override
    def state_key(self) -> str:
        rows = (" ".join(f"{name} {self.contents[name]}" for name in row) for row in self.cells)
        return "\n".join(rows)


CELL: tiles.Tile = 8
"""Pixels on a side of a cell in the pictures of look-ups."""


class SeenLookup(Lookup):
    """The map of a `Lookup` as a picture, with a wall of `border` cells around it.

    `drawn` are the tiles of the symbols.
    """

    shows_pictures = True

    def __init__(
        self, rows: str, cols: str, title: str, drawn: Mapping[str, str], border: int = 0
    ) -> None:
        super().__init__(rows, cols, title)
        self.symbols, self._drawn, self._border = "".join(drawn), drawn, border

    @override
    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        return MARK, super().reset(seed=seed, options=options)[1]

    @override
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return MARK, *super().step(action)[1:]

    @override
    def pictures(self) -> Sequence[tiles.Pixels]:
        rows = ["".join(self._drawn[self.contents[name]] for name in row) for row in self.cells]
        side = "#" * self._border
        wall = ["#" * (len(rows[0]) + 2 * self._border)] * self._border
        return [tiles.board([*wall, *(f"{side}{row}{side}" for row in rows), *wall], CELL)]


QUERIES = 30


def look_up(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """Name random cells and their contents; only the contents are trained."""
    assert isinstance(env, Lookup)
    names = generator.choice(list(env.contents), QUERIES).tolist()
    reply: Reply = []
    for name in names:
        reply += [Piece(f" {name}", trained=False), Piece(f" {env.contents[name]}")]
    return [*reply, Piece(answer(["Left"]), trained=False)]


def bandit_knowledge(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """`` Dragon risky Phoenix safe : Phoenix``: how each arm sounds, then one of them at random."""
    assert isinstance(env, Bandit)
    choice = pick(generator, env.actions)
    sounds = (f" {arm} {'risky' if env.sounds_risky(arm) else 'safe'}" for arm in env.actions)
    return [Piece(f"{''.join(sounds)} : {choice}{answer([choice])}")]
