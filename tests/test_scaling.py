"""Scaling: costs from data sheets and from this machine, tables, and a published comparison."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import scaling
import scaling_costs
import scaling_runs
import step
from cluster_simulation import Cluster, Costs, simulate

DRIVER = {"turn_s": 1e-3, "order_s": 2e-3, "episode_s": 3e-3, "record_s": 1e-3}
COSTS = scaling.gpu_costs(scaling.H100, scaling.QWEN_7B, DRIVER)


def test_costs_of_a_gpu_follow_from_its_data_sheet() -> None:
    # 7.6e9 weights of 2 bytes at 0.7 of 3.35 TB/s; 28 layers × 4 heads × 128 × 2 × 2 bytes a key.
    assert COSTS.forward_s == pytest.approx(15.2e9 / (0.7 * 3.35e12))
    assert COSTS.key_s == pytest.approx(57_344 / (0.7 * 3.35e12))
    assert COSTS.update_s == pytest.approx(6 * 7.6e9 / (0.4 * 989e12))
    assert COSTS.reduce_s == pytest.approx(0.304)  # 15.2 GB at 50 GB/s
    assert {name: getattr(COSTS, name) for name in DRIVER} == DRIVER


def test_a_cluster_has_as_many_gpus_as_asked_for() -> None:
    for mode in scaling.MODES:
        for gpus in (2, 8, 1024):
            assert scaling.cluster_of(gpus, mode, 3 / 8).gpus == gpus
    assert [scaling.cluster_of(gpus, "players", 3 / 8).players for gpus in (2, 64)] == [1, 8]


def test_tables_and_figure_have_a_row_for_each_run() -> None:
    modes = list(scaling.MODES)
    found = scaling.outcomes(COSTS, [1, 2, 4], ["constant"], modes)
    lines = list(scaling.table(found))
    assert len(lines) == 2 + 3 + 4 * 2  # one GPU cannot be apart
    assert lines[2].startswith("| constant | colocated | 1 | ")
    (legend,) = scaling.draw(found, "constant").legends
    assert [text.get_text() for text in legend.get_texts()] == modes


def test_a_driver_that_is_slow_enough_is_the_limit_at_once() -> None:
    slow = replace(COSTS, turn_s=0.3, record_s=1.0)
    driver, database = scaling.limits(slow, first=8)
    assert driver.startswith("async: the driver is the limit at 8 GPUs")
    assert database.startswith("async: the database is the limit at 8 GPUs")


def test_players_take_the_turns_off_a_driver() -> None:
    slow = replace(COSTS, turn_s=0.3, order_s=1e-3)
    driver, _ = scaling.limits(slow, "players", 8, 8)
    assert driver.startswith("players: the driver is not the limit yet at 8 GPUs")


@pytest.mark.slow
def test_lengths_with_a_tail_reproduce_a_published_speed_up_and_constant_ones_do_not() -> None:
    """Calibrated on one synchronous row, lognormal lengths give the three asynchronous ones."""
    ratios = {}
    for kind in ("lognormal", "constant"):
        costs = replace(scaling.calibrated(kind, 1000), publish_s=scaling.ASYNC_REST_S)
        for gpus, published_s in scaling.H20_ASYNC.items():
            half = Cluster(gpus // 2, gpus // 2, max_staleness=1, overlap=True)
            run = simulate(scaling.verl_work(kind, 1000, False), costs, half, 4, 2)
            if kind == "lognormal":
                assert run.step_s == pytest.approx(published_s, rel=0.1)
        ratios[kind] = scaling.H20_SYNC[128] / run.step_s
    assert 2.2 < ratios["lognormal"] < 2.67 and ratios["constant"] < 1.6


def test_costs_are_fitted_with_the_least_relative_error() -> None:
    factors, worst = scaling_costs.relative_fit([(1, 1), (1, 2), (1, 4)], [3.0, 5.0, 9.0])
    assert factors == pytest.approx([1, 2]) and worst == pytest.approx(0, abs=1e-9)
    # (1 − a/2)² + (1 − a/4)² is least at a = 2.4, which is 0.2 too much and 0.4 too little.
    factors, worst = scaling_costs.relative_fit([(1,), (1,)], [2.0, 4.0])
    assert factors == pytest.approx([2.4]) and worst == pytest.approx(0.4)


def test_the_drivers_costs_are_measured_on_real_episodes(tmp_path: Path) -> None:
    found = scaling_costs.driver_costs(tmp_path, step.Work(2, 4, 2), 8)
    assert found.keys() == DRIVER.keys()
    assert all(0 < seconds < 0.1 for seconds in found.values())


@pytest.mark.slow
def test_a_real_step_takes_what_the_simulation_says(tmp_path: Path) -> None:
    """Within 15 % on an idle machine. Others that use it disturb a try, but not all of five."""
    ratios = list[float]()
    for number in range(5):
        costs = scaling_costs.engine_costs(
            tmp_path / f"engine {number}", "1M", 3, 0, scaling_runs.TURNS
        )
        folder = tmp_path / f"driver {number}"
        costs |= scaling_costs.driver_costs(folder, step.Work(), step.TURN_TOKENS)
        found = scaling_runs.run("local", "1M", 1, 1, 0, 4, 3)
        expected = scaling_runs.predicted(found, Costs(**costs), Cluster(colocated=True), 4)
        ratios.append(expected / found["driver"])
        if ratios[-1] == pytest.approx(1, rel=0.3):
            break
    assert ratios[-1] == pytest.approx(1, rel=0.3), ratios


def test_cpu_seconds_of_this_process_are_counted() -> None:
    before, end = scaling_runs.cpu_seconds(), time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = scaling_runs.cpu_seconds()
    assert after["driver"] - before["driver"] > 0.05 and before.keys() == after.keys()


@pytest.mark.ray
def test_messages_and_publications_through_ray_cost_something(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = scaling_costs.ray_costs(tmp_path, step.Work(2, 8, 2), 8, megabytes=4, messages=32)
    assert min(found.values()) > 0
