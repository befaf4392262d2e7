"""The commands around training: sft and base make models; envs, check and doctor inspect."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import textwrap
from argparse import Namespace
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragen.cli.agent import agent_options, with_agent
from ragen.cli.command import Command, Overrides, Parser, complain, number, program, terminal, whole
from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS, TRAIN_LEVELS

PROCESSES = "engine.processes"
"""The key of `engine` that `ragen base` reads."""


def _sft_options(parser: Parser) -> None:
    parser.take("recipe", "RECIPE", "a recipe's name, or a path to a .toml")
    parser.take("--out", "DIR", "the model's folder; must not exist", Path, required=True)
    player = "random, wanderer, solver, teacher, a run or model, or conversations in FILE.jsonl"
    parser.take("--player", "P", player, default="solver")
    keep = "which episodes: solved or all [all of random and wanderer, else solved]"
    parser.take("--keep", "K", keep, choices=("solved", "all"))
    parser.take("--episodes", "N", "episodes that it plays [1024]", whole(2, 10_000_000))
    parser.take("--epochs", "E", "epochs over the examples [3]", whole(1, 1000))
    parser.take("--lr", "LR", "learning rate [10 × the recipe's update.lr]", number(1e-12, 1))
    parser.output_flags()
    parser.epilog = (
        "The recipe sets environment, prompts, budgets and model. Their keys and most\n"
        "update keys (ragen help keys) may be set too. Then: ragen train RECIPE --model DIR"
    )


def _sft(options: Namespace, overrides: Overrides) -> int:
    from ragen.rollout.setup import facts_of
    from ragen.settings.resolve import resolve

    def watch(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr)

    config = resolve(options.recipe, overrides, watch)
    config.require_one_env()
    facts_of(config.env)
    from ragen.finetuning.sft import refuse_unread, sft
    from ragen.finetuning.transcripts import is_file
    from ragen.settings.target import EPISODE_KEYS

    refuse_unread(overrides)
    if is_file(options.player) and (options.episodes or options.keep):
        raise RagenError("a file has its own episodes: leave out --episodes and --keep")
    given = {name: getattr(options, name) for name in ("keep", "episodes", "epochs", "lr")}
    given = {name: value for name, value in given.items() if value is not None}
    tuned = sft(config, options.out, options.player, watch=watch, **given)
    if options.json:
        print(json.dumps(asdict(tuned), default=str))
        return 0
    print(tuned)
    print(f"{tuned.seconds:.0f} s; the model is in {tuned.model}")
    env = shlex.quote(overrides.get("env.name", options.recipe))
    played = _typed(overrides, EPISODE_KEYS, ("model.path", "env.name"))
    trained = _typed(overrides, (*EPISODE_KEYS, "lora."), ("model.path",))
    recipe, model, ragen = shlex.quote(options.recipe), shlex.quote(str(tuned.model)), program()
    print(f"evaluate it:       {ragen} eval {model} --env {env}{played}")
    print(f"train it further:  {ragen} train {recipe} --model {model}{trained}")
    return 0


def _typed(overrides: Overrides, prefixes: tuple[str, ...], but: Container[str] = ()) -> str:
    """Config keys that begin with one of the prefixes, as they are typed on the command line."""
    from ragen.settings.saved import typed

    asked = {k: v for k, v in overrides.items() if k.startswith(prefixes) and k not in but}
    return "".join(f" --{key} {shlex.quote(typed(key, value))}" for key, value in asked.items())


LENGTHS = ("prompt.window", "prompt.summary", "model.max_length", "rollout.max_tokens")
"""The keys that `ragen base --env` reads beside the environment's."""


def _base_options(parser: Parser) -> None:
    families = (
        "bandit, frozen-lake, frozen-lake-no-skill, frozen-lake-parts, frozen-lake-picture, "
        "frozen-lake-still, sokoban or sokoban-picture; or --env, or --agent"
    )
    parser.take("family", "FAMILY", families, nargs="?")
    agent_options(parser)
    parser.take("--out", "DIR", "folder of the model", Path, required=True)
    parser.take("--seed", "N", "seed", whole(0), 0)
    parser.take("--steps", "N", "steps per stage; fewer for a trial", whole(1))
    parser.take("--experts", "N", "of each feed-forward block of a FAMILY [0: dense]", whole(0), 0)
    parser.take("--iterations", "N", "passes of the chain of experts", whole(1), 1)
    parser.epilog = (
        "With --env, any environment that can be played at random or by its solver gets a small\n"
        "model of its own, in minutes: it reads the screen and replies in form, and has no plan.\n"
        "Keys of the section env may be set, such as --env.params.NAME and --env.max_turns, and\n"
        "--prompt.window, the number of turns in a prompt; or --prompt.summary learned,\n"
        "--model.max_length and --rollout.max_tokens, for episodes that are summed up. With\n"
        "--engine.processes N, N processes train it, each its share of every step.\n"
        "With --agent, a model that calls the agent's tools and answers, both by guessing."
    )


