"""Playing episodes: one coroutine each, no lock-step.

Environments are other people's code. They are called through `Guarded` and nowhere else: what they
raise, a call that takes too long, and answers that make no sense become a failed episode with its
traceback, which is data. Anything else that goes wrong here is a bug and crashes.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from reprlib import repr as shortened
from typing import Any, Literal

from ragen.config.config import Config
from ragen.core.boundary import UserCodeError, boundary
from ragen.core.errors import RagenError
from ragen.core.seeding import derive
from ragen.core.types import Completion, Episode, Group, Prompt, StopReason, Turn
from ragen.envs.contract import Env, Reading, is_picture
from ragen.envs.isolation import Workers
from ragen.envs.registry import build_env, env_factory
from ragen.rollout.actions import Parsed, parse
from ragen.rollout.chat import Chat
from ragen.rollout.context import Conversation, View
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import NoCompletion, Policy, spoken
from ragen.rollout.prompt import Limits, PromptBuilder, prefill
from ragen.rollout.reasoning import NEED_READING, charged, notes


class Stopwatch:
    """The seconds that were spent inside, summed up in `seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


@dataclass(frozen=True, slots=True)
class Setup:
    """How episodes are played: the environment, its budgets, the prompts and the parser.

    Example:
        >>> from ragen.envs.bandit import Bandit
        >>> setup = Setup("bandit", Bandit, turns=1, actions_per_turn=1, actions=1)
        >>> setup.prefill
        '<think>'
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
    drops_thoughts: bool = False
    chat: Chat | None = None
    max_tokens: int = 80
    min_tokens: int = 0
    max_length: int = 1024
    temperature: float = 1.0
    format_penalty: float = 0.1
    terms: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float = 30.0
    common_noise: bool = False
    workers: Workers | None = None
    env_time: Stopwatch = field(default_factory=Stopwatch, repr=False, compare=False)

    def close(self) -> None:
        """Stop the processes that its environments run in, if they do."""
        if self.workers is not None:
            self.workers.close()

    @property
    def prefill(self) -> str:
        """The start of every reply that the policy is given for free, by us or by its template."""
        if self.prefilled:
            return prefill(self.think)
        return self.chat.opening if self.chat is not None else ""


def setup_of(config: Config, chat: Chat | None) -> Setup:
    """The setup that a config describes.

    Raises:
        RagenError: The environment, or a parameter of it, does not exist.
    """
    settings, prompt, rollout = config.env, config.prompt, config.rollout
    name, params = settings.name, settings.params
    workers = Workers(name, params, settings.timeout_s) if settings.isolate else None
    make = workers.make if workers else env_factory(name, **params)
    try:
        with closing(build_env(make, name)) as env:  # what the class itself refuses shows now
            _refuse_unreadable(env, config.reward.terms)
    except RagenError:
        if workers is not None:
            workers.close()
        raise
    return Setup(
        env=name,
        make=make,
        turns=settings.max_turns,
        actions_per_turn=settings.actions_per_turn,
        actions=settings.max_actions,
        style=prompt.style,
        think=prompt.think,
        prefilled=prompt.prefill,
        window=prompt.window,
        drops_thoughts=prompt.think and prompt.history_thoughts == "drop",
        chat=chat,
        max_tokens=rollout.max_tokens,
        min_tokens=rollout.min_tokens,
        max_length=config.model.max_length,
        temperature=rollout.temperature,
        format_penalty=config.reward.format_penalty,
        terms=config.reward.terms,
        timeout_s=settings.timeout_s,
        common_noise=settings.common_noise,
        workers=workers,
    )


def _refuse_unreadable(env: Env, terms: Mapping[str, float]) -> None:
    """Terms about what a thought says take an environment that can tell.

    Raises:
        RagenError: The environment reads no thoughts.
    """
    for name in terms:
        if name in NEED_READING and not env.reads_thoughts:
            raise RagenError(
                f"reward.terms.{name}: the environment {env.name} cannot read thoughts; leave it "
                f"out, or "
                "give the environment a read_thought (docs/environments.md)"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Which episode this is, and where its randomness comes from.

    `path` begins with the run's seed: `derive(*path, "noise", …)` gives every number that the
    episode needs, so an episode can be played again alone.

    Example:
        >>> Place(10000, 0, 3, (0, "train", 0)).noise_seed(common=True) == Place(
        ...     10000, 0, 5, (0, "train", 0)
        ... ).noise_seed(common=True)
        True
    """

    level_seed: int
    group: int
    member: int
    path: tuple[int | str, ...]

    def noise_seed(self, common: bool) -> int:
        """Seed of the environment's random events: one for each member, or one for the group."""
        return _derive(self.path, "noise", self.group, 0 if common else self.member)

    def request_seed(self, turn: int) -> int:
        """Seed of one completion's sampling."""
        return _derive(self.path, "sample", self.group, self.member, turn)


@dataclass(frozen=True, slots=True)
class Branch(Place):
    """A recorded episode that is played anew from one of its turns on.

    `turns` are the recorded ones up to that turn, which comes last and of which only what went
    before the reply counts. The environment goes on from its snapshot, with the noise that lay
    before the
    original: `noise` is that episode's seed, and `path` decides the sampling alone.

    Raises:
        RagenError: The last turn has no snapshot.
    """

    noise: int
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if self.turns[-1].snapshot is None:
            raise RagenError(
                f"no snapshot of the environment is kept of turn {len(self.turns) - 1}"
            )

    def noise_seed(self, common: bool) -> int:
        """The original's."""
        return self.noise


def _derive(path: tuple[int | str, ...], *rest: int | str) -> int:
    run_seed, *above = path
    return derive(int(run_seed), *above, *rest)


async def run_groups(
    policy: Policy | PlayerPolicy,
    setup: Setup,
    levels: Sequence[int],
    members: int,
    path: tuple[int | str, ...],
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
    first_group: int = 0,
) -> list[Group]:
    """Play `members` episodes on each level and return them as groups, in the order of `levels`.

    Args:
        policy: Who plays.
        setup: What is played, and how.
        levels: One level seed a group.
        members: Episodes a group.
        path: The run's seed and what the episodes are for, such as ``(seed, "train", step)``.
        concurrency: Episodes that are played at once; they begin in (group, member) order.
        on_episode: Called when an episode ends, in the order of their ends.
        first_group: Number of the first group; the others count up from it.

    Raises:
        RagenError: The player cannot play this environment.
    """
    places = [
        Place(level, group, member, path)
        for group, level in enumerate(levels, first_group)
        for member in range(members)
    ]
    played = await run_places(policy, setup, places, concurrency, on_episode)
    return [Group(tuple(played[at : at + members])) for at in range(0, len(played), members)]


async def run_places(
    policy: Policy | PlayerPolicy,
    setup: Setup,
    places: Sequence[Place],
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play the episodes of `places` and return them in that order; otherwise as `run_groups`."""
    gate = asyncio.Semaphore(concurrency)

    async def one(place: Place) -> Episode:
        async with gate:
            episode = await play(policy, setup, place)
        if on_episode is not None:
            on_episode(episode)
        return episode

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(place)) for place in places]
    except ExceptionGroup as errors:
        mistakes, bugs = errors.split(RagenError)
        if mistakes is None or bugs is not None:
            raise
        raise _first(mistakes) from None
    return [task.result() for task in running]


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


async def play(policy: Policy | PlayerPolicy, setup: Setup, place: Place) -> Episode:
    """Play one episode to its end."""
    running = _Running(setup, place)
    # A worker's calls are timed where it is waited for, and those of others by the process's timer.
    timeout_s = None if setup.workers else setup.timeout_s
    try:
        with closing(Guarded(setup.make, timeout_s, setup.env_time)) as env:
            try:
                await running.play(env, policy)
            except NoCompletion as failure:
                running.stop_reason = failure.stop_reason
                running.error = str(failure) if failure.stop_reason == "request" else None
            running.final = env.observation, env.picture()
    except UserCodeError as failure:
        running.stop_reason = "timeout" if failure.timed_out else "error"
        running.error, running.success = str(failure), False
    return running.episode()


def refuse_cramped(setup: Setup, level: int) -> None:
    """Refuse a run whose first prompt leaves no room for a reply.

    Raises:
        RagenError: The prompt of `level` is too long. Other levels may be shorter, but not by much.
    """
    try:
        with closing(Guarded(setup.make, None if setup.workers else setup.timeout_s)) as env:
            conversation, view = _Running(setup, Place(level, 0, 0, (0, "look"))).begin(env)
    except UserCodeError:
        return  # the episodes that fail will tell
    _, token_ids, _ = conversation.ask(view)
    if token_ids and len(token_ids) + setup.max_tokens > setup.max_length:
        setup.close()
        raise RagenError(
            f"the first prompt of the environment {setup.env!r} has {len(token_ids)} tokens, which "
            f"leaves no room for a reply of rollout.max_tokens = {setup.max_tokens}: "
            f"raise model.max_length from {setup.max_length}, or lower rollout.max_tokens"
        )


def refuse_changed(setup: Setup, branch: Branch) -> None:
    """Make sure that a recorded turn comes back as it was, before anyone plays on from it.

    Raises:
        RagenError: The environment, or what the policy is shown of it, is another one by now.
    """
    running = _Running(setup, branch)
    try:
        with closing(Guarded(setup.make, None if setup.workers else setup.timeout_s)) as env:
            conversation, view = running.begin(env)
            running.prompt(conversation, view, len(running.turns))
    except UserCodeError as failure:
        raise RagenError(
            f"the environment {setup.env!r} cannot go back to turn {len(branch.turns) - 1}: "
            f"{failure.reason}; run `ragen check` on it"
        ) from failure


class _Running:
    """An episode while it is played: the turns so far and what is left of the budgets."""

    def __init__(self, setup: Setup, place: Place) -> None:
        self.setup = setup
        self.place = place
        self.turns: list[Turn] = []
        self.actions_left = setup.actions
        self.stop_reason: StopReason = "max_turns"
        self.success = False
        self.error: str | None = None
        self.final: tuple[str | None, tuple[str, ...] | None] = (None, None)

    async def play(self, env: Guarded, policy: Policy | PlayerPolicy) -> None:
        setup = self.setup
        conversation, view = self.begin(env)
        for number in range(len(self.turns), setup.turns):
            prompt = self.prompt(conversation, view, number)
            if prompt.token_ids and len(prompt.token_ids) + setup.max_tokens > setup.max_length:
                self.stop_reason = "context"
                return
            if isinstance(policy, PlayerPolicy):
                completion = policy.act(env.env, view.limits, prompt)
            else:
                completion = await policy.complete(prompt)
            conversation.reply(completion)
            turn, problem = self._turn(env, view.observation, prompt, completion)
            self.turns.append(turn)
            if env.terminated:
                self.success = bool(env.info.get("success", False))
                self.stop_reason = "solved" if self.success else "failed"
                return
            if (
                env.truncated or self.actions_left == 0
            ):  # an environment's own limit is a budget too
                self.stop_reason = "max_actions"
                return
            view = View(env.observation, self._limits(number + 1), turn.reward, problem)

    def begin(self, env: Guarded) -> tuple[Conversation, View]:
        """Reset the environment; what is talked about it, and the first thing that is seen.

        A branch begins behind its earlier turns, with all of them already talked about.
        """
        setup, place = self.setup, self.place
        observation = env.reset(place.level_seed, place.noise_seed(setup.common_noise))
        conversation = Conversation(
            PromptBuilder(setup.style, setup.think, max_tokens=setup.max_tokens),
            (env.rules, env.goal, env.actions),
            setup.chat,
            setup.window,
            setup.max_length - setup.max_tokens,
            setup.prefill,
            setup.drops_thoughts,
        )
        if isinstance(place, Branch):
            return conversation, self._replay(env, conversation, place)
        return conversation, View(observation, self._limits(0))

    def _replay(self, env: Guarded, conversation: Conversation, branch: Branch) -> View:
        """Talk through the earlier turns and put the environment back; what is seen behind them."""
        view = View(branch.turns[0].observation, self._limits(0))
        for number, (turn, following) in enumerate(pairwise(branch.turns)):
            prompt = self.prompt(conversation, view, number)
            conversation.reply(self._said(turn.completion))
            problem = self._read(env, turn.completion).problem
            self.turns.append(replace(turn, prompt=prompt))
            self.actions_left -= len(turn.actions_executed)
            limits = self._limits(number + 1)
            view = View(following.observation, limits, turn.reward, problem)
        present = branch.turns[-1]
        assert present.snapshot is not None
        env.restore(present.snapshot, present.observation)
        if env.state()[0] != present.state_key:
            raise RagenError(
                f"the environment {self.setup.env!r} comes back to turn {len(branch.turns) - 1} in "
                "another state than was recorded: its code or its parameters have changed since"
            )
        return view

    def _said(self, completion: Completion) -> Completion:
        """A recorded completion with its ids, those of its text where none were recorded."""
        chat = self.setup.chat
        if completion.token_ids is not None or chat is None:
            return completion
        end = (chat.end,) if completion.finish_reason == "stop" else ()
        return spoken(completion.text, lambda text: (*chat.encode(text), *end))

    def _limits(self, number: int) -> Limits:
        setup = self.setup
        return Limits(number + 1, setup.turns - number, self.actions_left, setup.actions_per_turn)

    def prompt(self, conversation: Conversation, view: View, number: int) -> Prompt:
        """What the policy is asked in a turn; a recorded one must be asked as it was.

        Raises:
            RagenError: It would be asked in other tokens.
        """
        setup = self.setup
        messages, token_ids, num_prefill = conversation.ask(view)
        if isinstance(self.place, Branch) and number < len(self.place.turns):
            _refuse_other(token_ids, self.place.turns[number].prompt.token_ids, number)
        return Prompt(
            messages,
            token_ids,
            num_prefill,
            setup.max_tokens,
            setup.temperature,
            self.place.request_seed(number),
            setup.min_tokens,
            conversation.turns_dropped,
        )

    def _turn(
        self, env: Guarded, observation: str, prompt: Prompt, completion: Completion
    ) -> tuple[Turn, str | None]:
        """Carry out what the completion asks for."""
        setup = self.setup
        (key, snapshot), picture = env.state(), env.picture()
        parsed = self._read(env, completion)
        read: dict[str, Any] = {}
        if parsed.thought is not None and env.env.reads_thoughts:
            read = notes(env.read_thought(parsed.thought), parsed.actions_asked)
        executed: list[str] = []
        reward, effective = 0.0, 0
        for action in parsed.actions:
            reward += env.step(action)
            executed.append(action)
            effective += bool(env.info.get("effective", True))
            self.actions_left -= 1
            if env.terminated or env.truncated:
                break
        turn = Turn(
            observation,
            prompt,
            completion,
            parsed.thought,
            _thought_span(setup, completion, parsed),
            parsed.actions_asked,
            tuple(executed),
            reward,
            0.0 if parsed.valid else -setup.format_penalty,
            parsed.valid,
            key,
            {**(env.info if executed else {}), "effective": effective, **read},
            snapshot,
            picture,
        )
        return charged(turn, setup.terms), parsed.problem

    def _read(self, env: Guarded, completion: Completion) -> Parsed:
        """What a completion says, and what of it is to be done."""
        setup = self.setup
        parsed = parse(
            setup.prefill + completion.text,
            think=setup.think,
            actions=env.actions,
            max_actions=min(setup.actions_per_turn, self.actions_left),
        )
        if completion.finish_reason == "length":
            problem = f"It was cut off after {setup.max_tokens} tokens, so nothing of it was done."
            return replace(parsed, actions=(), valid=False, problem=problem)
        return parsed

    def episode(self) -> Episode:
        place = self.place
        terminated = self.stop_reason in ("solved", "failed")
        return Episode(
            self.setup.env,
            place.level_seed,
            place.noise_seed(self.setup.common_noise),
            place.group,
            place.member,
            tuple(self.turns),
            self.stop_reason,
            terminated,
            not terminated,
            False,
            self.success,
            self.error,
            *self.final,
        )


def _refuse_other(
    asked: tuple[int, ...] | None, recorded: tuple[int, ...] | None, number: int
) -> None:
    """Where a prompt's ids were recorded, they must be the ones that it is rebuilt as.

    Raises:
        RagenError: They are not.
    """
    if recorded is None or asked is None or asked == recorded:
        return
    pairs = enumerate(zip(asked, recorded, strict=False))
    first = next((at for at, (one, other) in pairs if one != other), min(len(asked), len(recorded)))
    raise RagenError(
        f"the prompt of turn {number} cannot be rebuilt: its token {first} differs from what the "
        "model saw; the tokenizer, its chat template, the environment or RAGEN has changed since"
    )


def _thought_span(setup: Setup, completion: Completion, parsed: Parsed) -> tuple[int, int] | None:
    """The completion's tokens that spell the thought; the prefill is none of them."""
    if parsed.thought_chars is None or completion.token_ids is None or setup.chat is None:
        return None
    shift = len(setup.prefill)
    start, end = (max(0, at - shift) for at in parsed.thought_chars)
    return setup.chat.token_span(completion.token_ids, completion.text, start, end)


class Guarded:
    """An environment, each call of it behind the boundary and its answer checked.

    After each call `observation`, `terminated`, `truncated` and `info` hold what it answered. The
    time that the environment takes is added to `spent`.
    """

    def __init__(
        self, make: Callable[[], Env], timeout_s: float | None, spent: Stopwatch | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._spent = spent or Stopwatch()
        self.observation = ""
        self.terminated, self.truncated = False, False
        self.info: dict[str, Any] = {}
        with self._calling("being made"):
            self.env = make()
            self.rules, self.goal, self.actions = self.env.rules, self.env.goal, self.env.actions

    def reset(self, level_seed: int, noise_seed: int) -> str:
        """Begin an episode; returns the first observation."""
        with self._calling("reset"):
            observation, info = self.env.reset(seed=level_seed, options={"noise_seed": noise_seed})
            # An environment may have names of its own for each level (a bandit's arms).
            self.rules, self.goal, self.actions = self.env.rules, self.env.goal, self.env.actions
        self._answer("reset", observation, info)
        return self.observation

    def step(self, action: str) -> float:
        """Carry out one action; returns its reward."""
        with self._calling("step"):
            observation, reward, terminated, truncated, info = self.env.step(action)
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise UserCodeError(f"step returned {reward!r} as reward: a finite number is expected")
        self._answer("step", observation, info)
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        return float(reward)

    def restore(self, state: Mapping[str, Any], observation: str) -> None:
        """Go back to a snapshot of the level that was begun, and to what was seen there."""
        with self._calling("set_state"):
            self.env.set_state(
                copy.deepcopy(dict(state))
            )  # an environment may keep what it is given
        self.observation, self.info = observation, {}
        self.terminated, self.truncated = False, False

    def read_thought(self, thought: str) -> Reading | None:
        """What the thought says of the environment as it is now."""
        with self._calling("read_thought"):
            reading = self.env.read_thought(thought)
        if not (reading is None or isinstance(reading, Reading)):
            kind = type(reading).__name__
            raise UserCodeError(f"read_thought returned {kind}: a Reading or None is expected")
        return reading

    def state(self) -> tuple[str, dict[str, Any]]:
        """The observable state, as text that equal states share, and an exact snapshot."""
        with self._calling("state_key"):
            key = str(self.env.state_key())
        with self._calling("get_state"):
            # A copy: the environment may go on with what it returned. And what is no JSON shows
            # here.
            return key, json.loads(json.dumps(self.env.get_state()))

    def picture(self) -> tuple[str, ...] | None:
        """What the environment draws of its present state; ``None`` where it draws nothing."""
        if not self.env.draws:
            return None
        with self._calling("picture"):
            rows = self.env.picture()
        if not is_picture(rows):
            raise UserCodeError(
                f"picture returned {shortened(rows)}: rows of one length are expected, of single "
                "printable characters"
            )
        return None if rows is None else tuple(rows)

    @contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        with self._spent, boundary(call, self._timeout_s):
            yield

    def _answer(self, call: str, observation: Any, info: Any) -> None:
        if not isinstance(observation, str):
            kind = type(observation).__name__
            raise UserCodeError(f"{call} returned {kind} as observation: text is expected")
        if not isinstance(info, dict):
            raise UserCodeError(
                f"{call} returned {type(info).__name__} as info: a dict is expected"
            )
        self.observation, self.info = observation, info

    def close(self) -> None:
        """Let the environment free what it holds. An episode that is over cannot fail any more."""
        with suppress(UserCodeError), self._calling("close"):
            self.env.close()
