"""The set-up of a rollout, and the level and the seeds of one episode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from ragen.chat.actions import SEPARATOR
from ragen.chat.chat import Chat, PictureForm
from ragen.chat.prompt import prefill
from ragen.chat.template import Tokenizer
from ragen.chat.tool_calls import ToolForm, find_tool_parser
from ragen.config.config import Config
from ragen.config.extensions import JUDGE
from ragen.config.keys import BUDGETS, PARAMS
from ragen.config.reading import changed
from ragen.config.sections import EnvConfig
from ragen.core.errors import RagenError
from ragen.core.pictures import Picture
from ragen.core.seeding import derive, train_level
from ragen.core.types import Turn
from ragen.core.user_code import UserCodeError
from ragen.core.waiting import in_thread
from ragen.envs.adapters.agent import AgentEnv, split_tasks
from ragen.envs.blocking import blocking
from ragen.envs.contract import Env, Schema
from ragen.envs.isolation import Workers
from ragen.envs.registry import build_env, env_class, env_factory
from ragen.gateway.agent import Agent
from ragen.gateway.outside import ADDRESS
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.reward_terms import NEED_READING
from ragen.rollout.venue import Venue


class Start(NamedTuple):
    """The rules, the goal, the names of the actions, and the observation after a reset.

    `pictures` are those of the observation.
    """

    rules: str
    goal: str
    actions: tuple[str, ...] | None
    observation: str
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything about an episode except its seeds and its policy.

    `make` builds `env` with its `params`; `turns`, `actions_per_turn` and `actions` are the
    budgets. With `think` a reply has a thought, with `prefilled` its first tag is pre-filled. A
    prompt shows the last `window` turns (0 shows all) and a `summary` of those before, which the
    policy writes itself if it is ``learned``; with `drops_thoughts` it is without the thoughts of
    earlier replies. `chat` is ``None`` for policies that take messages only. A reply has at most
    `max_tokens` tokens, prompt and reply together at most `max_length`. `format_penalty` is
    subtracted from the reward of a turn whose reply is not valid; `reward_terms` are the weights of
    the reward terms. One call of the environment may take `timeout_s` seconds; it runs in `venue`.
    `start` shows the first level of training. `stage` is the stage of the curriculum, counted from
    1; 0 is the full task. An `agent` that is given plays the episodes; it may take `timeout_s` for
    each.
    """

    env: str
    make: Callable[[], Env]
    turns: int = 5
    actions_per_turn: int = 5
    actions: int = 10
    style: Literal["compact", "paper"] = "compact"
    think: bool = True
    prefilled: bool = True
    window: int = 0
    summary: Literal["none", "actions", "observations", "learned"] = "none"
    drops_thoughts: bool = False
    chat: Chat | None = None
    tools: tuple[Schema, ...] = ()
    max_tokens: int = 80
    max_length: int = 1024
    temperature: float = 1.0
    format_penalty: float = 0.1
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float = 30.0
    venue: Venue = field(default_factory=Venue, repr=False, compare=False)
    start: Start | None = None
    stage: int = 0
    agent: Agent | None = field(default=None, repr=False, compare=False)
    params: Mapping[str, Any] = field(default_factory=dict)

    def make_env(self) -> GuardedEnv:
        """A guarded environment."""
        venue = self.venue
        if venue.workers is not None:  # which enforce the time limit themselves
            return GuardedEnv(venue.workers.make, None, waits=True)
        if venue.waits:
            return GuardedEnv(self.make, self.timeout_s, waits=True)
        return GuardedEnv(self.make, self.timeout_s, venue)

    async def open_env(self) -> GuardedEnv:
        """A guarded environment, of which the run's loop does not wait until it is made."""
        return await in_thread(self.make_env) if self.venue.waits else self.make_env()

    def has_room(self, token_ids: Sequence[int] | None) -> bool:
        """True if a prompt leaves room for a reply."""
        return token_ids is None or len(token_ids) + self.max_tokens <= self.max_length

    @property
    def waits(self) -> bool:
        """True if episodes wait for something else than the policy."""
        return self.agent is not None or self.venue.waits

    def invite(self) -> str:
        """Begin to listen for an agent outside, if it plays; returns what to tell the user."""
        return self.agent.invite() if self.agent is not None else ""

    def close(self) -> None:
        """Stop the worker processes and the agent, if there are any."""
        self.venue.close()
        if self.agent is not None:
            self.agent.close()

    @property
    def prefill(self) -> str:
        """The pre-filled start of every reply, written by RAGEN or by the chat template."""
        if self.prefilled and (self.think or not self.tools):
            return prefill(self.think)
        return self.chat.opening if self.chat is not None else ""

    @property
    def calls(self) -> ToolForm:
        """The form in which replies call tools."""
        return (self.chat and self.chat.calls) or ToolForm()

    def write(self, actions: Sequence[str]) -> str:
        """The reply of a player that takes these actions, without a thought."""
        if self.tools:
            return self.calls.reply(actions)
        return f"<answer>{f' {SEPARATOR} '.join(actions)}</answer>"


