"""How the cost of a step grows from 1 to 1,024 GPUs: simulated, from measured and stated costs.

    python benchmarks/scaling.py                    # the tables, some minutes
    python benchmarks/scaling.py --out docs         # and the figure docs/scaling.svg
    python benchmarks/scaling.py --published        # beside a published comparison

`cluster_simulation.py` says what is simulated, `scaling_costs.py` measures what the driver costs on
this machine, in docs/scaling.json. What GPUs cost is computed from data sheets by `gpu_costs`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster_simulation import KINDS, Cluster, Costs, Kind, Outcome, Spread, Work, simulate
from matplotlib.figure import Figure

from ragen.reports.plots import COLOURS, figure_of

MEASURED = Path(__file__).parent.parent / "docs" / "scaling.json"


@dataclass(frozen=True)
class Gpu:
    """Dense bfloat16 operations a second, bytes a second of its memory and of its network."""

    operations: float
    memory: float
    network: float


H100 = Gpu(989e12, 3.35e12, 50e9)
"""NVIDIA's data sheet of the H100 SXM5, and one 400 Gb/s adapter for each GPU, as in a DGX H100."""


@dataclass(frozen=True)
class Model:
    """Weights of a model in bfloat16, and the bytes of a token's keys and values."""

    weights: float
    key_bytes: float


QWEN_7B = Model(7.6e9, 2 * 28 * 4 * 128 * 2)
"""Qwen2.5-7B: 28 layers, 4 heads of 128 for keys and values."""

CHECKSUM_S = 1e-3
"""Assumed: the driver's work for a sampler's answer after a publication."""

MEMORY_SHARE, READ_SHARE, UPDATE_SHARE = 0.7, 0.5, 0.4
"""Assumed: what a decode reaches of the memory's rate, a prefill and an update of the operations.

Llama 3 was trained at 0.38 to 0.43 (arXiv:2407.21783)."""


def gpu_costs(gpu: Gpu, model: Model, driver: Mapping[str, float]) -> Costs:
    """The costs of a model on one GPU a process, with a driver's measured ones.

    A forward reads all weights (2 bytes each) and the keys of its rows; a token takes 2 operations
    a weight in a forward and 6 in an update. Gradients and a publication are 2 bytes a weight over
    the network; the pipelined broadcast of a publication takes as long for many as for one.
    """
    size = 2 * model.weights
    read_s = 2 * model.weights / gpu.operations / READ_SHARE
    return Costs(
        forward_s=size / gpu.memory / MEMORY_SHARE,
        row_s=read_s,
        key_s=model.key_bytes / gpu.memory / MEMORY_SHARE,
        prefill_s=read_s,
        score_s=read_s,
        update_s=6 * model.weights / gpu.operations / UPDATE_SHARE,
        reduce_s=size / gpu.network,
        publish_s=2 * size / gpu.network,
        publish_sampler_s=CHECKSUM_S,
        switch_s=5.0,
        **driver,
    )


def work_of(gpus: int, kind: Kind = "lognormal", per_gpu: int = 16) -> Work:
    """An agent's episodes of five turns: so many for each GPU, in groups of 16."""
    groups = max(1, gpus * per_gpu // 16)
    completion = Spread(300, kind, 4096)
    return Work(groups, 16, 5, 500, 200, completion, Spread(1.0, kind, 30.0), scores=True)


MODES: Mapping[str, Cluster] = {
    "colocated": Cluster(colocated=True),
    "apart": Cluster(),
    "async": Cluster(max_staleness=1),
    "overlap": Cluster(max_staleness=1, overlap=True),
    "players": Cluster(max_staleness=1, overlap=True, players=1),
}
"""The ways to divide the work. The loop does the last two; in async, collections do not overlap."""

PLAYER_GPUS = 8
"""GPUs for each player."""

LEARNER_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)


