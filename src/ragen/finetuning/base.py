"""Preparing the embedded models: supervised learning on demonstrations, by the path of training.

Demonstrators play the environments through the rollout; their episodes become samples; the learner
takes
its steps on them with the loss ``nll``. What is learnt, in which order, stands in `FAMILIES`. The
preparation counts steps, not seconds, so it gives the same weights again on the same machine and
build.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ragen.algorithms.batch import collate
from ragen.algorithms.samples import to_samples
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.errors import RagenError
from ragen.core.seeding import base_level, derive, eval_level
from ragen.core.types import Episode, Sample
from ragen.engines.learner import Learner
from ragen.engines.threads import use_threads
from ragen.envs.contract import Env
from ragen.envs.registry import env_factory
from ragen.finetuning.demonstrations import (
    Demonstrator,
    Lookup,
    Writer,
    bandit_knowledge,
    look_up,
)
from ragen.finetuning.demonstrations_lake import slippery_lake, still_lake, stroll, winding
from ragen.finetuning.demonstrations_sokoban import sokoban_plan, takes
from ragen.finetuning.tokenizer import END, build
from ragen.models.loading import save_model
from ragen.rollout.chat import Chat
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup

HELD_OUT = 1024
"""Evaluation levels whose boards no demonstration shows."""
LEVELS_PER_LESSON = 1_000_000
WARMUP = 20


def anything(env: Env) -> bool:
    """Every level."""
    return True


@dataclass(frozen=True, slots=True)
class Lesson:
    """Episodes of one kind: the environment, its player, the levels and the number of turns."""

    write: Writer
    make: Callable[[], Env]
    accept: Callable[[Env], bool] = anything
    turns: tuple[int, ...] = (5,)
    actions: int = 10
    share: float = 1.0
    held_out: bool = True

    @property
    def name(self) -> str:
        """The environment's."""
        return self.make().name


@dataclass(frozen=True, slots=True)
class Stage:
    """Some steps on a mixture of lessons; learning rates fall in a line to `lr_end` of them."""

    name: str
    steps: int
    lessons: tuple[Lesson, ...]
    episodes: int = 16
    lr: float = 3e-3
    muon_lr: float = 0.02
    lr_end: float = 1.0
    context_weight: float = 0.0


def config_of(vocabulary: int, layers: int) -> Qwen2Config:
    """The embedded models' architecture. Two key–value heads: with one, none learns to look up."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        tie_word_embeddings=True,
    )


def prepare_family(
    family: str,
    out: Path,
    seed: int = 0,
    steps: int | None = None,
    watch: Callable[[str], None] | None = None,
    stages_out: Path | None = None,
) -> Path:
    """Prepare the embedded model of a family, as the shipped one was.

    Args:
        family: One of `FAMILIES`.
        out: A folder that does not exist yet.
        seed: Of weights and demonstrations.
        steps: Of each stage at most; for a trial.
        watch: Told a line now and then.
        stages_out: As in `prepare`.

    Raises:
        RagenError: No such family, or `out` exists.
    """
    if family not in FAMILIES:
        raise RagenError(f"unknown family {family!r}; there are {', '.join(FAMILIES)}")
    stages = [
        replace(stage, steps=min(stage.steps, steps if steps is not None else stage.steps))
        for stage in FAMILIES[family]
    ]
    return prepare(stages, out, seed, watch, LAYERS[family], stages_out)


def prepare(
    stages: Sequence[Stage],
    out: Path,
    seed: int = 0,
    watch: Callable[[str], None] | None = None,
    layers: int = 3,
    stages_out: Path | None = None,
) -> Path:
    """Prepare a model and save it in Hugging Face's layout.

    Args:
        stages: What it learns.
        out: A folder that does not exist yet.
        seed: Of weights and demonstrations.
        watch: Told a line now and then.
        layers: Of the model.
        stages_out: A new folder that keeps the model as it was after each stage but the last.

    Raises:
        RagenError: `out` or `stages_out` exists.
    """
    for folder in (out, stages_out):
        if folder is not None and folder.exists():
            raise RagenError(f"{folder} exists already; name a folder that does not")
    use_threads(1)  # the same weights however many cores are free
    tokenizer = build()
    torch.manual_seed(seed)
    model: PreTrainedModel = Qwen2ForCausalLM(config_of(len(tokenizer), layers))  # type: ignore[no-untyped-call]
    model.train(False)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    chat = Chat(tokenizer)
    school = School(chat, seed)
    for number, stage in enumerate(stages):
        learner = Learner(
            model,
            update_of(stage),
            LossConfig(name="nll"),
            steps=stage.steps,
            muon_lr=stage.muon_lr,
            weight_decay=0.0,
        )
        for step in range(stage.steps):
            batch = collate(school.samples(stage, number, step), stage.context_weight)
            metrics = learner.update(batch, step)
            if watch and (step + 1) % 50 == 0:
                watch(f"{stage.name} {step + 1}/{stage.steps}  nll {metrics['loss/nll'].value:.4f}")
        if stages_out is not None and stage is not stages[-1]:
            _save(model, tokenizer, stages_out / stage.name.replace(" ", "-").replace(",", ""))
    _save(model, tokenizer, out)
    return out


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Save half the precision; the model itself keeps all of it."""
    save_model(copy.deepcopy(model).half(), tokenizer, out)  # type: ignore[no-untyped-call]
    words = out / "tokenizer.json"  # one line: it ships with each model
    words.write_text(json.dumps(json.loads(words.read_text()), ensure_ascii=False))


