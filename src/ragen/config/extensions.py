"""The kinds of functions that a config names, each from RAGEN or from outside.

A name is one of RAGEN's own, an entry point of an installed package, or a reference
``path/to/file.py:name``. The folder that calls the function holds RAGEN's own. Environments of
other libraries are named ``LIBRARY:NAME``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ragen.core.errors import RagenError, nearest
from ragen.core.inputs import check_positional, inputs_of
from ragen.core.plugins import Loaded, installed, load_object
from ragen.core.types import Episode, Turn

T = TypeVar("T")

OWN = "path/to/file.py:name"
"""How a function of a file is named."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of function, as metadata of the config key that names it.

    Attributes:
        noun: The kind in messages, such as ``"loss"``.
        group: The entry-point group of installed packages.
        names: RAGEN's own.
        check: Raises `ValueError` if a function has the wrong signature.
    """

    noun: str
    group: str
    names: tuple[str, ...]
    check: Callable[[Any], object] = callable

    def complaint(self, name: str) -> str | None:
        """Why a name cannot stand for a function of this kind, if so."""
        if name in self.names or ":" in name or name in installed(self.group):
            return None
        hint = nearest(name, self.names, f"expected {self.expected}")
        return f"there is no such {self.noun}{hint}"

    def find(self, name: str, own: Mapping[str, T]) -> T:
        """The function of a name: one of RAGEN's `own`, or one from outside."""
        if name in own:
            return own[name]
        function: T = load(name, self).object
        return function

    @property
    def expected(self) -> str:
        """In words, what a name may be."""
        return f"{', '.join(self.names)}, or {OWN}"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Let pydantic check a field that is annotated with this kind."""

        def check(name: str) -> str:
            if complaint := self.complaint(name):
                raise ValueError(complaint)
            return name

        return core_schema.no_info_after_validator_function(check, handler(source))


@dataclass(frozen=True, slots=True)
class Library:
    """A library whose environments have names, as in ``gymnasium:FrozenLake-v1``.

    `adapter` is the reference of the class that plays them (`ragen.envs.adapters`), `module` what
    has to be installed, and `names` what stands behind the colon.
    """

    adapter: str
    module: str
    names: str


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "gymnasium": Library("ragen.envs.adapters.gymnasium:GymnasiumEnv", "gymnasium", "ID"),
        "reasoning-gym": Library(
            "ragen.envs.adapters.reasoning_gym:ReasoningGymEnv", "reasoning_gym", "TASK"
        ),
        "textarena": Library("ragen.envs.adapters.textarena:TextArenaEnv", "textarena", "GAME"),
        "openenv": Library("ragen.envs.adapters.openenv:OpenEnvEnv", "websockets", "URL"),
        "agent": Library(
            "ragen.envs.adapters.agent:AgentEnv", "ragen.gateway.agent_host", "FILE.py:FUNCTION"
        ),
        "verifiers": Library(
            "ragen.envs.adapters.verifiers:VerifiersEnv", "ragen.envs.adapters.verifiers", "ID"
        ),
    }
)
"""The libraries, by the word before the colon."""


def library_of(name: str) -> Library | None:
    """The library of an environment's name, if it is one of `LIBRARIES`."""
    library, colon, _ = name.partition(":")
    return LIBRARIES.get(library) if colon else None


def short_name(name: str) -> str:
    """A name without the file or module that it comes from, for metrics, messages and run folders.

    Example:
        >>> short_name("/home/me/terms.py:brevity"), short_name("grounding")
        ('brevity', 'grounding')
        >>> short_name("openenv:http://host:8000"), short_name("verifiers:owner/math-python")
        ('openenv-host', 'math-python')
        >>> short_name("maze.v2"), short_name("python:my_env.Maze"), short_name("verifiers:a/b.py")
        ('maze.v2', 'Maze', 'b')
        >>> short_name("agent:/home/me/my_agent.py:main"), short_name("agent:node solve.js")
        ('my_agent', 'solve.js')
    """
    library, _, target = name.partition(":")
    if library == "agent":
        return target.partition(".py:")[0].split()[-1].rpartition("/")[2]
    if "://" in target:
        return f"{library}-{urlsplit(target).hostname}"
    if target.endswith(".py"):
        return target.rpartition("/")[2].removesuffix(".py")
    if "/" in target and ".py:" not in target:  # a package with its owner
        return target.rpartition("/")[2]
    return target.rpartition(":")[2].rpartition(".")[2] if target else name


def short_names(names: Iterable[str]) -> dict[str, str]:
    """A short name for each name, which stays whole where two would have the same.

    Example:
        >>> short_names(["a.py:Maze", "b.py:Maze", "b.py:Shop"])
        {'a.py:Maze': 'a.py:Maze', 'b.py:Maze': 'b.py:Maze', 'b.py:Shop': 'Shop'}
    """
    short = {name: short_name(name) for name in names}
    counts = Counter(short.values())
    return {name: each if counts[each] == 1 else name for name, each in short.items()}


