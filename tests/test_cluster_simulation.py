"""The simulation of many machines: one step by hand."""

from __future__ import annotations

import pytest
from cluster_simulation import Cluster, Costs, Spread, Work, simulate


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
