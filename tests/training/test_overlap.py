"""Steps that are played ahead: staleness, resumes and lost engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.errors import EngineLost, RagenError
from ragen.core.stopping import StopRequested
from ragen.core.types import Completion, Group, Prompt
from ragen.sampling.local_sampler import Sampler, Seat
from ragen.storage.reader import read_events, read_metrics
from ragen.training import collection
from ragen.training.ahead import Buffer, Played, staleness
from ragen.training.trainer import resume, train
from tests.bandit_model import settings
from tests.records import episode, turn
from tests.tiny import ends, tiny_model, tiny_tokenizer
from tests.training.copied_engine import CopiedEngine, use_copied
from tests.training.runs import rows


@pytest.fixture(autouse=True)
def _copied(monkeypatch: pytest.MonkeyPatch) -> None:
    use_copied(monkeypatch)


def ahead(most: int = 1, **more: Any) -> Config:
    own = {"engine__name": "ray", "engine__max_staleness": most, "eval__every": 1}
    return merge("bandit", settings(**{**own, **more}))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A run that plays up to two steps ahead, and the steps whose play began, from 0."""
    begun, play = list[int](), collection._play

    async def noted(run: Any, starts: Any, step: int, *more: Any) -> Any:
        begun.append(step)
        return await play(run, starts, step, *more)

    with pytest.MonkeyPatch.context() as patch:
        use_copied(patch)
        patch.setattr(collection, "_play", noted)
        run = tmp_path_factory.mktemp("ahead") / "run"
        train(ahead(2), run)
    return run, begun


def sampled_versions(run: Path) -> dict[int, set[int]]:
    """The versions that sampled each step."""
    found: dict[int, set[int]] = {}
    query = (
        "SELECT step, policy_version FROM turns JOIN episodes ON episodes.id = episode_id"
        " WHERE phase = 'train'"
    )
    for step, version in rows(run, query):
        found.setdefault(step, set()).add(version)
    return found


def test_steps_are_played_with_weights_of_earlier_ones(played: tuple[Path, list[int]]) -> None:
    """Step n is trained after n − 1 publications; its play began up to two of these before."""
    run, begun = played
    versions = sampled_versions(run)
    assert list(versions) == [1, 2, 3]
    for step, found in versions.items():
        assert min(found) >= step - 3 and max(found) <= step - 1
    assert any(min(found) < step - 1 for step, found in versions.items()), "none was ahead"
    assert begun == [0, 1, 2], "nothing is played beyond the last step"
    metrics = read_metrics(run)
    assert max(metrics["engine/staleness_max"].values()) <= 2
    assert set(metrics["engine/stale_groups"].values()) == {0.0}
    assert "mismatch/max_abs" not in metrics, "earlier weights are no mismatch"
    assert max(metrics["importance/mean"].values()) != 1.0
    assert "time/generate_s" not in metrics and min(metrics["engine/play_s"].values()) > 0


def test_every_step_has_its_own_levels_and_seeds(
    played: tuple[Path, list[int]], bandit_run: Path
) -> None:
    """As without staleness, whose first step is the same in every token."""
    query = (
        'SELECT step, "group", member, level_seed, noise_seed FROM episodes'
        " WHERE phase = 'train' ORDER BY 1, 2, 3"
    )
    assert rows(played[0], query) == rows(bandit_run, query)
    replies = "SELECT reply FROM turns JOIN episodes ON episodes.id = episode_id WHERE step = 1"
    first = [rows(run, f"{replies} AND phase = 'train'") for run in (played[0], bandit_run)]
    assert first[0] == first[1]


