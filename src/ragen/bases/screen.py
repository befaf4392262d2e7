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
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from ragen.bases.demonstrations import Piece, Reply, answer
from ragen.chat.prompt import Limits
from ragen.core.errors import RagenError, last_line
from ragen.core.seeding import BASE_LEVELS
from ragen.core.stopping import run_async
from ragen.core.user_code import boundary
from ragen.envs.contract import Env, Info, Options, State, pick
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, has_random_play, random_player, solver
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

    A run of upper-case letters is split into single symbols, and a number into pieces of at most
    three digits.
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
        if self.by_line:
            return self.before if first.line < second.line else self.after
        return self.before if first.place < second.place else self.after


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


class Screen(Env):
    """A wrapper of an environment that keeps the last observation for a teacher to read."""

    def __init__(self, make: Callable[[], Env]) -> None:
        self.inner = make()
        self.name, self.observation = self.inner.name, ""

    @property
    @override
    def goal(self) -> str:  # type: ignore[override]
        return self.inner.goal

    @property
    @override
    def rules(self) -> str:
        return self.inner.rules

    @property
    @override
    def actions(self) -> tuple[str, ...] | None:
        return self.inner.actions

    @override
    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        self.observation, info = self.inner.reset(seed=seed, options=options)
        return self.observation, info

    @override
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        result = self.inner.step(action)
        self.observation = result[0]
        return result

    @override
    def get_state(self) -> State:
        return self.inner.get_state()

    @override
    def set_state(self, state: State) -> None:
        self.inner.set_state(state)

    @override
    def state_key(self) -> str:
        return self.inner.state_key()

    @override
    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str] | None:
        return self.inner.solve(turns_left, actions_left, actions_per_turn)

    @override
    def random_action(self, generator: np.random.Generator) -> str | None:
        return self.inner.random_action(generator)

    def close(self) -> None:
        """Close the environment."""
        self.inner.close()


def random_actions(env: Env, limits: Limits, generator: np.random.Generator) -> list[str]:
    """Random play: at least one action, and at most as many as the budgets allow."""
    count = 1 + int(generator.random() * min(limits.actions_left, limits.actions_per_turn))
    player = random_player(int(generator.random() * 2**53))
    return player(env, limits.turns_left, limits.actions_left, count)


def optimal_actions(env: Env, limits: Limits, _: np.random.Generator) -> list[str]:
    """Optimal play, for environments of free text without a random player."""
    return solver(env, limits.turns_left, limits.actions_left, limits.actions_per_turn)


def choice_in(env: Env) -> Choose:
    """The function that chooses the actions: random play, or optimal play where there is none.

    Raises:
        RagenError: The environment has neither.
        UserCodeError: The environment fails.
    """
    with boundary("reset"):
        env.reset(seed=BASE_LEVELS, options={"noise_seed": 0})
    if has_random_play(env):
        return random_actions
    with boundary("solve"):
        if env.solve(1, 1, 1) is not None:
            return optimal_actions
        name = env.name
    raise RagenError(
        f"{name} takes free text and has neither a random player nor a solver: give it a "
        "random_action or a solve (docs/environments.md)"
    )


@dataclass(frozen=True, slots=True)
class Survey:
    """The survey of random play: `screens`, and all `texts` that a model would read or write.

    `episodes` is the number of episodes that did not fail.
    """

    screens: Sequence[str]
    texts: Sequence[str]
    episodes: int

    def words(self, most: int) -> list[str]:
        """At most `most` pieces of all texts, the most frequent first."""
        counts = Counter(piece for text in self.texts for piece in pieces(text))
        return [piece for piece, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))][
            :most
        ]


