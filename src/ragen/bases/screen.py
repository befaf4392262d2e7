"""Demonstrations in any environment: they read the screen, and their answers follow no plan.

The screen is the observation, line by line in pieces: words, numbers and symbols. A look-up names
pieces and says where they are, or names places and says what is there::

     P at 4 , 7 = G , H at 1

A thought states the pieces that tell this screen from others, in their order, and the answer is
random play::

     H 1 P 4 G 7</think><answer>Left || Right</answer>

In half of the thoughts a numbered habit decides instead: an arbitrary rule that picks one of two
actions by the order of two things on the screen. No habit is chosen for its use. The thought states
the habit's number and both things::

     3 : P 4 G 7</think><answer>Right || Right</answer>

Without habits, random play would teach the model to ignore the screen in its answers. A `survey`
plays episodes at random to find out which screens there are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, cast

import numpy as np

from ragen.bases.demonstrations import Piece, Reply, answer, unfailing
from ragen.chat.prompt import Limits
from ragen.core.seeding import BASE_LEVELS
from ragen.core.stopping import run_async
from ragen.core.types import Episode
from ragen.envs.contract import Env, Info, Options, pick
from ragen.rollout.groups import run_groups
from ragen.rollout.players import Player, PlayerPolicy, random_player, solver
from ragen.rollout.setup import Setup

EPISODES = 256
"""Episodes of the survey, each on a level of its own."""
QUERIES = 12
ITEMS = 4
HABITS = 12
HABIT_SHARE = 0.5
"""Share of thoughts in which a habit decides."""
COMMON = 0.6
"""A thought leaves out an item that more than this share of the screens show."""

Choose = Callable[[Env, Limits, np.random.Generator], list[str]]


class Item(NamedTuple):
    """A piece of the screen and its place: its line and where in the line, both from 1."""

    piece: str
    line: int
    place: int


def pieces(text: str) -> list[str]:
    """The words, numbers and symbols of a text, in order.

    A run of upper-case letters becomes single symbols, and a number pieces of up to three digits.
    """
    found: list[str] = []
    for run in re.findall(r"[^\W\d_]+|\d{1,3}|\S", text):
        found += run if run.isupper() else [run]
    return found


def items_of(screen: str) -> list[Item]:
    r"""All pieces of a screen with their places, in order."""
    return [
        Item(piece, line, place)
        for line, text in enumerate(screen.splitlines(), 1)
        for place, piece in enumerate(pieces(text), 1)
    ]


class Habit(NamedTuple):
    """A rule: the action `before` if `first` stands before `second` on the screen, else `after`.

    With `by_line` their lines are compared, otherwise their places in a line.
    """

    first: str
    second: str
    by_line: bool
    before: str
    after: str

    def action(self, first: Item, second: Item) -> str:
        """The action by the places of both."""
        is_before = first.line < second.line if self.by_line else first.place < second.place
        return self.before if is_before else self.after


def habits_for(pieces: Sequence[str], actions: Sequence[str], has_lines: bool) -> list[Habit]:
    """At most `HABITS` habits of these pieces and actions, each together with its opposite."""
    found = [
        Habit(first, second, by_line, *order)
        for first, second in combinations(pieces, 2)
        for by_line in ((True, False) if has_lines else (False,))
        for pair in combinations(actions, 2)
        for order in (pair, pair[::-1])
    ]
    generator = np.random.Generator(np.random.PCG64(0))
    rules = generator.permutation(len(found) // 2)[: HABITS // 2].tolist()
    return [found[2 * rule + side] for rule in sorted(rules) for side in (0, 1)]


class Screen:
    """An environment that keeps its last observation for a teacher to read."""

    draws = reads_thoughts = False

    def __init__(self, env: Env) -> None:
        self.env, self.shown = env, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        """Begin a level."""
        self.shown, info = self.env.reset(seed=seed, options=options)
        return self.shown, info

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Carry out an action."""
        result = self.env.step(action)
        self.shown = result[0]
        return result


def with_screen(env: Env) -> Env:
    """The environment, for a teacher that reads its screen."""
    return cast(Env, Screen(env))


def random_actions(env: Env, limits: Limits, generator: np.random.Generator) -> list[str]:
    """Random play: at least one action, and at most as many as the budgets allow."""
    count = 1 + int(generator.random() * min(limits.actions_left, limits.actions_per_turn))
    play = random_player(int(generator.random() * 2**53))
    return play(env, limits.turns_left, limits.actions_left, count)


def optimal_actions(env: Env, limits: Limits, _: np.random.Generator) -> list[str]:
    """Optimal play, for environments of free text without a random player."""
    return solver(env, limits.turns_left, limits.actions_left, limits.actions_per_turn)