def test_a_resumed_run_plays_again_what_was_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, updates = tmp_path / "run", 0
    update = CopiedEngine.update

    async def stopping(engine: Any, *arguments: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 3:
            raise StopRequested(2)
        return await update(engine, *arguments)

    monkeypatch.setattr(CopiedEngine, "update", stopping)
    with pytest.raises(StopRequested, match="resume with"):
        train(ahead(1, eval__every=0), run)
    monkeypatch.setattr(CopiedEngine, "update", update)
    resume(run)
    twice = 'GROUP BY attempt, phase, step, "group", member HAVING count(*) > 1'
    assert rows(run, f"SELECT step FROM episodes {twice}") == []
    assert list(sampled_versions(run)) == [1, 2, 3]
    assert list(read_metrics(run)["engine/queue"]) == [1, 2, 3]


@pytest.mark.slow
def test_a_lost_engine_takes_its_plays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = tmp_path / "run", 0
    complete = Seat.complete

    async def losing(seat: Seat, prompt: Prompt) -> Completion:
        nonlocal calls
        calls += 1
        if calls == 22:  # four of them in the first evaluation
            raise EngineLost("a sampler was killed")
        return await complete(seat, prompt)

    monkeypatch.setattr(Seat, "complete", losing)
    train(ahead(2, eval__every=0), run)
    assert [each["data"]["what"] for each in read_events(run, "engine")] == ["lost", "restored"]
    assert list(sampled_versions(run)) == [1, 2, 3]
    assert max(read_metrics(run)["engine/staleness_max"].values()) <= 2


def test_only_an_engine_of_many_processes_plays_ahead() -> None:
    with pytest.raises(RagenError, match=r'set engine\.name = "ray"'):
        merge("bandit", settings(engine__max_staleness=1))


def test_what_is_too_stale_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that says that its weights are three publications older than they are."""
    answer = Sampler._completion

    def older(sampler: Sampler, *parts: Any) -> Completion:
        made = answer(sampler, *parts)
        return replace(made, policy_version=made.policy_version - 3)

    monkeypatch.setattr(Sampler, "_completion", older)
    run = tmp_path / "run"
    train(ahead(1, steps=1, eval__every=0), run)
    assert set(read_metrics(run)["engine/stale_groups"].values()) == {2.0}
    assert rows(run, "SELECT DISTINCT kept FROM episodes WHERE phase = 'train'") == [(0,)]
    (first, *_) = read_events(run, "engine")
    assert first["text"] == "2 of 2 groups are staler than 1: not trained on"
    assert first["data"] == {"what": "stale", "groups": [0, 1]} and first["step"] == 1


def test_staleness_is_that_of_the_oldest_completion() -> None:
    turns = [turn(0.0), turn(1.0)]
    old = replace(turns[1], completion=replace(turns[1].completion, policy_version=-2))
    group = Group((episode(turns[0]), episode(turns[0], old)))
    assert staleness(group, 1) == 3 and staleness(Group((episode(),)), 7) == 0


def test_the_life_of_an_entry() -> None:
    """The first is trained on; dropping ends the second, which plays, and the third has failed."""
    played = Played((), 1, 0.0)

    async def finishes(_: asyncio.Semaphore) -> Played:
        return played

    async def plays_on(_: asyncio.Semaphore) -> Played:
        await asyncio.sleep(60)
        return played

    async def fails(_: asyncio.Semaphore) -> Played:
        raise EngineLost("gone")

    async def live() -> None:
        buffer = Buffer(2, slots=1)
        for play in (finishes, plays_on, fails):
            buffer.add((), play)
        entries = list(buffer.entries)
        assert not any(entry.play.done() for entry in entries)
        assert await buffer.take() is played
        await buffer.drop()
        assert not buffer.entries and all(entry.play.done() for entry in entries)

    asyncio.run(live())


# New weights while completions are open.


def test_open_completions_go_on_with_new_weights_and_leave_no_keys() -> None:
    """Up to the publication the logprobs are the old model's."""
    tokenizer = tiny_tokenizer("chatml")
    old, new = (tiny_model(tokenizer, seed=seed) for seed in (0, 1))
    model = tiny_model(tokenizer, seed=0)
    ids = tuple(range(5, 15))
    sampler = Sampler(model, ends(), slots=2, max_length=64)

    async def run() -> tuple[Completion, Completion, SimpleNamespace]:
        first = asyncio.create_task(sampler.complete(Prompt((), ids, 0, 20, 0.0, 0)))
        while not sampler._running or int(sampler._count[0]) + int(sampler._count[1]) < 8:
            await asyncio.sleep(0)
        (slot,) = sampler._running
        at = SimpleNamespace(count=int(sampler._count[slot]))
        with torch.no_grad():
            for one, other in zip(model.parameters(), new.parameters(), strict=True):
                one.copy_(other)
        await sampler.publish(model, 1)
        began = await first
        assert began.token_ids is not None
        longer = ids + began.token_ids
        second = await sampler.complete(Prompt((), longer, 0, 5, 0.0, 0))
        return began, second, at

    began, second, at = asyncio.run(run())
    assert (began.policy_version, second.policy_version) == (0, 1)
    assert sampler.stats.reused == 0, "the second prompt extends the first, whose keys are mixed"
    alone = Sampler(old, ends(), slots=2, max_length=64)
    expected = asyncio.run(alone.complete(Prompt((), ids, 0, 20, 0.0, 0)))
    assert began.logprobs is not None and expected.logprobs is not None
    assert began.logprobs[: at.count] == expected.logprobs[: at.count]
    assert began.logprobs[at.count + 1] != expected.logprobs[at.count + 1]
    fresh = Sampler(new, ends(), slots=2, max_length=64)
    again = asyncio.run(fresh.complete(Prompt((), ids + began.token_ids, 0, 5, 0.0, 0)))
    assert (again.token_ids, again.logprobs) == (second.token_ids, second.logprobs)


@pytest.mark.slow
def test_the_bandit_is_learnt_one_step_ahead(tmp_path: Path) -> None:
    more = {"steps": 24, "rollout__num_groups": 8, "eval__episodes": 128, "update__lr": 3e-3}
    more |= {"eval__every": 0, "rollout__slots": 32, "record__tokens_every": 0}
    result = train(ahead(1, **more), tmp_path / "run")
    assert result.after.success > result.before.success + 0.2
