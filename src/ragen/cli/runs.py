"""The commands for runs: train, resume, report, export, study."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen.cli.command import (
    Command,
    Overrides,
    Parser,
    complain,
    output_options,
    program,
    terminal,
)
from ragen.cli.help import train_epilog
from ragen.core.errors import RagenError

if TYPE_CHECKING:
    from rich.console import Console

    from ragen.config.config import Config
    from ragen.training.progress import Watcher
    from ragen.training.running import Result


def _train_options(parser: Parser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a recipe's name, or a path to a .toml")
    folder = "the run's folder; it must not exist [runs/RECIPE-N]"
    add("--out", type=Path, metavar="DIR", help=folder)
    add("--dry-run", action="store_true", help="print the resolved config and do nothing")
    output_options(parser)


def _train(options: Namespace, overrides: Overrides) -> int:
    from ragen.config.reading import resolve
    from ragen.config.sources import sources
    from ragen.envs.registry import make

    config = resolve(options.recipe, overrides)
    make(config.env.name, **config.env.params)
    sources(config)  # loads and checks code from outside
    if options.dry_run:
        from ragen.training.progress import hint

        if advice := hint(config):
            complain(advice)
        _show_config(config)
        return 0
    from ragen.models.names import resolve_model
    from ragen.storage.database import refuse_existing

    refuse_existing(options.out)
    resolve_model(config.model.path, config.env.name)
    # Mistakes come before this line, which loads torch.
    from ragen.training.trainer import train

    return _watch_run(lambda watcher: train(config, options.out, watcher=watcher), options)


def _resume_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    output_options(parser)
    parser.epilog = (
        "A run is resumed with its own settings. To train its model further with others: "
        "ragen train RECIPE --model RUN"
    )


def _resume(options: Namespace, _: Overrides) -> int:
    from ragen.storage.database import check_run_folder

    check_run_folder(options.run)
    from ragen.training.trainer import resume

    return _watch_run(lambda watcher: resume(options.run, watcher), options)


def _watch_run(work: Callable[[Watcher], Result], options: Namespace) -> int:
    from ragen.core.stopping import StopRequested
    from ragen.training.progress import watcher_for

    watcher = watcher_for(terminal(stderr=True), options.quiet)
    try:
        result = work(watcher)
    except StopRequested as stop:
        watcher.end()
        complain(f"stopped after the last finished step; {_advice(watcher)}")
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted at once; {_advice(watcher)}") from None
    finally:
        watcher.end()
    # With --json, standard output holds the JSON line only.
    _show_result(terminal(stderr=options.json), result)
    if options.json:
        print(json.dumps(_result_record(result)))
    return 0


def _advice(watcher: Watcher) -> str:
    return f"resume with: {program()} resume {watcher.run}" if watcher.run else "nothing had begun"


def _show_config(config: Config) -> None:
    from ragen.config.reading import differences, dump

    changes = differences(config)
    print(f"# {len(changes)} values differ from the preset {config.algorithm}:")
    for change in changes:
        preset = "unset" if change.preset is None else change.preset
        print(f"#   {change.key} = {change.value!r}  (preset: {preset!r})")
    print(dump(config), end="")
    _show_memory(config)


def _show_memory(config: Config) -> None:
    """Print the memory plan as comments, unless the model would have to be downloaded."""
    from ragen.engines.memory import plan
    from ragen.models.names import is_available_offline

    model = config.model.path
    if model == "base" or is_available_offline(model):
        for line in plan(config).lines():
            print(f"# {line}")
    else:
        print(f"# memory: unknown; {model} is neither a folder nor in the Hub's cache")


def _result_record(result: Result) -> dict[str, Any]:
    def number(name: str, field: str = "success") -> float | None:
        return getattr(result.evaluations.get(name), field, None)

    return {
        "env": result.env,
        "before": number("before"),
        "after": number("after"),
        "random": number("after", "random"),
        "optimal": number("after", "optimal"),
        "seconds": round(result.seconds, 1),
        "run": str(result.run),
        "before_greedy": number("before_greedy"),
        "after_greedy": number("after_greedy"),
        "alarms": [str(alarm) for alarm in result.alarms],
    }


def _show_result(console: Console, result: Result) -> None:
    from ragen.core.tables import Section, show

    names = ("before", "before_greedy", "after", "after_greedy")
    if made := {name: result.evaluations[name] for name in names if name in result.evaluations}:
        first = next(iter(made.values()))
        title = f"{first.env}, {first.episodes} held-out levels"
        rows = (each.row(f"{name.partition('_')[0]}, {each.how}") for name, each in made.items())
        columns = ("player", "success", "95 % interval", "mean return")
        show(console, [Section(title, (), columns, first.with_baselines(rows))])
    run = shlex.quote(str(result.run))
    for line in (
        *_collapse_signs(result),
        f"\n{result.seconds:.0f} s; the run is in {result.run}",
        f"watch it play:  {program()} play {result.env} --player {run}",
        f"evaluate it:    {program()} eval {run}",
        f"view it:        {program()} view {run}",
        f"report on it:   {program()} report {run}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _collapse_signs(result: Result) -> list[str]:
    """The Echo Trap's published signs, in a run that ended worse than it began."""
    if not result.evaluations or result.after.success >= result.before.success:
        return []
    from ragen.storage.reader import read_metrics

    metrics = read_metrics(result.run)
    spread = list(metrics.get("reward/std_in_group", {0: 0.0}).values())
    flat = list(metrics.get("reward/flat_group_fraction", {0: 0.0}).values())
    return [
        "\nthe agent got worse; signs of the Echo Trap (arXiv:2504.20073) in this run:",
        f"  reward std in the group {spread[0]:.3f} → {spread[-1]:.3f}, "
        f"groups without any {flat[0]:.0%} → {flat[-1]:.0%}",
        *(f"  {sign}" for sign in result.signs),
    ]


