"""The commands that measure and watch: eval, compare, play, branch."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen.cli.agent import agent_options, with_agent
from ragen.cli.command import Command, Overrides, Parser, complain, number, terminal, whole
from ragen.core.errors import RagenError
from ragen.core.files import file_errors, whole_file
from ragen.core.seeding import EVAL_LEVELS, TRAIN_LEVELS

if TYPE_CHECKING:
    from ragen.evaluation.outcomes import Outcome
    from ragen.evaluation.results import Evaluation
    from ragen.rollout.endpoint import Server


def _eval_options(parser: Parser) -> None:
    parser.take("target", "TARGET", "a run, a checkpoint, base, random, solver, or a model")
    agent_options(parser)
    _playing_options(parser)


def _eval(options: Namespace, overrides: Overrides) -> int:
    from ragen.evaluation.tables import evaluation_record, evaluation_table
    from ragen.rollout.players import PLAYERS
    from ragen.rollout.setup import facts_of
    from ragen.settings.model import advice
    from ragen.settings.target import config_for, envs_of

    server = _server(options)
    overrides = with_agent(options, overrides)
    named = [overrides["env.name"]] if options.agent else _named_envs(options)
    names = named or envs_of(options.target, server)
    by_env = [overrides | {"env": name} for name in names] or [overrides]
    envs = [config_for(options.target, values, server, complain).env for values in by_env]
    style = "paper" if server or options.target in PLAYERS else overrides.get("prompt.style")
    if warning := advice(style or "paper", options.target):
        complain(warning)
    for env in envs:  # refuses a missing one before any is played
        facts_of(env)
    with _output(options) as put:
        for env, values in zip(envs, by_env, strict=True):
            found = _evaluate(options, options.target, values, server, env.name)
            put(evaluation_table(*found), evaluation_record(*found))
    return 0


def _compare_options(parser: Parser) -> None:
    parser.take("one", "A", "a target of ragen eval; runs of several seeds: A1,A2,A3")
    parser.take("other", "B", "another target, such as base")
    parser.take("--suite", "NAME", "a suite of environments for generalisation: bandit or sokoban")
    _playing_options(parser)


def _compare(options: Namespace, overrides: Overrides) -> int:
    from ragen.evaluation.compare import compare_in_envs, refuse_absent_targets
    from ragen.evaluation.tables import closing_sections, comparison_table
    from ragen.settings.target import is_local

    server, envs = _server(options), _compared_envs(options)

    def measure(target: str, settings: Mapping[str, Any]) -> tuple[Evaluation, list[Outcome]]:
        return _evaluate(options, target, settings, None if is_local(target) else server, target)

    arms = options.one.split(","), options.other.split(",")
    refuse_absent_targets(*arms, server)
    comparisons = []
    with _output(options) as put:
        for comparison in compare_in_envs(*arms, envs, overrides, measure, server is not None):
            comparisons.append(comparison)
            put(comparison_table(comparison), comparison.record())
        for section in closing_sections(comparisons):
            put(section)
    return 0


def _evaluate(
    options: Namespace,
    target: str,
    settings: Mapping[str, Any],
    server: Server | None,
    label: str,
) -> tuple[Evaluation, list[Outcome]]:
    """Evaluate a target as the options say, with a progress bar if there is a terminal."""
    from rich.markup import escape
    from rich.progress import Progress

    from ragen.evaluation.evaluation import Options, default_out, evaluate_target

    given = {key: getattr(options, key) for key in Options.__annotations__}
    given["out"] = options.out or default_out(target, server)
    total, console = options.episodes * options.samples, terminal(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(escape(label), total=total)

            def count(_: Outcome, left: int) -> None:
                bar.update(task, completed=total - left)

            return evaluate_target(
                target, settings, server=server, on_outcome=count, note=complain, **given
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command continues from here") from None


@contextmanager
def _output(options: Namespace) -> Iterator[Callable[..., None]]:
    """Print each result as a table or a JSON line; at the end, write the tables as Markdown."""
    from ragen.core.tables import Section, markdown, show

    path: Path | None = options.markdown
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        reason = "is a folder" if path.is_dir() else "there is no such folder"
        raise RagenError(f"cannot write {path}: {reason}; name a file with --markdown FILE")
    sections: list[Section] = []

    def put(section: Section, record: Mapping[str, Any] | None = None) -> None:
        sections.append(section)
        if not options.json:
            show(terminal(), [section])
        elif record is not None:
            print(json.dumps(record), flush=True)

    yield put
    if path is not None:
        with file_errors("write", path), whole_file(path) as temporary:
            temporary.write_text(markdown(sections), encoding="utf-8")


def _playing_options(parser: Parser) -> None:
    take = parser.take
    take("--env", "E", "environment or recipe, or several: E1,E2 [the run's]", action="append")
    take("--episodes", "N", "levels", whole(1, TRAIN_LEVELS - EVAL_LEVELS), 256)
    take("--samples", "K", "episodes per level, for pass@K", whole(1, 10_000), 1)
    take("--seed", "S", "seed of random events and sampling", whole(0), 0)
    take("--temperature", "T", "sampling temperature; 0 is greedy", number(0, 100), 1.0)
    take("--concurrency", "N", "episodes played at the same time", whole(1, 65_536))
    take("--base-url", "URL", "an OpenAI-compatible endpoint that serves the model")
    take("--key-env", "NAME", "environment variable of its key [OPENAI_API_KEY]")
    take(
        "--timeout",
        "S",
        "timeout of one request in seconds [120]",
        number(0, 86_400),
        dest="timeout_s",
    )
    take("--rpm", "N", "requests per minute [no limit]", number(0, 1e9), dest="requests_per_minute")
    parser.flag("--json", "print one JSON object per environment")
    take("--markdown", "FILE", "also write the tables to FILE", Path)
    take("--out", "DIR", "folder for the outcomes [the run, or evals]", Path)
    parser.epilog = (
        "Outcomes are stored as episodes end: after a stop, the same command continues and\n"
        "repeats no episode."
    )


def _server(options: Namespace) -> Server | None:
    from ragen.rollout.endpoint import Server

    names = ("key_env", "timeout_s", "requests_per_minute")
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    if asked and options.base_url is None:
        raise RagenError("--key-env, --timeout and --rpm configure an endpoint: add --base-url URL")
    return None if options.base_url is None else Server(options.base_url, **asked)


def _named_envs(options: Namespace) -> list[str]:
    return [name for each in options.env or [] for name in each.split(",")]


def _compared_envs(options: Namespace) -> Mapping[str, Mapping[str, Any]]:
    """The environments to compare in: a suite, the named ones, or that of the first run."""
    from ragen.evaluation.compare import SUITES

    named = _named_envs(options)
    if options.suite is None:
        return {name: {"env": name} for name in named} or {"": {}}
    if named:
        raise RagenError("--suite already names the environments: leave --env out")
    if options.suite not in SUITES:
        raise RagenError(f"there is no suite {options.suite!r}: expected {' or '.join(SUITES)}")
    return SUITES[options.suite]


def _play_options(parser: Parser) -> None:
    parser.take("env", "ENV", "an environment (ragen envs), file.py:Class, or a recipe")
    parser.take("--player", "WHO", "human, random, solver, base or RUN", default="human")
    parser.take("--seed", "N", "number of the level", whole(0), 0)


def _play(options: Namespace, overrides: Overrides) -> int:
    from ragen.cli.play import play_env, show_episode
    from ragen.rollout.players import PLAYERS
    from ragen.settings.target import config_for

    overrides = {**overrides, "env.name": options.env}
    console = terminal()
    if options.player in PLAYERS:
        config = config_for(options.player, overrides)
        if options.player == "human" and "env.params.observation" not in overrides:
            config.env.params.pop("observation", None)  # the environment's own: a map
        try:
            play_env(console, config.env, PLAYERS[options.player](options.seed), options.seed)
        except EOFError:  # Ctrl-D at the prompt ends the episode
            print()
        return 0
    from ragen.evaluation.evaluation import play_target

    episode = play_target(options.player, overrides, seed=options.seed, note=complain)
    show_episode(console, episode)
    return 0


def _branch_options(parser: Parser) -> None:
    from ragen.storage.branches import MOST

    parser.take("run", "RUN", "the run's folder, finished or not", Path)
    parser.take("episode", "EPISODE", "the episode's id, as shown by ragen view", whole(0))
    parser.take("--turn", "K", "first turn to play again, from 0", whole(0), required=True)
    parser.take("--n", "N", "number of branches", whole(1, MOST), 4)
    parser.take(
        "--checkpoint", "STEP", "step of the checkpoint to play with [the newest]", whole(0)
    )
    parser.take("--temperature", "T", "0 is greedy [the run's]", number(0, 100))
    parser.take("--seed", "S", "seed of the branches", whole(0), 0)
    parser.flag("--json", "print the result as one JSON line")
    parser.epilog = (
        "The environment returns to its snapshot of that turn, with the same random\n"
        "events. The policy continues from the recorded tokens. Branches are stored in\n"
        "RUN/branches.sqlite."
    )


def _branch(options: Namespace, _: Overrides) -> int:
    from ragen.core.tables import show
    from ragen.evaluation.branch import branch, branch_table

    given = {name: getattr(options, name) for name in ("checkpoint", "temperature", "seed")}
    found = branch(options.run, options.episode, options.turn, options.n, **given)
    if options.json:
        print(json.dumps(found.record()))
    else:
        show(terminal(), [branch_table(found)])
    return 0


COMMANDS: dict[str, Command] = {
    "eval": Command("measure a run, a model or a player", _eval_options, _eval, True),
    "compare": Command(
        "compare two agents or methods on the same levels", _compare_options, _compare, True
    ),
    "play": Command("play an environment, or watch an agent play it", _play_options, _play, True),
    "branch": Command("branch a recorded episode at one of its turns", _branch_options, _branch),
}
