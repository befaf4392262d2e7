"""``ragen base --agent A``: a small model from scratch that can talk to an agent, and no more.

A `Guesser` answers the agent's calls as an endpoint would: it calls one of the tools with random
arguments, perhaps again, and then gives a random answer. Its tokenizer holds the words of these
conversations, and a stage of supervised learning on them teaches the model the form of calls and
answers. Reinforcement learning teaches it which calls and answers are right.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ragen.algorithms.samples import join
from ragen.bases.base import LAYERS, new_model, save, teach
from ragen.bases.curriculum import Stage
from ragen.bases.screen import frequent
from ragen.bases.tokenizer import TEMPLATE, build, words_for
from ragen.chat.chat import Chat
from ragen.chat.tool_calls import hermes, write_hermes
from ragen.config.keys import dotted
from ragen.core.errors import RagenError, last_line
from ragen.core.seeding import BASE_LEVELS, derive
from ragen.core.stopping import run_async
from ragen.core.types import Completion, Episode, Prompt, Sample, Turn
from ragen.envs.adapters.agent import split_tasks
from ragen.envs.contract import pick
from ragen.envs.tools import write_call
from ragen.models.names import PROMPT_STYLE
from ragen.networks.machine import use_threads
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import written_completion
from ragen.rollout.setup import make_setup
from ragen.settings.environment import with_budgets
from ragen.storage.checkpoint import new_folder

EPISODES = 512
"""Tasks that are worked on with guesses."""
STEPS, STEP_EPISODES = 300, 16
AGAIN = 0.25
"""Probability of another call after the first one."""
MOST_WORDS = 1000
LONGEST = 8192
"""Greatest number of tokens of a prompt and its reply."""
CALL = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '", "', '"}}')
"""The pieces of a call around its words."""
AGENT_TEMPLATE = (
    "{% for tool in tools or [] %}<|user|>{{ tool['function']['name'] }}{% endfor %}"
    + TEMPLATE.replace(
        "<|end|>",
        "{% for call in message['tool_calls'] or [] %}<tool_call>{{ {'name': call.function.name, "
        "'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>",
    )
)
"""The template of the embedded models, with the names of the tools before it and with calls."""

CARD = """# A base model for the agent {agent}

A Qwen2 of {size}, made from scratch by RAGEN {version}
(seed {seed}). Its tokenizer holds the words of this agent's conversations, and the lines and
messages that most of them share, and spells others in bytes. Its prompts name the tools without
their descriptions.

It was shown {count} conversations of this agent in which every call, its arguments and the answer
were guessed, with {solved} of the tasks solved; the words of the tasks changed places each time it
saw them. They teach the form of calls and answers, and to copy words: no plan and no skill. They
are of tasks that training uses, and evaluation does not.

`ragen train --agent {agent} --tasks FILE --model DIR` trains it further.
"""


class Guesser:
    """A policy that guesses: it calls tools with random arguments and gives a random answer.

    A text in the arguments is one of `texts`, and an answer one of `answers`. What the conversation
    has mentioned is preferred. Where a tool takes an ``answer``, to call it is to answer.
    """

    def __init__(self, texts: Sequence[str], answers: Sequence[str]) -> None:
        self._texts, self._answers = texts, answers

    async def complete(self, prompt: Prompt) -> Completion:
        """A call of a tool, or an answer."""
        generator = np.random.Generator(np.random.PCG64(prompt.seed))
        said = [message for message in prompt.messages if message["role"] != "system"]
        text = "\n".join(message["content"] for message in said)

        def guess(values: Sequence[Any]) -> Any:
            return pick(generator, [each for each in values if str(each) in text] or values)

        offered: list[Any] = [tool["function"] for tool in prompt.tools]
        last = [tool for tool in offered if "answer" in _parameters(tool)]
        others = [tool for tool in offered if tool not in last]
        is_first = all(message["role"] != "assistant" for message in said)
        again = is_first or generator.random() < AGAIN
        tools = others if others and again else last
        if not tools:
            return written_completion(guess(self._answers))
        tool = pick(generator, tools)
        arguments = {name: guess(self._values(name, a)) for name, a in _parameters(tool).items()}
        return written_completion(write_hermes([write_call(tool["name"], **arguments)]))

    def _values(self, name: str, schema: Mapping[str, Any]) -> Sequence[Any]:
        """The values of a parameter from which guesses are drawn."""
        if name == "answer":
            return self._answers
        numbers: Sequence[Any] = range(10)
        kinds = {"integer": numbers, "number": numbers, "boolean": (False, True)}
        values = schema.get("enum") or kinds.get(str(schema.get("type")))
        return values or self._texts


def _parameters(tool: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tool.get("parameters", {}).get("properties", {})
    return found


def vocabulary(played: Sequence[Episode]) -> list[str]:
    """The words of conversations; a message or line that more than half of them have is one, too.

    So a library's own long prompt costs one token.
    """
    turns = [turn for episode in played for turn in episode.turns]
    said = [message["content"] for turn in turns for message in turn.prompt.messages]
    replies = [turn.completion.text for turn in turns]
    counts = Counter[str]()
    for episode in played:
        shown = [message["content"] for message in episode.turns[-1].prompt.messages]
        lines = [line for text in shown for line in text.splitlines(keepends=True)]
        counts.update(dict.fromkeys([*shown, *lines], 1))
    shared = [text for text, count in counts.items() if count > len(played) / 2 and text.strip()]
    return [*words_for(frequent([*said, *replies], MOST_WORDS), 20), *shared, *CALL]


class Conversations:
    """The guessed conversations, in the tokens of a new model; each step draws some of them.

    In each that is drawn, the `words` change places at random. So a model cannot know which words
    come where, and learns to copy any word from anywhere.
    """

    def __init__(
        self, played: Sequence[Episode], chat: Chat, seed: int, words: Sequence[str]
    ) -> None:
        self._seed = seed
        spelled = [chat.encode_text(word) + chat.encode_text(f" {word}") for word in words]
        self._words = [ids for ids in spelled if len(ids) == 2]
        exchanges = [[exchange(turn, chat) for turn in each.turns] for each in played]
        self._samples = [join(each, number, number) for number, each in enumerate(exchanges)]

    def samples(self, stage: Stage, number: int, step: int) -> list[Sample]:
        """The demonstrations of one step."""
        generator = np.random.Generator(np.random.PCG64(derive(self._seed, "base", number, step)))
        drawn = generator.choice(len(self._samples), stage.episodes).tolist()
        made = list[Sample]()
        for index in drawn:
            others = [self._words[place] for place in generator.permutation(len(self._words))]
            table = dict(zip(chain(*self._words), chain(*others), strict=True))
            for sample in self._samples[index]:
                ids = tuple(table.get(token, token) for token in sample.token_ids)
                made.append(replace(sample, token_ids=ids))
        return made


def exchange(turn: Turn, chat: Chat) -> tuple[Prompt, Completion]:
    """A call's prompt and reply in the tokens of a chat."""
    chat = chat.offering(turn.prompt.tools) if turn.prompt.tools else chat
    calls = hermes(turn.completion.text)
    text = chat.calls.write(calls) if calls and chat.calls else turn.completion.text
    ids, num_prefill = chat.open(turn.prompt.messages)
    prompt = replace(turn.prompt, token_ids=ids, num_prefill=num_prefill)
    return prompt, written_completion(text, lambda said: (*chat.encode_text(said), chat.end))


