"""The environment contract: what an environment offers, and helpers for writing one.

An environment is a `gymnasium.Env` of texts, which may have pictures in them.
`docs/environments.md` has one in one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import gymnasium
import numpy as np
from pydantic import Field

Item = TypeVar("Item")
Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""A probability as a parameter of an environment; `registry.make` checks its bounds."""
Info: TypeAlias = dict[str, Any]
"""The info of `Env.step`: ``success``, ``effective`` and details."""
Options: TypeAlias = dict[str, Any] | None
"""The options of `Env.reset`, besides the seed."""
Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema, or a tool that has one."""
State: TypeAlias = dict[str, Any]
"""A snapshot that survives ``json.loads(json.dumps(state))``."""

Waits: TypeAlias = Literal["no", "threads", "workers"]
"""The values of `Env.waits`."""


@dataclass(frozen=True, slots=True)
class Baselines:
    """Random play and optimal play on one level, or their mean over several levels.

    `random` and `optimal` are probabilities of success, and optimal play has the highest. The
    returns are expectations. `optimal` and `optimal_return` are ``None`` if no solver is known.
    `draws` is the number of random episodes that estimated `random`, or ``None`` if it is exact.
    """

    random: float
    optimal: float | None
    random_return: float
    optimal_return: float | None
    draws: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a thought about the environment: facts, and the actions that it plans.

    `stated` is the number of facts, and `true` the number of those that hold in the environment's
    state. `plan` is ``None`` if the thought has no plan. `f1`, from 0 to 1, compares what is stated
    with all that holds: 2 · true / (stated + all), each fact once. An environment that does not
    count all facts leaves it ``None``.
    """

    stated: int
    true: int
    plan: tuple[str, ...] | None
    f1: float | None = None