def survey(setup: Setup, choose: Choose, seed: int) -> list[Episode]:
    """Play `EPISODES` episodes; `RagenError` if the environment fails."""

    def player(request_seed: int) -> Player:
        generator = np.random.Generator(np.random.PCG64(request_seed))
        return lambda env, *left: choose(env, Limits(1, *left), generator)

    levels = range(BASE_LEVELS, BASE_LEVELS + EPISODES)
    policy = PlayerPolicy(player, setup.think, setup.prefill)
    groups = run_async(run_groups(policy, setup, levels, 1, (seed, "survey")))
    return unfailing(groups)


def texts_of(episodes: Sequence[Episode]) -> list[str]:
    """All texts that a model would read or write in these episodes."""
    turns = [turn for episode in episodes for turn in episode.turns]
    prompts = [turn.prompt.messages[-1]["content"] for turn in turns]
    return prompts + [turn.completion.text for turn in turns]


def frequent(texts: Sequence[str], most: int) -> list[str]:
    """At most `most` pieces of the texts, the most frequent first."""
    counts = Counter(piece for text in texts for piece in pieces(text))
    return sorted(counts, key=lambda piece: (-counts[piece], piece))[:most]


class Reader:
    """Teachers for the screens of one environment.

    `shares` holds for each item the share of screens that show it. `choose` chooses the actions.
    `habits` are about the pieces that thoughts state most often, and about the named `actions`.
    `highest` is the highest number of a line, or of a place in a line.
    """

    taught = "to say what is where on the screen"
    theta = 300.0

    def __init__(self, screens: Sequence[str], choose: Choose, actions: Sequence[str] = ()) -> None:
        counts = Counter(item for screen in screens for item in items_of(screen))
        self.shares: Mapping[Item, float] = {i: n / len(screens) for i, n in counts.items()}
        self.choose = choose
        self._has_lines = any(item.line > 1 for item in counts)
        told = Counter(item.piece for screen in screens for item in self.telling(screen))
        often = [piece for piece, _ in told.most_common(ITEMS)]
        self.habits = habits_for(often, actions, self._has_lines)
        self.highest = max((max(item.line, item.place) for item in counts), default=1)

    def read(self, env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        """State what tells this screen from others; then play at random or follow a habit."""
        assert isinstance(env, Screen)
        if self.habits and generator.random() < HABIT_SHARE:
            number = int(generator.random() * len(self.habits))
            habit = self.habits[number]
            place = {item.piece: item for item in reversed(items_of(env.shown))}
            first, second = place.get(habit.first), place.get(habit.second)
            if first and second and {habit.before, habit.after} <= set(env.actions or ()):
                most = min(limits.actions_left, limits.actions_per_turn)
                actions = [habit.action(first, second)] * (1 + int(generator.random() * most))
                stated = "".join(f" {i.piece}{self._where(i)}" for i in (first, second))
                return [Piece(f" {number} :{stated}{answer(actions)}")]
        chosen = self.choose(env, limits, generator)
        return [Piece(f"{self.thought(env.shown)}{answer(chosen)}")]

    def sum_up(self, env: Env, generator: np.random.Generator) -> Reply:
        """State what tells the present screen from others."""
        assert isinstance(env, Screen)
        return [Piece(f" -{answer([self.thought(env.shown).strip()])}")]

    def look_up(self, env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        """Say where named pieces are and what named places hold; the names are not trained."""
        assert isinstance(env, Screen)
        items = items_of(env.shown)
        counts = Counter(item.piece for item in items)
        single = [item for item in items if counts[item.piece] == 1]
        reply: Reply = []
        for _ in range(QUERIES if items else 0):
            if single and generator.random() < 0.5:
                item = pick(generator, single)
                asked, told = f" {item.piece} at", self._where(item)
            else:
                item = pick(generator, items)
                asked, told = f"{self._where(item)} =", f" {item.piece}"
            reply += [Piece(asked, trained=False), Piece(told), Piece(" ,", trained=False)]
        return [*reply, Piece(answer(self.choose(env, limits, generator)))]

    @property
    def note(self) -> str:
        """A sentence about the habits for a model's card."""
        habits = f"one of {len(self.habits)} arbitrary habits decides, by the order of two things"
        return f"In half of the thoughts {habits}; none was chosen for its use." * bool(self.habits)

    def thought(self, screen: str) -> str:
        """The pieces that tell a screen from others, with their places."""
        return "".join(f" {item.piece}{self._where(item)}" for item in self.telling(screen))

    def telling(self, screen: str) -> list[Item]:
        """The `ITEMS` rarest items of a screen, in order; `COMMON` ones only if all are common."""
        items = items_of(screen)
        rarest = sorted(items, key=lambda item: (self.shares.get(item, 0.0), item.line, item.place))
        kept = [i for i in rarest[:ITEMS] if self.shares.get(i, 0.0) <= COMMON] or rarest[:1]
        return [item for item in items if item in kept]

    def _where(self, item: Item) -> str:
        return f" {item.line} {item.place}" if self._has_lines else f" {item.place}"