def _report_options(parser: Parser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder, finished or not")
    add("--out", type=Path, metavar="DIR", help="folder for report.md and its plots [RUN]")


def _report(options: Namespace, _: Overrides) -> int:
    from ragen.core.tables import show
    from ragen.reports.facts import read_facts
    from ragen.reports.report import page, write_report

    facts = read_facts(options.run)
    path = write_report(facts, options.out or options.run)
    console = terminal()
    show(console, page(facts))
    console.print(f"\nwith plots: {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _export_options(parser: Parser) -> None:
    add, which = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder, finished or not")
    add("--out", type=Path, metavar="DIR", help="a folder that does not exist [RUN/export-step-N]")
    which("--step", type=int, metavar="N", help="a checkpoint's step [the newest]")
    which("--best", action="store_true", help="the checkpoint with the best evaluation")
    add("--merge", action="store_true", help="merge a LoRA adapter into its base")
    episodes = "write all recorded episodes instead, one per row: FILE.jsonl or FILE.parquet"
    add("--episodes", type=Path, metavar="FILE", help=episodes)


def _export(options: Namespace, _: Overrides) -> int:
    if options.episodes is not None:
        return _export_episodes(options)
    from ragen.reports.export import export

    folder = export(
        options.run, options.out, step=options.step, best=options.best, merge=options.merge
    )
    print(f"the policy is in {folder}; its README.md reports its results and shows how to use it")
    return 0


def _export_episodes(options: Namespace) -> int:
    if options.out or options.step is not None or options.best or options.merge:
        raise RagenError("--episodes writes no policy: leave --out, --step, --best and --merge out")
    from ragen.storage.export_episodes import export_episodes

    count = export_episodes(options.run, options.episodes)
    print(f"{count} episodes are in {options.episodes}")
    return 0


def _study_options(parser: Parser) -> None:
    add = parser.add_argument
    add("study", nargs="?", metavar="NAME", help="a study; without one, list them")
    add("--seeds", type=int, default=5, metavar="N", help="seeds per arm [5]")
    add("--scale", choices=("laptop", "paper"), default="laptop", help="size [laptop]")
    add("--out", type=Path, metavar="DIR", help="folder [runs/study-NAME-SCALE]")
    add("--jobs", type=int, default=0, metavar="N", help="parallel runs [cores]")
    plan = "print the claim, the predictions and the runs, and do nothing"
    add("--dry-run", action="store_true", help=plan)
    add("--json", action="store_true", help="end with the verdict as one JSON line")
    parser.epilog = "Finished runs are kept: the same command continues after a stop or a kill."


def _study(options: Namespace, _: Overrides) -> int:
    from ragen.studies.study import load_study, study_names

    if options.study is None:
        for name in study_names():
            print(f"{name:<16} {load_study(name).title}")
        return 0
    study = load_study(options.study)
    out = options.out or Path("runs") / f"study-{study.name}-{options.scale}"
    if options.dry_run:
        from ragen.studies.grid import grid, plan

        print(plan(study, grid(study, options.scale, options.seeds, out)))
        return 0
    from ragen.studies.results import page
    from ragen.studies.runner import run_study

    findings = run_study(
        study, options.scale, seeds=options.seeds, out=out, jobs=options.jobs, report=complain
    )
    if options.json:
        print(json.dumps({"study": study.name, "verdict": findings.verdict, "out": str(out)}))
        return 0
    print("\n".join(page(findings)))
    print(f"\nwith its figure and a row for each run: {out}")
    return 0


COMMANDS: dict[str, Command] = {
    "train": Command("train an agent with a recipe", _train_options, _train, True, train_epilog),
    "resume": Command("resume a stopped run", _resume_options, _resume),
    "report": Command("write a one-page report of a run, with plots", _report_options, _report),
    "export": Command("export a run's policy for transformers and vLLM", _export_options, _export),
    "study": Command("test a published claim again, with a verdict", _study_options, _study),
}