@cache
def load(name: str, kind: Kind) -> Loaded:
    """The object of a name from outside, loaded once.

    A run or an evaluation calls ``load.cache_clear()`` when it begins, so it runs the code whose
    hash it records.
    """
    if kind is ENV and (library := library_of(name)) is not None:
        find = load_object(library.adapter).object.named
        return Loaded(cls := find(name), ", ".join(cls.versions))
    found = load_object(name, kind.group, kind=kind.noun, accepts=callable)
    try:
        kind.check(found.object)
    except ValueError as error:
        raise RagenError(f"{name} is no {kind.noun}: {error}") from None
    return found


ESTIMATOR_INPUTS = {
    "rewards_ES": "the reward at each token, penalties included, 0 off the mask",
    "mask_ES": "true on the episode's tokens, which come first in each row",
    "values_ES": "the critic's estimate of the state before each token",
    "state_values_ES": "the mean return of continuations from before the token's turn",
    "turn_ES": "the turn of each token, −1 off the mask",
    "turn_ends_ES": "true on the last token of each turn",
    "state_ES": "a number for the state in which the token's turn began, equal for equal states",
    "thought_ES": "true on the tokens of thoughts",
    "success_E": "true if the episode succeeded",
    "group_E": "the group of each episode: episodes of one group share their prompt",
    "gamma": "the discount γ per token or per turn, in [0, 1]",
    "gae_lambda": "the λ of GAE, in [0, 1]",
    "step_weight": "the weight ω of a turn's own advantage relative to its episode's",
    "whiten": "whether to give the advantages mean 0 and standard deviation 1",
}
"""Inputs that an advantage estimator may name as parameters."""

LOSS_INPUTS = ("clip_low", "clip_high", "dual_clip", "episode_N")
"""Keyword inputs that a policy loss may name: ε₋, ε₊, c, and the episode of each token."""


Judged = Literal["turn", "episode", "episodes"]


def judged_by(term: Callable[..., Any]) -> Judged:
    """The records that a reward term judges, from the annotation of its parameter.

    Raises:
        ValueError: The annotation is none of `Turn`, `Episode` and ``Sequence[Episode]`` (or
            another sequence), or the term does not take one argument.
    """
    check_positional(term, "record")
    try:
        parameter = next(iter(signature(term, eval_str=True).parameters.values()))
    except NameError as error:
        raise ValueError(f"its annotations cannot be read: {error}") from None
    match get_args(parameter.annotation) or parameter.annotation:
        case type() as record if record is Turn:
            return "turn"
        case type() as record if record is Episode:
            return "episode"
        case (record, *_) if record is Episode:
            return "episodes"
    raise ValueError(
        f"annotate {parameter} with what it judges: Turn, Episode or Sequence[Episode] "
        "(ragen.core.types)"
    )


def _takes(argument: str) -> Callable[[Callable[..., Any]], None]:
    return lambda function: check_positional(function, argument)


ESTIMATOR = Kind(
    "estimator",
    "ragen.advantages",
    (
        "gae",
        "bi_level_gae",
        "grpo",
        "dr_grpo",
        "act_focus",
        "raft",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gigpo",
        "vine",
    ),
    lambda function: inputs_of(function, ESTIMATOR_INPUTS),
)
LOSS = Kind(
    "loss",
    "ragen.losses",
    ("ppo_clip", "gspo", "cispo", "nll"),
    lambda function: inputs_of(function, LOSS_INPUTS, 2),
)
SCORE = Kind("filter score", "ragen.filters", ("reward_std", "variance"), _takes("group"))
THOUGHT_TERMS = ("grounding", "consistency", "observation", "prediction", "length", "repetition")
JUDGE = "judge"
"""The reward term that asks a language model (section ``judge``)."""
TERM = Kind("reward term", "ragen.rewards", (*THOUGHT_TERMS, JUDGE), judged_by)
_DETECTORS = (
    "reward_std_cliff",
    "entropy_cliff",
    "entropy_blowup",
    "grad_spike",
    "reward_drop",
    "mi_drop",
    "format_loss",
    "degenerate_text",
    "non_finite",
    "empty_filter",
    "mismatch",
    "stalled",
)
DETECTOR = Kind("detector", "ragen.detectors", _DETECTORS, _takes("history"))
_PARSERS = ("auto", "hermes", "llama3", "mistral")
TOOL_PARSER = Kind("tool parser", "ragen.tool_parsers", _PARSERS, _takes("reply"))
ENV = Kind("environment", "ragen.envs", ())
"""The registry knows RAGEN's own environments, and checks their names."""

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "env.name": ENV,
        "env.mix": ENV,
        "prompt.tool_parser": TOOL_PARSER,
        "advantage.name": ESTIMATOR,
        "loss.name": LOSS,
        "filter.score": SCORE,
        "reward.terms": TERM,
        "guard.responses": DETECTOR,
    }
)
"""The kind of each config key that names functions; some are tables, by name."""
