"""Supervised fine-tuning: a model learns from examples before reinforcement learning.

The examples are episodes of the environment's optimal player, or conversations from a file. They
take the path of training: prompts and completions become samples, and the learner takes its steps
on them with the loss ``nll``. The result is a model folder, for ``--model`` and ``ragen eval``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragen.algorithms.batch import Batch, collate, minibatches
from ragen.algorithms.samples import Exchange, join
from ragen.config.config import Config
from ragen.config.sections import LossConfig
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, merge
from ragen.core.seeding import derive, sft_level
from ragen.core.stopping import run_async
from ragen.engines.learner import Learner
from ragen.engines.local import chat_of, loaded, prepared, save_trained
from ragen.engines.threads import use_threads
from ragen.evaluation.outcomes import outcome_of, refuse_unplayable
from ragen.finetuning.demonstrations import Planner
from ragen.finetuning.transcripts import Transcript, read_transcripts, recite
from ragen.models.names import resolve_model
from ragen.rollout.chat import Chat
from ragen.rollout.groups import run_groups
from ragen.rollout.players import SolverPlayer
from ragen.rollout.prompt import prefill
from ragen.rollout.setup import make_setup
from ragen.storage.checkpoint import new_folder

EPISODES, EPOCHS = 1024, 3
"""Solver episodes, and passes over the examples, where nobody says otherwise."""

HELD_OUT = 0.1
"""Share of the examples that are not learnt, and on which what was learnt is measured."""

LR_FACTOR = 10.0
"""The learning rate over ``update.lr``: an example's gradient is far less noisy than a return's.
Llama 2 (arXiv:2307.09288) takes 2e-5 for examples and 1e-6 for PPO; of the embedded models the
preparation takes 3e-3 and the recipes 4e-4."""

LINES = 10
"""Lines of progress in all."""

READ = (
    *("seed", "threads", "env.", "prompt.", "lora.", "rollout.max_tokens", "model.path"),
    *("model.dtype", "model.gradient_checkpointing"),
    *("model.max_length", "update.minibatch_episodes", "update.microbatch_tokens"),
    *("update.lr_end", "update.warmup_steps", "update.beta2"),
)
"""The keys, or sections of them, that `sft` reads; `update.lr` comes in through `LR_FACTOR`."""


@dataclass(frozen=True, slots=True)
class Examples:
    """What there is to learn, each example an episode's prompts and completions.

    `unsolved` and `too_long` were left out: the optimal player may fail too, and what a rollout has
    no room for could never be said.
    """

    source: str
    found: list[list[Exchange]]
    unsolved: int
    too_long: int

    def __str__(self) -> str:
        """One line."""
        return (
            f"{len(self.found)} {self.source} (left out: {self.unsolved} unsolved, "
            f"{self.too_long} too long)"
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """A fine-tuned model: its folder, what it learnt from, and what that did.

    `nll_before` and `nll_after` are nats a token on the `held_out` examples.
    """

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
        """One line."""
        return (
            f"nll {self.nll_before:.4f} → {self.nll_after:.4f} on {self.held_out} held-out "
            f"examples, after {self.steps} steps on {self.examples}"
        )

    def record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self) | {"model": str(self.model)}


def sft(
    config: Config,
    out: Path,
    data: Path | None = None,
    *,
    episodes: int = EPISODES,
    epochs: int = EPOCHS,
    lr: float | None = None,
    watch: Callable[[str], None] | None = None,
) -> Tuned:
    """Fine-tune a model on examples and save it in Hugging Face's layout, or its adapter in PEFT's.

    Args:
        config: Environment, prompts, budgets and model; of ``update`` what `READ` names.
        out: A folder that does not exist yet.
        data: Conversations (`ragen.finetuning.transcripts`); without it the environment's best
        player is asked.
        episodes: How many episodes it plays, on levels that neither training nor evaluation shows.
        epochs: Passes over the examples.
        lr: The learning rate at its highest; `LR_FACTOR` times ``update.lr`` if not given.
        watch: Told a line now and then.

    Returns:
        The folder, and the loss on held-out examples before and after. On one machine and thread
        count the same call gives the same weights.

    Raises:
        RagenError: `out` exists, a number is out of its range, there is nothing to learn from, the
            model cannot be loaded or saved, or the loss is not finite.
    """
    began = time.monotonic()
    tell = watch or (lambda line: None)
    lr = LR_FACTOR * config.update.lr if lr is None else lr
    _refuse(config, out, episodes, epochs, lr)
    transcripts = None if data is None else read_transcripts(data)
    use_threads(config.threads)
    path = resolve_model(config.model.path, config.env.name)
    model, tokenizer = loaded(config, path)
    model = prepared(config, path, model, critic=False)
    chat = chat_of(config, tokenizer)
    if chat.warning:
        tell(chat.warning)
    if transcripts is None:
        examples = played(config, chat, episodes)
    else:
        examples = told(config, chat, transcripts)
    learnt, held_out = split(examples.found, derive(config.seed, "sft", "held out"))
    whole, unseen = rows(learnt), rows(held_out)
    update = config.update.model_copy(update={"lr": lr})
    num_steps = epochs * max(1, round(len(learnt) / update.minibatch_episodes))
    learner = Learner(model, update, LossConfig(name="nll"), steps=num_steps)
    tell(f"{examples}, {len(held_out)} of them held out; {num_steps} steps at lr {lr:g}")
    with new_folder(out) as folder:
        before = mean_nll(learner, unseen)
        seen: list[Metrics] = []
        for step, part in enumerate(planned(whole, update.minibatch_episodes, epochs, config.seed)):
            seen.append(learner.update(part, step))
            if (step + 1) * LINES // num_steps > step * LINES // num_steps:
                tell(f"step {step + 1}/{num_steps}  nll {merge(seen)['loss/nll'].value:.4f}")
                seen.clear()
        after = mean_nll(learner, unseen)
        if not math.isfinite(after):
            raise RagenError(f"the loss is {after} after {num_steps} steps: set a lower --lr")
        save_trained(model, tokenizer, folder)
    return Tuned(
        model=out,
        examples=len(learnt),
        unsolved=examples.unsolved,
        too_long=examples.too_long,
        held_out=len(held_out),
        steps=num_steps,
        lr=lr,
        nll_before=before,
        nll_after=after,
        seconds=time.monotonic() - began,
    )


def _refuse(config: Config, out: Path, episodes: int, epochs: int, lr: float) -> None:
    if out.exists():
        raise RagenError(f"{out} exists already; name a folder that does not")
    for name, count, least in (("episodes", episodes, 2), ("epochs", epochs, 1)):
        if count < least:
            raise RagenError(f"{name} = {count}: expected a whole number ≥ {least}")
    if not 0 < lr < math.inf:
        raise RagenError(f"lr = {lr}: expected a number > 0")


def refuse_unread(overrides: Mapping[str, Any]) -> None:
    """Refuse keys that would change nothing.

    Args:
        overrides: Values by their full keys.

    Raises:
        RagenError: `sft` does not read one of them.

    Example:
        >>> refuse_unread({"seed": 1, "env.max_turns": 3})
        >>> refuse_unread({"update.lr": 1e-4})
        Traceback (most recent call last):
        ragen.core.errors.RagenError: update.lr is the rate of reinforcement learning; set --lr
    """
    for key in overrides:
        if key == "update.lr":
            raise RagenError("update.lr is the rate of reinforcement learning; set --lr")
        if not key.startswith(READ):
            raise RagenError(f"{key} has no effect on supervised fine-tuning; leave it out")


def played(config: Config, chat: Chat, episodes: int) -> Examples:
    """Solved episodes of the environment's optimal player, who says its plan.

    Raises:
        RagenError: The environment has no solver, breaks in every episode, or too few are left.
    """
    setup = make_setup(config, chat)
    player = SolverPlayer("give conversations to learn from with --data FILE.jsonl")
    policy = Planner(
        lambda _: player, setup.think, setup.prefill, lambda text: (*chat.encode(text), chat.end)
    )
    levels = [sft_level(index) for index in range(episodes)]
    with closing(setup):
        groups = run_async(run_groups(policy, setup, levels, 1, (config.seed, "sft")))
    every = [group.episodes[0] for group in groups]
    refuse_unplayable([outcome_of(episode) for episode in every])
    solved = [
        [(turn.prompt, turn.completion) for turn in episode.turns]
        for episode in every
        if episode.success
    ]
    return _with_room("solver episodes", solved, len(every) - len(solved), config)


def told(config: Config, chat: Chat, transcripts: Sequence[Transcript]) -> Examples:
    """Conversations from a file, as the model's chat renders them.

    Raises:
        RagenError: A reply is nothing that the model could say, or too few are left.
    """
    most, prompt = config.rollout.max_tokens, config.prompt
    given = prefill(prompt.think) if prompt.prefill else ""
    drops = prompt.think and prompt.history_thoughts == "drop"
    recited = [recite(each, chat, given, most, drops) for each in transcripts]
    return _with_room("conversations", recited, 0, config)


def _with_room(source: str, found: list[list[Exchange]], unsolved: int, config: Config) -> Examples:
    """The examples that a rollout has room for."""
    most, longest = config.rollout.max_tokens, config.model.max_length

    def fits(exchange: Exchange) -> bool:
        asked, said = (len(part.token_ids or ()) for part in exchange)
        return said <= most and asked + said <= longest

    kept = [example for example in found if all(fits(exchange) for exchange in example)]
    examples = Examples(source, kept, unsolved, len(found) - len(kept))
    if len(kept) < 2:
        remedy = "give more"
        if examples.unsolved > examples.too_long:
            remedy = "raise env.max_turns or env.max_actions, or play more"
        elif examples.too_long:
            remedy = "raise rollout.max_tokens (of a reply) or model.max_length (of all)"
        raise RagenError(f"{examples}; two are needed, one of them to be held out: {remedy}")
    return examples


def split(
    found: Sequence[list[Exchange]], seed: int
) -> tuple[list[list[Exchange]], list[list[Exchange]]]:
    """The examples to learn from, and the share that is held out; at least one of each.

    Example:
        >>> learnt, held_out = split([[]] * 50, seed=0)
        >>> len(learnt), len(held_out)
        (45, 5)
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(found)).tolist()
    count = max(1, round(HELD_OUT * len(found)))
    return [found[i] for i in sorted(order[count:])], [found[i] for i in sorted(order[:count])]


def rows(found: Sequence[list[Exchange]]) -> Batch:
    """Examples as one batch, each an episode and a group of its own."""
    return collate([sample for i, each in enumerate(found) for sample in join(each, i, i)])


def planned(whole: Batch, minibatch_episodes: int, epochs: int, seed: int) -> Iterator[Batch]:
    """The minibatches of all passes, one pass in memory at a time."""
    for epoch in range(epochs):
        yield from minibatches(whole, minibatch_episodes, 1, derive(seed, "sft", "epoch", epoch))


def mean_nll(learner: Learner, batch: Batch) -> float:
    """Mean negative log-likelihood of what is to be learnt, in nats a token."""
    logprobs_BT, _ = learner.logprobs(batch)
    return -float(logprobs_BT[batch.mask_BT].mean())
