"""Environments that wait: the same episodes in every form, side by side, and none stops another."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Group
from ragen.core.user_code import UserCodeError
from ragen.envs.checker import check
from ragen.envs.contract import Baselines
from ragen.envs.isolation import Workers
from ragen.envs.registry import make
from ragen.envs.tools import write_call
from ragen.evaluation.baselines import DRAWS_WAITING, Budget, measure_baselines
from ragen.evaluation.targets import load_target
from ragen.models.names import base_folder
from ragen.rollout import venue
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup, make_setup
from ragen.storage.journal import Journal
from tests.heart import beating
from tests.scripted_policy import ScriptedPolicy

FILE = Path(__file__).parents[1] / "waiting_envs.py"
FORMS = ("Asynchronous", "InThreads", "InWorkers")
ON = ScriptedPolicy(lambda prompt: "t</think><answer>on</answer>")


def setup_of(name: str, isolate: bool = False, timeout_s: float = 5.0, **params: Any) -> Setup:
    values = {f"env.params.{key}": value for key, value in params.items()}
    own = {"env.name": f"{FILE}:{name}", "env.isolate": isolate, "env.timeout_s": timeout_s}
    return make_setup(merge(None, own | values), None)


async def played(setup: Setup, num_levels: int = 2, size: int = 2) -> list[Episode]:
    groups = await run_groups(ON, setup, range(num_levels), size, (0, "train", 0), 64)
    return [episode for group in groups for episode in group.episodes]


def play(setup: Setup, *size: int) -> list[Episode]:
    with closing(setup):
        return asyncio.run(played(setup, *size))


def plain(episode: Episode) -> dict[str, Any]:
    """An episode without times and processes."""
    turns = [
        (each.observation, each.reward, each.state_key, each.snapshot, each.info["success"])
        for each in episode.turns
    ]
    return {"level": episode.level_seed, "turns": turns, "end": episode.stop_reason}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_plays_the_same_episodes(form: str) -> None:
    expected = [plain(each) for each in play(setup_of("Count"))]
    episodes = play(setup_of(form))
    assert [plain(each) for each in episodes] == expected
    assert len(expected) == 4 and len(expected[0]["turns"]) == 3
    inside = {turn.info["process"] == os.getpid() for each in episodes for turn in each.turns}
    assert inside == {form != "InWorkers"}


@pytest.mark.parametrize("form", ["Asynchronous", "InThreads"])
def test_episodes_wait_side_by_side_and_the_loop_goes_on(form: str) -> None:
    setup = setup_of(form, delay=0.1)
    with closing(setup):
        episodes, gap = asyncio.run(beating(played(setup, 16, 4)))
    assert all(each.success for each in episodes)
    together = max(turn.info["together"] for each in episodes for turn in each.turns)
    assert together >= 32, "of 64 episodes most wait together"
    assert gap < 0.1, "no wait stops the loop"
    assert setup.venue.seconds == 0, "none of this is the loop's time"


@pytest.mark.parametrize("form", FORMS)
def test_a_limit_ends_its_episode_and_no_other(form: str) -> None:
    limit = 1.0 if form == "InWorkers" else 0.2  # which includes the start of a worker
    episodes = play(setup_of(form, timeout_s=limit, deed="hang"), 4, 1)
    assert [each.stop_reason for each in episodes] == ["solved", "timeout"] * 2
    assert f"longer than {limit:g} s in step" in (episodes[1].error or "")


@pytest.mark.parametrize("form", FORMS)
def test_an_exception_fails_its_episode_with_the_traceback(form: str) -> None:
    episodes = play(setup_of(form, deed="raise"), 4, 1)
    assert [each.stop_reason for each in episodes] == ["solved", "error"] * 2
    error = episodes[1].error or ""
    assert "waiting_envs.py" in error and "no such page" in error


@pytest.mark.parametrize("form", ["Asynchronous", "InWorkers"])
def test_a_run_that_is_stopped_does_not_wait_for_its_environments(form: str) -> None:
    setup = setup_of(form, timeout_s=30.0, deed="hang")

    async def stopped() -> float:
        playing = asyncio.create_task(played(setup, 2, 1))
        await asyncio.sleep(0.3)
        playing.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return time.monotonic() - began

    with closing(setup):
        assert asyncio.run(stopped()) < 3


def test_a_slow_environment_moves_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venue, "FEW", 2)
    monkeypatch.setattr(venue, "SLOW_S", 0.003)
    setup = setup_of("Count", delay=0.001)
    with closing(setup):
        first, second = (asyncio.run(played(setup)) for _ in range(2))
    assert [plain(each) for each in first] == [plain(each) for each in second]
    here, there = ({turn.info["process"] for turn in each[0].turns} for each in (first, second))
    assert here == {os.getpid()} and os.getpid() not in there
    assert "side by side in worker processes" in setup.venue.news

    def refuse(_: Workers) -> None:
        raise UserCodeError("it exists in a notebook only")

    monkeypatch.setattr(Workers, "take", refuse)
    stays = setup_of("Count", delay=0.001)
    with closing(stays):
        assert all(each.success for _ in range(2) for each in asyncio.run(played(stays)))
    assert "it exists in a notebook only" in stays.venue.news and not stays.venue.waits


def test_asynchronous_environments_keep_the_contract() -> None:
    """`ragen.make` gives one whose calls return, so the checker and players know both forms."""
    check(make(f"{FILE}:Asynchronous"), levels=2)
    env = make(f"{FILE}:Asynchronous")
    observation, _ = env.reset(seed=7)
    assert observation == "level 7" and env.step("on")[0] == "1 of 3"
    env.set_state({"number": 2})
    assert env.step("on")[2]
    with pytest.raises(ValueError, match="knows no action 'off'"):
        env.step("off")


def test_asynchronous_tools_are_tools() -> None:
    check(make(f"{FILE}:Library"), levels=1)
    env = make(f"{FILE}:Library")
    (schema,) = env.tools
    assert schema["function"]["name"] == "search"
    assert schema["function"]["parameters"]["properties"]["page"]["type"] == "integer"
    env.reset(seed=0)
    assert env.step(write_call("search", page=3))[0] == "page 3: owl"
    assert env.step(write_call("search", page="three"))[0].startswith("Error: page")
    assert env.step("owl")[1:3] == (1.0, True)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(RagenError, match="waits = 'sometimes': expected one of 'no', 'threads'"):
        make(f"{FILE}:Odd")


def test_baselines_of_waiting_environments_are_played_side_by_side() -> None:
    found = measure_baselines(f"{FILE}:Asynchronous", {"delay": 0.002}, Budget(3, 1, 3), range(4))
    assert found == Baselines(1.0, None, 3.0, None, draws=4 * DRAWS_WAITING)


def test_no_bit_depends_on_how_long_answers_take() -> None:
    """Between environments that wait; without waits, logprobs are equal up to rounding."""

    def config_of(form: str, delay: float) -> Config:
        own = {"env.name": f"{FILE}:{form}", "env.params.delay": delay, "model.path": model}
        return merge(None, own | {"rollout.max_tokens": 6})

    def sampled(form: str, delay: float) -> list[list[Completion]]:
        with closing(make_setup(config_of(form, delay), chat)) as setup:
            groups = asyncio.run(run_groups(policy, setup, range(3), 2, (0, "train", 0), 6))
        return [[turn.completion for turn in each.turns] for g in groups for each in g.episodes]

    model = str(base_folder("bandit"))
    policy, setup = load_target(model, config_of("Count", 0.0))
    chat = setup.chat
    expected = sampled("Asynchronous", 0.0)
    assert sampled("Asynchronous", 0.004) == expected == sampled("InThreads", 0.002)
    for ours, theirs in zip(expected, sampled("Count", 0.0), strict=True):
        assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_group_is_finished_while_others_are_still_played() -> None:
    seen: list[tuple[str, int]] = []

    async def finish(group: Group) -> Group:
        seen.append(("finished", group.episodes[0].group))
        return group

    def note(episode: Episode) -> None:
        seen.append(("ended", episode.group))

    with closing(setup_of("Asynchronous", delay=0.01)) as setup:
        asyncio.run(run_groups(ON, setup, [0, 1], 2, (0, "train", 0), 2, note, 5, finish))
    one, other = [("ended", 5)] * 2 + [("finished", 5)], [("ended", 6)] * 2 + [("finished", 6)]
    assert seen == one + other


def test_a_group_that_cannot_be_finished_or_kept_ends_the_others_in_one_error(
    tmp_path: Path,
) -> None:
    async def refuse(_: Group) -> Group:
        raise RagenError("no judge")

    class Full(Journal):
        def add(self, episode: Episode) -> None:
            raise RagenError("no room")

    with closing(setup_of("Asynchronous", delay=0.001)) as setup:
        about = ON, setup, [0, 1, 2], 2, (0, "train", 0)
        for finish, journal, said in (
            (refuse, None, "no judge"),
            (None, Full(tmp_path, 1, ""), "no room"),
        ):
            with pytest.raises(RagenError, match=said):
                asyncio.run(run_groups(*about, finish=finish, journal=journal))
