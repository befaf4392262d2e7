"""The command line, ``ragen COMMAND …``: each command calls one function and shows its result.

Results go to standard output, progress and errors to standard error. A user's mistake is one line
and exit code 2; a run that the guard stopped exits with 3; an interrupted run says how to go on and
exits with 130 (Ctrl-C) or 143 (SIGTERM). A traceback always means a bug.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen.errors import RagenError

# Whatever is heavy (torch, the worlds, pydantic, even rich) is imported by the command that needs
# it: help and mistakes must not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from ragen.arguments import Parser
    from ragen.config import Config
    from ragen.endpoint import Server
    from ragen.evaluation import Evaluation
    from ragen.outcomes import Outcome
    from ragen.progress import Watcher
    from ragen.running import Result

Overrides = dict[str, Any]

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes: 128 + the signal's number, as shells have it; an error brings its own."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it is for, its options, what it does, whether it takes config keys."""

    summary: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace, Overrides], int]
    takes_keys: bool = False
    keys_in_help: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    with _sigterm_as_ctrl_c() as terminated:
        try:
            return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        except RagenError as error:
            return _mistake(error)
        except ExceptionGroup as group:
            mistakes, bugs = group.split(RagenError)
            if mistakes is None or bugs is not None:
                raise
            return _mistake(mistakes)
        except KeyboardInterrupt as error:
            _complain(str(error) or "interrupted")
            return TERMINATED if terminated else INTERRUPTED
        except BrokenPipeError:
            # The reader (head, less) has seen enough; keep Python from flushing into a closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _mistake(error: RagenError | ExceptionGroup[RagenError]) -> int:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    _complain(" ".join(str(error).split()))
    return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"ragen {version('ragen')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise RagenError(f"unknown command {name!r}{_nearest(name)}; ragen --help lists them all")
    from ragen.arguments import Parser, keys_help, parse

    command = COMMANDS[name]
    asks_help = any(argument in ("-h", "--help") for argument in rest)
    epilog = keys_help() if command.keys_in_help and asks_help else ""
    parser = Parser(f"ragen {name}", command.summary, epilog)
    command.options(parser)
    return command.run(*parse(parser, rest, command.takes_keys))


def _overview() -> str:
    lines = [
        "RAGEN trains and evaluates LLM agents with multi-turn reinforcement learning.",
        "",
        "usage: ragen COMMAND [options]",
        "",
        *(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()),
        "",
        "Begin with:  ragen train bandit        (seconds on a laptop)",
        "More:        ragen COMMAND --help",
    ]
    return "\n".join(lines)


def _train_options(parser: Parser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a path to a .toml")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run's folder; it must not exist [runs/RECIPE-N]",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the settled config and do nothing"
    )
    _output_options(parser)


def _resume_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    _output_options(parser)
    parser.epilog = (
        "A run goes on by its own settings. To train its model further by others: "
        "ragen train RECIPE --model RUN"
    )


def _output_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="end with the result as one JSON line")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _train(options: Namespace, overrides: Overrides) -> int:
    from ragen.env import make
    from ragen.settings import resolve

    config = resolve(options.recipe, overrides)
    make(config.world.name, **config.world.params)
    if options.dry_run:
        from ragen.progress import hint

        if advice := hint(config):
            _complain(advice)
        _show_config(config)
        return 0
    from ragen.recorder import refuse_existing

    refuse_existing(options.out)
    from ragen.trainer import train

    return _watch_run(lambda watcher: train(config, options.out, watcher=watcher), options)


def _resume(options: Namespace, _: Overrides) -> int:
    from ragen.recorder import CONFIG

    if not (options.run / CONFIG).is_file():
        raise RagenError(f"{options.run} is no run folder ({CONFIG} is missing)")
    from ragen.trainer import resume

    return _watch_run(lambda watcher: resume(options.run, watcher), options)


def _watch_run(work: Callable[[Watcher], Result], options: Namespace) -> int:
    from ragen.progress import watcher_for
    from ragen.stopping import StopRequested

    watcher = watcher_for(_console(stderr=True), options.quiet)
    try:
        result = work(watcher)
    except StopRequested as stop:
        watcher.end()
        _complain(f"stopped after the last finished step; {_go_on(watcher)}")
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted at once; {_go_on(watcher)}") from None
    finally:
        watcher.end()
    # With --json, standard output is for the machine.
    _show_result(_console(stderr=options.json), result)
    if options.json:
        print(json.dumps(_result_record(result)))
    return 0


