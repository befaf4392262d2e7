"""Environments of the verifiers package: a dataset, the messages of every turn, and a rubric.

The adapter plays the library's own rollout, with RAGEN's policy in place of its client.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from ragen.core.errors import RagenError
from ragen.core.plugins import load_object
from ragen.core.seeding import EVAL_LEVELS, TRAIN_LEVELS
from ragen.core.waiting import begin, wait
from ragen.envs.adapters.adapted import Adapted, Played, version_of
from ragen.envs.adapters.randomness import GlobalRandomness
from ragen.envs.contract import Schema
from ragen.envs.tools import Call, read_call, tool_schema

MOST_TURNS = 20
"""Turns of an episode where the environment sets no limit."""
MOST_ROUNDS = 2
"""An answer of the environment that ends an episode, and the stop condition that sees it."""
HELD_OUT = 4
"""One example in this many is for evaluation if an environment has only one dataset."""
RULES = "Answer the message. Your answer is scored as it stands."
"""The rules of an example without a system message."""
OF_ANSWERS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    SyntaxError,
)
"""Exceptions of a reward function for an unreadable answer. The library counts it as 0."""


class VerifiersEnv(Adapted):
    """An environment of verifiers, of one turn or several, also with tools (`ToolEnv`).

    Observation: the example's messages, then the environment's answers; system messages are the
    rules. Actions: free text, and calls of the tools, each a message of its own. Reward: the
    rubric's at the end, 0 before; the rubric sees no thoughts. Ends when: the environment's stop
    conditions say so. Success is a reward of `success_at` or more. Global random generators follow
    from the level seed in the setup, and then from the noise seed. There is no random play.

    Parameters: `success_at`; any other keyword goes to ``load_environment``.
    """

    waits = "workers"  # not threads: it draws from generators that a process has once
    actions_per_turn = 1

    def __init__(self, success_at: float = 1.0, **params: Any) -> None:
        self._success_at = success_at
        self._loaded = _loaded(self.target, self.versions, json.dumps(params, sort_keys=True))
        # The folder of a file would give other tokens on another machine.
        self.goal = f"Answer ({self.target.rpartition('/')[2].removesuffix('.py')})"
        self._rules = RULES
        self._state: Any = None  # of the library, while an episode is open
        self._messages: list[Any] = []  # the conversation
        self._randomness = GlobalRandomness(0)
        limit = self._loaded.environment.max_turns
        self.max_turns = self.max_actions = limit if limit > 0 else MOST_TURNS

    @property
    def tools(self) -> tuple[Schema, ...]:
        return self._loaded.tools

    @classmethod
    def find(cls, target: str) -> tuple[str, ...]:
        import verifiers

        if not hasattr(verifiers, "MultiTurnEnv"):
            raise RagenError(
                f"verifiers:{target}: {version_of('verifiers')} has no load_environment any more: "
                "pip install 'ragen-rl[verifiers]'"
            )
        entry = _entry(target)
        module = entry.partition(":")[0].partition(".")[0]
        if not target.endswith(".py") and (not module or importlib.util.find_spec(module) is None):
            raise RagenError(
                f"verifiers:{target}: no module {module!r} is installed here: install the package "
                "of the environment, or name a file as in verifiers:path/to/file.py"
            )
        return version_of("verifiers"), load_object(entry, kind="environment").source

    def begin(self, level_seed: int, noise_seed: int) -> str:
        self._leave()
        rows, first = self._loaded.training, TRAIN_LEVELS
        if level_seed < TRAIN_LEVELS:
            rows, first = self._loaded.evaluation, EVAL_LEVELS
        self._randomness.seed(level_seed)
        self._run(self._set_up(rows[(level_seed - first) % len(rows)]))
        self._randomness.seed(noise_seed)
        rules = [_text(each) for each in self._messages if each["role"] == "system"]
        self._rules = "\n\n".join(rules) or RULES
        return _shown([each for each in self._messages if each["role"] != "system"])

    def play(self, action: str) -> Played:
        before = len(self._messages) + 1
        call = read_call(action) if self.tools else None
        text = action if call else _written(self._loaded.environment.parser, action)
        if not self._run(self._take_turn(text, call)):
            return Played(_shown(self._messages[before:]), 0.0, False, False, False)
        reward = self._run(self._score())
        said = self._messages[before:]
        shown = _shown(said) if said else f"Your answer has the reward {reward:g}."
        return Played(shown, reward, True, False, reward >= self._success_at)

    def state_key(self) -> str:
        shown = [(*_called(each), each["role"], _text(each)) for each in self._messages]
        return hashlib.blake2b(json.dumps(shown).encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        self._leave()

    async def _set_up(self, row: Mapping[str, Any]) -> None:
        environment = self._loaded.environment
        self._state = await environment.init_state(dict(row), self._loaded.no_client, "")
        self._state = await environment.setup_state(self._state) or self._state
        if _schemas(self._state["tool_defs"]) != self.tools:
            raise RuntimeError(f"{self.name}: the example has other tools than the environment")
        if await self._ends():
            raise RuntimeError(f"{self.name}: the episode ended before its first turn")

    async def _take_turn(self, text: str, call: Call | None) -> bool:
        """Add the agent's message, let the environment answer, and return whether it has ended."""
        from verifiers.types import Response, ResponseMessage, ToolCall

        content: dict[str, Any] = {"content": text, "finish_reason": "stop"}
        if call is not None:
            number, arguments = len(self._messages), json.dumps(call.arguments)
            made = ToolCall(id=f"call{number:05d}", name=call.name, arguments=arguments)
            content = {"content": "", "tool_calls": [made], "finish_reason": "tool_calls"}
        message = ResponseMessage(**content, is_truncated=False)
        response = Response(id="", created=0, model="", message=message)
        environment, state = self._loaded.environment, self._state
        await environment.add_model_response(state, self._messages, response)
        self._messages = [*self._messages, *state["trajectory"][-1]["completion"]]
        return await self._ends()

    async def _ends(self) -> bool:
        """True if the episode has ended; if not, the messages of the next turn are in place."""
        from verifiers.errors import ToolError
        from verifiers.utils.message_utils import maybe_normalize_messages

        environment, state = self._loaded.environment, self._state
        for _ in range(MOST_ROUNDS):
            if await environment.is_completed(state):
                break
            try:
                messages = await environment.get_prompt_messages(state)
            except ToolError as error:  # of a call that has to end the episode (`stop_errors`)
                state["error"] = error
                continue
            messages = maybe_normalize_messages(messages, field_name="prompt_messages")
            if state.get("final_env_response") is None:
                self._messages = messages
                return False
        else:
            raise RuntimeError(f"{self.name}: its stop conditions ignore the end of an episode")
        if last := state.get("final_env_response"):
            said = maybe_normalize_messages(last, field_name="final_env_response")
            self._messages = [*self._messages, *said]
        return True

    async def _score(self) -> float:
        state, self._state = self._state, None
        rubric = self._loaded.environment.rubric
        await self._loaded.environment.cleanup(state)  # which first puts its completion together
        with _failures() as raised:
            await rubric.score_rollout(state)
        await rubric.cleanup(state)
        for error in raised:
            if not isinstance(error, OF_ANSWERS):
                raise RuntimeError(f"a reward function raised {error!r}") from error
        return float(state["reward"])

    def _leave(self) -> None:
        """Let the environment clean up after an episode that did not end."""
        state, self._state = self._state, None
        if state is not None:
            self._run(self._loaded.environment.cleanup(state))
            self._run(self._loaded.environment.rubric.cleanup(state))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine of the environment, which draws from its own generators."""
        with self._randomness.placed():
            return wait(begin(coroutine))


class _Loaded(NamedTuple):
    """The result of `load_environment`, for all instances: datasets can be large."""

    environment: Any
    tools: tuple[Schema, ...]
    no_client: Any
    evaluation: Sequence[Mapping[str, Any]]
    training: Sequence[Mapping[str, Any]]

    def __deepcopy__(self, _: dict[int, Any]) -> _Loaded:
        return self


@lru_cache(maxsize=16)
def _loaded(target: str, versions: tuple[str, ...], params: str) -> _Loaded:
    import datasets
    import verifiers

    datasets.disable_progress_bars()
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    name = f"verifiers:{target}"
    with _signals_as_they_are():
        environment: Any = load_object(_entry(target), kind="environment").object(
            **json.loads(params)
        )
    kind = type(environment).__name__
    if not isinstance(environment, verifiers.MultiTurnEnv):
        raise RagenError(f"{name} is a {kind}; RAGEN plays SingleTurnEnv, MultiTurnEnv and ToolEnv")
    if hasattr(environment, "mcp_servers"):
        raise RagenError(
            f"{name} is a {kind}, which keeps its MCP servers running in a thread for good: name "
            "them in an environment of RAGEN (McpEnv in docs/environments.md)"
        )
    if environment.rubric.has_group_rewards:
        raise RagenError(f"{name} scores episodes by comparing them, which RAGEN does not do")
    environment.env_id = environment.env_id or target
    evaluation, training = environment.build_eval_dataset(), environment.build_dataset()
    if not (evaluation and training):
        rows = list(training or evaluation or ())
        evaluation = rows[::HELD_OUT]
        training = [row for index, row in enumerate(rows) if index % HELD_OUT] or rows
    if not evaluation:
        raise RagenError(f"{name} has no examples")
    tools = _schemas(environment.tool_defs)
    return _Loaded(environment, tools, _no_client(), evaluation, training)


def _schemas(tools: Sequence[Any] | None) -> tuple[Schema, ...]:
    return tuple(tool_schema(each.name, each.description, each.parameters) for each in tools or ())


def _no_client() -> Any:
    from verifiers.clients import Client

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("this environment asks a model itself, which RAGEN does not offer")

    methods = dict.fromkeys([*Client.__abstractmethods__, "get_response"], refuse)
    return type("NoClient", (Client,), {**methods, "__init__": lambda _: None})()


def _entry(target: str) -> str:
    """The function that makes an environment, named by its package or its file."""
    if target.endswith(".py"):
        return f"{target}:load_environment"
    return f"{target.rpartition('/')[2].replace('-', '_')}:load_environment"


@contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """Keep the library from installing signal handlers, which fails outside the main thread."""
    install, signal.signal = signal.signal, lambda *_: None
    try:
        yield
    finally:
        signal.signal = install


@contextmanager
def _failures() -> Iterator[list[BaseException]]:
    """Collect the exceptions of reward functions, which the library would only write to its log."""
    raised: list[BaseException] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = sys.exc_info()[1]
            if error is not None and record.msg.startswith("Error calling reward function"):
                raised.append(error)

    logger = logging.getLogger("verifiers")
    handlers, logger.handlers = logger.handlers, [Listener()]
    try:
        yield raised
    finally:
        logger.handlers = handlers


def _written(parser: Any, answer: str) -> str:
    """The agent's message: its answer, in the form that the environment's parser reads."""
    import verifiers

    if isinstance(parser, verifiers.ThinkParser):
        return f"<think>\n</think>\n{answer}"
    if not isinstance(parser, verifiers.XMLParser):
        return answer
    fields = parser.get_fields()
    if any(f"<{field}>" in answer for field in fields):
        return answer
    own = parser.answer_field if parser.answer_field in fields else fields[-1]
    return str(parser.format(**{**dict.fromkeys(fields, ""), own: answer}))


def _shown(messages: Sequence[Any]) -> str:
    """Messages as one text: a single one as it is, several with their roles."""
    if len(messages) == 1:
        return _text(messages[0])
    return "\n\n".join(f"{each['role']}: {_text(each)}" for each in messages)


def _called(message: Any) -> list[tuple[str, str]]:
    return [(each.name, each.arguments) for each in getattr(message, "tool_calls", None) or ()]


def _text(message: Any) -> str:
    content = message["content"] or ""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part["type"] == "text"]
    if len(texts) < len(content):
        raise RuntimeError("the environment shows more than text")
    return "\n".join(texts)