class Env(gymnasium.Env[str, str], ABC):
    """Base class of all environments: text in, text out, and all randomness from two seeds.

    The level (its visible and its hidden state) follows from `seed` alone. Random events during the
    episode follow from ``options["noise_seed"]`` alone. So the episodes of a group can share their
    level and still meet different events.

    An environment defines `rules`, `goal` and `actions` and the five abstract methods. It may also
    define `solve` and `baselines` if optimal play is known, `random_action` if it takes free text,
    `read_thought` if it can check thoughts, `pictures` if the agent sees, and `drawing` if it has a
    board. Read `rules` and `actions` after `reset`: they may depend on the level. `reset`, `step`,
    `set_state`, `pictures`, `close` and tools may be ``async def``: RAGEN awaits them while other
    episodes go on.
    """

    name: str
    """The name under which the environment is registered; `make` sets it. A class from a file or a
    module may set its own; otherwise, `make` sets the name of the class."""
    goal: str
    """The environment in a few words: all that the compact prompt says about it."""
    max_turns: int = 5
    """Maximum number of turns in an episode. This attribute and the next two are the default
    budgets. A recipe for this environment or a setting may replace them."""
    actions_per_turn: int = 5
    """Maximum number of actions in a turn."""
    max_actions: int = 10
    """Maximum number of actions in an episode."""
    prompt_style: Literal["compact", "paper"] | None = None
    """The style of prompts that suits the environment; ``None`` leaves it to the model."""
    waits: ClassVar[Waits] = "no"
    """How episodes are played if calls wait for something else, such as a server.

    ``"no"``: in the run's loop, one call after the other, which is the fastest for short calls.
    ``"workers"``: each in a worker process of its own. ``"threads"``: each in a thread. Instances
    may then be called at the same time, and a call has to end by itself
    (`ragen.core.user_code.seconds_left`). Methods that are ``async def`` need no mark.
    """

    @property
    @abstractmethod
    def rules(self) -> str:
        """The aim, the events and the symbols, as plain text for the agent."""

    @property
    @abstractmethod
    def actions(self) -> tuple[str, ...] | None:
        """The action names that `step` accepts, or ``None`` if it accepts any text."""

    @property
    def tools(self) -> tuple[Schema, ...]:
        """The tools that the agent may call, as JSON; `ragen.envs.tools.ToolEnv` makes them.

        Each is ``{"type": "function", "function": {"name": …, "description": …, "parameters":
        JSON schema}}``. The tools are the same in every level, and `actions` is ``None``. `step`
        receives a call as JSON text, ``{"name": …, "arguments": {…}}``, with any name and any
        arguments. Any other text is an answer.
        """
        return ()

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        """Begin a level, a fresh one if `seed` is ``None``; returns the observation and an info.

        Without ``options["noise_seed"]``, `seed` determines the random events as well.
        """

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Carry out one action.

        Returns observation, reward, terminated, truncated, and an info. The info's ``success`` says
        whether this step solved the environment, and its ``effective`` says whether the observable
        state changed.

        Raises:
            ValueError: `action` is not one of `actions`.
        """

    @abstractmethod
    def get_state(self) -> State:
        """An exact snapshot, as JSON values. It includes the state of the generators."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Restore a snapshot of this or of another instance with the same parameters."""

    @abstractmethod
    def state_key(self) -> str:
        """The observable state as text, without generators and counters.

        States that look equal have equal keys.
        """

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str] | None:
        """The actions of optimal play for this turn, at least one; ``None`` if unknown.

        Optimal play has the highest probability of success within the budgets. It sees the effects
        of the actions of a turn only after the turn, as an agent does.
        """
        return None

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines | None:
        """Baselines from the present state; if ``None``, RAGEN estimates them from episodes.

        They are exact unless `Baselines.draws` is set. Probabilities lie between 0 and 1, with
        `random` at most `optimal`, and returns are finite.
        """
        return None

    def random_action(self, generator: np.random.Generator) -> str | None:
        """An action of random play in free text; ``None`` if there is no random play.

        It depends only on `generator` and the present state, and the call changes neither the
        environment nor its generators. Random play of named actions draws from `actions` instead.
        """
        return None

    def read_thought(self, thought: str) -> Reading | None:
        """The facts and the plan that a thought states about the present state.

        A thought that cannot be read with certainty gives ``None`` and is not measured. Of a
        thought with ``<observation>…</observation>``, RAGEN passes that part alone; it passes
        ``<prediction>…</prediction>`` when the actions of the turn have been carried out.
        """
        return None

    def pictures(self) -> Sequence[Any]:
        """The pictures of the last observation, whose text marks each place with ``<image>``.

        A picture is a `PIL.Image.Image`, or a uint8 array of shape ``(height, width)`` or
        ``(height, width, 3)``. RAGEN looks after `reset`, `step` and `set_state`; looking changes
        nothing. In an observation without pictures, ``<image>`` is text like any other.
        """
        return ()

    def drawing(self) -> list[str] | None:
        """The present state as a board for people to look at; ``None`` draws nothing.

        All rows have one length, and a cell is one character, even if the observation uses other
        symbols. The viewer draws ``#`` wall, ``_`` floor, ``P`` player, ``X`` box, ``O`` target,
        ``√`` box on target, ``S`` player on target, ``H`` hole, ``G`` goal, ``@`` player in a hole
        and ``*`` player on the goal as pictures, and any other character as itself in a plain cell.
        """
        return None

    @property
    def draws(self) -> bool:
        """True if this environment defines `drawing`."""
        return type(self).drawing is not Env.drawing

    @property
    def shows_pictures(self) -> bool:
        """True if this environment defines `pictures`."""
        return type(self).pictures is not Env.pictures

    @property
    def reads_thoughts(self) -> bool:
        """True if this environment defines `read_thought`."""
        return type(self).read_thought is not Env.read_thought

    def interrupt(self) -> None:
        """Let a call that waits in another thread end soon; RAGEN does so if a run is stopped."""

    def action_index(self, action: str) -> int:
        """Position of `action` in `actions`; raises `ValueError` if it is not one of them."""
        names = self.actions or ()
        if action not in names:
            raise ValueError(f"{self.name} knows no action {action!r}; it knows {', '.join(names)}")
        return names.index(action)


def generators(
    seed: int | None, options: Mapping[str, Any] | None
) -> tuple[np.random.Generator, np.random.Generator]:
    """Two independent generators, for a level and its random events; arguments as in `reset`."""
    seed = fresh_seed() if seed is None else seed
    noise_seed = (options or {}).get("noise_seed", seed)
    return (
        np.random.Generator(np.random.PCG64([0, seed])),
        np.random.Generator(np.random.PCG64([1, noise_seed])),
    )


def fresh_seed() -> int:
    """A random seed of 32 bits, drawn from the entropy of the system."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def pick(generator: np.random.Generator, items: Sequence[Item]) -> Item:
    """One of `items`, uniformly.

    It draws only by `Generator.random`, whose bits NumPy keeps the same across versions.
    """
    return items[int(generator.random() * len(items))]


def shuffled(generator: np.random.Generator, items: Sequence[Item]) -> list[Item]:
    """The items in random order, by one draw for each."""
    return sorted(items, key=lambda _: generator.random())
