"""The simulation of many machines: one step by hand, and what must hold for all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cluster_simulation import KINDS, Cluster, Costs, Kind, Outcome, Spread, Work, simulate, slowest

FREE = Costs(forward_s=1.0, row_s=0.1, key_s=0.0, prefill_s=0.01, score_s=0.0, update_s=0.0)


def test_a_step_that_can_be_redone_by_hand() -> None:
    work = Work(1, 2, 2, prompt=10, answer=5, completion=Spread(4), scores=False)
    costs = Costs(
        **{"forward_s": 1.0, "row_s": 0.1, "key_s": 0.01, "prefill_s": 0.1},
        **{"score_s": 9.0, "update_s": 0.5, "turn_s": 0.2, "episode_s": 0.3, "record_s": 0.7},
        **{"publish_s": 1.0, "publish_sampler_s": 0.5},
    )
    done = simulate(work, costs, Cluster(), steps=3, warm_up=1)
    # Both prompts are one, 10 tokens: 1 + 1 = 2 s. Three forwards of 2 rows and 20, 22, 24 keys:
    # 1.4 + 1.42 + 1.44. The driver takes 0.2 s for each completion: 6.46 and 6.66 s.
    # The first reads its last token and 5 new ones until 8.06 s, the second, which waited, until
    # 9.66 s. Then 3 forwards of 38, 40, 42 keys: 1.58 + 1.6 + 1.62, until 14.46 s, and 0.4 s.
    rollout = 2 + 4.26 + 0.2 + 1.6 + 1.6 + 4.8 + 0.4
    assert rollout == pytest.approx(14.86)
    # Two episodes of 10 + 4 + 5 + 4 tokens are made a batch, updated on and published.
    step = rollout + 0.6 + 46 * 0.5 + 1.5
    assert done.step_s == pytest.approx(step)
    assert done.tokens_per_s == pytest.approx(16 / step)
    assert done.learner_idle == pytest.approx(1 - 23 / step)
    assert done.sampler_idle == pytest.approx(1 - (2 + 4.26 + 1.6 + 1.6 + 4.8) / step)
    assert done.driver_busy == pytest.approx((4 * 0.2 + 0.6) / step)
    assert done.database_busy == pytest.approx(2 * 0.7 / step)
    assert done.rows == 2 and done.balance == 1 and done.staleness == {0: 6}


@pytest.mark.parametrize("samplers", [1, 2, 4])
@pytest.mark.parametrize("learners", [1, 2, 8])
def test_a_synchronous_step_of_constant_lengths_has_a_closed_form(
    learners: int, samplers: int
) -> None:
    work = Work(4, 8, 3, prompt=100, answer=20, completion=Spread(10), updates=2)
    costs = Costs(
        **{"forward_s": 1.0, "row_s": 0.1, "key_s": 0.0, "prefill_s": 0.01},
        **{"score_s": 0.01, "update_s": 0.03, "update_fixed_s": 5.0, "reduce_s": 2.0},
        **{"publish_s": 3.0, "publish_sampler_s": 0.25},
    )
    rows = 32 // samplers
    # All groups are on all samplers. A later prompt has 20 new tokens and the last one drawn.
    read = 3 * 1.0 + 4 * 100 * 0.01 + 2 * rows * 21 * 0.01
    rollout = read + 3 * 9 * (1.0 + rows * 0.1)
    tokens = 32 * (100 + 3 * 10 + 2 * 20) / learners
    update = 2 * 5.0 + 2 * 2 * (learners - 1) / learners * 2.0
    step = rollout + tokens * 0.04 + update + 3.0 + samplers * 0.25
    done = simulate(work, costs, Cluster(learners, samplers))
    assert done.step_s == pytest.approx(step)
    assert done.sampler_idle == pytest.approx(1 - rollout / step)
    assert done.rows == rows
    # With learner and sampler in one process.
    if learners == samplers:
        done = simulate(work, costs, Cluster(learners, samplers, colocated=True))
        assert done.step_s == pytest.approx(step)


ASYNC = [(0, 0, 0.0), (1, 0, 0.0), (2, 0, 0.0), (0, 3, 5.0), (1, 3, 5.0), (3, 2, 0.0)]


def outcome(kind: Kind, setting: tuple[int, int, float], seed: int = 0) -> Outcome:
    """Twelve steps of four groups of five, on two learners and three samplers."""
    staleness, min_members, close_after_s = setting
    cluster = Cluster(2, 3, False, staleness, min_members, close_after_s)
    work = Work(4, 5, 3, completion=Spread(20, kind, 400), environment_s=Spread(2, kind))
    costs = Costs(
        **{"forward_s": 0.1, "row_s": 0.01, "key_s": 1e-5, "prefill_s": 1e-4},
        **{"score_s": 1e-3, "update_s": 3e-3, "turn_s": 0.01, "record_s": 0.02},
        **{"publish_s": 1.0, "slots": 4},
    )
    return simulate(work, costs, cluster, 10, 2, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", ASYNC)
def test_every_episode_is_trained_on_once_dropped_or_still_open(
    kind: Kind, setting: tuple[int, int, float]
) -> None:
    done = outcome(kind, setting)
    assert done.played == done.trained + done.dropped + done.left
    # Each of the 12 steps trained its groups, but for episodes that a group did not wait for.
    waited = setting[1] or 5
    assert 12 * 4 * waited <= done.trained <= 12 * 4 * 5
    assert 0 <= done.left <= (setting[0] + (setting[1] > 0)) * 20 + 12 * 4 * (5 - waited)
    assert max(done.staleness) <= setting[0]
    assert (done.late_episodes > 0) <= (setting[1] > 0)
    for share in (done.learner_idle, done.sampler_idle, done.driver_busy, done.database_busy):
        assert 0 <= share <= 1
    assert done == outcome(kind, setting) != outcome(kind, setting, seed=1) or kind == "constant"


def test_late_episodes_are_trained_on_later_or_dropped_as_the_staleness_says() -> None:
    strict, lenient = outcome("heavy", (0, 3, 5.0)), outcome("heavy", (3, 3, 5.0))
    assert strict.late_episodes == 0 < strict.dropped_groups < strict.dropped
    assert lenient.late_episodes > 0
    assert strict.tokens_per_s > outcome("heavy", (0, 0, 0.0)).tokens_per_s


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "update_s"), [("samplers", 1e-4), ("learners", 0.1)])
def test_more_samplers_or_learners_are_never_slower(kind: Kind, name: str, update_s: float) -> None:
    work = Work(8, 8, 2, completion=Spread(30, kind, 1000))
    costs = Costs(1.0, 0.1, 1e-4, 0.01, 0.0, update_s)
    counts = (1, 2, 4, 8, 16, 64)
    steps = [simulate(work, costs, Cluster(**{name: count})).step_s for count in counts]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in itertools.pairwise(steps))
    assert steps[-1] < 0.7 * steps[0]


def test_with_a_staleness_of_one_the_longer_part_sets_the_pace() -> None:
    """If learning takes longer, samplers idle for the difference, and no one else waits."""
    work = Work(2, 4, 1, completion=Spread(11), scores=False)
    slow = Costs(1.0, 0.0, 0.0, 0.0, 0.0, update_s=50 / (8 * 113))
    done = simulate(work, slow, Cluster(max_staleness=1))
    assert done.step_s == pytest.approx(50) and done.learner_idle == pytest.approx(0)
    assert done.sampler_idle == pytest.approx(1 - 11 / 50) and done.staleness == {1: 32}
    sync = simulate(work, slow, Cluster())
    assert sync.step_s == pytest.approx(61)


def test_the_next_collection_waits_for_the_last_episode_of_the_one_before() -> None:
    """Unless it may overlap: then the step takes half of the time of a collection and its update.

    A collection begins with every publication, and lasts until its step is trained one later.
    """
    work = Work(2, 4, 1, completion=Spread(11), scores=False)
    costs = Costs(1.0, 0.0, 0.0, 0.0, 0.0, update_s=5 / (8 * 113))
    assert simulate(work, costs, Cluster(max_staleness=1)).step_s == pytest.approx(11)
    overlapped = simulate(work, costs, Cluster(max_staleness=1, overlap=True), 8)
    assert overlapped.step_s == pytest.approx((11 + 5) / 2, rel=0.07)  # up to a forward of 1 s


@pytest.mark.parametrize(("players", "step"), [(0, 5.0), (1, 5.25), (2, 5.0)])
def test_players_play_the_turns_side_by_side_and_the_driver_takes_the_episodes(
    players: int, step: float
) -> None:
    """Two completions end after four forwards of 1 s; a turn takes 0.5 s, an episode 0.25 s.

    The driver is done with the turns after 4.5 and 5 s; one player is too, and the driver is done
    with its episodes after 4.75 and 5.25 s; two players both after 4.5 s, the driver after 5 s.
    """
    work = Work(1, 2, 1, completion=Spread(4), scores=False)
    costs = Costs(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, turn_s=0.5, order_s=0.25)
    done = simulate(work, costs, Cluster(players=players))
    assert done.step_s == pytest.approx(step)
    assert done.driver_busy == pytest.approx((0.5 if players else 1.0) / step)


def test_a_database_that_is_slower_than_the_step_sets_the_pace() -> None:
    work = Work(2, 4, 1, completion=Spread(11))
    done = simulate(work, Costs(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, record_s=5.0), Cluster())
    assert done.step_s == pytest.approx(40) and done.database_busy == pytest.approx(1)


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_have_their_mean_and_their_limit(kind: Kind) -> None:
    drawn = Spread(10.0, kind).draw(np.random.default_rng(0), (200, 1000))
    # The mean of a sample of the heavy one has no standard error; the median is 2^(2/3) / 3.
    if kind == "heavy":
        assert np.median(drawn) == pytest.approx(10 * 2 ** (2 / 3) / 3, rel=0.01)
    else:
        assert drawn.mean() == pytest.approx(10, rel=0.01)
    assert Spread(10.0, kind, 12.0).draw(np.random.default_rng(0), (1000,)).max() <= 12


def test_whole_episodes_go_to_the_learner_with_fewest_tokens() -> None:
    # 5; then 4; 3 to the second, which has 7; 3 to the first, 8; 3 to the second, 10.
    assert slowest([3, 5, 3, 4, 3], 2) == 10
    assert slowest([7], 4) == 7
