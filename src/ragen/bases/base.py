"""Prepare the embedded models: supervised learning on demonstrations, with the code of training.

Teachers play the environments through the rollout, their episodes become samples, and the learner
takes its steps on them with the loss ``nll``, stage by stage (`curriculum.FAMILIES`). The same
machine and build give the same weights, since stages count steps, not seconds.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ragen.algorithms.batch import Batch, collate
from ragen.algorithms.samples import to_samples
from ragen.bases.curriculum import FAMILIES, PARTS, WARMUP_STEPS, Lesson, Stage
from ragen.bases.demonstrations import Demonstrator, mask_untrained, unfailing
from ragen.bases.seeing import picture_side, with_sight
from ragen.bases.tokenizer import PART_WORDS, build, words
from ragen.chat.chat import Chat
from ragen.cluster.process_learner import learner_in
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, merge
from ragen.core.seeding import derive
from ragen.core.stopping import run_async
from ragen.core.types import Sample
from ragen.learning.learner import Learner
from ragen.models.experts import LOAD_WEIGHT, ChainConfig, ChainForCausalLM, ChainOfExperts
from ragen.models.loading import save_model
from ragen.models.names import PROMPT_STYLE
from ragen.networks.machine import use_threads
from ragen.networks.pictures import reader_of
from ragen.rollout.groups import run_groups
from ragen.storage.checkpoint import new_folder

LAYERS = 3
"""Layers of every model but that of Bandit, where two are enough."""
INNER = 256
"""Width between the two layers of a feed-forward block; of a token's experts together."""
CHOSEN = ChainConfig.num_experts_per_tok
"""The number of experts that a token passes, where a block has experts."""
LINES = 10


def prepare(
    family: str,
    out: Path,
    seed: int = 0,
    steps: int | None = None,
    watch: Callable[[str], None] = lambda line: None,
    processes: int = 1,
    experts: int = 0,
    iterations: int = 1,
) -> Path:
    """Prepare the embedded model of a family and save it in Hugging Face's layout.

    `out` is a folder that does not exist yet. `seed` decides weights and demonstrations. `steps` is
    the maximum per stage, for a trial. `watch` receives lines of progress. Each of several
    `processes` trains its share of every step. With `experts`, each feed-forward block is a mixture
    of so many, passed in so many `iterations` (`ragen.models.experts`).
    """
    if family not in FAMILIES:
        raise RagenError(f"unknown family {family!r}; choose one of {', '.join(FAMILIES)}")
    use_threads(1)  # the same weights however many cores are free
    stages, layers = FAMILIES[family], 2 if family == "bandit" else LAYERS
    tokenizer = tokenizer_of(family)
    model = new_model(tokenizer, layers, seed, experts=experts, iterations=iterations)
    if side := picture_side(stages[0].lessons[0].setup.make):
        if experts:
            raise RagenError("--experts: a base that reads pictures has none; leave it out")
        model = with_sight(model, tokenizer, side, seed)
    if family == PARTS:  # its tokenizer is not the embedded models'
        setattr(model.config, PROMPT_STYLE, "compact")
    player = LessonPlayer(Chat(tokenizer, pictures=reader_of(tokenizer)), seed)
    with new_folder(out) as whole:
        for number, stage in enumerate(stages):
            teach(model, player, stage, number, steps, watch, processes)
        save(model, tokenizer, whole)
    return out