def _go_on(watcher: Watcher) -> str:
    return f"go on with: {_program()} resume {watcher.run}" if watcher.run else "nothing had begun"


def _program() -> str:
    """How this command is called from here."""
    if shutil.which("ragen"):
        return "ragen"
    return os.path.relpath(Path(sys.executable).with_name("ragen"))


def _show_config(config: Config) -> None:
    from ragen.settings import differences, dump

    changes = differences(config)
    print(f"# {len(changes)} values differ from the preset {config.algorithm}:")
    for change in changes:
        preset = "unset" if change.preset is None else change.preset
        print(f"#   {change.key} = {change.value!r}  (preset: {preset!r})")
    print(dump(config), end="")
    _show_memory(config)


def _show_memory(config: Config) -> None:
    """The memory plan as comments, where nothing has to be fetched for it."""
    from ragen.memory import plan
    from ragen.pretrained import is_at_hand

    model = config.model.path
    if model == "base" or is_at_hand(model):
        for line in plan(config).lines():
            print(f"# {line}")
    else:
        print(
            f"# memory: told once the model is here; {model} is no folder, nor in the Hub's cache"
        )


def _result_record(result: Result) -> dict[str, Any]:
    shown = result.after or result.before

    def success(evaluation: Evaluation | None) -> float | None:
        return None if evaluation is None else evaluation.success

    return {
        "world": result.world,
        "before": success(result.before),
        "after": success(result.after),
        "random": None if shown is None else shown.random,
        "best": None if shown is None else shown.best,
        "seconds": round(result.seconds, 1),
        "run": str(result.run),
        "before_greedy": success(result.before_greedy),
        "after_greedy": success(result.after_greedy),
        "alarms": [str(alarm) for alarm in result.alarms],
    }


