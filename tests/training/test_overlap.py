"""Steps that are played ahead: staleness, late episodes, stops, rollbacks and resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ragen.algorithms.batch import TokenFields
from ragen.algorithms.losses import correct_for_sampler
from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.errors import EngineLost, RagenError
from ragen.core.stopping import StopRequested
from ragen.core.types import Completion, Episode, Group, Prompt
from ragen.diagnostics.collapse import STAGE
from ragen.engines.sampler import Sampler
from ragen.evaluation.branch import stage_of
from ragen.rollout.chat import Chat
from ragen.rollout.groups import run_most
from ragen.rollout.setup import Setup, make_setup
from ragen.storage.reader import read_events, read_metrics
from ragen.storage.stored_episodes import read_episode
from ragen.training import experience
from ragen.training.ahead import Ahead, Rest, Start
from ragen.training.experience import staleness
from ragen.training.progress import Watcher
from ragen.training.trainer import resume, train
from tests.bandit_model import settings
from tests.records import episode, turn
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.copied_engine import CopiedEngine, use_copied
from tests.training.test_trainer import rows

STEPS = 5
GATE = asyncio.Semaphore
CLOSING: dict[str, Any] = {"engine__min_members": 2, "engine__close_after_s": 0.05}


@pytest.fixture(autouse=True)
def _copied(monkeypatch: pytest.MonkeyPatch) -> None:
    use_copied(monkeypatch)


def ahead(most: int = 1, **more: Any) -> Config:
    own = {"engine__name": "ray", "engine__max_staleness": most, "steps": STEPS}
    return resolve("bandit", settings(**{**own, **more}))


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


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_are_played_with_weights_of_earlier_ones(tmp_path: Path, steps: int) -> None:
    """Step n is trained after n − 1 publications; its play began `steps` of these before."""
    config = ahead(steps)
    train(config, tmp_path / "run")
    versions = sampled_versions(tmp_path / "run")
    assert list(versions) == [1, 2, 3, 4, 5]
    for step, found in versions.items():
        assert min(found) >= step - 1 - steps and max(found) <= step - 1
    assert any(min(found) < step - 1 for step, found in versions.items()), "none was ahead"
    metrics = read_metrics(tmp_path / "run")
    assert max(metrics["engine/staleness_max"].values()) <= steps
    assert set(metrics["engine/stale_groups"].values()) == {0.0}
    assert "mismatch/max_abs" not in metrics, "earlier weights are no mismatch"
    assert max(metrics["importance/mean"].values()) != 1.0
    assert "time/generate_s" not in metrics and min(metrics["engine/play_s"].values()) > 0


def test_every_step_has_its_own_levels_and_seeds(tmp_path: Path) -> None:
    """As without staleness, whose first step is the same in every token."""
    query = (
        'SELECT step, "group", member, level_seed, noise_seed FROM episodes'
        " WHERE phase = 'train' ORDER BY 1, 2, 3"
    )
    train(ahead(2), tmp_path / "run")
    train(resolve("bandit", settings(steps=STEPS)), tmp_path / "sync")
    assert rows(tmp_path / "run", query) == rows(tmp_path / "sync", query)
    replies = "SELECT reply FROM turns JOIN episodes ON episodes.id = episode_id WHERE step = 1"
    first = [rows(tmp_path / name, f"{replies} AND phase = 'train'") for name in ("run", "sync")]
    assert first[0] == first[1]


def test_a_run_plays_nothing_beyond_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    play = experience._play

    async def noted(run: Any, starts: Any, step: int, *more: Any) -> Any:
        begun.append(step)
        return await play(run, starts, step, *more)

    monkeypatch.setattr(experience, "_play", noted)
    train(ahead(3), tmp_path / "run")
    assert begun == [0, 1, 2, 3, 4]


def test_a_resumed_run_plays_again_what_was_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, updates = tmp_path / "run", 0
    update = CopiedEngine.update

    async def stopping(engine: Any, *arguments: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 5:
            raise StopRequested(2)
        return await update(engine, *arguments)

    monkeypatch.setattr(CopiedEngine, "update", stopping)
    with pytest.raises(StopRequested, match="resume with"):
        train(ahead(1), run)
    monkeypatch.setattr(CopiedEngine, "update", update)
    resume(run)
    twice = 'GROUP BY attempt, phase, step, "group", member HAVING count(*) > 1'
    assert rows(run, f"SELECT step FROM episodes {twice}") == []
    assert list(sampled_versions(run)) == [1, 2, 3, 4, 5]
    assert list(read_metrics(run)["engine/queue"]) == [1, 2, 3, 4, 5]


def test_a_lost_engine_takes_its_plays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = tmp_path / "run", 0
    complete = Sampler.complete

    async def losing(sampler: Sampler, prompt: Prompt) -> Completion:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise EngineLost("a sampler was killed")
        return await complete(sampler, prompt)

    monkeypatch.setattr(Sampler, "complete", losing)
    train(ahead(2), run)
    assert [each["data"]["what"] for each in read_events(run, "engine")] == ["lost", "restored"]
    assert list(sampled_versions(run)) == [1, 2, 3, 4, 5]
    assert max(read_metrics(run)["engine/staleness_max"].values()) <= 2


def test_only_an_engine_of_many_processes_plays_ahead() -> None:
    for more, words in (
        ({"engine__max_staleness": 1}, 'set engine.name = "ray"'),
        ({"engine__name": "ray", "engine__min_members": 2}, "set both, or neither"),
        (
            {"engine__name": "ray", "engine__min_members": 2, "engine__close_after_s": 1.0},
            "above 0",
        ),
    ):
        with pytest.raises(RagenError, match=words):
            resolve("bandit", settings(**cast(dict[str, Any], more)))


# Episodes that a group does not wait for.


class SlowPolicy:
    """Replies at once, but to the prompts that are held back."""

    def __init__(self, *held: int) -> None:
        self.held, self.calls = held, 0
        self.released = asyncio.Event()

    async def complete(self, prompt: Prompt) -> Completion:
        number = self.calls
        self.calls += 1
        if number in self.held:
            await self.released.wait()
        return Completion((1,), (-1.0,), "Phoenix</answer>", "stop", 0)


def a_setup() -> Setup:
    chat = Chat(tiny_tokenizer("chatml"), think=False)
    return make_setup(resolve("bandit", settings()), chat)


def play_most(policy: SlowPolicy, least: int) -> tuple[list[Group], list[list[Episode]]]:
    """Two groups of four; the episodes that they did not wait for, once these have ended."""

    async def play() -> tuple[list[Group], list[list[Episode]]]:
        work = run_most(policy, [a_setup()] * 2, [5, 6], 4, (0, "x"), GATE(8), None, least, 0.05)
        groups, tasks = await asyncio.wait_for(work, 20)
        policy.released.set()
        return groups, [[await task for task in each.values()] for each in tasks]

    return asyncio.run(play())


def test_groups_close_without_their_last_episodes() -> None:
    groups, rests = play_most(SlowPolicy(2, 7), least=3)
    assert [[e.member for e in group.episodes] for group in groups] == [[0, 1, 3], [0, 1, 2]]
    assert [[(e.group, e.member, e.level_seed) for e in rest] for rest in rests] == [
        [(0, 2, 5)],
        [(1, 3, 6)],
    ]


def test_a_group_with_too_few_episodes_waits() -> None:
    policy = SlowPolicy(0, 1)

    async def play() -> tuple[list[Group], list[dict[int, asyncio.Task[Episode]]]]:
        asyncio.get_running_loop().call_later(0.3, policy.released.set)
        return await run_most(policy, [a_setup()] * 2, [5, 6], 4, (0, "x"), GATE(8), None, 3, 0.05)

    groups, rests = asyncio.run(play())
    assert [len(group.episodes) for group in groups] == [4, 4] and rests == [{}, {}]


def test_the_end_of_an_episode_costs_as_much_in_a_large_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not all open episodes are waited for anew each time that one of them ends."""
    waited, wait, setup = list[int](), asyncio.wait, a_setup()

    async def counted(tasks: Any, **how: Any) -> Any:
        waited.append(len(tasks))
        return await wait(tasks, **how)

    class OneByOne(SlowPolicy):
        async def complete(self, prompt: Prompt) -> Completion:
            self.calls += 1
            await asyncio.sleep(0.1 + 0.005 * self.calls)
            return await super().complete(prompt)

    async def play() -> list[Group]:
        what = OneByOne(), [setup] * 8, list(range(8)), 4, (0, "x"), GATE(32), None
        groups, rests = await run_most(*what, 4, 0.05)
        assert rests == [{}] * 8
        return groups

    monkeypatch.setattr(asyncio, "wait", counted)
    groups = asyncio.run(play())
    assert [len(group.episodes) for group in groups] == [4] * 8
    assert sum(waited) <= 2 * 32


