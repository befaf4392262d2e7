"""The curriculum of the embedded models: lessons, stages and the stages of each family.

A lesson is one kind of demonstration: an environment, a teacher, levels and budgets. A stage is a
number of training steps on a mixture of lessons.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ragen.bases.demonstrations import (
    Lookup,
    SeenLookup,
    SummaryTeacher,
    Teacher,
    bandit_knowledge,
    look_up,
    no_summary,
)
from ragen.bases.demonstrations_lake import (
    careful_turn,
    hard_level,
    in_parts,
    lake_turns,
    safe_walk,
    slippery_turn,
    unthinking,
    wander,
)
from ragen.bases.demonstrations_sokoban import sokoban_plan, solved_in
from ragen.core.seeding import BASE_LEVELS, EVAL_LEVELS
from ragen.envs.contract import Env
from ragen.envs.registry import env_factory
from ragen.envs.worlds.frozen_lake import DRAWN
from ragen.rollout.setup import Setup

NUM_HELD_OUT = 1024
"""Number of evaluation levels whose boards no lesson with `Lesson.held_out` shows."""
LEVELS_PER_LESSON = 1_000_000
WARMUP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Lesson:
    """Demonstrations of one kind.

    `accept` is true for a level of the lesson, to which the environment has been reset; without it,
    every level is one. Each episode draws one of the turn budgets `turns`. `share` is the weight of
    the lesson in its stage. With `held_out` the boards of evaluation levels are left out.
    `sum_up` writes the summaries that prompts ask for.
    """

    teacher: Teacher
    setup: Setup
    accept: Callable[[Env], bool] | None = None
    turns: tuple[int, ...] = (5,)
    share: float = 1.0
    held_out: bool = True
    sum_up: SummaryTeacher = no_summary

    def levels(self, stage: int, index: int) -> Iterator[int]:
        """The levels of this lesson, each once; it has number `index` in stage number `stage`."""
        levels = itertools.count(BASE_LEVELS + LEVELS_PER_LESSON * (100 * stage + index))
        if self.accept is None and not self.held_out:  # no user code outside an episode
            yield from levels
        env, accept = self.setup.make(), self.accept or (lambda env: True)
        held_out = set()
        for number in range(NUM_HELD_OUT if self.held_out else 0):
            env.reset(seed=EVAL_LEVELS + number, options={"noise_seed": 0})
            held_out.add(env.state_key())
        for level in levels:
            env.reset(seed=level, options={"noise_seed": 0})
            if accept(env) and env.state_key() not in held_out:
                yield level


@dataclass(frozen=True, slots=True)
class Stage:
    """Training steps on a mixture of lessons; learning rates decay linearly to `lr_end` × rate."""

    name: str
    steps: int
    lessons: tuple[Lesson, ...]
    episodes: int = 16
    lr: float = 3e-3
    muon_lr: float = 0.02
    lr_end: float = 1.0
    context_weight: float = 0.0


def played(env: str, **params: Any) -> Setup:
    """An environment with the usual budgets."""
    return Setup(env, env_factory(env, **params))


def arms(share: float, **params: Any) -> Lesson:
    """A lesson with one turn and one action."""
    setup = replace(played("bandit", **params), actions_per_turn=1, actions=1)
    return Lesson(bandit_knowledge, setup, turns=(1,), share=share, held_out=False)


ARMS = (arms(0.4), arms(0.4, name_set="pairs"), arms(0.2, name_set="pairs", split="test"))
"""How each name sounds, also in the test split; which sound pays more is not taught."""

# FrozenLake: careful play on all levels from any state (untrained walks lead to some of them), and
# random walks. The mix makes careful play one habit among others.
LAKE_MAP = Setup("look-up", partial(Lookup, "abcd", "0123", "FrozenLake"))
LOOKUP_LAKE = Lesson(look_up, LAKE_MAP, held_out=False)
STILL = played("frozen-lake-still", observation="named")
MORE_HOLES = played("frozen-lake-still", observation="named", p_frozen=0.5)
SAFE_WALKS = Lesson(safe_walk, MORE_HOLES, turns=(1,), share=1.5, held_out=False)
STILL_LESSON = partial(Lesson, setup=STILL, turns=(1, 1, 2, 3, 5))
STILL_LAKE = (
    STILL_LESSON(lake_turns(careful_turn, careful=1.0), share=0.3),
    STILL_LESSON(lake_turns(careful_turn, careful=1.0), accept=hard_level, share=0.3),
    STILL_LESSON(lake_turns(careful_turn, careful=0.75, walks_trained=False), share=0.3),
    STILL_LESSON(lake_turns(careful_turn, careful=0.0), share=0.1),
)
STILL_LAKE_MIX = (Lesson(lake_turns(careful_turn, careful=0.2), STILL),)

# Slips reach every state of slippery ice; the optimal plan depends on the remaining turns.
SLIPPERY = played("frozen-lake", observation="named")
SLIPPERY_LAKE = (
    Lesson(lake_turns(slippery_turn, careful=1.0), SLIPPERY, share=0.6),
    Lesson(lake_turns(slippery_turn, careful=0.75, walks_trained=False), SLIPPERY, share=0.3),
    Lesson(lake_turns(slippery_turn, careful=0.0), SLIPPERY, share=0.1),
)
SLIPPERY_MIX = (Lesson(lake_turns(slippery_turn, careful=0.2), SLIPPERY),)

# Sokoban: mostly levels of more than one turn, since late turns need practice, too, and
# boards that untrained slips have led to.
BOX_MAP = Setup("look-up", partial(Lookup, "bcde", "1234", "Sokoban"))
LOOKUP_SOKOBAN = Lesson(look_up, BOX_MAP, held_out=False)
BOX = played("sokoban", observation="named")
SOKOBAN = (
    Lesson(sokoban_plan(1.0), BOX, solved_in(4), turns=(2, 3, 5), share=0.4),
    Lesson(sokoban_plan(0.7, slips_trained=False), BOX, solved_in(3), turns=(3, 5), share=0.35),
    Lesson(sokoban_plan(0.75, slips_trained=False), BOX, turns=(1, 2, 3), share=0.25),
)
SOKOBAN_MIX = (Lesson(sokoban_plan(0.25), BOX),)


# The same lessons, seen. Look-ups go on until all tiles are read, in Sokoban to the end: its plans
# look at few walls, and how a wall looks would be forgotten.
SEE_LAKE, SEE_BOX = "frozen-lake-picture", "sokoban-picture"
LAKE_TILES = {symbol: symbol.translate(DRAWN) for symbol in "_OPG"}
BOX_TILES = {symbol: symbol for symbol in "#_O√XPS"}
LAKE_PICTURE = partial(SeenLookup, "abcd", "0123", "FrozenLake", LAKE_TILES)
BOX_PICTURE = partial(SeenLookup, "bcde", "1234", "Sokoban", BOX_TILES, border=1)
SEEN_LAKE = replace(LOOKUP_LAKE, setup=Setup("look-up", LAKE_PICTURE))
SEEN_BOX = replace(LOOKUP_SOKOBAN, setup=Setup("look-up", BOX_PICTURE))


def seen(env: str, *lessons: Lesson, **params: Any) -> tuple[Lesson, ...]:
    """The lessons in an environment that shows pictures."""
    return tuple(replace(lesson, setup=played(env, **params)) for lesson in lessons)


SEEN_MAPS = SEEN_LAKE, *seen(SEE_LAKE, replace(SAFE_WALKS, share=1.0), p_frozen=0.5)
MORE_LOOKS = replace(SEEN_BOX, share=0.25)
"""A fifth of the demonstrations, beside lessons whose shares sum to 1."""
SEEN_SOKOBAN = *seen(SEE_BOX, *SOKOBAN), MORE_LOOKS
SEEN_MIX = *seen(SEE_BOX, *SOKOBAN_MIX), MORE_LOOKS

TEACHERS = {
    "frozen-lake": lake_turns(slippery_turn, careful=1.0),
    "frozen-lake-still": lake_turns(careful_turn, careful=1.0),
    "sokoban": sokoban_plan(1.0),
}
"""Optimal play with the thoughts of the embedded models, by environment."""

LAKE_STAGES = (
    Stage("look-up", 300, (LOOKUP_LAKE, SAFE_WALKS)),
    Stage("still ice", 600, STILL_LAKE, context_weight=0.1),
)
"""The first stages of both lake families."""

# Reading, moving and looking around at random: these lessons show no way to the goal.
WANDER = partial(Lesson, wander, turns=(1, 1, 2, 3, 5), share=0.5)
WANDERING = (WANDER(MORE_HOLES, held_out=False), WANDER(STILL))
LOOKING = (LOOKUP_LAKE, Lesson(wander, MORE_HOLES, turns=(1,), held_out=False))

# The same from pictures, with every form of a thought: no goal in the thought, but in its parts.
PARTS = "frozen-lake-parts"
IN_PARTS = tuple(
    played(SEE_LAKE, thoughts=form) for form in ("free", "state", "transition", "world")
)


def every_form(careful: float, accept: Callable[[Env], bool] | None = None) -> tuple[Lesson, ...]:
    """A lesson for each form of a thought, and one for answers without a thought."""
    teacher, turns = in_parts(careful), (1, 1, 2, 3, 5)
    silent = Lesson(unthinking(teacher), replace(IN_PARTS[0], think=False), accept, turns)
    return *(Lesson(teacher, setup, accept, turns) for setup in IN_PARTS), silent


SKILL_IN_PARTS = *every_form(0.9), *every_form(1.0, hard_level)

FAMILIES: dict[str, tuple[Stage, ...]] = {
    "bandit": (
        Stage("names", 80, ARMS, episodes=32, lr_end=0.3),
        Stage("choice", 120, ARMS, episodes=64, lr=6e-4, muon_lr=0.003, lr_end=0.02),
    ),
    "frozen-lake-still": (
        *LAKE_STAGES,
        Stage("settling", 400, STILL_LAKE, context_weight=0.1, lr_end=0.02),
        Stage("mix", 120, STILL_LAKE_MIX, context_weight=0.1, lr=6e-4, muon_lr=0.004, lr_end=0.02),
    ),
    "frozen-lake": (
        *LAKE_STAGES,
        Stage("slippery ice", 200, SLIPPERY_LAKE, context_weight=0.1, lr_end=0.02),
        Stage("mix", 80, SLIPPERY_MIX, context_weight=0.1, lr=6e-4, muon_lr=0.004, lr_end=0.02),
    ),
    "sokoban": (
        Stage("look-up", 250, (LOOKUP_SOKOBAN,)),
        Stage("skill", 500, SOKOBAN, context_weight=0.1),
        Stage("skill, settling", 700, SOKOBAN, context_weight=0.1, lr_end=0.02),
        Stage("mix", 120, SOKOBAN_MIX, context_weight=0.1, lr=5e-4, muon_lr=0.004, lr_end=0.02),
    ),
    SEE_LAKE: (
        Stage("look-up", 500, SEEN_MAPS, episodes=24),
        Stage("still ice", 500, seen(SEE_LAKE, *STILL_LAKE)),
        Stage("settling", 300, seen(SEE_LAKE, *STILL_LAKE), lr_end=0.02),
        Stage("mix", 120, seen(SEE_LAKE, *STILL_LAKE_MIX), lr=6e-4, muon_lr=0.004, lr_end=0.02),
    ),
    SEE_BOX: (
        Stage("look-up", 300, (SEEN_BOX,), episodes=24),
        Stage("skill", 500, SEEN_SOKOBAN, episodes=20),
        Stage("skill, settling", 500, SEEN_SOKOBAN, episodes=20, lr_end=0.02),
        Stage("mix", 120, SEEN_MIX, episodes=20, lr=5e-4, muon_lr=0.004, lr_end=0.02),
    ),
    PARTS: (
        Stage("look-up", 500, SEEN_MAPS, episodes=24),
        Stage("still ice", 600, SKILL_IN_PARTS, episodes=24),
        Stage("settling", 300, SKILL_IN_PARTS, episodes=24, lr_end=0.02),
        Stage("mix", 150, every_form(0.2), episodes=24, lr=6e-4, muon_lr=0.004, lr_end=0.02),
    ),
    "frozen-lake-no-skill": (
        Stage("look-up", 250, LOOKING),
        Stage("wandering", 400, WANDERING, context_weight=0.1, lr_end=0.02),
    ),
}
