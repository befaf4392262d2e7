"""``ragen base --env W``: a small model from scratch that can read W and reply, and no more.

Its tokenizer holds the words that random play meets in W. Two stages of demonstrations (`screen`)
teach the model to find things on the screen and to reply in the right form. Where actions are free
text, the model begins with heads that copy, and one stage teaches it the form (`copying`). What to
do is left to reinforcement learning.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from ragen.bases.base import LessonPlayer, new_model, save, teach
from ragen.bases.copying import ROPE_THETA, Copier, write_induction, write_words
from ragen.bases.curriculum import Lesson, Stage
from ragen.bases.screen import (
    Reader,
    Screen,
    Survey,
    choice_in,
    random_actions,
    survey,
)
from ragen.bases.tokenizer import build, words_for
from ragen.chat.chat import Chat
from ragen.config.keys import BUDGETS, PARAMS
from ragen.config.reading import flatten
from ragen.config.sections import EnvConfig
from ragen.config.sources import parts_of, without_folder
from ragen.core.errors import RagenError
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.contract import Env
from ragen.envs.registry import build_env, closing_env, env_factory
from ragen.models.names import PROMPT_STYLE
from ragen.networks.machine import use_threads
from ragen.rollout.setup import Setup, knows_no_tools
from ragen.settings.environment import config_of_env
from ragen.settings.saved import typed
from ragen.storage.checkpoint import new_folder

LAYERS = 3
MOST_WORDS, MOST_FREE_WORDS = 1000, 2500
"""Greatest number of words in a vocabulary, for named actions and for free text. The most frequent
words are kept; others are spelled in bytes."""
STEP_TOKENS = 2000
"""Approximate number of tokens in the demonstrations of one step."""
FEWEST, MOST = 4, 32
LONGEST = 2048
"""Greatest number of tokens of a prompt and its reply; a longer episode drops its oldest turns."""


@dataclass(frozen=True, slots=True)
class EnvBase:
    """A finished base: its folder, and the numbers of parameters, demonstrations and seconds."""

    model: Path
    parameters: int
    demonstrations: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:.2f} million parameters, {self.demonstrations:,} "
            f"demonstrations, {self.seconds:.0f} s; the base model is in {self.model}"
        )


def prepare_env(
    env: EnvConfig,
    out: Path,
    seed: int = 0,
    steps: int | None = None,
    watch: Callable[[str], None] = lambda line: None,
    window: int = 0,
) -> EnvBase:
    """Make a base model for an environment and save it in Hugging Face's layout.

    `env` holds the environment and its budgets, `out` is a folder that does not exist yet. `seed`
    decides weights and demonstrations. `steps` is the maximum per stage, for a trial. `watch`
    receives lines of progress. Prompts show the last `window` turns (0 shows all). The model's
    config says that it reads compact prompts.
    """
    began = time.monotonic()
    if out.exists():
        raise RagenError(f"{out} exists already; name a folder that does not")
    use_threads(1)  # the same weights however many cores are free
    make = env_factory(env.name, **env.params)
    try:
        with closing_env(build_env(make, env.name)) as first:
            with boundary("tools"):
                tools = first.tools
            if tools:
                raise knows_no_tools(env.name)
            choose = choice_in(first)
            with boundary("actions"):
                actions = first.actions
    except UserCodeError as failure:
        raise RagenError(
            f"the environment {env.name!r} fails: {failure.reason}; run `ragen check` on it"
        ) from failure
    budgets = env.max_turns, env.actions_per_turn, env.max_actions
    setup = Setup(
        *(env.name, make, *budgets),
        window=window,
        timeout_s=env.timeout_s,
    )
    met = survey(setup, choose, seed)
    teacher: Reader | Copier
    if actions is None:
        words = met.words(MOST_FREE_WORDS)
        teacher, highest = Copier(words, choose), 0
    else:
        words = met.words(MOST_WORDS)
        teacher = Reader(met.screens, choose, actions if choose is random_actions else None)
        highest = teacher.places
    tokenizer = build(words_for(words, min(max(20, *budgets, highest), 999)))
    chat = Chat(tokenizer)
    episodes = _episodes(met, chat)
    if isinstance(teacher, Copier):
        model = new_model(tokenizer, LAYERS, seed, longest=4 * LONGEST, theta=ROPE_THETA)
        write_words(model, tokenizer)
        write_induction(model)
        stages = copying_stages(teacher, make, env, episodes, window)
    else:
        model = new_model(tokenizer, LAYERS, seed, longest=4 * LONGEST)
        stages = stages_of(teacher, partial(Screen, make), env, episodes, window)
    setattr(model.config, PROMPT_STYLE, "compact")
    player = LessonPlayer(chat, seed, LONGEST)
    count = sum(min(stage.steps, steps or stage.steps) * stage.episodes for stage in stages)
    with new_folder(out) as folder:
        for number, stage in enumerate(stages):
            teach(model, player, stage, number, steps, watch)
        save(model, tokenizer, folder)
        made = EnvBase(out, model.num_parameters(), count, time.monotonic() - began)
        text = card(env, made, teacher, met, seed, _changes(env, window))
        (folder / "README.md").write_text(text, encoding="utf-8")
    return made


def _episodes(met: Survey, chat: Chat) -> int:
    """Number of demonstrations whose tokens are about `STEP_TOKENS`, from `FEWEST` to `MOST`."""
    tokens = fmean(len(chat.encode_text(text)) for text in met.texts) * len(met.texts)
    return max(FEWEST, min(MOST, round(STEP_TOKENS / (1 + tokens / met.episodes))))


def _lesson(make: Callable[[], Env], env: EnvConfig, window: int) -> Callable[..., Lesson]:
    """A function that makes a lesson with the environment's budgets from a teacher and a share."""
    return partial(
        Lesson,
        make=make,
        turns=(env.max_turns,),
        actions=env.max_actions,
        actions_per_turn=env.actions_per_turn,
        window=window,
        held_out=False,
        env=env.name,
        timeout_s=env.timeout_s,
    )


