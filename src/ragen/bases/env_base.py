"""``ragen base --env W``: a small model from scratch that can read W and reply, and no more.

Its tokenizer holds the words that random play meets in W. Two stages of demonstrations (`screen`)
teach the model to find things on the screen and to reply in the right form. Where actions are free
text, the model begins with heads that copy, and one stage teaches it the form (`copying`).
Reinforcement learning teaches it to choose its actions.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ragen.bases.base import LAYERS, LessonPlayer, new_model, save, teach
from ragen.bases.copying import Copier, write_induction, write_words
from ragen.bases.curriculum import Lesson, Stage
from ragen.bases.demonstrations_manor import Guide
from ragen.bases.screen import (
    Choose,
    Reader,
    frequent,
    optimal_actions,
    random_actions,
    survey,
    texts_of,
    with_screen,
)
from ragen.bases.tokenizer import build, words_for
from ragen.chat.chat import Chat
from ragen.config.keys import Flat, dotted
from ragen.config.sections import EnvConfig
from ragen.core.errors import RagenError
from ragen.core.seeding import BASE_LEVELS
from ragen.core.types import Episode
from ragen.envs.blocking import blocking
from ragen.envs.contract import Env
from ragen.envs.registry import build_env, env_class, env_factory
from ragen.envs.worlds.manor import Manor
from ragen.models.names import PROMPT_STYLE
from ragen.networks.machine import use_threads
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import has_random_play
from ragen.rollout.setup import Setup, knows_no_tools
from ragen.rollout.venue import Venue
from ragen.settings.code import parts_of, without_folder
from ragen.settings.environment import with_budgets
from ragen.settings.saved import typed
from ragen.storage.checkpoint import new_folder

MOST_WORDS, MOST_FREE_WORDS = 1000, 2500
"""Greatest number of words in a vocabulary, for named actions and for free text. The most frequent
words are kept; others are spelled in bytes."""
STEP_TOKENS = 2000
"""Approximate number of tokens in the demonstrations of one step."""
FEWEST, MOST = 4, 32
LONGEST = 2048
"""Greatest number of tokens of a prompt and its reply; a longer episode drops its oldest turns."""
LENGTH = "model.max_length"


def prepare_env(
    given: Mapping[str, Any],
    out: Path,
    seed: int = 0,
    steps: int | None = None,
    watch: Callable[[str], None] = lambda line: None,
    processes: int = 1,
) -> Path:
    """Make a base model for an environment and save it in Hugging Face's layout.

    `given` are settings by key: ``env.name``, others of the section ``env``, ``prompt.window``,
    ``prompt.summary``, ``model.max_length`` and ``rollout.max_tokens``. `seed` decides weights and
    demonstrations. `steps` is the maximum per stage, for a trial. Each of several `processes`
    trains its share of every step. The model's config says that it reads compact prompts.

    Raises:
        RagenError: `out` exists or cannot be written; or the environment does not exist, fails, has
            tools, shows too much, or can be played neither at random nor by a solver.
    """
    began, given = time.monotonic(), dotted(given)
    config = with_budgets(given)
    env, prompt = config.env, config.prompt
    with new_folder(out) as folder:
        use_threads(1)  # the same weights however many cores are free
        # Play the environment, to know its words and screens.
        make = env_factory(env.name, **env.params)
        choose, actions = build_env(partial(find_play, env, make), env.name)
        budgets = env.max_turns, env.actions_per_turn, env.max_actions
        setup = Setup(
            env.name,
            make,
            *budgets,
            window=prompt.window,
            summary=prompt.summary,
            max_tokens=config.rollout.max_tokens,
            timeout_s=env.timeout_s,
            venue=Venue("threads" if blocking(env_class(env.name)).waits == "threads" else "no"),
        )
        met = survey(setup, choose, seed)
        screens = [turn.observation for episode in met for turn in episode.turns]
        # What is taught decides the vocabulary and the first weights.
        words = frequent(texts_of(met), MOST_FREE_WORDS if actions is None else MOST_WORDS)
        teacher: Reader | Copier = Copier(words, choose)
        if actions is not None:
            reader = Guide if issubclass(env_class(env.name), Manor) else Reader
            teacher = reader(screens, choose, actions if choose is random_actions else ())
        tokenizer = build(words_for(words, min(max(20, *budgets, teacher.highest), 999)))
        model = new_model(tokenizer, LAYERS, seed, 4 * LONGEST, teacher.theta)
        if isinstance(teacher, Copier):
            write_words(model, tokenizer)
            write_induction(model)
        setattr(model.config, PROMPT_STYLE, "compact")
        # Demonstrations are played as in training; each stage learns from its own.
        chat = Chat(tokenizer)
        stages = stages_of(teacher, setup, episodes_of(met, chat))
        player = LessonPlayer(chat, seed, min(given.get(LENGTH, LONGEST), LONGEST))
        for number, stage in enumerate(stages):
            teach(model, player, stage, number, steps, watch, processes)
        save(model, tokenizer, folder)
        size = f"{model.num_parameters() / 1e6:.2f} million parameters"
        count = sum(min(stage.steps, steps or stage.steps) * stage.episodes for stage in stages)
        screen = next(filter(None, screens), "")
        text = card(given, setup, teacher, screen, size, count, seed)
        (folder / "README.md").write_text(text, encoding="utf-8")
    seconds = time.monotonic() - began
    watch(f"{size}, {count:,} demonstrations, {seconds:.0f} s; the base model is in {out}")
    return out


def find_play(env: EnvConfig, make: Callable[[], Env]) -> tuple[Choose, tuple[str, ...] | None]:
    """Random play, or optimal play where there is none; and the actions (``None``: free text)."""
    with closing(GuardedEnv(make, env.timeout_s)) as built:
        if built.tools:
            raise knows_no_tools(env.name)
        built.reset(BASE_LEVELS, 0)
        if has_random_play(built.env):
            return random_actions, built.actions
        if built.env.solve(1, 1, 1) is not None:
            return optimal_actions, built.actions
    raise RagenError(
        f"{env.name} takes free text and has neither a random player nor a solver: give it a "
        "random_action or a solve (docs/environments.md)"
    )


def episodes_of(met: Sequence[Episode], chat: Chat) -> int:
    """Number of demonstrations whose tokens are about `STEP_TOKENS`, from `FEWEST` to `MOST`."""
    tokens = sum(len(chat.encode_text(text)) for text in texts_of(met))
    return max(FEWEST, min(MOST, round(STEP_TOKENS / (1 + tokens / len(met)))))


def stages_of(teacher: Reader | Copier, setup: Setup, episodes: int) -> tuple[Stage, ...]:
    """The stages of a base, with the budgets of `setup`.

    A reader begins with look-ups of where things are, mostly, and goes on to short thoughts. For
    free text, some lessons repeat words, and most show random play.
    """
    per_turn = min(setup.actions_per_turn, setup.actions)
    seen = replace(setup, make=lambda: with_screen(setup.make()), actions_per_turn=per_turn)
    lesson = partial(
        Lesson, setup=seen, turns=(setup.turns,), held_out=False, sum_up=teacher.sum_up
    )
    if isinstance(teacher, Copier):
        lessons = lesson(teacher.repeat, share=0.1), lesson(teacher.act, share=0.9)
        rates = {"lr": 2e-3, "muon_lr": 0.006, "lr_end": 0.02}
        return (Stage("copying", 600, lessons, episodes, context_weight=0.03, **rates),)
    if isinstance(teacher, Guide):
        return teacher.stages(seen, episodes)
    find, read = lesson(teacher.look_up, share=0.8), lesson(teacher.read, share=0.2)
    look_up = Stage("look-up", 300, (find, read), episodes, context_weight=0.1)
    mixed = replace(find, share=0.2), replace(read, share=0.8)
    return look_up, Stage("reading", 200, mixed, episodes, context_weight=0.1, lr_end=0.02)


def card(
    given: Flat,
    setup: Setup,
    teacher: Reader | Copier,
    screen: str,
    size: str,
    count: int,
    seed: int,
) -> str:
    """The README of a model's folder: the model, its `count` demonstrations, how to train it."""
    play, skill = "random play", "no plan and no skill"
    if teacher.choose is optimal_actions:
        play, skill = "optimal play, since nothing plays it at random", "no reason of its actions"
    library, file, attribute = parts_of(setup.env)
    name = f"{library}{Path(file).name}:{attribute}" if file else setup.env
    short = {key: without_folder(key, value) for key, value in given.items() if key != "env.name"}
    options = "".join(f" --{key} {shlex.quote(typed(key, short[key]))}" for key in short)
    return f"""# A base model for {name}

A Qwen2 of {size}, made from scratch by RAGEN {version("ragen-rl")}
(seed {seed}). Its tokenizer holds the words of this environment and spells others in bytes. It
reads compact prompts.

It was shown {count:,} episodes of {play}, on levels that neither training nor evaluation uses, with
at most {setup.turns} turns, {setup.actions_per_turn} actions a turn and {setup.actions} actions in
all. They teach the form of a reply, legal actions, and {teacher.taught}: {skill}.
{teacher.note}

A screen, and the thought about it:

```
{screen}

{teacher.thought(screen).strip()}
```

`ragen train --env {name} --model DIR{options}` trains it further.
"""