class School:
    """Draws the lessons of each step and lets the demonstrators play them."""

    def __init__(self, chat: Chat, seed: int) -> None:
        self._chat, self._seed = chat, seed
        self._levels: dict[tuple[int, int], Iterator[int]] = {}

    def samples(self, stage: Stage, number: int, step: int) -> list[Sample]:
        """One step's demonstrations, with nothing in the mask but what is to be learnt."""
        generator = np.random.Generator(np.random.PCG64(derive(self._seed, "base", number, step)))
        shares = np.array([lesson.share for lesson in stage.lessons])
        drawn = Counter(
            (int(index), int(generator.choice(stage.lessons[index].turns)))
            for index in generator.choice(len(shares), stage.episodes, p=shares / shares.sum())
        )
        found: list[Sample] = []
        for (index, turns), count in sorted(drawn.items()):
            lesson = stage.lessons[index]
            levels = self._levels.setdefault((number, index), suitable(lesson, number, index))
            path = (self._seed, "base", number, step, index, turns)
            found += self._play(lesson, turns, list(itertools.islice(levels, count)), path)
        return found

    def _play(
        self, lesson: Lesson, turns: int, levels: list[int], path: tuple[int | str, ...]
    ) -> list[Sample]:
        setup = Setup(
            lesson.name,
            lesson.make,
            turns=turns,
            actions_per_turn=min(5, lesson.actions),
            actions=lesson.actions,
            chat=self._chat,
        )
        demonstrator = Demonstrator(lesson.write, self._chat.encode, END)
        groups = asyncio.run(run_groups(demonstrator, setup, levels, 1, path))
        errors = [e.error for group in groups for e in group.episodes if e.error is not None]
        assert not errors, errors[0]
        return hide(*to_samples(groups), demonstrator.trained)


def suitable(lesson: Lesson, stage: int, index: int) -> Iterator[int]:
    """Levels that a lesson accepts and that no evaluation shows, each once."""
    env = lesson.make()
    held_out = set()
    for number in range(HELD_OUT if lesson.held_out else 0):
        env.reset(seed=eval_level(number), options={"noise_seed": 0})
        held_out.add(env.state_key())
    for number in itertools.count(LEVELS_PER_LESSON * (100 * stage + index)):
        level = base_level(number)
        env.reset(seed=level, options={"noise_seed": 0})
        if lesson.accept(env) and env.state_key() not in held_out:
            yield level


def hide(
    samples: Sequence[Sample], episodes: Sequence[Episode], trained: Mapping[int, Sequence[bool]]
) -> list[Sample]:
    """Take from the mask what a demonstrator does not want learnt.

    Args:
        samples: Of `episodes`.
        episodes: Demonstrations.
        trained: For each turn, by its prompt's seed, which tokens of the completion stay.
    """
    found = []
    for sample in samples:
        turns = episodes[sample.episode].turns
        flags = [flag for turn in turns for flag in trained[turn.prompt.seed]]
        assert len(flags) == sum(sample.loss_mask), "a demonstration with its whole history"
        kept = iter(flags)
        mask = tuple(sampled and next(kept) for sampled in sample.loss_mask)
        found.append(replace(sample, loss_mask=mask))
    return found


def update_of(stage: Stage) -> UpdateConfig:
    """The learner's settings for a stage."""
    return UpdateConfig(
        lr=stage.lr,
        lr_end=stage.lr_end,
        warmup_steps=WARMUP,
        beta2=0.99,
    )


