"""Supervised fine-tuning: a model learns from examples before reinforcement learning.

The examples are episodes of a player or a model, or conversations from a file. They use the code of
training: prompts and completions become samples, and the learner takes optimiser steps on them with
the loss ``nll``. The result is a model folder, for ``--model`` and ``ragen eval``, whose card says
what the model was shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ragen.algorithms.batch import Batch, collate, minibatches
from ragen.algorithms.samples import Exchange, join
from ragen.bases.curriculum import TEACHERS
from ragen.bases.demonstrations import (
    Demonstrator,
    mask_untrained,
    neutral_thought,
    plan_in_words,
)
from ragen.chat.chat import Chat
from ragen.chat.prompt import prefill
from ragen.config.config import Config
from ragen.config.sections import LossConfig
from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.metrics import Metrics, merge
from ragen.core.seeding import SFT_LEVELS, derive
from ragen.core.stopping import run_async
from ragen.core.types import Group
from ragen.engines.factory import load_model, prepare_model
from ragen.evaluation.outcomes import outcome_of, refuse_unplayable
from ragen.evaluation.targets import load_target, refuse_absent
from ragen.finetuning.descriptions import wanderer
from ragen.finetuning.transcripts import (
    OWN_PLAYERS,
    Transcript,
    is_file,
    read_transcripts,
    to_exchanges,
)
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.loading import save_model
from ragen.models.names import resolve_model
from ragen.networks.machine import use_threads
from ragen.rollout.groups import run_groups
from ragen.rollout.players import Player, PlayerPolicy, random_player, solver
from ragen.rollout.policies import Closable, Policy
from ragen.rollout.setup import Setup, make_chat, make_setup
from ragen.settings.model import advice
from ragen.storage.checkpoint import new_folder

HELD_OUT = 0.1
"""Share of the examples that are held out to measure the loss."""

LR_FACTOR = 10.0
"""The default learning rate divided by ``update.lr``. Gradients of examples are far less noisy than
gradients of returns. Llama 2 (arXiv:2307.09288) uses 2e-5 for examples and 1e-6 for PPO; the
embedded models use 3e-3 in preparation and 2.5e-4 to 1e-3 in the recipes."""

LINES = 10

KEYS = (
    *("seed", "threads", "env.", "prompt.", "lora.", "rollout.max_tokens", "model.path"),
    *("model.dtype", "model.gradient_checkpointing"),
    *("model.max_length", "update.minibatch_episodes", "update.microbatch_tokens"),
    *("update.lr_end", "update.warmup_steps", "update.beta2"),
)
"""How the keys begin that `sft` reads, besides `update.lr` (`LR_FACTOR`)."""

Keep = Literal["solved", "all"]

UNSKILLED = {
    "random": "lean to no action",
    "wanderer": "describe the map and then name a move, a word that is not trained",
}
"""Random players, and what their thoughts do."""

Example = list[Exchange]
"""The prompts and completions of an episode or a conversation."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Training examples.

    `unsolved` counts the episodes that are not kept: failed ones and, where only solved ones are
    kept, those without success. `too_long` counts the examples that do not fit into a rollout. Both
    are left out. `shows` says in a sentence what there is to learn from the examples. `trained` is
    that of a `Demonstrator`; without one, all tokens of the replies are trained.
    """

    source: str
    shows: str
    kept: list[Example]
    unsolved: int
    too_long: int
    trained: Mapping[int, Sequence[bool]] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{len(self.kept)} {self.source} (left out: {self.unsolved} unsolved, "
            f"{self.too_long} too long)"
        )


@dataclass(frozen=True, slots=True)
class SftResult:
    """A fine-tuned model: its folder, counts of examples, and losses.

    `nll_before` and `nll_after` are in nats per token, on the `held_out` examples.
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
    those that `keep` names: by default all of random play (`UNSKILLED`), and the solved ones of
    others. `lr` is the peak learning rate, by default `LR_FACTOR` times ``update.lr``. `watch`
    receives lines of progress. On one machine, with one thread count, the same call gives the same
    weights.

    Raises:
        RagenError: `out` exists, a number is out of its range, there is no such player, there are
            too few examples, the model cannot be loaded or saved, or the loss is not finite.
    """
    began = time.monotonic()
    lr = LR_FACTOR * config.update.lr if lr is None else lr
    _refuse(config, out, episodes, epochs, lr)
    transcripts = read_transcripts(Path(player)) if is_file(player) else None
    use_threads(config.threads)
    if warning := advice(config.prompt.style, config.model.path):
        watch(warning)
    path = resolve_model(config.model.path, config.env.name)
    model, tokenizer = load_model(config.model, path)
    model = prepare_model(model, path, config.lora, config.seed)
    chat = make_chat(config, tokenizer)
    if chat.warning:
        watch(chat.warning)
    if transcripts is None:
        examples = played_examples(config, chat, player, episodes, keep)
    else:
        examples = transcript_examples(config, chat, transcripts)
    training, held_out = split_examples(examples.kept, derive(config.seed, "sft", "held out"))
    train_batch = collate_examples(training, examples.trained)
    test_batch = collate_examples(held_out, examples.trained)
    update = config.update.model_copy(update={"lr": lr})
    size = update.minibatch_episodes
    num_steps = epochs * max(1, round(len(training) / size))
    learner = Learner(Models(model), update, LossConfig(name="nll"), steps=num_steps)
    watch(f"{examples}, {len(held_out)} of them held out; {num_steps} steps at lr {lr:g}")
    parts = epoch_minibatches(train_batch, size, epochs, config.seed)
    with new_folder(out) as folder:
        before = mean_nll(learner, test_batch)
        learn(learner, parts, num_steps, watch)
        try:
            after = mean_nll(learner, test_batch)
        except NotFiniteError as failure:
            raise RagenError(
                f"{failure.numbers} are not finite after {num_steps} steps: set a lower --lr"
            ) from failure
        save_model(model, tokenizer, folder)
        about = card(config, examples, len(training))
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


def learn(
    learner: Learner, parts: Iterable[Batch], num_steps: int, watch: Callable[[str], None]
) -> None:
    """Take an optimiser step on each of the minibatches; report at most `LINES` times."""
    recent: list[Metrics] = []
    for step, part in enumerate(parts, 1):
        recent.append(learner.update(part, step - 1))
        if step * LINES // num_steps > (step - 1) * LINES // num_steps:
            metrics = merge(recent)
            skipped = metrics["update/skipped_policy"].value
            more = f"  {skipped:.0f} updates skipped: not finite" if skipped else ""
            watch(f"step {step}/{num_steps}  nll {metrics['loss/nll'].value:.4f}{more}")
            recent.clear()


def _refuse(config: Config, out: Path, episodes: int, epochs: int, lr: float) -> None:
    if out.exists():
        raise RagenError(f"{out} exists already; name a folder that does not")
    for name, count, least in (("episodes", episodes, 2), ("epochs", epochs, 1)):
        if count < least:
            raise RagenError(f"{name} = {count}: expected a whole number ≥ {least}")
    if not 0 < lr <= 1:
        raise RagenError(f"lr = {lr:g}: expected a number > 0 and ≤ 1; set --lr")


def refuse_unread(overrides: Mapping[str, Any]) -> None:
    """Refuse keys without effect.

    Example:
        >>> refuse_unread({"seed": 1, "env.max_turns": 3})
        >>> refuse_unread({"update.lr": 1e-4})
        Traceback (most recent call last):
        ragen.core.errors.RagenError: update.lr is the rate of reinforcement learning; set --lr
    """
    for key in overrides:
        if key == "update.lr":
            raise RagenError("update.lr is the rate of reinforcement learning; set --lr")
        if not key.startswith(KEYS):
            raise RagenError(f"{key} has no effect on supervised fine-tuning; leave it out")


def played_examples(
    config: Config, chat: Chat, player: str, episodes: int, keep: Keep | None
) -> Examples:
    """Episodes of a player, a run or a model."""
    env, keep = config.env.name, keep or ("all" if player in UNSKILLED else "solved")
    policy, setup = _player(config, chat, player)
    setup = replace(setup, temperature=1.0, reward_terms={})  # keys that `sft` does not read
    levels = [SFT_LEVELS + index for index in range(episodes)]

    async def play() -> list[Group]:
        try:
            return await run_groups(policy, setup, levels, 1, (config.seed, "sft"))
        finally:
            if isinstance(policy, Closable):  # a sampler's memory is needed for training
                await policy.close()

    with closing(setup):
        groups = run_async(play())
    played = [group.episodes[0] for group in groups]
    refuse_unplayable([outcome_of(episode) for episode in played])
    kept = [each for each in played if (each.success or keep == "all") and not each.failed]
    examples = [[(turn.prompt, turn.completion) for turn in episode.turns] for episode in kept]
    for example in filter(None, examples):  # without a turn, the first prompt left no room
        first, _ = example[0]
        texts = all(chat.decode(reply.token_ids or ()) == reply.text for _, reply in example)
        if not texts or chat.open(first.messages, setup.prefill)[0] != first.token_ids:
            raise RagenError(
                f"the tokens of {player} are not those of {config.model.path}: give its episodes "
                "as conversations, --player FILE.jsonl"
            )
    if keep == "solved":
        shows = f"Only episodes of {player} play in {env} that ended in success were kept."
    elif player in UNSKILLED:
        shows = (
            f"All of them are random play in {env}, with thoughts that {UNSKILLED[player]}. "
            "Successes and failures were kept, so they show the form of a reply and legal actions, "
            "and no skill."
        )
    else:
        shows = f"All episodes of {player} in {env} were kept, successes and failures."
    fitting = _fitting(f"{player} episodes", shows, examples, len(played) - len(kept), config)
    return replace(fitting, trained=policy.trained) if isinstance(policy, Demonstrator) else fitting


def _player(config: Config, chat: Chat, player: str) -> tuple[Policy | PlayerPolicy, Setup]:
    if player not in OWN_PLAYERS:
        refuse_absent(player, words=", ".join((*OWN_PLAYERS, "a FILE.jsonl")))
        return load_target(player, config)
    setup = make_setup(config, chat)
    if player in ("teacher", "wanderer") and setup.prefill.strip() != "<think>":
        raise RagenError(
            f"the reply of a {player} begins after a pre-filled <think>: set prompt.think = true "
            "and prompt.prefill = true, or take --player solver"
        )
    if player == "wanderer":
        return Demonstrator(wanderer, chat), setup
    if player == "teacher":
        if config.env.name not in TEACHERS:
            raise RagenError(
                f"there is no teacher for {config.env.name}, only for {', '.join(TEACHERS)}: "
                "take --player solver"
            )
        if config.env.params.get("boxes", 1) != 1:
            raise RagenError("the teacher of sokoban pushes one box only: take --player solver")
        return Demonstrator(TEACHERS[config.env.name], chat), setup

    def encode(text: str) -> tuple[int, ...]:
        return (*chat.encode_text(text), chat.end)

    remedy = "give conversations to learn from with --player FILE.jsonl"
    best: Player = partial(solver, instead=remedy)
    form = setup.think, setup.prefill, encode
    if player == "random":
        return PlayerPolicy(random_player, *form, neutral_thought, setup.write), setup
    return PlayerPolicy(lambda _: best, *form, plan_in_words, setup.write), setup


def card(config: Config, examples: Examples, count: int) -> str:
    """The README of a fine-tuned model's folder."""
    return (
        f"# Fine-tuned from {Path(config.model.path).name}\n\n"
        f"RAGEN {version('ragen-rl')} trained it on {count} examples: {examples}, "
        f"{len(examples.kept) - count} of them held out. {examples.shows}\n"
    )