def prepare_agent(
    given: Mapping[str, Any],
    out: Path,
    seed: int = 0,
    steps: int | None = None,
    watch: Callable[[str], None] = lambda line: None,
    processes: int = 1,
) -> Path:
    """Make a base model for an agent and save it in Hugging Face's layout.

    `given` are settings by key, of the section ``env``. The other arguments are those of
    `ragen.bases.env_base.prepare_env`.

    Raises:
        RagenError: `out` exists or cannot be written, the agent cannot be loaded or fails in every
            task, or the tasks have no answers.
    """
    began = time.monotonic()
    config = with_budgets(dotted(given))
    tasks, _ = split_tasks(config.env.params["tasks"], config.env.params.get("test_tasks", ""))
    answers = sorted({str(task["answer"]) for task in tasks if "answer" in task})
    parts = [task[key] for task in tasks for key in task if key != "answer"]
    texts = sorted({part for part in parts if isinstance(part, str)}) or answers
    if not answers:
        raise RagenError('a base learns how answers look from the tasks: give each an "answer"')
    with new_folder(out) as folder:
        use_threads(1)  # the same weights however many cores are free
        setup = replace(make_setup(config, None), think=False, prefilled=False)
        levels = range(BASE_LEVELS, BASE_LEVELS + EPISODES)
        with closing(setup):
            watch(setup.invite() or "the agent works on tasks with guesses")
            guesser = Guesser(texts, answers)
            groups = run_async(run_groups(guesser, setup, levels, 1, (seed, "survey")))
        played = [episode for group in groups for episode in group.episodes]
        whole = [episode for episode in played if episode.turns and not episode.failed]
        if not whole:
            reason = last_line(played[0].error or "no call")
            raise RagenError(f"the agent fails in every task: {reason}")
        solved = f"{sum(episode.success for episode in whole) / len(whole):.1%}"
        watch(f"{len(whole)} of {len(played)} tasks ended without a failure, {solved} solved")
        tokenizer = build(vocabulary(whole))
        tokenizer.chat_template = AGENT_TEMPLATE
        model = new_model(tokenizer, LAYERS, seed, LONGEST)
        setattr(model.config, PROMPT_STYLE, "compact")
        words = [*dict.fromkeys([*texts, *answers])]
        conversations = Conversations(whole, Chat(tokenizer, think=False), seed, words)
        stage = Stage("form", STEPS, (), STEP_EPISODES, context_weight=0.1, lr_end=0.02)
        teach(model, conversations, stage, 0, steps, watch, processes)
        save(model, tokenizer, folder)
        size = f"{model.num_parameters() / 1e6:.2f} million parameters"
        text = CARD.format(
            agent=Path(config.env.name.removeprefix("agent:")).name,
            size=size,
            version=version("ragen-rl"),
            seed=seed,
            count=f"{len(whole):,}",
            solved=solved,
        )
        (folder / "README.md").write_text(text, encoding="utf-8")
    watch(f"{size}, {time.monotonic() - began:.0f} s; the base model is in {out}")
    return out
