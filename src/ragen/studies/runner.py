"""Running a study: each run of its grid once, several at a time.

Runs go to ``OUT/<environment>/<arm>/seed-<n>``, each on one thread, several at once in processes of
their own. Finished runs are skipped and interrupted ones are resumed, so the same command continues
a study. At the end `results` writes ``runs.csv``, ``study.svg`` and ``study.md``.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

from ragen.config.reading import changed
from ragen.core.errors import GuardStop, RagenError
from ragen.core.files import OTHER_OUT, file_errors
from ragen.core.stopping import StopRequested
from ragen.evaluation.results import load_evaluations
from ragen.finetuning.sft import sft
from ragen.networks.machine import usable_cpus
from ragen.settings.code import resolve_paths
from ragen.settings.saved import run_config
from ragen.storage.database import CONFIG
from ragen.storage.reader import read_events
from ragen.studies.results import Findings, conclude, transfer_of
from ragen.studies.study import Cell, Scale, Study, cells_of
from ragen.training.trainer import resume, train


def run_study(
    study: Study,
    scale: Scale = "laptop",
    *,
    seeds: int | None = None,
    out: Path,
    jobs: int = 0,
    only: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Make the runs of a study that `out` does not hold yet, then decide.

    Each arm has `seeds` training seeds, by default those of the study. `jobs` runs are made at
    once; 0 takes one for each core. `only` is the one environment to run: others are decided if all
    of their runs are there. `report` receives a line about each run that ends.
    """
    if jobs < 0:
        raise RagenError(f"--jobs {jobs}: expected a whole number ≥ 0")
    seeds = study.seeds if seeds is None else seeds
    cells = cells_of(study, scale, seeds, out)
    for cell in cells:
        is_there = (cell.folder / CONFIG).exists()
        if is_there and run_config(cell.folder) != resolve_paths(cell.config):
            raise RagenError(
                f"{cell.folder} was made with other settings than the study has now; "
                "name another --out"
            )
    with file_errors("write", out, OTHER_OUT):
        out.mkdir(parents=True, exist_ok=True)
    asked = cells if only is None else cells_of(study, scale, seeds, out, only)
    missing = [cell for cell in asked if not is_finished(cell)]
    report(f"{study.name}: {len(asked)} runs, {len(asked) - len(missing)} of them done")
    for number, cell in enumerate(make_runs(missing, jobs or usable_cpus()), 1):
        report(f"{number}/{len(missing)}  {cell.environment}, {cell.arm}, seed {cell.seed}")
    others = (cell for cell in cells if only not in (None, cell.environment))
    unfinished = {cell.environment for cell in others if not is_finished(cell)}
    known = [cell for cell in cells if cell.environment not in unfinished]
    return conclude(study, scale, seeds, out, known)


def make_runs(cells: Sequence[Cell], jobs: int) -> Iterator[Cell]:
    """Make the runs, `jobs` of them at once; yield each when it ends."""
    if jobs == 1:
        for cell in cells:
            make_run(cell)
            yield cell
        return
    # Spawned: a fork of a process with torch's threads in it may hang.
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        started = {pool.submit(make_run, cell): cell for cell in cells}
        try:
            for future in as_completed(started):
                future.result()
                yield started[future]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()  # each saves its run as of its last step
            if isinstance(error, BrokenProcessPool):
                raise RagenError(
                    "the process of a run was killed, as the system does when memory runs out; "
                    "the same command continues from here: give it fewer --jobs"
                ) from None
            raise


def end_with_parent() -> None:
    """End this process of the pool as soon as the study's own ends, even if that is killed.

    Otherwise it would write into a run that the same command, given again, resumes.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_run(cell: Cell) -> None:
    """Make or resume one run. A stop by the guard is a result like any other.

    Raises:
        RagenError: The run failed.
        KeyboardInterrupt: The run was stopped, and is saved.
    """
    try:
        if cell.fine_tuning is not None and not cell.tuned_model.exists():
            config = changed(cell.config, {"model.path": cell.base})
            sft(config, cell.tuned_model, **cell.fine_tuning.model_dump())
        if any(cell.folder.glob("checkpoints/step-*")):
            resume(cell.folder)
        else:
            shutil.rmtree(cell.folder, ignore_errors=True)  # killed before its first checkpoint
            with file_errors("write", cell.folder.parent, OTHER_OUT):
                cell.folder.parent.mkdir(parents=True, exist_ok=True)
            train(cell.config, cell.folder)
        transfer_of(cell)
    except GuardStop:
        return
    except StopRequested:
        raise KeyboardInterrupt("stopped; the same command continues from here") from None


def is_finished(cell: Cell) -> bool:
    """True if a run has its last evaluation, or was stopped by the guard."""
    if not (cell.folder / CONFIG).exists():
        return False
    actions = (event["data"] or {} for event in read_events(cell.folder, "guard"))
    if any(action.get("action") == "stop" for action in actions):
        return True
    # The greedy evaluation is the last thing that a run does.
    greedy = [e.step for e in load_evaluations(cell.folder) if e.evaluation.temperature == 0]
    return bool(greedy) and (max(greedy) > 0 or cell.config.steps == 0)