@pytest.mark.parametrize("close_after_s", [0.05, 5.0])
def test_a_bug_in_an_episode_ends_a_collection_that_closes_early(close_after_s: float) -> None:
    setup = a_setup()

    class Broken(SlowPolicy):
        async def complete(self, prompt: Prompt) -> Completion:
            if self.calls == 5:
                await asyncio.sleep(0.2)
                raise RagenError("the policy is broken")
            return await super().complete(prompt)

    async def play() -> None:
        what = Broken(*range(5)), [setup] * 2, [5, 6], 4, (0, "x"), GATE(8), None
        with pytest.raises(RagenError, match="the policy is broken"):
            await asyncio.wait_for(run_most(*what, 3, close_after_s), 3)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())


def test_late_episodes_are_a_group_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply of the first step takes until that step is trained on."""
    complete, update, calls = Sampler.complete, CopiedEngine.update, 0
    trained = asyncio.Event()

    async def slow(sampler: Sampler, prompt: Prompt) -> Completion:
        nonlocal calls
        calls += 1
        if calls == 4 + 7:  # after the evaluation of four levels, at two temperatures
            await trained.wait()
        return await complete(sampler, prompt)

    async def telling(engine: Any, *arguments: Any) -> Any:
        trained.set()
        return await update(engine, *arguments)

    monkeypatch.setattr(Sampler, "complete", slow)
    monkeypatch.setattr(CopiedEngine, "update", telling)
    run = tmp_path / "run"
    train(ahead(2, **CLOSING, filter__rule="all", eval__every=0), run)
    sizes = rows(
        run,
        "SELECT step, \"group\", count(*) FROM episodes WHERE phase = 'train' GROUP BY 1, 2",
    )
    played = sum(count for *_, count in sizes)
    seeds = rows(run, "SELECT count(DISTINCT noise_seed) FROM episodes WHERE phase = 'train'")
    assert seeds == [(played,)], "none is there twice"
    late = read_metrics(run)["engine/late_episodes"]
    assert sum(late.values()) == played - sum(n for _, g, n in sizes if g < 2)
    assert sum(late.values()) > 0 and STEPS * 4 <= played <= STEPS * 8


def test_late_groups_that_have_ended_are_found_without_comparing_each_pair() -> None:
    """Their number grows with that of the samplers, and that of the pairs with its square."""
    compared, start = list[int](), Start(a_setup(), 5)

    class Compared(Rest):
        def __eq__(self, other: object) -> bool:
            compared.append(1)
            return self is other

    async def take() -> tuple[list[Group], list[Rest]]:
        loop, kept = asyncio.get_running_loop(), Ahead()
        for number in range(40):
            task: Any = loop.create_future()
            if number % 2:
                task.set_result(episode(turn(1.0)))
            kept.rests.append(Compared(0, number, 1, start, {3: task}))
        state, settings = SimpleNamespace(step=1), SimpleNamespace(seed=0)
        run: Any = SimpleNamespace(ahead=kept, state=state, config=settings, judge=None)
        groups, stages = await experience._ended(run, 7)
        assert stages == [1] * 20
        return groups, kept.rests

    groups, left = asyncio.run(take())
    assert [group.episodes[0].group for group in groups] == [*range(7, 27)]
    assert [rest.group for rest in left] == [*range(0, 40, 2)] and not compared


def test_late_episodes_of_an_easier_stage_count_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply of the first step takes until a step of the second stage is trained on."""
    complete, calls, advanced = Sampler.complete, 0, asyncio.Event()

    async def slow(sampler: Sampler, prompt: Prompt) -> Completion:
        nonlocal calls
        calls += 1
        if calls == 4 + 7:  # after the evaluation of four levels, at two temperatures
            await advanced.wait()
        return await complete(sampler, prompt)

    class Noting(Watcher):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            if metrics[STAGE] == 2:
                advanced.set()

    monkeypatch.setattr(Sampler, "complete", slow)
    easier = {"curriculum__stages": [{"safe_reward": 0.5}], "curriculum__success": 0.01}
    closing = {"engine__min_members": 3, "engine__close_after_s": 0.05, "eval__every": 0}
    run = tmp_path / "run"
    train(ahead(1, **{**easier, **closing, "steps": 11}), run, watcher=Noting())
    metrics = read_metrics(run)
    stages, own, crossed = metrics[STAGE], dict[int, list[bool]](), 0
    for number, step in rows(run, "SELECT id, step FROM episodes WHERE phase = 'train'"):
        recorded = read_episode(run, number)
        played = 1 + (recorded.episode.level_seed - 10_000) // 2  # each step has two levels
        assert stage_of(run, recorded) == stages[played]
        crossed += stages[played] < stages[step]
        if stages[played] == stages[step]:
            own.setdefault(step, []).append(recorded.episode.success)
    assert crossed > 0
    successes = [fmean(own[step]) for step in sorted(own) if stages[step] == 2]
    expected = [fmean(successes[: n + 1][-5:]) for n in range(len(successes))]
    compared = [each for step, each in metrics["curriculum/success"].items() if stages[step] == 2]
    assert compared == expected


