"""`ragen export`: a run's policy as a folder that does not need RAGEN.

The weights are a checkpoint's, byte for byte, in Hugging Face's layout (or PEFT's, if the
run trained an adapter). With them come the tokenizer, its chat template, a generation config that
samples as the evaluation did, and a model card. Plain `transformers` loads it and vLLM serves it.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ragen.chat.chat import Chat
from ragen.chat.template import dated
from ragen.core.errors import RagenError
from ragen.core.pictures import for_people
from ragen.core.seeding import EVAL_LEVELS
from ragen.core.user_code import UserCodeError
from ragen.engines.factory import load_model
from ragen.models.adapter_folder import ADAPTER_WEIGHTS
from ragen.models.loading import load_tokenizer, save_tokenizer
from ragen.models.names import ADAPTER_CONFIG, BASE, is_adapter
from ragen.networks import lora
from ragen.reports.card import Usage, card
from ragen.reports.facts import read_facts
from ragen.rollout.episode import opening
from ragen.rollout.setup import EpisodeSpec, Setup, make_chat, make_setup
from ragen.storage.checkpoint import choose, new_folder, sound, step_of

WEIGHTS = [
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
]
"""The policy's files in a checkpoint; all others but the tokenizer belong to the learner."""


def export(
    run: Path,
    out: Path | None = None,
    *,
    step: int | None = None,
    best: bool = False,
    merge: bool = False,
) -> Path:
    """Write a run's policy, with tokenizer and model card, into its own folder, and return it.

    Args:
        run: The run's folder; the run may be unfinished.
        out: A folder that does not exist yet; ``None`` means ``RUN/export-step-N``.
        step: The checkpoint; ``None`` means the newest.
        best: Take the checkpoint that was evaluated best instead.
        merge: Add a LoRA adapter to its base and write the whole model.

    Raises:
        RagenError: There is no such run or checkpoint, it is damaged, its environment is gone,
            there is no adapter to merge, or `out` exists or cannot be written.
    """
    facts = read_facts(run)
    checkpoint = choose(run, step, best)
    number, config = step_of(checkpoint), facts.config
    target = out or run / f"export-step-{number}"
    sound(checkpoint)
    if merge and not is_adapter(checkpoint):
        raise RagenError(
            f"{run} trained all weights and has no adapter to merge: leave --merge out"
        )
    tokenizer = load_tokenizer(checkpoint, checkpoint)
    chat = make_chat(config, tokenizer)
    tokenizer.chat_template = dated(tokenizer.chat_template)  # others prompt it as it was trained
    alone, *_ = config.by_env().values()  # a mixture shows the prompt of its first environment
    with closing(make_setup(alone, None)) as setup:
        usage = usage_of(setup, chat, tokenizer.chat_template, config.seed)
    if is_adapter(checkpoint) and not merge:
        usage = replace(usage, rank=config.lora.rank)
    # If the evaluation was greedy, the temperature is that of training.
    temperature = config.eval.temperature or config.rollout.temperature
    with new_folder(target) as folder:
        if merge:
            model, _ = load_model(config.model, str(checkpoint))
            lora.merge(model).save_pretrained(folder)
        else:
            for path in chain.from_iterable(map(checkpoint.glob, WEIGHTS)):
                shutil.copyfile(path, folder / path.name)
        save_tokenizer(tokenizer, folder)
        generation_config(
            tokenizer, chat.end_ids, temperature, config.rollout.max_tokens
        ).save_pretrained(folder)
        (folder / "README.md").write_text(card(facts, number, usage), encoding="utf-8")
    return target


def usage_of(setup: Setup, chat: Chat, template: str, seed: int) -> Usage:
    """How to prompt the run's policy, with the first prompt of the first evaluation level.

    The arguments that `Chat` passes to every template are listed if this one reads them.
    """
    try:
        prompt, _ = opening(setup, EpisodeSpec(EVAL_LEVELS, 0, 0, (seed, "play")))
    except UserCodeError as failure:
        raise RagenError(
            f"the environment {setup.env!r} failed; run `ragen check` on it"
        ) from failure
    messages = chat.taken(prompt.messages)
    begun, _ = chat.open(messages, setup.prefill)
    in_template = begun == chat.open(messages)[0]  # the template writes the prefill itself
    start = "" if in_template else setup.prefill
    options = {"tools": repr(list(setup.tools))} if setup.tools else {}
    if "enable_thinking" in template and not setup.think:
        options["enable_thinking"] = "False"
    usage = Usage(messages, start, options, setup.think, (chat.asked, chat.header))
    if not prompt.pictures:
        return usage
    shown = [{**each, "content": for_people(each["content"])} for each in messages]
    return replace(usage, messages=shown, pictures=True)


def generation_config(
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    temperature: float,
    max_tokens: int,
) -> GenerationConfig:
    """Sampling as in the run's evaluation: any filter of tokens would make it another policy."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=temperature,
        top_k=0,  # off; the default of transformers is 50
        top_p=1.0,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(end_ids),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
