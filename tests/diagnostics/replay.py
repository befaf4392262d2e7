"""The alarms of a run's metrics, step by step."""

from __future__ import annotations

from collections.abc import Mapping

from ragen.diagnostics.guard import Alarm, GuardState, raise_alarms


def replay(history: Mapping[str, Mapping[int, float]]) -> list[Alarm]:
    """What the guard raises while the metrics come in."""
    state, alarms = GuardState(), list[Alarm]()
    past: dict[str, dict[int, float]] = {name: {} for name in history}
    last = max((step for series in history.values() for step in series), default=0)
    for now in range(last + 1):
        for name, series in history.items():
            if now in series:
                past[name][now] = series[now]
        alarms += raise_alarms(past, now, state)
    return alarms
