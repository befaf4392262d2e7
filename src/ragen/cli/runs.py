"""The commands for runs: train, resume, report, export, study."""

from __future__ import annotations

import gc
import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen.cli.agent import agent_options, task_options, with_agent
from ragen.cli.command import Command, Overrides, Parser, complain, program, terminal, whole
from ragen.cli.help import train_epilog
from ragen.cli.process import STARTED
from ragen.core.errors import RagenError

if TYPE_CHECKING:
    from rich.console import Console

    from ragen.config.config import Config
    from ragen.evaluation.results import Evaluation
    from ragen.studies.study import Study
    from ragen.training.progress import Watcher
    from ragen.training.running import Result


def load_for_good(name: str) -> None:
    """Import a module, and hide every object that exists then from Python's garbage collector.

    torch and transformers make half a million objects. While they are loaded, the collector would
    search these again and again, in a quarter of the time, and free none of them.
    """
    if name not in sys.modules:
        gc.disable()
        try:
            import_module(name)
        finally:
            gc.freeze()
            gc.enable()


def _train_options(parser: Parser) -> None:
    recipe = "a recipe's name, or a path to a .toml; without one, name an environment with --env"
    parser.take("recipe", "RECIPE", recipe, nargs="?")
    agent_options(parser)
    parser.take("--out", "DIR", "the run's folder; it must not exist [runs/RECIPE-N]", Path)
    parser.flag("--dry-run", "print the resolved config and do nothing")
    parser.output_flags()


def _train(options: Namespace, overrides: Overrides) -> int:
    from ragen.rollout.setup import at_stage, facts_of
    from ragen.settings.code import sources
    from ragen.settings.model import advice
    from ragen.settings.resolve import resolve

    config = resolve(options.recipe, with_agent(options, overrides), complain)
    for alone in config.by_env().values():
        facts_of(alone.env)  # refuses wrong parameters, and is read again by the run
    for stage in range(1, len(config.curriculum.stages) + 1):
        facts_of(at_stage(config, stage).env)
    sources(config)  # loads and checks code from outside
    if options.dry_run:
        if warning := advice(config.prompt.style, config.model.path):
            complain(warning)
        _show_config(config)
        return 0
    from ragen.models.names import resolve_model
    from ragen.storage.database import refuse_existing

    refuse_existing(options.out)
    resolve_model(config.model.path, config.env.name)
    load_for_good("ragen.training.trainer")  # loads torch, so mistakes are refused before
    from ragen.training.trainer import train

    return _watch_run(lambda watcher: train(config, options.out, watcher=watcher), options)


def _gateway_options(parser: Parser) -> None:
    parser.take("model", "MODEL", "the model to train: a folder, a run, or a name on the Hub")
    task_options(parser)
    parser.take("--port", "N", "0 takes any free port", whole(0, 65535), 8000)
    host = "address to serve on; others than of this machine need a token, RAGEN_GATEWAY_TOKEN"
    parser.take("--host", "ADDRESS", host, default="127.0.0.1")
    parser.take("--out", "DIR", "the run's folder; it must not exist [runs/outside-N]", Path)
    parser.flag("--dry-run", "print the resolved config and do nothing")
    parser.output_flags()
    parser.epilog = (
        "Short for: ragen train --agent outside --model MODEL. Programs fetch their tasks with\n"
        "POST /v1/episodes and post rewards to /v1/reward (docs/agents.md). To measure a model in\n"
        "the same way: ragen eval MODEL --agent outside --tasks FILE"
    )


def _gateway(options: Namespace, overrides: Overrides) -> int:
    options.agent, options.recipe = "outside", None
    where = {"env.params.address": f"{options.host}:{options.port}"}
    return _train(options, {"model.path": options.model, **where, **overrides})


def _resume_options(parser: Parser) -> None:
    parser.take("run", "RUN", "the run's folder", Path)
    parser.output_flags()
    parser.epilog = (
        "A run is resumed with its own settings. --KEY VALUE changes one from here on, such as\n"
        "--steps 400, and is recorded as an event (ragen help keys lists them).\n"
        "To train its model further in a new run: ragen train RECIPE --model RUN"
    )


def _resume(options: Namespace, overrides: Overrides) -> int:
    from ragen.storage.database import DATABASE, check_run_folder

    check_run_folder(options.run, DATABASE)
    load_for_good("ragen.training.trainer")
    from ragen.training.trainer import resume

    return _watch_run(lambda watcher: resume(options.run, watcher, overrides), options)


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
        if error := sys.exception():
            error.add_note(_advice(watcher))
    # With --json, standard output holds the JSON line only.
    _show_result(terminal(stderr=options.json), result)
    if options.json:
        print(json.dumps(_result_record(result)))
    return 0