def test_late_episodes_are_played_again_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply of step 1 takes until the engine is lost, after the third step."""
    run, update, complete = tmp_path / "run", CopiedEngine.update, Sampler.complete
    calls = updates = 0

    async def slow(sampler: Sampler, prompt: Prompt) -> Completion:
        nonlocal calls
        calls += 1
        if calls == 2 * 4 + 7:  # after the evaluations of four levels
            await asyncio.Event().wait()
        return await complete(sampler, prompt)

    async def losing(engine: Any, *arguments: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 3 * 2 + 1:
            raise EngineLost("a learner was killed")
        return await update(engine, *arguments)

    monkeypatch.setattr(Sampler, "complete", slow)
    monkeypatch.setattr(CopiedEngine, "update", losing)
    least = {"engine__min_members": 3, "engine__close_after_s": 0.05, "filter__rule": "all"}
    train(ahead(2, **least, advantage__name="reinforce_pp"), run)
    query = "SELECT count(*), count(DISTINCT noise_seed) FROM episodes WHERE phase = 'train'"
    ((played, seeds),) = rows(run, query)
    assert played == seeds, "none is there twice"
    of_first_steps = f"{query} AND level_seed < {10_000 + 3 * 2}"
    assert rows(run, of_first_steps) == [(3 * 8, 3 * 8)], "the run ends before the last ones only"
    assert sum(read_metrics(run)["engine/late_episodes"].values()) >= 1


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
    train(ahead(1, steps=3), run)
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


def test_dropping_ends_every_task() -> None:
    async def drop() -> Ahead:
        kept = Ahead()
        kept.plays.append(asyncio.create_task(asyncio.sleep(60)))  # type: ignore[arg-type]
        failed: Any = asyncio.get_running_loop().create_future()
        failed.set_exception(EngineLost("gone"))
        kept.plays.append(failed)
        await kept.drop()
        return kept

    kept = asyncio.run(drop())
    assert not kept.plays and not kept.rests and not kept.plans


def test_the_decoupled_weight_is_that_of_the_learner_over_the_sampler() -> None:
    """AReaL (arXiv:2505.24298), eq. 5: π_proximal / π_behaviour, truncated, times the clipped term.

    The behaviour policy, three publications older, sampled with .5 and .2 what the learner, before
    its update, gives .25 and .6.
    """
    one = torch.ones(2)
    sampled, old = (torch.tensor(pair).log() for pair in ([0.5, 0.2], [0.25, 0.6]))
    tokens = TokenFields(one.long(), one.bool(), one, one.long(), sampled, old, advantages_N=one)
    weighted, metrics = correct_for_sampler(tokens, cap=2.0)
    assert weighted.advantages_N is not None
    assert weighted.advantages_N.tolist() == pytest.approx([0.5, 2.0])
    assert float(cast(Any, metrics["importance/capped_fraction"]).value) == 0.5


# New weights while completions are open.


def test_open_completions_go_on_with_new_weights_and_leave_no_keys() -> None:
    """Up to the publication the logprobs are the old model's."""
    tokenizer = tiny_tokenizer("chatml")
    old, new = (tiny_model(tokenizer, seed=seed) for seed in (0, 1))
    model = tiny_model(tokenizer, seed=0)
    ids = tuple(range(5, 15))
    sampler = Sampler(model, (), lambda tokens: "", slots=2, max_length=64)

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
    alone = Sampler(old, (), lambda tokens: "", slots=2, max_length=64)
    expected = asyncio.run(alone.complete(Prompt((), ids, 0, 20, 0.0, 0)))
    assert began.logprobs is not None and expected.logprobs is not None
    assert began.logprobs[: at.count] == expected.logprobs[: at.count]
    assert began.logprobs[at.count + 1] != expected.logprobs[at.count + 1]
    fresh = Sampler(new, (), lambda tokens: "", slots=2, max_length=64)
    again = asyncio.run(fresh.complete(Prompt((), ids + began.token_ids, 0, 5, 0.0, 0)))
    assert (again.token_ids, again.logprobs) == (second.token_ids, second.logprobs)


@pytest.mark.slow
def test_the_bandit_is_learnt_one_step_ahead(tmp_path: Path) -> None:
    more = {"steps": 40, "rollout__num_groups": 8, "eval__episodes": 256, "update__lr": 3e-3}
    result = train(ahead(1, **more), tmp_path / "run")
    assert result.after.success > result.before.success + 0.2