def _show_result(console: Console, result: Result) -> None:
    rows = [
        (f"{who}, {evaluation.how}", evaluation)
        for who, evaluation in (
            ("before", result.before),
            ("before", result.before_greedy),
            ("after", result.after),
            ("after", result.after_greedy),
        )
        if evaluation is not None
    ]
    if rows:
        _show_evaluations(console, rows)
    for line in (
        *_collapse(result),
        f"\n{result.seconds:.0f} s; everything is in {result.run}",
        f"watch it play:  {_program()} play {result.world} --player {result.run}",
        f"evaluate it:    {_program()} eval {result.run}",
        f"read about it:  {_program()} report {result.run}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _collapse(result: Result) -> list[str]:
    """What a run that ended worse than it began shows of the Echo Trap's published signs."""
    before, after = result.before, result.after
    if before is None or after is None or after.success >= before.success:
        return []
    from ragen.recorder import read_metrics

    metrics = read_metrics(result.run)
    spread = list(metrics.get("reward/std_in_group", {0: 0.0}).values())
    flat = list(metrics.get("reward/flat_group_fraction", {0: 0.0}).values())
    return [
        "\nthe agent got worse; signs of the Echo Trap (arXiv:2504.20073) in this run:",
        f"  reward std in the group {spread[0]:.3f} → {spread[-1]:.3f}, "
        f"groups without any {flat[0]:.0%} → {flat[-1]:.0%}",
        *(f"  {sign}" for sign in result.signs),
    ]


def _show_evaluations(console: Console, rows: Sequence[tuple[str, Evaluation]]) -> None:
    from rich.table import Table

    first = rows[0][1]
    table = Table(title=f"{first.world}, {first.episodes} held-out levels", title_justify="left")
    table.add_column("player")
    table.add_column("success", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("mean return", justify="right")
    table.add_row("random play", f"{first.random:.1%}", "", f"{first.random_return:.3f}")
    for name, e in rows:
        interval = f"{e.success_low:.1%} – {e.success_high:.1%}"
        table.add_row(name, f"{e.success:.1%}", interval, f"{e.mean_return:.3f}", style="bold")
    if first.best is not None:
        best_return = "" if first.best_return is None else f"{first.best_return:.3f}"
        table.add_row("best play", f"{first.best:.1%}", "", best_return)
    console.print(table)


def _playing_options(parser: Parser) -> None:
    """What `eval` and `compare` take alike."""
    add = parser.add_argument
    which = "a world, or a recipe that says how it is shown; or several: W1,W2 [the run's]"
    add("--world", action="append", metavar="W", help=which)
    add("--episodes", type=int, default=256, metavar="N", help="levels [256]")
    add("--samples", type=int, default=1, metavar="K", help="episodes a level, for pass@K [1]")
    add("--seed", type=int, default=0, metavar="S", help="of events and sampling [0]")
    add("--temperature", type=float, default=1.0, metavar="T", help="0: greedy [1.0]")
    add("--concurrency", type=int, metavar="N", help="episodes played at once")
    add("--base-url", metavar="URL", help="an OpenAI-compatible endpoint, to ask models there")
    add("--key-env", metavar="NAME", help="variable that holds its key [OPENAI_API_KEY]")
    add("--timeout", type=float, metavar="S", help="seconds of one request [120]")
    add("--rpm", type=float, metavar="N", help="requests a minute [no limit]")
    add("--json", action="store_true", help="print one JSON object a world")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    add("--out", type=Path, metavar="DIR", help="where outcomes are kept [the run, or evals]")
    parser.epilog = (
        "Any config key (ragen train --help) may be set as well. Outcomes are kept as episodes end:"
        "\nthe same command goes on where another was stopped, and plays nothing twice."
    )


def _server(options: Namespace) -> Server | None:
    """The endpoint that the options describe."""
    from ragen.endpoint import Server

    asked = {
        "key_env": options.key_env,
        "timeout_s": options.timeout,
        "requests_per_minute": options.rpm,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked and options.base_url is None:
        raise RagenError("--key-env, --timeout and --rpm are about an endpoint: add --base-url URL")
    return None if options.base_url is None else Server(options.base_url, **asked)


def _eval_options(parser: Parser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="a run, a checkpoint, base, random, solver, or a model")
    _playing_options(parser)
    add("--price-in", type=float, default=0.0, metavar="P", help="of a million tokens read")
    add("--price-out", type=float, default=0.0, metavar="P", help="of a million tokens written")


def _eval(options: Namespace, overrides: Overrides) -> int:
    from ragen.env import make
    from ragen.evaluation import outcomes_of
    from ragen.report import markdown, show
    from ragen.scores import Prices, as_record, scores
    from ragen.targets import config_for

    server = _server(options)
    prices = Prices(options.price_in, options.price_out)
    named = [name for each in options.world or [] for name in each.split(",")]
    asked_in = [overrides | {"world": name} for name in named] or [overrides]
    worlds = [config_for(options.target, values, server).world for values in asked_in]
    for world in worlds:  # none is played before all are known to exist
        make(world.name, **world.params)
    sections = []
    for world, values in zip(worlds, asked_in, strict=True):
        with _counting(world.name, options.episodes * options.samples) as count:
            evaluation, outcomes = outcomes_of(
                options.target,
                values,
                episodes=options.episodes,
                seed=options.seed,
                temperature=options.temperature,
                samples=options.samples,
                server=server,
                concurrency=options.concurrency,
                out=options.out,
                on_outcome=count,
            )
        sections.append(scores(evaluation, outcomes, prices))
        if options.json:
            print(json.dumps(as_record(evaluation, outcomes, prices)), flush=True)
        else:
            show(_console(), sections[-1:])
    if options.markdown is not None:
        _write(options.markdown, markdown(sections))
    return 0


@contextmanager
def _counting(name: str, total: int) -> Iterator[Callable[[Outcome, int], None]]:
    """A bar of the episodes that are played, where somebody sees it."""
    from rich.progress import Progress

    console = _console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(name, total=total)
            yield lambda _, left: bar.update(task, completed=total - left)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on from here") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise RagenError(f"cannot write {path}: {reason}") from None


def _compare_options(parser: Parser) -> None:
    add = parser.add_argument
    add("one", metavar="A", help="what ragen eval takes; runs of several seeds: A1,A2,A3")
    add("other", metavar="B", help="the same, such as base")
    add("--suite", metavar="NAME", help="where a skill may carry over to: bandit or sokoban")
    _playing_options(parser)


def _compare(options: Namespace, overrides: Overrides) -> int:
    from ragen.compare import contests, in_all, table
    from ragen.evaluation import outcomes_of
    from ragen.report import markdown, show
    from ragen.targets import is_local

    server, places = _server(options), _places(options)

    def measure(target: str, settings: Mapping[str, Any]) -> tuple[Evaluation, list[Outcome]]:
        with _counting(target, options.episodes * options.samples) as count:
            return outcomes_of(
                target,
                settings,
                episodes=options.episodes,
                seed=options.seed,
                temperature=options.temperature,
                samples=options.samples,
                server=None if is_local(target) else server,
                concurrency=options.concurrency,
                out=options.out,
                on_outcome=count,
            )

    arms = options.one.split(","), options.other.split(",")
    found = []
    for comparison in contests(*arms, places, overrides, measure):
        found.append(comparison)
        if options.json:
            print(json.dumps(comparison.record()), flush=True)
        else:
            show(_console(), [table(comparison)])
    if not options.json:
        show(_console(), in_all(found))
    if options.markdown is not None:
        _write(options.markdown, markdown([*map(table, found), *in_all(found)]))
    return 0


def _places(options: Namespace) -> Mapping[str, Mapping[str, Any]]:
    """Where is compared: a suite, the worlds that were named, or where the first run was trained.

    Raises:
        RagenError: There is no such suite, or worlds are named besides.
    """
    from ragen.compare import SUITES

    named = [name for each in options.world or [] for name in each.split(",")]
    if options.suite is None:
        return {name: {"world": name} for name in named} or {"": {}}
    if named:
        raise RagenError("--suite names the worlds already: leave --world out")
    if options.suite not in SUITES:
        raise RagenError(f"there is no suite {options.suite!r}: expected {' or '.join(SUITES)}")
    return SUITES[options.suite]


def _report_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, finished or not")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where report.md and its plots go [RUN]"
    )


def _report(options: Namespace, _: Overrides) -> int:
    from ragen.report import page, read_facts, show, write_report

    facts = read_facts(options.run)
    path = write_report(facts, options.out or options.run)
    console = _console()
    show(console, page(facts))
    console.print(f"\nwith plots: {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _study_options(parser: Parser) -> None:
    parser.add_argument("study", nargs="?", metavar="NAME", help="a study; without one, list them")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="of each arm [5]")
    parser.add_argument("--scale", choices=("laptop", "paper"), default="laptop", help="[laptop]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="[runs/study-NAME-SCALE]")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="runs at once [cores]")
    parser.add_argument(
        "--dry-run", action="store_true", help="print claim, rule and runs, and do nothing"
    )
    parser.add_argument("--json", action="store_true", help="end with the verdict as one JSON line")
    parser.epilog = "What is done is kept: the same command goes on after a stop or a kill."


def _study(options: Namespace, _: Overrides) -> int:
    from ragen.study import load_study, studies

    if options.study is None:
        for name in studies():
            print(f"{name:<16} {load_study(name).title}")
        return 0
    study = load_study(options.study)
    out = options.out or Path("runs") / f"study-{study.name}-{options.scale}"
    from ragen.studies import grid, page, plan, run_study

    if options.dry_run:
        print(plan(study, grid(study, options.scale, options.seeds, out)))
        return 0
    found = run_study(
        study, options.scale, seeds=options.seeds, out=out, jobs=options.jobs, say=_complain
    )
    if options.json:
        print(json.dumps({"study": study.name, "verdict": found.verdict, "out": str(out)}))
        return 0
    print("\n".join(page(found)))
    print(f"\nwith its figure and a row for each run: {out}")
    return 0


def _export_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, finished or not")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a folder that does not exist [RUN/export-step-N]"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="a checkpoint's step [the newest]")
    which.add_argument("--best", action="store_true", help="the checkpoint that was evaluated best")
    parser.add_argument(
        "--merge", action="store_true", help="add a LoRA adapter to its base: whole weights"
    )


def _export(options: Namespace, _: Overrides) -> int:
    from ragen.export import export

    folder = export(
        options.run, options.out, step=options.step, best=options.best, merge=options.merge
    )
    print(f"the policy is in {folder}; its README.md says how well it plays and how to use it")
    return 0


def _play_options(parser: Parser) -> None:
    which = "a world (ragen envs), file.py:Class, or a recipe"
    parser.add_argument("world", metavar="WORLD", help=which)
    parser.add_argument(
        "--player",
        default="human",
        metavar="WHO",
        help="human, random, solver, base or RUN [human]",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which level [0]")
    parser.epilog = "Any config key (ragen train --help) may be set as well."


def _play(options: Namespace, overrides: Overrides) -> int:
    from ragen.play import play_world, show_episode
    from ragen.players import PLAYERS
    from ragen.targets import config_for

    if options.seed < 0:
        raise RagenError(f"--seed {options.seed}: expected a whole number ≥ 0")
    overrides = {**overrides, "world.name": options.world}
    console = _console()
    if options.player in PLAYERS:
        config = config_for(options.player, overrides)
        if options.player == "human" and "world.params.observation" not in overrides:
            config.world.params.pop("observation", None)  # the world's own: a map
        try:
            play_world(console, config.world, PLAYERS[options.player](options.seed), options.seed)
        except EOFError:  # Ctrl-D at the prompt: the person has had enough.
            print()
        return 0
    from ragen.evaluation import play_target

    show_episode(console, play_target(options.player, overrides, seed=options.seed))
    return 0


def _envs_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument(
        "--episodes", type=int, default=256, metavar="N", help="levels behind random and best [256]"
    )


def _envs(options: Namespace, _: Overrides) -> int:
    if options.episodes < 1:
        raise RagenError(f"--episodes {options.episodes}: expected a whole number ≥ 1")
    from ragen.env import worlds
    from ragen.references import Budget, reference
    from ragen.seeding import eval_level
    from ragen.settings import recipes, resolve

    levels = [eval_level(index) for index in range(options.episodes)]
    rows: list[dict[str, Any]] = []
    for name, world in worlds().items():
        recipe = name if name in recipes() else None
        budgets = resolve(recipe, {"world.name": name}).world
        budget = Budget(budgets.turns, budgets.actions_per_turn, budgets.actions)
        found = reference(name, {}, budget, levels)
        rows.append(
            {
                "name": name,
                "random": found.random,
                "best": found.best,
                "random_return": found.random_return,
                "best_return": found.best_return,
                "turns": budget.turns,
                "actions": budget.actions,
                "description": world.description,
            }
        )
    if options.json:
        print(json.dumps(rows))
        return 0
    from rich.table import Table

    table = Table(title=f"worlds, {len(levels)} levels, within their budgets", title_justify="left")
    for column in ("world", "random play", "best play", "turns", "actions", "what it is"):
        left = column in ("world", "what it is")
        table.add_column(column, justify="left" if left else "right", no_wrap=column == "world")
    for row in rows:
        best = "?" if row["best"] is None else f"{row['best']:.1%}"
        numbers = (f"{row['random']:.1%}", best, str(row["turns"]), str(row["actions"]))
        table.add_row(row["name"], *numbers, row["description"])
    _console().print(table)
    return 0


def _check_options(parser: Parser) -> None:
    parser.add_argument(
        "worlds", nargs="*", metavar="WORLD", help="worlds, or path/to/file.py:Class [all]"
    )


def _check(options: Namespace, _: Overrides) -> int:
    from ragen.env import check, make, worlds

    for name in options.worlds or worlds():
        check(make(name))
        print(f"{name}: keeps the contract")
    return 0


def _base_options(parser: Parser) -> None:
    families = "bandit, frozen-lake, frozen-lake-still or sokoban"
    parser.add_argument("family", metavar="FAMILY", help=families)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where it is saved")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="[0]")
    parser.add_argument("--steps", type=int, metavar="N", help="of each stage; fewer for a trial")
    parser.add_argument("--stages", type=Path, metavar="DIR", help="keep the model of each stage")


def _base(options: Namespace, _: Overrides) -> int:
    if options.steps is not None and options.steps < 1:
        raise RagenError(f"--steps {options.steps}: expected a whole number ≥ 1")
    from ragen.base import prepare_family

    prepare_family(options.family, options.out, options.seed, options.steps, print, options.stages)
    print(f"the base of {options.family} is in {options.out}")
    return 0


def _sft_options(parser: Parser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a path to a .toml")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the model's folder; must not exist"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='conversations, one {"messages": […]} a line [episodes of the best player]',
    )
    parser.add_argument("--episodes", type=int, metavar="N", help="of the best player [1024]")
    parser.add_argument("--epochs", type=int, metavar="E", help="passes over the examples [3]")
    parser.add_argument("--lr", type=float, metavar="LR", help="[10 times the recipe's update.lr]")
    _output_options(parser)
    parser.epilog = (
        "World, prompts, budgets and model are the recipe's; keys of these and most of update "
        "(ragen train --help) may be set as well. Then: ragen train RECIPE --model DIR"
    )


def _sft(options: Namespace, overrides: Overrides) -> int:
    from ragen.env import make
    from ragen.settings import resolve

    config = resolve(options.recipe, overrides)
    make(config.world.name, **config.world.params)
    from ragen.sft import refuse_unread, sft
    from ragen.targets import PLAYED_UNDER

    refuse_unread(overrides)
    if options.data and options.episodes is not None:
        raise RagenError("--episodes counts those of the best player; leave it or --data out")
    given = {name: getattr(options, name) for name in ("episodes", "epochs", "lr")}
    console = _console(stderr=True)

    def watch(line: str) -> None:
        if not options.quiet:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    tuned = sft(
        config,
        options.out,
        options.data,
        **{name: value for name, value in given.items() if value is not None},
        watch=watch,
    )
    if options.json:
        print(json.dumps(tuned.record()))
        return 0
    print(tuned)
    print(f"{tuned.seconds:.0f} s; the model is in {tuned.model}")
    again = {key: value for key, value in overrides.items() if key != "model.path"}
    asked = {key: value for key, value in again.items() if key.startswith(PLAYED_UNDER)}
    kept = {key: value for key, value in again.items() if key.startswith((*PLAYED_UNDER, "lora."))}
    world = asked.pop("world.name", options.recipe)
    model, ragen = tuned.model, _program()
    print(f"evaluate it:       {ragen} eval {model} --world {world}{_typed(asked)}")
    print(f"train it further:  {ragen} train {options.recipe} --model {model}{_typed(kept)}")
    return 0


def _typed(overrides: Overrides) -> str:
    """Values by key as they are typed.

    Example:
        >>> _typed({"prompt.think": False, "world.params.names": "two words"})
        " --prompt.think false --world.params.names 'two words'"
    """
    texts = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in overrides.items()
    }
    return "".join(f" --{key} {shlex.quote(text)}" for key, text in texts.items())


def _doctor_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _doctor(options: Namespace, _: Overrides) -> int:
    from ragen.doctor import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            print(f"{'ok' if finding.ok else 'NO':<3} {finding.name:<24} {finding.value}")
    if options.json:
        print(json.dumps({finding.name: finding.value for finding in findings}))
    return 0 if all(finding.ok for finding in findings) else 1


COMMANDS: dict[str, Command] = {
    "train": Command("train an agent by a recipe", _train_options, _train, True, True),
    "resume": Command("go on with a run that was stopped", _resume_options, _resume),
    "eval": Command("measure a run, a model or a player", _eval_options, _eval, True),
    "compare": Command(
        "which of two is better, on the same levels", _compare_options, _compare, True
    ),
    "report": Command("one page about a run, with plots", _report_options, _report),
    "study": Command("run a published claim again, with a verdict", _study_options, _study),
    "export": Command("a run's policy for transformers and vLLM", _export_options, _export),
    "play": Command("play a world yourself, or watch it played", _play_options, _play, True),
    "envs": Command("list the worlds with their floor and ceiling", _envs_options, _envs),
    "check": Command("hold worlds to the contract", _check_options, _check),
    "base": Command("prepare the embedded model anew", _base_options, _base),
    "sft": Command("fine-tune a model on examples", _sft_options, _sft, True),
    "doctor": Command("what is installed, what this machine can do", _doctor_options, _doctor),
}


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _complain(text: str) -> None:
    print(f"ragen: {text}", file=sys.stderr)


def _nearest(name: str) -> str:
    import difflib

    found = difflib.get_close_matches(name, COMMANDS, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Let SIGTERM take Ctrl-C's way inside; what is yielded is no longer empty once it came."""
    came: list[int] = []

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
            return
        from ragen.stopping import cancel_running  # a background job of a script

        if not cancel_running():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
