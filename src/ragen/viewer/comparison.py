"""Comparison of two sets of episodes: a run at two steps, or two runs.

Only recorded evaluations are compared; nothing is played. If both sets have the same levels of the
same task, success is compared level by level, because a paired comparison shows smaller differences
than two separate rates do. `level` gives the episodes of one level, so that their texts can be read
side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from ragen.core.statistics import (
    Interval,
    difference,
    mcnemar,
    paired_difference,
    pass_at_k,
    smallest_detectable,
)
from ragen.evaluation.outcomes import how_sampled
from ragen.settings.target import task_settings
from ragen.viewer.episode_page import detail
from ragen.viewer.reading import Answer, Question, RunReader
from ragen.viewer.run_list import evaluations, read_settings, with_parts

MOST_OF_LEVEL = 400
"""Maximum number of episodes of one level that are sent at once; a run records fewer."""


class EpisodeSet(NamedTuple):
    """The recorded episodes of an evaluation: share of successes and number, by level seed."""

    env: str
    step: int
    levels: dict[int, tuple[float, int]]


Recorded = Mapping[tuple[str, str], list[EpisodeSet]]
"""A run's own evaluations that count, by phase and environment, in the order of the steps."""


def compare(asked: Question) -> Answer:
    """``/api/compare``: how much better the second of two sets of episodes does than the first.

    Without ``other``, these are the first and the last evaluation of a run. With it, they are the
    last evaluations of the run and of the other one, in each environment and way of sampling.
    """
    with asked.reading() as reader:
        run = _evaluated(reader)
    if "other" not in asked.query:
        found = list(_first_and_last(run))
    else:
        with asked.reading("other") as reader:
            found = list(_two_runs(run, _evaluated(reader)))
        found.sort(key=lambda each: (each["env"], each["how"]))
    for each in found:  # random and optimal play, if they were measured on the same levels
        rate = run.rates.get((each["env"], each["how"]), {}) if each["won"] is not None else {}
        each |= {"random": rate.get("random"), "optimal": rate.get("optimal")}
    return {"comparisons": found}


def levels(asked: Question) -> Answer:
    """``/api/levels``: levels evaluated at more than one step, with the ``successes`` at each."""
    with asked.reading() as run:
        recorded = _recorded(run)
    found: list[Answer] = []
    for (phase, env), sets in recorded.items():
        for seed in sorted({seed for each in sets for seed in each.levels}):
            played = [each for each in sets if seed in each.levels]
            if len(played) > 1:
                known = {"phase": phase, "env": env, "level_seed": seed}
                steps = [each.step for each in played]
                successes = [each.levels[seed][0] for each in played]
                found.append(known | {"steps": steps, "successes": successes})
    return {"levels": found}


def level(asked: Question) -> Answer:
    """``/api/level``: the episodes of one level that count, by step."""
    query = "SELECT id, attempt, step FROM episodes WHERE phase = ? AND level_seed = ?"
    place: list[Any] = [asked.text("phase"), asked.whole_number("level_seed")]
    if "env" in asked.query:  # a level of one environment of a mixture
        query, place = f"{query} AND env = ?", [*place, asked.text("env")]
    with asked.reading() as run:
        rows = run.rows(f"{query} ORDER BY step, id", *place)
        ids = [number for number, attempt, step in rows if run.counts(attempt, step)]
        return {"episodes": [detail(run, number) for number in ids[:MOST_OF_LEVEL]]}


class _Evaluated(NamedTuple):
    """The evaluations of one run; `rates` are the last ones, by environment and way of sampling."""

    task: Mapping[str, Any]
    temperature: float
    rates: Mapping[tuple[str, str], Answer]
    recorded: Recorded

    def how(self, phase: str) -> str:
        """How an evaluation of this phase chose its tokens."""
        return how_sampled(0.0 if phase == "eval greedy" else self.temperature)