ARMS = tuple(
    Lesson(
        bandit_knowledge,
        env_factory("bandit", **names),
        turns=(1,),
        actions=1,
        share=share,
        held_out=False,
    )
    for share, names in (
        (0.4, {}),
        (0.4, {"name_set": "pairs"}),
        (0.2, {"name_set": "pairs", "split": "test"}),
    )
)
"""What every name sounds like, those of the test splits too; which sound pays is left to find."""

# FrozenLake: careful play on all levels, from any state (walks that are not learnt lead to some),
# and what walks are like. The mix makes careful play one habit among others.
LOOKUP_LAKE = Lesson(look_up, partial(Lookup, "abcd", "0123", "FrozenLake"), held_out=False)
STILL = env_factory("frozen-lake-still", observation="named")
HOLED = env_factory("frozen-lake-still", observation="named", p_frozen=0.5)
STROLL = Lesson(stroll, HOLED, turns=(1,), share=1.5, held_out=False)
STILL_LAKE = tuple(
    Lesson(write, STILL, accept, turns=(1, 1, 2, 3, 5), share=share)
    for share, write, accept in (
        (0.3, still_lake(careful=1.0), anything),
        (0.3, still_lake(careful=1.0), winding),
        (0.3, still_lake(careful=0.75, walks_trained=False), anything),
        (0.1, still_lake(careful=0.0), anything),
    )
)
STILL_LAKE_MIX = (Lesson(still_lake(careful=0.2), STILL),)

# On slippery ice every state is reached anyway; what is best depends on the turns that are left.
SLIPPERY = env_factory("frozen-lake", observation="named")
SLIPPERY_LAKE = (
    Lesson(slippery_lake(careful=1.0), SLIPPERY, share=0.6),
    Lesson(slippery_lake(careful=0.75, walks_trained=False), SLIPPERY, share=0.3),
    Lesson(slippery_lake(careful=0.0), SLIPPERY, share=0.1),
)
SLIPPERY_MIX = (Lesson(slippery_lake(careful=0.2), SLIPPERY),)

# Sokoban: mostly levels that take more than one turn, or else what is read later in an episode is
# hardly practised; and boards that slips, which are not learnt, have led to.
LOOKUP_SOKOBAN = Lesson(look_up, partial(Lookup, "bcde", "1234", "Sokoban"), held_out=False)
BOX = env_factory("sokoban", observation="named")
SOKOBAN = (
    Lesson(sokoban_plan(1.0), BOX, takes(4), turns=(2, 3, 5), share=0.4),
    Lesson(sokoban_plan(0.7, slips_trained=False), BOX, takes(3), turns=(3, 5), share=0.35),
    Lesson(sokoban_plan(0.75, slips_trained=False), BOX, turns=(1, 2, 3), share=0.25),
)
SOKOBAN_MIX = (Lesson(sokoban_plan(0.25), BOX),)

LAKE_SCHOOL = (
    Stage("look-up", 300, (LOOKUP_LAKE, STROLL)),
    Stage("still ice", 600, STILL_LAKE, context_weight=0.1),
)
"""How both families of lakes begin."""

LAYERS = {"bandit": 2, "frozen-lake-still": 3, "frozen-lake": 3, "sokoban": 3}
"""How deep each embedded model is."""

FAMILIES: dict[str, tuple[Stage, ...]] = {
    "bandit": (
        Stage("names", 80, ARMS, episodes=32, lr_end=0.3),
        Stage("choice", 120, ARMS, episodes=64, lr=6e-4, muon_lr=0.003, lr_end=0.02),
    ),
    "frozen-lake-still": (
        *LAKE_SCHOOL,
        Stage("settling", 400, STILL_LAKE, context_weight=0.1, lr_end=0.02),
        Stage("mix", 120, STILL_LAKE_MIX, context_weight=0.1, lr=6e-4, muon_lr=0.004, lr_end=0.02),
    ),
    "frozen-lake": (
        *LAKE_SCHOOL,
        Stage("slippery ice", 200, SLIPPERY_LAKE, context_weight=0.1, lr_end=0.02),
        Stage("mix", 80, SLIPPERY_MIX, context_weight=0.1, lr=6e-4, muon_lr=0.004, lr_end=0.02),
    ),
    "sokoban": (
        Stage("look-up", 250, (LOOKUP_SOKOBAN,)),
        Stage("skill", 500, SOKOBAN, context_weight=0.1),
        Stage("skill, settling", 700, SOKOBAN, context_weight=0.1, lr_end=0.02),
        Stage("mix", 120, SOKOBAN_MIX, context_weight=0.1, lr=5e-4, muon_lr=0.004, lr_end=0.02),
    ),
}
"""What each embedded model learns, in order."""