def _advice(watcher: Watcher) -> str:
    from ragen.storage.checkpoint import folders

    if not watcher.run:
        return "nothing was saved"
    if not folders(watcher.run):
        return f"{watcher.run} holds no checkpoint yet: train again, with another --out"
    return f"resume with: {program()} resume {shlex.quote(str(watcher.run))}"


def _show_config(config: Config) -> None:
    """Print a config, its changes to its preset, and the memory that it needs."""
    from ragen.config.reading import differences, dump
    from ragen.models.memory import plans
    from ragen.models.names import is_available_offline

    changes = differences(config)
    print(f"# {len(changes)} values differ from the preset {config.algorithm}:")
    for change in changes:
        preset = "unset" if change.preset is None else json.dumps(change.preset, default=str)
        value = json.dumps(change.value, default=str)  # such as a date
        print(f"#   {change.key} = {value}  (preset: {preset})")
    print(dump(config), end="")
    model = config.model.path
    if model == "base" or is_available_offline(model):  # else it would be downloaded
        print(*(f"# {line}" for each in plans(config) for line in each.lines()), sep="\n")
    else:
        print(f"# memory: unknown; {model} is neither a folder nor in the Hub's cache")


EVALUATIONS = ("before", "before_greedy", "after", "after_greedy")
"""The names of a run's evaluations, in the order of the table."""


def _result_record(result: Result) -> dict[str, Any]:
    made = result.evaluations
    after = made.get("after")
    parts = {
        part.env: _rates({name: each.parts[place] for name, each in made.items()})
        for place, part in enumerate(after.parts if after else ())
    }
    return {
        "env": result.env,
        **_rates(made),
        **({"envs": parts} if parts else {}),
        "seconds": round(result.seconds, 1),
        "command_seconds": round(time.perf_counter() - STARTED, 1),
        "run": str(result.run),
        "alarms": [str(alarm) for alarm in result.alarms],
    }


def _rates(made: Mapping[str, Evaluation]) -> dict[str, float | None]:
    """Success of each evaluation that was made, with the baselines."""
    after = made.get("after")
    rates = {name: made[name].success if name in made else None for name in EVALUATIONS}
    random, optimal = (after.random, after.optimal) if after else (None, None)
    return {**rates, "random": random, "optimal": optimal}


def _show_result(console: Console, result: Result) -> None:
    from ragen.core.tables import Section, show

    lines: list[str] = []
    made = {name: result.evaluations[name] for name in EVALUATIONS if name in result.evaluations}
    if made:
        columns = ("player", "success", "95 % interval", "mean return")
        sections = []
        for place, first in enumerate(next(iter(made.values())).by_env):
            title = f"{first.env}, {first.episodes} held-out levels"
            rows = (
                each.by_env[place].row(f"{name.partition('_')[0]}, {each.how}")
                for name, each in made.items()
            )
            sections.append(Section(title, (), columns, first.with_baselines(rows)))
        show(console, sections)
        if result.after.success < result.before.success:
            lines.append("\nthe agent got worse; its signs of the Echo Trap (arXiv:2504.20073):")
            lines += [f"  {sign}" for sign in result.signs] or ["  none"]
    run, ragen = shlex.quote(str(result.run)), program()
    env = result.after.by_env[0].env if made else result.env
    lines += [
        f"\nall took {time.perf_counter() - STARTED:.0f} s with start-up and evaluations, "
        f"the run's steps {result.seconds:.0f} s",
        f"the run is in {result.run}",
        f"watch it play:  {ragen} play {env} --player {run}",
        f"evaluate it:    {ragen} eval {run}",
        f"view it:        {ragen} view {run}",
        f"report on it:   {ragen} report {run}",
    ]
    print("\n".join(lines), file=console.file)


def _report_options(parser: Parser) -> None:
    parser.take("run", "RUN", "the run's folder, finished or not", Path)
    parser.take("--out", "DIR", "folder for report.md and its plots [RUN]", Path)


def _report(options: Namespace, _: Overrides) -> int:
    from ragen.core.tables import show
    from ragen.reports.facts import read_facts
    from ragen.reports.report import page, write_report

    facts = read_facts(options.run)
    path = write_report(facts, options.out or options.run)
    show(terminal(), page(facts))
    print(f"\nwith plots: {path}")
    return 0


