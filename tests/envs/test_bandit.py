"""Bandit: payouts, names and order of the arms, and success."""

from itertools import product

from ragen.envs.registry import make
from ragen.envs.worlds.bandit import NAMES


def pull_rewards(env, arm, count=500):
    rewards = []
    for noise_seed in range(count):
        env.reset(seed=123, options={"noise_seed": noise_seed})
        rewards.append(env.step(arm)[1])
    return rewards


def test_a_pull_terminates_and_the_better_arm_succeeds_for_any_payout():
    env = make("bandit")
    outcomes = set()
    for noise_seed in range(50):
        env.reset(seed=123, options={"noise_seed": noise_seed})
        _, reward, terminated, truncated, info = env.step("Dragon")
        assert terminated and not truncated and info == {"success": True, "effective": True}
        outcomes.add(reward)
    assert outcomes == {0.0, 1.0}
    env.reset(seed=123)
    assert env.step("Phoenix")[1:] == (0.15, True, False, {"success": False, "effective": True})


def test_the_risky_arm_pays_a_quarter_of_the_time():
    rewards = pull_rewards(make("bandit"), "Dragon")
    # Standard error √(.25·.75/500) = .0194; four of them.
    assert abs(sum(rewards) / len(rewards) - 0.25) < 0.078


def test_the_noise_does_not_depend_on_the_level():
    env = make("bandit")
    for noise_seed in range(10):
        rewards = set()
        for level in range(10):
            env.reset(seed=level, options={"noise_seed": noise_seed})
            rewards.add(env.step("Dragon")[1])
        assert len(rewards) == 1


def test_reverse_swaps_the_arms_behind_the_names():
    env = make("bandit-rev")
    assert set(pull_rewards(env, "Phoenix", 50)) == {0.0, 1.0}
    assert set(pull_rewards(env, "Dragon", 5)) == {0.15}
    env.reset(seed=123)
    assert env.solve(1, 1, 1) == ["Phoenix"]


def test_both_orders_of_the_names_appear():
    env = make("bandit")
    first = [(env.reset(seed=level)[0], env.actions)[1][0] for level in range(400)]
    assert abs(first.count("Dragon") - 200) < 40  # 4·√(400·¼)


def test_every_pair_of_a_name_set_is_played_and_training_and_test_share_no_name():
    for name_set, split in product(NAMES, ("train", "test")):
        env = make("bandit", name_set=name_set, split=split)
        seen = set()
        for level in range(150):
            env.reset(seed=level)
            seen.add(frozenset(env.actions))
        assert seen == {frozenset(pair) for pair in NAMES[name_set][split]}
    pairs = NAMES["pairs"]
    assert (len(pairs["train"]), len(pairs["test"])) == (12, 8)
    used = {name for pair in pairs["train"] for name in pair}
    assert not used & {name for pair in pairs["test"] for name in pair}


def test_the_safe_arm_is_optimal_if_it_has_the_higher_mean():
    env = make("bandit", risky_probability=0.1)
    env.reset(seed=123)
    assert env.solve(1, 1, 1) == ["Phoenix"]
    assert env.baselines(1, 1, 1).optimal_return == 0.15
