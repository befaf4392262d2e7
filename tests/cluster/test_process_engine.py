"""Runs in several processes of one machine: the same numbers each time, whatever is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen.cluster import process_engine
from ragen.cluster.child import Child
from ragen.cluster.process_engine import ProcessEngine, SpreadSampler, with_processes
from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS
from ragen.core.stopping import StopRequested
from ragen.core.types import Episode
from ragen.evaluation.evaluation import evaluate_target
from ragen.models.memory import plans
from ragen.networks.machine import usable_cpus
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup, make_setup
from ragen.sampling.weighted_policy import Stats
from ragen.settings.saved import run_config
from ragen.storage.reader import read_events
from ragen.training.trainer import resume, train
from tests.scripted_policy import ScriptedPolicy
from tests.training.runs import (
    GAE,
    SMALL,
    SendSignal,
    assert_same_results,
    exit_code,
    fork,
    make_config,
    uninterrupted,
    uninterrupted_run,
)

TWO: dict[str, Any] = SMALL | GAE | {"engine__processes": 2}


# Who plays what.


class FakeChild:
    """Plays in this process what a child would, and answers with the counts of a sampler."""

    def __init__(self, policy: ScriptedPolicy, setup: Setup) -> None:
        self._policy, self._setup = policy, setup
        self.eras, self.most = list[int](), list[int]()

    def begin(self, method: str, *arguments: Any, tell: Any) -> Any:
        assert method == "play"
        return arguments, tell

    async def wait(self, call: Any) -> Stats:
        (kinds, which, specs, most, era), tell = call
        self.eras.append(era)
        self.most.append(most)
        setups = [replace(self._setup, **kinds[number]) for number in which]
        await process_engine.run_episodes(self._policy, setups, specs, most, tell)
        return Stats(prefilled=10, reused=30)


class Scripted(ScriptedPolicy):
    """A sampler of scripted replies."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "Dragon</answer>")
        self.stats = Stats(prefilled=30, reused=10)

    def forget(self) -> None:
        """Nothing is remembered."""


def test_groups_are_dealt_out_in_turn_and_come_back_in_order() -> None:
    with_setup = make_setup(make_config(), None)
    hot = replace(with_setup, temperature=0.5)
    children = [FakeChild(Scripted(), with_setup) for _ in range(2)]
    policy: Any = SpreadSampler(Scripted(), children)  # type: ignore[arg-type]
    setups, told = [with_setup, hot, with_setup, with_setup, hot], list[Episode]()
    path, levels = (0, "train", 0), range(EVAL_LEVELS, EVAL_LEVELS + 5)

    def play(player: Any) -> Any:
        return asyncio.run(run_groups(player, setups, levels, 2, path, 9, told.append))

    found = play(policy)
    assert len(told) == 10
    alone = play(Scripted())
    assert [replaced(group.episodes) for group in found] == [
        replaced(group.episodes) for group in alone
    ]
    temperatures = [group.episodes[0].turns[0].prompt.temperature for group in found]
    assert temperatures == [1.0, 0.5, 1.0, 1.0, 0.5]
    assert [child.most for child in children] == [[3], [3]], "nine at once in three processes"
    shares = policy.stats.metrics()["rollout/prefix_cache_hit_fraction"]
    assert shares.value == 70 / 120
    policy.forget()
    play(policy)
    assert [child.eras for child in children] == [[0, 1], [0, 1]]


def replaced(episodes: Sequence[Episode]) -> list[Any]:
    """Episodes without the seconds of their completions."""
    return [
        replace(each, turns=tuple(replace(turn, completion_s=None) for turn in each.turns))
        for each in episodes
    ]


# How many processes.