def tokenizer_of(family: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a family's model."""
    return build([*words(), *PART_WORDS] if family == PARTS else None)


def new_model(
    tokenizer: PreTrainedTokenizerBase,
    layers: int,
    seed: int,
    longest: int = 2048,
    theta: float = 300.0,
    experts: int = 0,
    iterations: int = 1,
) -> PreTrainedModel:
    """A model with random weights for this tokenizer and sequences of up to `longest` tokens.

    Models with one key-value head do not learn to look up. With `experts`, a token passes as many
    parameters, up to the routers', as without.

    Raises:
        RagenError: The experts cannot be passed in so many iterations.
    """
    if experts and (CHOSEN % iterations or experts <= CHOSEN // iterations):
        raise RagenError(
            f"--experts {experts} --iterations {iterations}: a token passes {CHOSEN} experts in "
            f"all, so iterations are 1, 2 or {CHOSEN}, and experts more than {CHOSEN} / iterations"
        )
    torch.manual_seed(seed)
    chain: dict[str, Any] = {"iterations": iterations, "num_experts": experts} if experts else {}
    config = (ChainConfig if experts else Qwen2Config)(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=INNER // CHOSEN * experts if experts else INNER,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        **chain,
    )
    model: PreTrainedModel
    model = (ChainForCausalLM if experts else Qwen2ForCausalLM)(config)  # type: ignore[no-untyped-call]
    for block in model.modules():
        if isinstance(block, ChainOfExperts):
            block.load_weight = LOAD_WEIGHT
    model.train(False)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    return model


class Demonstrations(Protocol):
    """What a stage shows."""

    def samples(self, stage: Stage, number: int, step: int) -> list[Sample]:
        """One step's demonstrations; the mask is true only on tokens that are trained."""
        ...


def teach(
    model: PreTrainedModel,
    player: Demonstrations,
    stage: Stage,
    number: int,
    steps: int | None,
    watch: Callable[[str], None],
    processes: int = 1,
) -> None:
    """Take the training steps of a stage, at most `steps`; it has this `number` in its family."""
    num_steps = min(stage.steps, steps or stage.steps)
    update = UpdateConfig(lr=stage.lr, lr_end=stage.lr_end, warmup_steps=WARMUP_STEPS, beta2=0.99)
    settings = {"update": update, "loss": LossConfig(name="nll"), "steps": num_steps}
    settings |= {"muon_lr": stage.muon_lr, "weight_decay": 0.0}
    batches = (
        collate(player.samples(stage, number, step), stage.context_weight)
        for step in range(num_steps)
    )
    with learner_in(processes, model, partial(copy.copy, model), **settings) as learner:
        learn(learner, batches, num_steps, lambda line: watch(f"{stage.name}: {line}"))


def learn(
    learner: Learner, batches: Iterable[Batch], num_steps: int, watch: Callable[[str], None]
) -> None:
    """Take an optimiser step on each of the batches; report at most `LINES` times."""
    recent: list[Metrics] = []
    for step, batch in enumerate(batches, 1):
        recent.append(learner.update(batch, step - 1))
        if step * LINES // num_steps > (step - 1) * LINES // num_steps:
            metrics = merge(recent)
            skipped = metrics["update/skipped_policy"].value
            more = f"  {skipped:.0f} updates skipped: not finite" if skipped else ""
            watch(f"step {step}/{num_steps}  nll {metrics['loss/nll'].value:.4f}{more}")
            recent.clear()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Save in half precision; the model itself keeps its precision."""
    save_model(copy.deepcopy(model).half(), tokenizer, out)  # type: ignore[no-untyped-call]
    words = out / "tokenizer.json"  # one line: it ships with each model
    vocabulary = json.loads(words.read_text(encoding="utf-8"))
    words.write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")


class LessonPlayer:
    """Draws the lessons of each step and plays them with their teachers."""

    def __init__(self, chat: Chat, seed: int, max_length: int = 1024) -> None:
        self._chat, self._seed, self._max_length = chat, seed, max_length
        self._levels: dict[tuple[int, int], Iterator[int]] = {}

    def samples(self, stage: Stage, number: int, step: int) -> list[Sample]:
        """One step's demonstrations; the mask is true only on tokens that are trained."""
        generator = np.random.Generator(np.random.PCG64(derive(self._seed, "base", number, step)))
        shares = np.array([lesson.share for lesson in stage.lessons])
        drawn = Counter(
            (int(index), int(generator.choice(stage.lessons[index].turns)))
            for index in generator.choice(len(shares), stage.episodes, p=shares / shares.sum())
        )
        samples: list[Sample] = []
        for (index, turns), count in sorted(drawn.items()):
            lesson = stage.lessons[index]
            levels = self._levels.setdefault((number, index), lesson.levels(number, index))
            path = (self._seed, "base", number, step, index, turns)
            samples += self._play(lesson, turns, list(itertools.islice(levels, count)), path)
        if not samples:
            env = stage.lessons[0].setup.env
            raise RagenError(
                f"the environment {env!r} shows too much: no first prompt leaves room for a reply "
                f"within the {self._max_length} tokens that this model reads; let it show less, or "
                "train another model"
            )
        return samples

    def _play(
        self, lesson: Lesson, turns: int, levels: list[int], path: tuple[int | str, ...]
    ) -> list[Sample]:
        chat, max_length = self._chat, self._max_length
        setup = replace(lesson.setup, turns=turns, chat=chat, max_length=max_length)
        demonstrator = Demonstrator(lesson.teacher, self._chat, lesson.sum_up)
        groups = run_async(run_groups(demonstrator, setup, levels, 1, path))
        unfailing(groups)
        samples, episodes = to_samples(groups)
        prompts = [[turn.prompt for turn in episode.turns] for episode in episodes]
        return mask_untrained(samples, prompts, demonstrator.trained)