def _base(options: Namespace, overrides: Overrides) -> int:
    overrides = with_agent(options, overrides)
    env = overrides.get("env.name")
    if (env is None) == (options.family is None):
        raise RagenError("name a family (ragen base --help), or --env, or --agent")
    keys = () if env is None else ("env.", *LENGTHS)
    given = {key: value for key, value in overrides.items() if key != PROCESSES}
    other = [key for key in given if not key.startswith(keys) or key == "env.isolate"]
    if other:
        raise RagenError(f"{other[0]} has no effect on this base; leave it out")
    experts = {"experts": options.experts, "iterations": options.iterations}
    if (env is not None or not options.experts) and experts != {"experts": 0, "iterations": 1}:
        raise RagenError("--experts works with a FAMILY only, and --iterations with --experts only")
    from ragen.cluster.process_engine import with_processes
    from ragen.config.reading import merge

    of_engine = {key: value for key, value in overrides.items() if key == PROCESSES}
    processes = with_processes(merge(None, of_engine)).engine.processes
    if env is None:
        from ragen.bases.base import prepare

        common = options.family, options.out, options.seed, options.steps, print, processes
        prepare(*common, **experts)
        print(f"the base model of {options.family} is in {options.out}")
        return 0
    if str(env).startswith("agent:"):
        from ragen.bases.agent_base import prepare_agent as prepare_base
    else:
        from ragen.bases.env_base import prepare_env as prepare_base
    prepare_base(given, options.out, options.seed, options.steps, print, processes)
    typed = _typed(overrides, keys, ("env.name",))
    env, model = shlex.quote(env), shlex.quote(str(options.out))
    print(f"train it further:  {program()} train --env {env} --model {model}{typed}")
    return 0


def _envs_options(parser: Parser) -> None:
    parser.take("names", "NAME", "environments, also LIBRARY:NAME [all with a name]", nargs="*")
    parser.flag("--json", "print a JSON list")
    parser.take(
        "--episodes",
        "N",
        "levels for random and optimal play",
        whole(1, TRAIN_LEVELS - EVAL_LEVELS),
        256,
    )


def _envs(options: Namespace, _: Overrides) -> int:
    from ragen.config.extensions import LIBRARIES
    from ragen.envs.registry import closing_env, env_class, make, registered_envs
    from ragen.evaluation.baselines import Budget, measure_baselines

    levels = [EVAL_LEVELS + index for index in range(options.episodes)]
    rows: list[dict[str, Any]] = []
    known = registered_envs()
    for name in options.names or known:
        with closing_env(make(name)) as made:
            budget = Budget(made.max_turns, made.actions_per_turn, made.max_actions)
            description = known[name].description if name in known else made.goal
        found = asdict(measure_baselines(name, {}, budget, levels))
        about = {"turns": budget.turns, "actions": budget.actions, "description": description}
        rows.append({"name": name, **found, **about})
    if options.json:
        print(json.dumps(rows))
        return 0
    heads = ("random", "optimal", "turns", "actions")
    width = max(len(name) for name in ("environment", *(row["name"] for row in rows)))
    print(f"{'environment':<{width}}  {'  '.join(f'{head:>7}' for head in heads)}")
    for row in rows:
        optimal = "?" if row["optimal"] is None else f"{row['optimal']:.1%}"
        cells = (f"{row['random']:.1%}", optimal, str(row["turns"]), str(row["actions"]))
        print(f"{row['name']:<{width}}  {'  '.join(f'{cell:>7}' for cell in cells)}")
        print(textwrap.fill(row["description"], 78, initial_indent="  ", subsequent_indent="  "))
    print(f"\nSuccess of random and optimal play on {len(levels)} levels, in the given turns and")
    print("actions of an episode.")
    for name in options.names:
        if documentation := env_class(name).__doc__:
            card = inspect.cleandoc(documentation).partition("\n\nExample:")[0]
            print(f"\n{name}: {card}")
    if not options.names:
        others = (f"{library}:{each.names}" for library, each in LIBRARIES.items())
        print("Environments of other libraries (ragen envs NAME):")
        print(textwrap.fill(", ".join(others), 78, initial_indent="  ", subsequent_indent="  "))
    return 0