def survey(setup: Setup, choose: Choose, seed: int) -> Survey:
    """Play `EPISODES` episodes and keep their texts."""

    def player(request_seed: int) -> Callable[[Env, int, int, int], list[str]]:
        generator = np.random.Generator(np.random.PCG64(request_seed))

        def play(env: Env, turns_left: int, actions_left: int, per_turn: int) -> list[str]:
            return choose(env, Limits(1, turns_left, actions_left, per_turn), generator)

        return play

    levels = range(BASE_LEVELS, BASE_LEVELS + EPISODES)
    policy = PlayerPolicy(player, setup.think, setup.prefill)
    groups = run_async(run_groups(policy, setup, levels, 1, (seed, "survey")))
    episodes = [group.episodes[0] for group in groups]
    errors = [episode.error for episode in episodes if episode.error is not None]
    if len(errors) > EPISODES // 2:
        reason = last_line(errors[0])
        raise RagenError(f"the environment {setup.env!r} fails: {reason}; run `ragen check` on it")
    turns = [turn for episode in episodes for turn in episode.turns]
    screens = [turn.observation for turn in turns]
    return Survey(
        screens,
        [message["content"] for turn in turns for message in turn.prompt.messages[-1:]]
        + [turn.completion.text for turn in turns],
        EPISODES - len(errors),
    )


class Reader:
    """Teachers for the screens of one environment.

    `shares` holds for each item the share of screens that show it. `choose` chooses the actions.
    `habits` are about the pieces that thoughts state most often, and about the named `actions`.
    """

    def __init__(
        self, screens: Sequence[str], choose: Choose, actions: Sequence[str] | None = None
    ) -> None:
        counts = Counter(item for screen in screens for item in items_of(screen))
        self.shares: Mapping[Item, float] = {i: n / len(screens) for i, n in counts.items()}
        self.choose = choose
        self._has_lines = any(item.line > 1 for item in counts)
        told = Counter(item.piece for screen in screens for item in self.telling(screen))
        often = [piece for piece, _ in told.most_common(ITEMS)]
        self.habits = habits_for(often, actions or (), self._has_lines)

    def read(self, env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        """State what tells this screen from others; then play at random or follow a habit."""
        assert isinstance(env, Screen)
        if self.habits and generator.random() < HABIT_SHARE:
            number = int(generator.random() * len(self.habits))
            habit = self.habits[number]
            place = {item.piece: item for item in reversed(items_of(env.observation))}
            legal = {habit.before, habit.after} <= set(env.actions or ())
            if legal and habit.first in place and habit.second in place:
                first, second = place[habit.first], place[habit.second]
                most = min(limits.actions_left, limits.actions_per_turn)
                actions = [habit.action(first, second)] * (1 + int(generator.random() * most))
                stated = "".join(f" {i.piece}{self._where(i)}" for i in (first, second))
                return [Piece(f" {number} :{stated}{answer(actions)}")]
        chosen = self.choose(env, limits, generator)
        return [Piece(f"{self.thought(env.observation)}{answer(chosen)}")]

    def look_up(self, env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        """Say where named pieces are and what named places hold; the names are not trained."""
        assert isinstance(env, Screen)
        items = items_of(env.observation)
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

    def thought(self, screen: str) -> str:
        """The pieces that tell a screen from others, with their places."""
        return "".join(f" {item.piece}{self._where(item)}" for item in self.telling(screen))

    def telling(self, screen: str) -> list[Item]:
        """The `ITEMS` rarest items of a screen, in order, without `COMMON` ones.

        If all are common, it is the rarest item alone.
        """
        items = items_of(screen)
        rarest = sorted(items, key=lambda item: (self.shares.get(item, 0.0), item.line, item.place))
        kept = [i for i in rarest[:ITEMS] if self.shares.get(i, 0.0) <= COMMON] or rarest[:1]
        return [item for item in items if item in kept]

    def _where(self, item: Item) -> str:
        return f" {item.line} {item.place}" if self._has_lines else f" {item.place}"

    @property
    def places(self) -> int:
        """The highest number of a line, or of a place in a line."""
        return max((max(item.line, item.place) for item in self.shares), default=1)