def knows_no_tools(env: str) -> RagenError:
    """The refusal of an embedded model in an environment with tools."""
    return RagenError(
        f"the environment {env} has tools, which the embedded models do not know: set model.path "
        "to a model whose chat template renders tools"
    )


def reads_no_pictures(env: str, model: str) -> RagenError:
    """The refusal of a model of texts in an environment with pictures."""
    return RagenError(
        f"the environment {env} shows pictures, and {model} reads no pictures: evaluate "
        "a model of pictures at an endpoint (ragen eval MODEL --base-url URL), or let the "
        "environment show text"
    )


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """Facts of an environment, read from one instance that is built for it.

    `reads_thoughts` says that it can check thoughts. `start` is what it shows on the first level of
    training, ``None`` if its `reset` fails there, which the episodes will report.
    """

    tools: tuple[Schema, ...]
    reads_thoughts: bool
    start: Start | None


_FACTS: dict[tuple[type[Env], str], EnvFacts] = {}
"""By class and parameters. An edited file has another class; `forget_facts` is for all else."""


def forget_facts() -> None:
    """Read facts and tasks anew from here on: a server may change its tools, and a file its tasks.

    A run calls this at its end, and an evaluation at its start.
    """
    _FACTS.clear()
    split_tasks.cache_clear()


def facts_of(env: EnvConfig) -> EnvFacts:
    """The facts of an environment, which is built for them unless they are known.

    Raises:
        RagenError: The environment or one of its parameters does not exist, or it cannot be made.
    """
    known = _FACTS.get(_key(env))
    if known is None:
        with open_env(env) as built:
            known = read_facts(env, built)
    return known


def read_facts(env: EnvConfig, built: GuardedEnv) -> EnvFacts:
    """The facts of an environment that has just been built, which `facts_of` then knows."""
    start = None
    with suppress(UserCodeError):
        observation = built.reset(FIRST.level_seed, FIRST.noise_seed)
        start = Start(built.rules, built.goal, built.actions, observation, built.pictures)
    facts = _FACTS[_key(env)] = EnvFacts(built.tools, built.reads_thoughts, start)
    return facts


def _key(env: EnvConfig) -> tuple[type[Env], str]:
    return env_class(env.name), f"{env.name} {env.params}"


@contextmanager
def open_env(env: EnvConfig) -> Iterator[GuardedEnv]:
    """One guarded environment, in a worker process of its own if it is isolated.

    Raises:
        RagenError: The environment or one of its parameters does not exist, or it cannot be made.
    """
    workers = Workers(env.name, env.params, env.timeout_s) if env.isolate else None
    make = workers.make if workers else env_factory(env.name, **env.params)
    limit = None if workers else env.timeout_s  # a worker process enforces it itself
    try:
        with closing(build_env(partial(GuardedEnv, make, limit), env.name)) as built:
            yield built
    finally:
        if workers:
            workers.close()


def make_chat(config: Config, tokenizer: Tokenizer) -> Chat:
    """The chat of a tokenizer with the tools of a config's environment.

    The tokenizer of a model that reads pictures has its `picture_reader`.
    """
    prompt = config.prompt
    tools, *others = (facts_of(each.env).tools for each in config.by_env().values())
    if others and any((tools, *others)):
        raise RagenError(
            "env.mix has an environment with tools, and a mixture has one chat for all: train in "
            "the environment alone"
        )
    parser = None if prompt.tool_parser == "auto" else find_tool_parser(prompt.tool_parser)
    pictures: PictureForm | None = getattr(tokenizer, "picture_reader", None)
    chat = Chat(tokenizer, prompt.think, prompt.history_thoughts, tools, parser, pictures)
    if any(issubclass(env_class(each.env.name), AgentEnv) for each in config.by_env().values()):
        chat.expect_tools()
    return chat


def at_stage(config: Config, stage: int) -> Config:
    """The config in a stage of the curriculum, from 1; after the last comes the full task."""
    values = dict(enumerate(config.curriculum.stages, 1)).get(stage, {})
    keys = {name: f"env.{name}" if name in BUDGETS else f"{PARAMS}.{name}" for name in values}
    return changed(config, {keys[name]: value for name, value in values.items()})