def _check_options(parser: Parser) -> None:
    names = (
        "environments, functions of installed packages, or classes and functions as "
        "path/to/file.py:name [all environments]"
    )
    parser.take("names", "NAME", names, nargs="*")


def _check(options: Namespace, overrides: Overrides) -> int:
    from ragen.config.keys import PARAMS, dotted
    from ragen.envs.registry import registered_envs

    given = dotted(overrides)
    if other := [key for key in given if not key.startswith(f"{PARAMS}.")]:
        raise RagenError(f"{other[0]} has no effect on a check; leave it out")
    params = {key.removeprefix(f"{PARAMS}."): value for key, value in given.items()}
    exit_code = 0
    for name in options.names or registered_envs():
        try:
            print(f"{name}: {_checked(name, params)}", flush=True)
        except RagenError as error:
            complain(str(error))
            exit_code = error.exit_code
    return exit_code


def _checked(name: str, params: Overrides) -> str:
    from ragen.config.extensions import ENV, KINDS, library_of
    from ragen.core.plugins import load_object
    from ragen.envs.checker import check
    from ragen.envs.registry import make, registered_envs

    if library_of(name):
        is_env = True
    elif ":" in name:
        kind = "environment (subclass of ragen.Env) or function"
        is_env = isinstance(load_object(name, kind=kind).object, type)
    else:
        functions = (kind.complaint(name) is None for key, kind in KINDS.items() if kind is not ENV)
        is_env = name in registered_envs() or not any(functions)
    if is_env:
        check(make(name, **params))
        return "keeps the contract"
    if params:
        raise RagenError(f"{name} is a function: env.params are for environments; leave them out")
    from ragen.training.code_check import check_function

    return f"passes as {check_function(name)}"


def _new_world_options(parser: Parser) -> None:
    parser.take("name", "NAME", "the environment's name; the file is NAME.py")
    parser.flag("--picture", "one whose agent sees a picture")


def _new_world(options: Namespace, _: Overrides) -> int:
    from ragen.envs.new_world import write_new_world

    file, title = write_new_world(options.name, Path(), options.picture)
    reference, model, ragen = f"{file}:{title}", Path("models") / options.name, program()
    print(f"{file} holds a complete environment; change it into your own")
    print(f"check it:      {ragen} check {reference}")
    print(f"play it:       {ragen} play {reference}")
    if not options.picture:  # a base of these commands reads text
        print(f"train on it:   {ragen} base --env {reference} --out {model}")
        print(f"               {ragen} train --env {reference} --model {model}")
    return 0


def _doctor_options(parser: Parser) -> None:
    about = "a run, base, a model's folder or hub id; without one, this machine"
    parser.take("model", "MODEL", about, nargs="?")
    parser.take("--env", "E", "environment or recipe that a model plays [the run's, or sokoban]")
    parser.flag("--json", "print a JSON object")


def _doctor(options: Namespace, overrides: Overrides) -> int:
    if options.model is not None:
        return _doctor_model(options, overrides)
    if options.env is not None or overrides:
        raise RagenError("--env and config keys are about a model: name one")
    from ragen.cli.doctor import examine

    results, healthy = {}, True
    for name, result, passed in examine():
        results[name], healthy = result, healthy and passed
        if not options.json:
            print(f"{'ok' if passed else 'NO':<3} {name:<24} {result}")
    if options.json:
        print(json.dumps(results))
    return 0 if healthy else 1


def _doctor_model(options: Namespace, overrides: Overrides) -> int:
    from ragen.cli.doctor_model import show_model
    from ragen.evaluation.inspection import inspect_model

    env = {} if options.env is None else {"env": options.env}
    found = inspect_model(options.model, overrides | env)
    if options.json:
        print(json.dumps(found.record()))
    else:
        show_model(terminal(), found)
    return 0


COMMANDS: dict[str, Command] = {
    "sft": Command("fine-tune a model on examples", _sft_options, _sft, True),
    "base": Command(
        "make a small model from scratch for an environment", _base_options, _base, True
    ),
    "envs": Command("list the environments with random and optimal play", _envs_options, _envs),
    "check": Command("check environments and your own functions", _check_options, _check, True),
    "new-world": Command(
        "write a small environment of your own to begin from", _new_world_options, _new_world
    ),
    "doctor": Command(
        "examine this machine, or what a model sees and costs", _doctor_options, _doctor, True
    ),
}