def stages_of(
    reader: Reader, make: Callable[[], Screen], env: EnvConfig, episodes: int, window: int
) -> tuple[Stage, ...]:
    """The stages: first mostly look-ups of where things are, then mostly short thoughts."""
    lesson = _lesson(make, env, window)
    find, read = lesson(reader.look_up, share=0.8), lesson(reader.read, share=0.2)
    look_up = Stage("look-up", 300, (find, read), episodes, context_weight=0.1)
    find, read = lesson(reader.look_up, share=0.2), lesson(reader.read, share=0.8)
    reading = Stage("reading", 200, (find, read), episodes, context_weight=0.1, lr_end=0.02)
    return look_up, reading


def copying_stages(
    copier: Copier, make: Callable[[], Env], env: EnvConfig, episodes: int, window: int
) -> tuple[Stage, ...]:
    """The stage of free text: some lessons repeat words, most show random play."""
    lesson = _lesson(make, env, window)
    lessons = lesson(copier.repeat, share=0.1), lesson(copier.act, share=0.9)
    rates = {"lr": 2e-3, "muon_lr": 0.006, "lr_end": 0.02}
    return (Stage("copying", 600, lessons, episodes, context_weight=0.03, **rates),)


def _changes(env: EnvConfig, window: int) -> dict[str, Any]:
    """The settings that differ from a run's in the environment, besides parameters, by key."""
    given = {"env.name": env.name, PARAMS: env.params}
    used = {f"env.{key}": each for key, each in env} | {"prompt.window": window}
    keys = ("prompt.window", "env.timeout_s", *(f"env.{key}" for key in BUDGETS))
    usual = flatten(config_of_env(given))
    return {key: used[key] for key in keys if used[key] != usual[key]}


def card(
    env: EnvConfig,
    made: EnvBase,
    teacher: Reader | Copier,
    met: Survey,
    seed: int,
    changes: Mapping[str, Any],
) -> str:
    """The README of a model's folder: the model, and what it was shown.

    A run needs the `changes` of its settings, by key, to play as the model was shown.
    """
    is_random = teacher.choose is random_actions
    play = "random play" if is_random else "optimal play, since nothing plays it at random"
    skill = "no plan and no skill" if is_random else "the solver's actions, without a reason"
    shown = next(filter(None, met.screens), "")
    if isinstance(teacher, Copier):
        taught = "to repeat words"
        habits = "\nHeads that copy were written into its attention before."
        seen = f"A screen:\n\n```\n{shown}\n```"
    else:
        taught, count = "to say what is where on the screen", len(teacher.habits)
        habits = f"""
In half of the thoughts one of {count} arbitrary habits decides, by the order of two things on the
screen; none was chosen for its use."""
        habits = habits if count else ""
        thought = teacher.thought(shown).strip()
        seen = f"A screen, and what a thought says about it:\n\n```\n{shown}\n\n{thought}\n```"
    library, file, attribute = parts_of(env.name)
    name = f"{library}{Path(file).name}:{attribute}" if file else env.name
    params = {f"{PARAMS}.{key}": each for key, each in without_folder("", env.params).items()}
    given = (
        f" --{key} {shlex.quote(typed(key, each))}" for key, each in {**params, **changes}.items()
    )
    return f"""# A base model for {name}

A Qwen2 of {made.parameters / 1e6:.2f} million parameters, made from scratch by RAGEN
{version("ragen-rl")} (seed {seed}). Its tokenizer holds the words of this environment and spells
others in bytes. It reads compact prompts.

It was shown {made.demonstrations:,} episodes of {play}, on levels that neither training nor
evaluation uses, with at most {env.max_turns} turns, {env.actions_per_turn} actions a turn and
{env.max_actions} actions in all. They teach the form of a reply, legal actions, and {taught}:
{skill}.{habits} {seen}

`ragen train --env {name} --model DIR{"".join(given)}` trains it further.
"""