def make_setup(config: Config, chat: Chat | None) -> Setup:
    """The set-up that a config describes.

    Raises:
        RagenError: The environment or one of its parameters does not exist, its class refuses
            them, a reward term needs an environment that reads thoughts, the model or a judge reads
            no pictures, or there are several environments (`Config.by_env`).
    """
    config.require_one_env()
    env, prompt, facts = config.env, config.prompt, facts_of(config.env)
    unread = NEED_READING.intersection(config.reward.terms)
    if unread and not facts.reads_thoughts:
        raise RagenError(
            f"reward.terms.{min(unread)}: the environment {env.name} cannot read thoughts; leave "
            "the term out, or give the environment a read_thought (docs/environments.md)"
        )
    if facts.tools and chat is not None and chat.calls is None:
        raise knows_no_tools(env.name)
    if facts.start is not None and facts.start.pictures:
        if chat is not None and not chat.reads_pictures:
            raise reads_no_pictures(env.name, config.model.path)
        if JUDGE in config.reward.terms:
            raise RagenError(
                f"reward.terms.{JUDGE}: a judge reads text, and the environment {env.name} shows "
                "pictures; leave the term out, or let the environment show text"
            )
    make = env_factory(env.name, **env.params)
    waits = "workers" if env.isolate else blocking(env_class(env.name)).waits
    return Setup(
        env=env.name,
        make=make,
        params=env.params,
        turns=env.max_turns,
        actions_per_turn=env.actions_per_turn,
        actions=env.max_actions,
        style=prompt.style,
        think=prompt.think,
        prefilled=prompt.prefill,
        window=prompt.window,
        summary=prompt.summary,
        drops_thoughts=prompt.think and prompt.history_thoughts == "drop",
        chat=chat,
        tools=facts.tools,
        start=facts.start,
        max_tokens=config.rollout.max_tokens,
        max_length=config.model.max_length,
        temperature=config.rollout.temperature,
        format_penalty=config.reward.format_penalty,
        reward_terms=config.reward.terms,
        timeout_s=env.timeout_s,
        venue=Venue(waits, Workers(env.name, env.params, env.timeout_s)),
        agent=_agent(env),
    )


def _agent(env: EnvConfig) -> Agent | None:
    cls = env_class(env.name)
    if not issubclass(cls, AgentEnv):
        return None
    given = env.params
    address = given.get("address") or ADDRESS
    python, processes = given.get("python", ""), given.get("processes", 0)
    return Agent(cls.program(), python, processes, address, cls.sees_secrets)


def open_setups(config: Config, chat: Chat | None, stack: ExitStack) -> dict[str, Setup]:
    """The set-ups of a run's environments by name, which `stack` closes."""
    return {
        name: stack.enter_context(closing(make_setup(each, chat)))
        for name, each in config.by_env().items()
    }


def open_stages(config: Config, chat: Chat | None, stack: ExitStack) -> list[Setup]:
    """The set-ups of the curriculum's stages, which `stack` closes."""
    return [
        replace(
            stack.enter_context(closing(make_setup(at_stage(config, stage), chat))), stage=stage
        )
        for stage in range(1, len(config.curriculum.stages) + 1)
    ]


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """The level, the place in its group, and the seeds of one episode.

    `path` begins with the run's seed. The seeds of the episode are derived only from `path`,
    `group` and `member`, so one episode can be played again by itself.
    """

    level_seed: int
    group: int
    member: int
    path: tuple[int | str, ...]

    @property
    def noise_seed(self) -> int:
        """Seed of the environment's random events."""
        return self._derive("noise", self.group, self.member)

    def request_seed(self, turn: int) -> int:
        """Seed of one completion's sampling."""
        return self._derive("sample", self.group, self.member, turn)

    def call_seed(self, content: Sequence[Any], times: int) -> int:
        """Seed of the completion of an agent's call, whose ids or text came `times` before."""
        name = hashlib.blake2b(str(content).encode(), digest_size=16).hexdigest()
        return self._derive("call", self.group, self.member, name, times)

    def _derive(self, *rest: int | str) -> int:
        run_seed, *above = self.path
        return derive(int(run_seed), *above, *rest)


FIRST = EpisodeSpec(train_level(0), 0, 0, (0, "look"))
"""The episode whose start is read before a run."""


@dataclass(frozen=True, slots=True)
class BranchSpec(EpisodeSpec):
    """A recorded episode that is played again from one of its turns.

    `turns` are the recorded turns up to that one. Of the last, only what came before the reply
    counts: the environment restarts from its snapshot. `noise` is the recorded episode's noise
    seed, so the random events stay the same; `path` decides only the sampling.
    """

    noise: int
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if self.turns[-1].snapshot is None:
            number = len(self.turns) - 1
            raise RagenError(f"no snapshot of the environment is kept of turn {number}")

    @property
    def noise_seed(self) -> int:
        """The noise seed of the recorded episode."""
        return self.noise
