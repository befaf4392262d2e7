"""The model card of an exported policy: how well it plays, how it was trained, how to use it.

It is Markdown with the front matter that Hugging Face reads. It has the tables of the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from ragen.config.config import Config
from ragen.config.extensions import KINDS, library_of
from ragen.config.sections import EnvConfig
from ragen.core.pictures import MARK
from ragen.core.tables import Section, markdown
from ragen.core.types import Message
from ragen.reports.facts import Facts
from ragen.reports.report import events, exactness, in_each_env, settings, success
from ragen.settings.code import parts_of, value_of, without_folder
from ragen.settings.saved import run_config
from ragen.storage.checkpoint import run_of


@dataclass(frozen=True, slots=True)
class Usage:
    """How to prompt a policy as in training.

    Attributes:
        messages: The first prompt of an episode.
        start: The start of the reply, which follows the template's generation prompt.
        header: The end of that prompt which is left out, and what takes its place (`Chat.header`).
        options: Further arguments of the template: Python expressions by name.
        think: A reply begins with a thought.
        rank: The rank of the adapter, whose base is another model; 0 for a whole model.
        pictures: The prompt shows pictures, each at a `ragen.core.pictures.MARK`.
    """

    messages: Sequence[Message] = ()
    start: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    think: bool = True
    header: tuple[str, str] = ("", "")
    rank: int = 0
    pictures: bool = False


def card(facts: Facts, step: int, usage: Usage) -> str:
    """The card of a run's policy after `step` steps, when its checkpoint was written."""
    base, config = origin(facts.config.model.path), without_paths(facts.config)
    short = _without_folders(facts.config)
    successes_by_level = {
        which: {(short.get(env, env), level): success for (env, level), success in levels.items()}
        for which, levels in facts.successes.items()
    }
    known = replace(until(facts, step), config=config, successes=successes_by_level)
    sections = [headline(known, base, step), *in_each_env(known, success)]
    sections += [exactness(known), events(known), settings(known)]
    algorithm = config.algorithm.partition("/")[0]
    tags = "ragen", "reinforcement-learning", "multi-turn", algorithm, *config.by_env()
    front, use = front_matter(tags, hub_id(base), usage), how_to_use(hub_id(base), usage)
    return f"{front}\n{markdown(sections)}\n{use}"


def until(facts: Facts, step: int) -> Facts:
    """The data of a run as of its first `step` steps."""
    metrics = {
        name: early
        for name, series in facts.metrics.items()
        if (early := {at: value for at, value in series.items() if at <= step})
    }
    evaluations = tuple(each for each in facts.evaluations if each.step <= step)
    events = tuple(event for event in facts.events if event["step"] <= step)
    return replace(facts, metrics=metrics, evaluations=evaluations, events=events)


def without_paths(config: Config) -> Config:
    """The config with each path of this machine shortened to its last part."""
    tree, short = config.model_dump(), _without_folders(config)
    for key, model in config.local_models.items():
        section, name = key.split(".")
        tree[section][name] = hub_id(model) or _short(Path(model))
    for env in (tree["env"], *tree["env"]["mix"].values()):
        env["params"] = without_folder("", env["params"])
    tree["curriculum"]["stages"] = without_folder("", tree["curriculum"]["stages"])
    tree["sources"] = {short[name]: each for name, each in config.sources.items()}
    for key in KINDS:
        section, name = key.split(".")
        value = tree[section][name]
        if isinstance(value, str):
            tree[section][name] = short[value]
        else:
            tree[section][name] = {short[entry]: each for entry, each in value.items()}
    return Config.model_validate(tree)


def origin(model: str) -> str:
    """The model that training began with, traced back through the runs before."""
    before = set[str]()
    while (run := run_of(model)) and model not in before:  # a run may have taken another's place
        before.add(model)
        model = run_config(run).model.path
    return model


def _without_folders(config: Config) -> dict[str, str]:
    """Each name in a config with the last part of its path, or with as many as tell it apart.

    A mixture's name, or a library's without a file, is no path.
    """
    names, mixture = set(config.sources), config.env.name if config.env.mix else ""
    for key in KINDS:
        value = value_of(config, key)
        names |= {value} if isinstance(value, str) else value.keys()
    libraries = {name: parts_of(name)[0] for name in names}
    whole = {n for n in names if (library_of(n) and not libraries[n]) or n == mixture}
    paths = {n: (n,) if n in whole else Path(n.removeprefix(libraries[n])).parts for n in names}
    short = {}
    for name, parts in paths.items():
        ends = (parts[-count:] for count in range(1, len(parts) + 1))
        alone = (end for end in ends if sum(p[-len(end) :] == end for p in paths.values()) == 1)
        end = str(Path(*next(alone, parts))) if len(parts) > 1 else name
        short[name] = end if end == name else libraries[name] + end
    return short


def _short(model: Path) -> str:
    """The last part of a model's path; with its run, if it is a checkpoint."""
    run = run_of(model)
    return str(model.relative_to(run.parent)) if run else model.name


def hub_id(model: str) -> str | None:
    """The model's name on the Hub, or ``None`` for a local one, whose path in a config is absolute.

    Example:
        >>> hub_id("Qwen/Qwen2.5-0.5B-Instruct"), hub_id("base"), hub_id("/home/me/model")
        ('Qwen/Qwen2.5-0.5B-Instruct', None, None)
    """
    return model if model != "base" and not Path(model).is_absolute() else None


