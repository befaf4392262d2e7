"""Supervised fine-tuning: a model learns from examples before reinforcement learning.

The examples are episodes of a player or a model, or conversations from a file. They use the code of
training: prompts and completions become samples, and the learner takes optimiser steps on them with
the loss ``nll``. The result is a model folder, for ``--model`` and ``ragen eval``, whose card says
what the model was shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.algorithms.batch import Batch, minibatches, num_minibatches
from ragen.bases.base import learn
from ragen.cluster.process_engine import with_processes
from ragen.cluster.process_learner import learner_in
from ragen.config.config import Config
from ragen.config.sections import LossConfig
from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.seeding import derive
from ragen.engines.factory import load_model, prepare_model
from ragen.finetuning.examples import Keep, find_player, played_examples, transcript_examples
from ragen.finetuning.transcripts import is_file, lost_blanks, read_transcripts
from ragen.learning.learner import Learner
from ragen.models.loading import save_model
from ragen.models.names import resolve_model
from ragen.networks.machine import use_threads
from ragen.rollout.setup import make_chat
from ragen.settings.model import advice
from ragen.storage.checkpoint import new_folder

LR_FACTOR = 10.0
"""The default learning rate divided by ``update.lr``. Gradients of examples are far less noisy than
gradients of returns. Llama 2 (arXiv:2307.09288) uses 2e-5 for examples and 1e-6 for PPO; the
embedded models use 3e-3 in preparation and 2.5e-4 to 1e-3 in the recipes."""

KEYS = (
    "seed",
    "threads",
    "engine.processes",
    "env.",
    "prompt.",
    "lora.",
    "rollout.max_tokens",
    "model.path",
    "model.dtype",
    "model.gradient_checkpointing",
    "model.train_vision",
    "model.max_length",
    "update.minibatch_episodes",
    "update.microbatch_tokens",
    "update.lr_end",
    "update.warmup_steps",
    "update.beta2",
)
"""How the keys begin that `sft` reads, besides `update.lr` (`LR_FACTOR`)."""


@dataclass(frozen=True, slots=True)
class SftResult:
    """A fine-tuned model and its counts; losses are in nats per token on `held_out` examples."""

    model: Path
    examples: int
    unsolved: int
    too_long: int
    held_out: int
    steps: int
    lr: float
    nll_before: float
    nll_after: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"nll {self.nll_before:.4f} → {self.nll_after:.4f} on {self.held_out} held-out "
            f"examples, after {self.steps} steps on {self.examples}"
        )


def sft(
    config: Config,
    out: Path,
    player: str = "solver",
    *,
    keep: Keep | None = None,
    episodes: int = 1024,
    epochs: int = 3,
    lr: float | None = None,
    watch: Callable[[str], None] = lambda line: None,
) -> SftResult:
    """Fine-tune a model on examples and save it in Hugging Face's layout, or its adapter in PEFT's.

    Only the keys in `KEYS` are read. `out` is a folder that does not exist yet. `player` is
    ``random`` (with thoughts that lean to no action), ``wanderer`` (random play with thoughts that
    describe the map), ``solver`` (whose thought is its plan), ``teacher`` (optimal play with the
    thoughts of the embedded models), a run or a model with the same tokenizer, which plays at
    temperature 1, or a file of conversations (`ragen.finetuning.transcripts`). Except with a file,
    it plays `episodes` on levels that neither training nor evaluation uses, and the examples are
    those that `keep` names (`played_examples`). `lr` is the peak learning rate, by default
    `LR_FACTOR` times ``update.lr``. `watch` receives lines of progress. On one machine, with one
    thread count, the same call gives the same weights.

    Raises:
        RagenError: `out` exists, the learning rate is above 1, there is no such player, there are
            too few examples, the model cannot be loaded or saved, or the loss is not finite.
    """
    began, seed = time.monotonic(), config.seed
    if out.exists():
        raise RagenError(f"{out} exists already; name a folder that does not")
    lr = LR_FACTOR * config.update.lr if lr is None else lr
    if not 0 < lr <= 1:
        raise RagenError(f"lr = {lr:g}: expected a number > 0 and ≤ 1; set --lr")
    transcripts = read_transcripts(Path(player)) if is_file(player) else None
    config = with_processes(config)
    use_threads(config.threads, config.engine.processes)
    path = resolve_model(config.model.path, config.env.name)
    model, tokenizer = _load(config, path)
    chat = make_chat(config, tokenizer)
    advised = advice(config.prompt.style, config.model.path)
    lost = lost_blanks(transcripts or (), chat)
    for warning in filter(None, (advised, chat.warning, lost)):
        watch(warning)

    if transcripts is None:
        policy, setup = find_player(config, chat, player)
        examples = played_examples(policy, setup, chat, player, episodes, keep, seed)
    else:
        examples = transcript_examples(transcripts, chat, config.prompt)
    examples = examples.fitting(config.rollout.max_tokens, config.model.max_length)
    training, held_out = examples.split(derive(seed, "sft", "held out"))
    batch, test = examples.batch(training), examples.batch(held_out)

    update = config.update.model_copy(update={"lr": lr})
    size = update.minibatch_episodes
    num_steps = epochs * num_minibatches(len(training), size)
    settings = {"update": update, "loss": LossConfig(name="nll"), "steps": num_steps}
    load = partial(_load_model, config, path)
    watch(f"{examples}, {len(held_out)} of them held out; {num_steps} steps at lr {lr:g}")
    with new_folder(out) as folder:
        with learner_in(config.engine.processes, model, load, **settings) as learner:
            before = mean_nll(learner, test)
            learn(learner, epoch_minibatches(batch, size, epochs, seed), num_steps, watch)
            try:
                after = mean_nll(learner, test)
            except NotFiniteError as failure:
                raise RagenError(
                    f"{failure.numbers} are not finite after {num_steps} steps: set a lower --lr"
                ) from failure
        save_model(model, tokenizer, folder)
        about = (
            f"# Fine-tuned from {Path(config.model.path).name}\n\n"
            f"RAGEN {version('ragen-rl')} trained it on {len(training)} examples: {examples}, "
            f"{len(held_out)} of them held out. {examples.shows}\n"
        )
        (folder / "README.md").write_text(about, encoding="utf-8")
    return SftResult(
        model=out,
        examples=len(training),
        unsolved=examples.unsolved,
        too_long=examples.too_long,
        held_out=len(held_out),
        steps=num_steps,
        lr=lr,
        nll_before=before,
        nll_after=after,
        seconds=time.monotonic() - began,
    )


def _load(config: Config, path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that is trained, which is the same in all processes, and its tokenizer."""
    model, tokenizer = load_model(config.model, path)
    vision = config.model.train_vision
    prepared = prepare_model(model, path, config.lora, config.seed, train_vision=vision)
    return prepared, tokenizer


def _load_model(config: Config, path: str) -> PreTrainedModel:
    return _load(config, path)[0]


def epoch_minibatches(
    batch: Batch, minibatch_episodes: int, epochs: int, seed: int
) -> Iterator[Batch]:
    """The minibatches of all epochs, one epoch in memory at a time."""
    for epoch in range(epochs):
        yield from minibatches(batch, minibatch_episodes, 1, derive(seed, "sft", "epoch", epoch))


def mean_nll(learner: Learner, batch: Batch) -> float:
    """Mean negative log-likelihood of the trained tokens, in nats per token."""
    logprobs_BT, _ = learner.logprobs(batch)
    return -float(logprobs_BT[batch.mask_BT].mean())


def refuse_unread(overrides: Mapping[str, Any]) -> None:
    """Refuse keys without effect."""
    for key in overrides:
        if key == "update.lr":
            raise RagenError("update.lr is the rate of reinforcement learning; set --lr")
        if not key.startswith(KEYS):
            raise RagenError(f"{key} has no effect on supervised fine-tuning; leave it out")
