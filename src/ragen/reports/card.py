"""The model card of a policy that leaves its run: how it plays, how it was made, how to use it.

Markdown, with the front matter that Hugging Face reads; the tables are those of `ragen report`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from ragen.config.config import Config
from ragen.config.reading import read_config
from ragen.core.tables import Section, markdown
from ragen.core.types import Message
from ragen.reports.report import Facts, exactness, happened, learnt, settings
from ragen.storage.database import CONFIG

PARTS = (learnt, exactness, happened, settings)
"""What the card and the report say alike."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How a policy is asked as it was asked in training.

    Attributes:
        messages: The first prompt of an episode.
        start: What stands behind the template's generation prompt: the start of the reply.
        options: What the template is told besides, as Python: keyword arguments.
        adapter: Whether the weights are an adapter of the base model, and no model by themselves.
    """

    messages: Sequence[Message]
    start: str
    options: Mapping[str, str]
    adapter: bool


def card(facts: Facts, step: int, usage: Usage) -> str:
    """The card of a run's policy as it was after `step` steps.

    Args:
        facts: What the run's folder says of it.
        step: The step of the checkpoint that leaves.
        usage: How the policy is asked.
    """
    base, config = origin(facts.config.model.path), without_paths(facts.config)
    seen = replace(until(facts, step), config=config)
    parts = (headline(seen, base, step), *(part(seen) for part in PARTS))
    front, use = front_matter(config, base, usage), how_to_use(config, base, usage)
    return f"{front}\n{markdown(parts)}\n{use}"


def until(facts: Facts, step: int) -> Facts:
    """What was known of a run when `step` steps were finished."""
    course = {
        name: early
        for name, series in facts.course.items()
        if (early := {at: value for at, value in series.items() if at <= step})
    }
    evaluations = tuple(each for each in facts.evaluations if each.step <= step)
    events = tuple(event for event in facts.events if event["step"] <= step)
    return replace(facts, course=course, evaluations=evaluations, events=events)


def without_paths(config: Config) -> Config:
    """The config with the last part of each path of this machine."""
    env, model = config.env, config.model
    path = hub_id(model.path) or Path(model.path).name
    return config.model_copy(
        update={
            "env": env.model_copy(update={"name": Path(env.name).name}),
            "model": model.model_copy(update={"path": path}),
        }
    )


def origin(model: str) -> str:
    """The model that training began with, through all the runs that went on from one another.

    Example:
        >>> origin("Qwen/Qwen2.5-0.5B-Instruct")
        'Qwen/Qwen2.5-0.5B-Instruct'
    """
    while (Path(model) / CONFIG).is_file():
        model = read_config(Path(model) / CONFIG).model.path
    return model


def hub_id(model: str) -> str | None:
    """A model's name, where it is one that others can load; a run's config has paths from the root.

    Example:
        >>> hub_id("Qwen/Qwen2.5-0.5B-Instruct"), hub_id("base"), hub_id("/home/me/model")
        ('Qwen/Qwen2.5-0.5B-Instruct', None, None)
    """
    return model if model != "base" and not Path(model).is_absolute() else None


def headline(facts: Facts, base: str, step: int) -> Section:
    """What was trained where, from what and by what."""
    config, env = facts.config, facts.config.env
    local = "RAGEN's embedded model" if base == "base" else f"the local model {Path(base).name}"
    params = "".join(f", {name} = {value}" for name, value in env.params.items())
    lines = [
        "A language model that acts in an environment turn by turn, trained by reinforcement "
        "learning on "
        f"whole episodes with RAGEN {version('ragen')} (arXiv:2504.20073).",
        f"Environment {env.name}{params}; at most turns {env.max_turns}, actions a turn "
        f"{env.actions_per_turn}, actions in all {env.max_actions}.",
        f"Began as {hub_id(base) or local}; {step} steps of {config.algorithm}, recipe "
        f"{config.recipe}, seed {config.seed}.",
    ]
    last = max((each.step for each in facts.evaluations), default=step)
    if last != step:
        lines.append(f"These are the weights of step {step}; step {last} was evaluated last.")
    return Section(facts.run.resolve().name, tuple(lines))


def front_matter(config: Config, base: str, usage: Usage) -> str:
    """What the Hub sorts models by, in YAML, of which JSON's strings are a part."""
    known, algorithm = hub_id(base), config.algorithm.partition("/")[0]
    tags = ("ragen", "reinforcement-learning", "multi-turn", algorithm, config.env.name)
    lines = [
        "---",
        "# license: name one here; that of the base model binds it",
        f"library_name: {'peft' if usage.adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {json.dumps(known)}"] if known else []),
        "tags:",
        *(f"- {json.dumps(tag)}" for tag in tags),
        "---",
    ]
    return "\n".join(lines) + "\n"


def how_to_use(config: Config, base: str, usage: Usage) -> str:
    """The first prompt of an episode, put to the policy by transformers and by vLLM."""
    messages = json.dumps([dict(each) for each in usage.messages], ensure_ascii=False, indent=4)
    begun, chats = "", "it takes chat requests"
    if usage.start:
        begun = f"text += {usage.start!r}  # as in training\n"
        chats = (
            f"chat requests end with an assistant's message `{usage.start}`\n"
            'and say `"continue_final_message": true, "add_generation_prompt": false`'
        )
    form = "<think>…</think><answer>…</answer>" if config.prompt.think else "<answer>…</answer>"
    told = "".join(f", {name}={value}" for name, value in usage.options.items())
    dated = "import datetime\n\n" if "datetime" in told else ""
    if "enable_thinking" in usage.options:
        chats += ' and say `"chat_template_kwargs": {"enable_thinking": false}`'
    libraries, classes, own = "transformers", "AutoModelForCausalLM, AutoTokenizer", ""
    imports, load, request, serve = "", "LLM(folder)", "", "vllm serve ."
    if usage.adapter:  # the base brings a generation_config.json of its own, which comes first
        rank, named = config.lora.rank, hub_id(base) or "BASE"
        libraries, classes = "transformers and peft", f"{classes}, GenerationConfig"
        own = "model.generation_config = GenerationConfig.from_pretrained(folder)\n"
        imports = "from vllm.lora.request import LoRARequest\n"
        options = f"enable_lora=True, max_lora_rank={rank}, generation_config=folder"
        load = f"LLM({named!r}, {options})"
        request = ', lora_request=LoRARequest("policy", 1, folder)'
        serve = (
            f"vllm serve {named} --enable-lora --max-lora-rank {rank} --lora-modules policy=. "
            "--generation-config ."
        )
    return f"""## How to use it

A reply has the form `{form}`, with `||` between actions. What the environment
answers is the next user message. `generation_config.json` holds the temperature of the evaluation,
without top-k or top-p, and the tokens that end a turn. With {libraries}, in this folder:

```python
{dated}from transformers import {classes}

folder = "."
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{own}messages = {messages}
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True{told})
{begun}prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
output = model.generate(prompt["input_ids"], attention_mask=prompt["attention_mask"])
reply = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
```

With vLLM, from the same prompt:

```python
from vllm import LLM
{imports}
llm = {load}
ids = prompt["input_ids"][0].tolist()
reply = llm.generate({{"prompt_token_ids": ids}}{request})[0].outputs[0].text
```

As a server: `{serve}`; {chats}.
"""