def transcript_examples(config: Config, chat: Chat, transcripts: Sequence[Transcript]) -> Examples:
    """Conversations from a file, as the model's chat renders them."""
    most, prompt = config.rollout.max_tokens, config.prompt
    given = prefill(prompt.think) if prompt.prefill else ""
    drops = prompt.think and prompt.history_thoughts == "drop"
    examples = [to_exchanges(each, chat, given, most, drops) for each in transcripts]
    return _fitting("conversations", "They are conversations from a file.", examples, 0, config)


def _fitting(
    source: str, shows: str, examples: list[Example], unsolved: int, config: Config
) -> Examples:
    most, longest = config.rollout.max_tokens, config.model.max_length

    def fits(exchange: Exchange) -> bool:
        prompt, completion = (len(part.token_ids or ()) for part in exchange)
        return completion <= most and prompt + completion <= longest

    kept = [example for example in examples if example and all(map(fits, example))]
    result = Examples(source, shows, kept, unsolved, len(examples) - len(kept))
    if len(kept) >= 2:
        return result
    if unsolved > result.too_long:
        remedy = "raise env.max_turns or env.max_actions, or play more"
    elif result.too_long:
        remedy = "raise rollout.max_tokens (of a reply) or model.max_length (of all)"
    else:
        remedy = "give more"
    raise RagenError(f"{result}; at least two are needed, one of them held out: {remedy}")


def split_examples(examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """The training examples and the held-out share, at least one of each."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(examples)).tolist()
    held_out = set(order[: max(1, round(HELD_OUT * len(examples)))])
    training = [example for i, example in enumerate(examples) if i not in held_out]
    return training, [examples[i] for i in sorted(held_out)]


def collate_examples(
    examples: Sequence[Example], trained: Mapping[int, Sequence[bool]] | None = None
) -> Batch:
    """One batch of the examples; each is one episode and one group."""
    samples = [sample for i, each in enumerate(examples) for sample in join(each, i, i)]
    if trained:
        prompts = [[prompt for prompt, _ in example] for example in examples]
        samples = mask_untrained(samples, prompts, trained)
    return collate(samples)


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