def cluster_of(gpus: int, mode: str, share: float) -> Cluster:
    """So many GPUs, of which a share are learners."""
    if MODES[mode].colocated:
        return replace(MODES[mode], learners=gpus, samplers=gpus)
    learners = max(1, round(gpus * share))
    players = max(1, gpus // PLAYER_GPUS) if MODES[mode].players else 0
    return replace(MODES[mode], learners=learners, samplers=gpus - learners, players=players)


def best_share(costs: Costs, kind: Kind, mode: str) -> float:
    """The share of learners, of `LEARNER_SHARES`, with which 32 GPUs do most."""
    work = work_of(32, kind)

    def speed(share: float) -> float:
        return simulate(work, costs, cluster_of(32, mode, share), 3, 2).tokens_per_s

    return 0.0 if MODES[mode].colocated else max(LEARNER_SHARES, key=speed)


def outcomes(
    costs: Costs, sizes: Sequence[int], kinds: Sequence[Kind], modes: Sequence[str]
) -> dict[tuple[str, str, int], Outcome]:
    """A simulated run of each kind of length, mode and size."""
    found = {}
    for kind in kinds:
        for mode in modes:
            share = best_share(costs, kind, mode)
            for gpus in sizes:
                if gpus > 1 or MODES[mode].colocated:
                    cluster = cluster_of(gpus, mode, share)
                    steps = 2 if gpus > 256 else 4
                    found[kind, mode, gpus] = simulate(work_of(gpus, kind), costs, cluster, steps)
    return found


def table(found: Mapping[tuple[str, str, int], Outcome]) -> Iterator[str]:
    """Lines of Markdown, one for each run."""
    names = ("lengths", "mode", "GPUs", "tokens/s", "a GPU", "step, s", "learners idle")
    names += ("samplers idle", "rows", "staleness", "driver", "database")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for (kind, mode, gpus), run in found.items():
        episodes = sum(run.staleness.values())
        stale = sum(k * count for k, count in run.staleness.items()) / episodes
        shares = (run.learner_idle, run.sampler_idle, run.driver_busy, run.database_busy)
        learners, samplers, driver, database = (f"{100 * each:.0f} %" for each in shares)
        speed = f"{run.tokens_per_s:,.0f} | {run.tokens_per_s / gpus:,.0f} | {run.step_s:.0f}"
        cells = f"{learners} | {samplers} | {run.rows:.0f} | {stale:.2g} | {driver} | {database}"
        yield f"| {kind} | {mode} | {gpus:,} | {speed} | {cells} |"


LOSS = 0.1
"""A part is the limit when it costs more than this share of the tokens a second."""


def limits(costs: Costs, mode: str = "async", first: int = 128, most: int = 4096) -> Iterator[str]:
    """At which size the driver becomes the limit of a run, and then the database.

    Tried are `first` GPUs, twice as many, and so on up to `most`, beside a driver or database that
    costs nothing. The database is tried with such a driver.
    """
    share = best_share(costs, "lognormal", mode)
    turn_s = costs.turn_s if MODES[mode].players else 0.0
    free_driver = replace(costs, turn_s=turn_s, order_s=0.0, episode_s=0.0)
    for part, free in (("driver", free_driver), ("database", replace(free_driver, record_s=0.0))):
        gpus, loss = first // 2, 0.0
        while loss <= LOSS and gpus < most:
            gpus *= 2
            cluster, work = cluster_of(gpus, mode, share), work_of(gpus)
            speeds = [simulate(work, each, cluster, 2).tokens_per_s for each in (costs, free)]
            loss = 1 - speeds[0] / speeds[1]
        said = "is the limit" if loss > LOSS else "is not the limit yet"
        share_lost = f"it costs {100 * loss:.0f} % of the speed"
        yield f"{mode}: the {part} {said} at {gpus:,} GPUs: {share_lost}."
        costs = free_driver


# A published comparison.

H20_STEP = {"gen": 177.85, "score": 53.92, "update": 113.81, "step": 356.30}
"""Seconds of a synchronous step on 128 H20: "Recipe: Fully Async Policy Trainer" of verl's
documentation, https://verl.readthedocs.io/en/latest/advance/fully_async.html, as of 12/15/2025.
Qwen2.5-Math-7B, DAPO, 512 prompts × 16 a step, 16 updates, responses of at most 28K tokens."""

H20_SYNC = {32: 790.10, 64: 365.28, 128: 356.30}
H20_ASYNC = {32: 294.77, 64: 189.26, 128: 150.63}
"""Seconds of a step by GPUs, half of which are learners where it is asynchronous; these use the
samplers' logprobs and do not score. Over 400 steps, 128 GPUs were 2.35 to 2.67 times as fast."""

ASYNC_REST_S = 150.63 - 33.14 - 113.16
"""What remains of the asynchronous step without waiting for completions and without updates."""


def verl_work(kind: Kind, mean: float, scores: bool) -> Work:
    """A step of the published runs."""
    return Work(512, 16, 1, 150, 0, Spread(mean, kind, 28_000), updates=16, scores=scores)


def calibrated(kind: Kind, mean: float) -> Costs:
    """Costs with which a synchronous step on 128 GPUs takes as long as the published one.

    Samplers: bytes of weights and keys at 0.7 of an H20's 4 TB/s, times a factor. All three parts
    are linear in their costs, so one simulation of each gives the factors.
    """
    size, rate = 2 * QWEN_7B.weights, MEMORY_SHARE * 4.0e12
    unit = Costs(size / rate, 2e-5, QWEN_7B.key_bytes / rate, 1e-4, 0.0, 0.0)
    both = Cluster(128, 128, True)

    def seconds(costs: Costs) -> float:
        return simulate(verl_work(kind, mean, True), costs, both, 2, 1).step_s

    gen_s = seconds(unit)
    factor = H20_STEP["gen"] / gen_s
    samplers = {name: factor * getattr(unit, name) for name in ("forward_s", "row_s", "key_s")}
    samplers["prefill_s"] = factor * unit.prefill_s
    score_s = H20_STEP["score"] / (seconds(replace(unit, score_s=1.0)) - gen_s)
    update_s = H20_STEP["update"] / (seconds(replace(unit, update_s=1.0)) - gen_s)
    rest_s = H20_STEP["step"] - sum(H20_STEP[name] for name in ("gen", "score", "update"))
    return Costs(**samplers, score_s=score_s, update_s=update_s, publish_s=rest_s)


def published(means: Sequence[float] = (1000, 2000, 3000)) -> Iterator[str]:
    """Lines of Markdown: seconds of a step beside the published ones, and the ratio at 128 GPUs."""
    sizes = (32, 64, 128)
    names = ["lengths", "mean", *(f"sync, {each}" for each in sizes)]
    names += [*(f"async, {each}" for each in sizes), "ratio", "scored", "no overlap"]
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    known = [*H20_SYNC.values(), *H20_ASYNC.values()]
    ratio = f"{H20_SYNC[128] / H20_ASYNC[128]:.2f}"
    yield f"| published | | {' | '.join(f'{each:.0f}' for each in known)} | {ratio} | | |"
    for kind in KINDS:
        for mean in means:
            costs = calibrated(kind, mean)
            overlapped = replace(costs, publish_s=ASYNC_REST_S)
            cells = [kind, f"{mean:,.0f}"]
            for gpus in sizes:
                run = simulate(verl_work(kind, mean, True), costs, Cluster(gpus, gpus, True), 3, 1)
                cells.append(f"{run.step_s:.0f}")
            half = Cluster(16, 16, max_staleness=1, overlap=True)
            plain = verl_work(kind, mean, False)
            for gpus in sizes:
                half = replace(half, learners=gpus // 2, samplers=gpus // 2)
                run = simulate(plain, overlapped, half, 4, 2)
                cells.append(f"{run.step_s:.0f}")
            scored = simulate(verl_work(kind, mean, True), overlapped, half, 4, 2)
            waiting = simulate(plain, overlapped, replace(half, overlap=False), 4, 2)
            for each in (run, scored, waiting):
                cells.append(f"{H20_STEP['step'] / each.step_s:.2f}")
            yield f"| {' | '.join(cells)} |"


def draw(found: Mapping[tuple[str, str, int], Outcome], kind: Kind) -> Figure:
    """Tokens a second and GPU, and the share of the driver's time, by GPUs."""
    with figure_of(1, 2) as (figure, axes):
        ((speed, driver),) = axes
        for colour, mode in zip(COLOURS, MODES, strict=False):
            runs = {
                gpus: run for (of, how, gpus), run in found.items() if (of, how) == (kind, mode)
            }
            if runs:
                each = [run.tokens_per_s / gpus for gpus, run in runs.items()]
                speed.plot(list(runs), each, ".-", color=colour, label=mode)
                shares = [run.driver_busy for run in runs.values()]
                driver.plot(list(runs), shares, ".-", color=colour)
        speed.set(xscale="log", ylim=(0, None), title=f"tokens a second and GPU, {kind}")
        driver.set(xscale="log", ylim=(0, 1.02), title="the driver's busy share")
        for place in (speed, driver):
            ticks = sorted({gpus for _, _, gpus in found})[::2]
            place.set_xticks(ticks, [f"{each:,}" for each in ticks])
            place.minorticks_off()
            place.set_xlabel("GPUs")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [1, 2, 8, 32, 128, 512, 1024]
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes, help="numbers of GPUs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["lognormal", "heavy"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--published", action="store_true", help="beside a published comparison")
    parser.add_argument("--out", type=Path, help="folder for scaling.svg")
    args = parser.parse_args()
    if args.published:
        print("\n".join(published()))
        return
    measured = json.loads(MEASURED.read_text())
    driver = dict(measured["driver"])
    driver["turn_s"] += measured["ray"]["message_s"]
    driver["order_s"] += measured["ray"]["episode_message_s"]
    costs = gpu_costs(H100, QWEN_7B, driver)
    found = outcomes(costs, args.sizes, args.kinds, args.modes)
    print("\n".join(table(found)))
    for mode in ("async", "overlap", "players"):
        print("", *limits(costs, mode), sep="\n")
    if args.out:
        draw(found, args.kinds[0]).savefig(args.out / "scaling.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