def headline(facts: Facts, base: str, step: int) -> Section:
    """The environment, the base model, the recipe and the step."""
    config = facts.config
    local = "RAGEN's embedded model" if base == "base" else f"the local model {Path(base).name}"
    envs = [each.env for each in config.by_env().values()]
    lines = [
        "A language model that acts in an environment turn by turn, trained by reinforcement "
        f"learning on whole episodes with RAGEN {version('ragen-rl')} (arXiv:2504.20073).",
        *(
            f"Environment {env.name}{_params(env)}; budgets: turns {env.max_turns}, actions per "
            f"turn {env.actions_per_turn}, actions per episode {env.max_actions}."
            for env in envs
        ),
        f"Base model: {hub_id(base) or local}. Training: {step} steps of {config.algorithm}, "
        f"recipe {config.recipe}, seed {config.seed}.",
    ]
    if config.sources:
        code = ", ".join(f"{name} ({each})" for name, each in config.sources.items())
        lines.append(f"Code from outside RAGEN: {code}.")
    last = max((each.step for each in facts.evaluations), default=step)
    if last != step:
        lines.append(f"Weights: those of step {step}. The last evaluation is that of step {last}.")
    return Section(facts.run.resolve().name, tuple(lines))


def _params(env: EnvConfig) -> str:
    return "".join(f", {name} = {value}" for name, value in env.params.items())


def front_matter(tags: Sequence[str], base: str | None, usage: Usage) -> str:
    """The metadata by which the Hub sorts models, in YAML (which includes JSON's strings)."""
    lines = [
        "---",
        "# license: name one here; the base model's licence applies to it",
        f"library_name: {'peft' if usage.rank else 'transformers'}",
        f"pipeline_tag: {'image-text-to-text' if usage.pictures else 'text-generation'}",
        *([f"base_model: {json.dumps(base)}"] if base else []),
        "tags:",
        *(f"- {json.dumps(tag)}" for tag in tags),
        "---",
    ]
    return "\n".join(lines) + "\n"


def how_to_use(base: str | None, usage: Usage) -> str:
    """Examples that prompt the policy with transformers and with vLLM."""
    messages = json.dumps([dict(each) for each in usage.messages], ensure_ascii=False, indent=4)
    if usage.pictures:
        return f"""## How to use it

The policy reads pictures. Its first prompt, with a picture at each `{MARK}`:

```json
{messages}
```

`AutoModelForImageTextToText`, `AutoTokenizer` and `AutoImageProcessor` of transformers load this
folder. In a prompt, the tokens of a picture take the place of its `{MARK}`. `ragen eval` plays the
policy with its prompts as in training.
"""
    prefix, chats = "", "it takes chat requests"
    asked, header = usage.header
    if begun := header + usage.start:
        cut = f"text = text.removesuffix({asked!r}) +" if asked else "text +="
        prefix = f"{cut} {begun!r}  # as in training\n"
        chats = "it takes prompts as in training with `/v1/completions`"
    if usage.start:
        chats = (
            f"chat requests end with an assistant's message `{usage.start}`\n"
            'and say `"continue_final_message": true, "add_generation_prompt": false`'
        )
    form = "<think>…</think><answer>…</answer>" if usage.think else "<answer>…</answer>"
    options = "".join(f", {name}={value}" for name, value in usage.options.items())
    if "enable_thinking" in usage.options:
        chats += ' and say `"chat_template_kwargs": {"enable_thinking": false}`'
    libraries, classes, own = "transformers", "AutoModelForCausalLM, AutoTokenizer", ""
    imports, load, request, serve = "", "LLM(folder)", "", "vllm serve ."
    if usage.rank:  # the base's own generation_config.json would win
        rank, named = usage.rank, base or "BASE"
        libraries, classes = "transformers and peft", f"{classes}, GenerationConfig"
        own = "model.generation_config = GenerationConfig.from_pretrained(folder)\n"
        imports = "from vllm.lora.request import LoRARequest\n"
        load = f"LLM({named!r}, enable_lora=True, max_lora_rank={rank}, generation_config=folder)"
        request = ', lora_request=LoRARequest("policy", 1, folder)'
        serve = (
            f"vllm serve {named} --enable-lora --max-lora-rank {rank} --lora-modules policy=. "
            "--generation-config ."
        )
    return f"""## How to use it

A reply has the form `{form}`, with `||` between actions. The environment's
answer is the next user message. `generation_config.json` holds the temperature of the evaluation
(no top-k, no top-p) and the tokens that end a turn. With {libraries}, in this folder:

```python
from transformers import {classes}

folder = "."
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{own}messages = {messages}
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True{options})
{prefix}prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
output = model.generate(prompt["input_ids"], attention_mask=prompt["attention_mask"])
reply = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
```

With vLLM, for the same prompt:

```python
from vllm import LLM
{imports}
llm = {load}
ids = prompt["input_ids"][0].tolist()
reply = llm.generate({{"prompt_token_ids": ids}}{request})[0].outputs[0].text
```

As a server: `{serve}`; {chats}.
"""