def _export_options(parser: Parser) -> None:
    parser.take("run", "RUN", "the run's folder, finished or not", Path)
    parser.take("--out", "DIR", "a folder that does not exist [RUN/export-step-N]", Path)
    which = parser.add_mutually_exclusive_group().add_argument
    which("--step", type=whole(0), metavar="N", help="a checkpoint's step [the newest]")
    which("--best", action="store_true", help="the checkpoint with the best evaluation")
    parser.flag("--merge", "merge a LoRA adapter into its base")
    episodes = "write all recorded episodes instead, one per row: FILE.jsonl or FILE.parquet"
    parser.take("--episodes", "FILE", episodes, Path)
    traces = "write all recorded episodes' tokens as OpenEnv's TrainingTrace, one JSON per line"
    parser.take("--trace", "FILE", traces, Path)


def _export(options: Namespace, _: Overrides) -> int:
    from ragen.storage.database import check_run_folder

    check_run_folder(options.run)
    if options.episodes is None and options.trace is None:
        from ragen.reports.export import export

        policy = {name: getattr(options, name) for name in ("out", "step", "best", "merge")}
        folder = export(options.run, **policy)
        print(f"the policy is in {folder}; its README.md shows its results and how to use it")
        return 0
    if options.out or options.step is not None or options.best or options.merge:
        raise RagenError(
            "--episodes and --trace write no policy: leave --out, --step, --best and --merge out"
        )
    from ragen.storage.export_episodes import export_episodes, export_traces

    for out, write in ((options.episodes, export_episodes), (options.trace, export_traces)):
        if out is not None:
            print(f"{write(options.run, out)} episodes are in {out}")
    return 0


def _study_options(parser: Parser) -> None:
    parser.take("study", "NAME", "a study; without one, list them", nargs="?")
    parser.flag("--all", "every study, and an overview of what they found")
    parser.take("--only", "ENVIRONMENT", "one environment of the study [all]")
    parser.take("--seeds", "N", "seeds per arm [the study's own]", whole(0, 10_000))
    scales = ("laptop", "paper")
    parser.take("--scale", "SCALE", "laptop or paper", default="laptop", choices=scales)
    parser.take("--out", "DIR", "folder [runs/study-NAME-SCALE, for all runs/studies-SCALE]", Path)
    parser.take("--jobs", "N", "parallel runs [cores]", whole(0, 1024))
    parser.flag("--dry-run", "print the claim, the predictions and the runs, and do nothing")
    parser.flag("--json", "end with each verdict as one JSON line")
    parser.epilog = "Finished runs are kept: the same command continues after a stop or a kill."


def _study(options: Namespace, _: Overrides) -> int:
    from ragen.studies.study import cells_of, load_study, preview, study_names

    if options.all and (options.study or options.only):
        raise RagenError("--all takes every study and environment: leave the name and --only out")
    if options.study is None and not options.all:
        for name in study_names():
            print(f"{name:<17} {load_study(name).title}")
        return 0
    studies = [load_study(name) for name in (study_names() if options.all else [options.study])]
    name = "studies" if options.all else f"study-{options.study}"
    out = options.out or Path("runs") / f"{name}-{options.scale}"
    places = [(each, out / each.name if options.all else out) for each in studies]
    if not options.dry_run:
        return _run_studies(options, out, places)
    for each, folder in places:
        seeds = each.seeds if options.seeds is None else options.seeds
        print(preview(each, cells_of(each, options.scale, seeds, folder, options.only)))
    return 0


def _run_studies(options: Namespace, out: Path, places: Sequence[tuple[Study, Path]]) -> int:
    from ragen.studies.overview import write_overview
    from ragen.studies.results import page
    from ragen.studies.runner import run_study

    how = {"seeds": options.seeds, "jobs": options.jobs or 0, "only": options.only}
    found = [
        run_study(each, options.scale, out=folder, report=complain, **how)
        for each, folder in places
    ]
    for findings, (study, folder) in zip(found, places, strict=True):
        if options.json:
            outcomes = {each.environment: each.outcome for each in findings.decisions}
            record = {"study": study.name, "verdict": findings.verdict, "outcomes": outcomes}
            print(json.dumps(record | {"out": str(folder)}))
        else:
            print("\n".join(page(findings)))
            print(f"\nwith its figure and a row for each run: {folder}")
    if options.all:
        write_overview(found, out)
    return 0


COMMANDS: dict[str, Command] = {
    "train": Command("train an agent with a recipe", _train_options, _train, True, train_epilog),
    "gateway": Command(
        "train a model by programs that fetch their tasks", _gateway_options, _gateway, True
    ),
    "resume": Command("resume a stopped run", _resume_options, _resume, True),
    "report": Command("write a one-page report of a run, with plots", _report_options, _report),
    "export": Command("export a run's policy for transformers and vLLM", _export_options, _export),
    "study": Command("test a published claim again, with a verdict", _study_options, _study),
}