def _evaluated(run: RunReader) -> _Evaluated:
    settings = read_settings(run.folder)
    return _Evaluated(
        task_settings(settings),
        settings.get("eval.temperature", 1.0),
        {(each["env"], each["how"]): each for each in with_parts(evaluations(run))},
        _recorded(run),
    )


def _recorded(run: RunReader) -> Recorded:
    """A run's own evaluations that count; a phase plays the same levels each time."""
    found: dict[tuple[str, str], list[EpisodeSet]] = {}
    for phase, env, step, attempt, seed, share, count in run.rows(
        "SELECT phase, env, step, attempt, level_seed, avg(success), count(*) FROM episodes"
        " WHERE phase IN ('eval', 'eval greedy')"
        " GROUP BY phase, env, step, attempt, level_seed ORDER BY phase, env, step"
    ):
        if run.counts(attempt, step):
            sets = found.setdefault((phase, env), [])
            if not sets or sets[-1].step != step:
                sets.append(EpisodeSet(env, step, {}))
            sets[-1].levels[seed] = share, count
    return found


def _first_and_last(run: _Evaluated) -> Iterator[Answer]:
    for (phase, _), sets in run.recorded.items():
        if len(sets) > 1:
            yield from _paired(sets[0], sets[-1], run.how(phase), "first and last evaluation")


def _two_runs(run: _Evaluated, other: _Evaluated) -> Iterator[Answer]:
    keys = sorted(run.task.keys() | other.task.keys(), key=lambda key: (key != "env.name", key))
    differing = next((key for key in keys if run.task.get(key) != other.task.get(key)), None)
    why, played = f"the tasks differ in {differing}", set[tuple[str, str]]()
    if differing is None:
        why = "no levels that both played are recorded"
        played = run.recorded.keys() & other.recorded.keys()
    compared = set()
    for phase, env in played:
        how = run.how(phase)
        if how == other.how(phase):
            last, others = (each.recorded[phase, env][-1] for each in (run, other))
            for found in _paired(last, others, how, "last evaluation of each"):
                compared.add((env, how))
                yield found
    for key in run.rates.keys() & other.rates.keys() - compared:
        yield _unpaired(run.rates[key], other.rates[key], why)


def _paired(one: EpisodeSet, other: EpisodeSet, how: str, note: str) -> Iterator[Answer]:
    """The comparison on the levels of both sets, if all of these were played equally often."""
    both = sorted(one.levels.keys() & other.levels.keys())
    counts = {each.levels[seed][1] for each in (one, other) for seed in both}
    if len(counts) != 1:
        return
    (samples,) = counts
    before, after = ([each.levels[seed][0] for seed in both] for each in (one, other))
    solved = [[round(share * samples) for share in shares] for shares in (before, after)]
    gains = [late - early for early, late in zip(*solved, strict=True)]
    a, b = (asdict(pass_at_k(each, samples, 1)) for each in solved)
    found = paired_difference([after], [before], samples)
    yield {
        "env": one.env,
        "how": how,
        "a": a | {"step": one.step},
        "b": b | {"step": other.step},
        "difference": asdict(found),
        "levels": len(both),
        "won": sum(gain > 0 for gain in gains),
        "lost": sum(gain < 0 for gain in gains),
        "mcnemar_p": mcnemar(gains),
        "smallest_detectable": smallest_detectable(found),
        "note": f"{note}, level by level",
    }


def _unpaired(one: Answer, other: Answer, why: str) -> Answer:
    found = difference(Interval(**other["success"]), Interval(**one["success"]))
    return {
        "env": one["env"],
        "how": one["how"],
        "a": one["success"] | {"step": one["step"]},
        "b": other["success"] | {"step": other["step"]},
        "difference": asdict(found),
        "levels": min(one["episodes"], other["episodes"]),
        **dict.fromkeys(("won", "lost", "mcnemar_p")),
        "smallest_detectable": smallest_detectable(found),
        "note": f"two rates, not level by level: {why}",
    }