def test_zero_processes_are_as_many_as_are_free_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(engine__processes=0, rollout__num_groups=6)
    most: list[int] = []
    monkeypatch.setattr(process_engine, "free_cores", lambda count: most.append(count) or 3)
    monkeypatch.setattr(process_engine, "usable_cpus", lambda: 8)
    assert with_processes(config).engine.processes == 3
    (two,) = plans(make_config(engine__processes=2))
    monkeypatch.setattr("ragen.models.memory.available", lambda _: two.needed)
    assert with_processes(config).engine.processes == 2
    assert most == [6, 6], "each process gets a group"
    assert with_processes(make_config(engine__processes=5)).engine.processes == 5


def test_a_gpu_is_used_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "usable_device", lambda: "cuda")
    assert with_processes(make_config(engine__processes=0)).engine.processes == 1
    config = make_config(engine__processes=2)
    with pytest.raises(RagenError, match="processes = 2: a GPU is used by one process; set it"):
        ProcessEngine(config, config.model.path)


@pytest.mark.parametrize("other", [{"engine__name": "ray"}, {"rollout__sampler": "vllm"}])
def test_processes_are_of_the_local_engine_and_sampler(other: dict[str, Any]) -> None:
    with pytest.raises(RagenError, match=r"engine.processes = 2: .* set it to 1, or engine.name"):
        make_config(engine__processes=2, **other)


# Whole runs, each process of which loads torch.


def two() -> Config:
    return make_config(**TWO)


@pytest.mark.slow
def test_a_run_in_two_processes_repeats_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    with pytest.raises(StopRequested):
        train(two(), tmp_path / "run", watcher=SendSignal("step", 1, signal.SIGINT))
    resume(tmp_path / "run")
    assert_same_results(tmp_path / "run", uninterrupted(two()))


@pytest.mark.slow
def test_a_child_that_is_killed_changes_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed as it gets these calls; a new engine goes on from the last checkpoint."""
    left = [("play", 3), ("update", 1), ("load", 1)]
    begin, wanted = Child.begin, len(left)

    def killing(child: Child, method: str, *arguments: Any, **named: Any) -> Any:
        call = begin(child, method, *arguments, **named)
        method = arguments[0] if method == "call" else method
        if left and left[0][0] == method:
            left[0] = method, left[0][1] - 1
            if not left[0][1]:
                del left[0]
                child.kill()
        return call

    monkeypatch.setattr(Child, "begin", killing)
    run = tmp_path / "run"
    train(two(), run)
    assert not left
    lost = [each for each in read_events(run, "engine") if each["data"]["what"] == "lost"]
    assert len(lost) == wanted
    assert all("process 2 of 2 has ended (killed, perhaps" in each["text"] for each in lost)
    assert_same_results(run, uninterrupted(two()))


@pytest.mark.slow
def test_weights_that_differ_between_processes_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums = process_engine.checksums

    def other(tensors: Any) -> dict[str, int]:
        found = checksums(tensors)
        return found | {next(iter(found)): 0}

    monkeypatch.setattr(process_engine, "checksums", other)
    with pytest.raises(RagenError, match=r"the weights of process 2 of 2 are not those of the fi"):
        train(two(), tmp_path / "run")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_refused_once_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a fork: a process group that stayed would be in the way of the next engine."""

    def refuse() -> None:
        config = make_config(engine__processes=2, model__path=str(tmp_path))
        for _ in range(2):
            with pytest.raises(RagenError, match=str(tmp_path)):
                ProcessEngine(config, str(tmp_path))
        assert not torch.distributed.is_initialized()

    assert exit_code(fork(refuse)) == 0, capfd.readouterr().err


@pytest.mark.slow
def test_an_evaluation_has_the_processes_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = uninterrupted_run(two())
    assert run_config(run).engine.processes == 2
    used, begin = list[str](), Child.begin

    def noting(child: Child, method: str, *arguments: Any, **named: Any) -> Any:
        used.append(method)
        return begin(child, method, *arguments, **named)

    monkeypatch.setattr(Child, "begin", noting)
    assert len(evaluate_target(str(run), episodes=6)[1]) == 6
    assert used == ["ready", "start", "play"]
    assert torch.get_num_threads() <= max(1, usable_cpus() // 2)
