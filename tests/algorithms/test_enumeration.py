"""Estimators against a small game: every possible group is enumerated with its probability.

The game, its exact values and the sums over groups are those of `benchmarks/bias.py`. Nothing is
sampled, so equalities hold up to the rounding of float64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bias import (
    ROWS,
    Game,
    a_token,
    a_turn,
    estimator,
    exact_values,
    mean_advantages,
    measure,
    shown,
)

GAME = Game()
TRUE = GAME.true_gradient()
ALGORITHMS = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
close = torch.testing.assert_close


def test_game_enumerates_all_episodes() -> None:
    plays = GAME.plays
    assert GAME.chance_N.sum().item() == pytest.approx(1, abs=1e-12)
    assert len({(play.draws, play.rewards) for play in plays}) == len(plays) == 22
    assert {len(play) for play in plays} == {4, 5, 6, 7, 8}
    # It includes a turn of reward 0, a state that occurs twice, and random transitions.
    first = plays[1]
    assert [place for place, _ in first.draws[::2]] == ["hall", "door", "hall"]
    assert [r for r, end in zip(first.rewards, first.ends, strict=True) if end] == [0, 0, -0.125]
    assert {play.luck for play in plays} == {0.5, 1.0}


def test_exact_values_golden() -> None:
    values_NS, advantages_NS = exact_values(GAME, a_token(1.0))
    # In the door Right pays 1, and Left leads to the hall's last turn, where a Right costs 1/8.
    right = 1 / (1 + math.exp(0.4 + 0.4))
    hall = _softmax([0.2, 0.5, -0.3])
    after = _softmax([0.6, -0.1])
    last = -0.125 * (hall[1] + hall[2] * after[1])
    door = right * 1 + (1 - right) * last
    num_checked = 0
    for n, play in enumerate(GAME.plays):
        for s, (place, token) in enumerate(play.draws):
            if place == "door":
                assert values_NS[n, s].item() == pytest.approx(door)
                gain = 1 if token == 1 else last
                assert advantages_NS[n, s].item() == pytest.approx(gain - door)
                num_checked += 1
    assert num_checked == 10


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_mean_of_gae_with_exact_values_is_the_advantage(gamma: float, lam: float) -> None:
    values_NS, advantages_NS = exact_values(GAME, a_token(gamma))
    mean_NS = mean_advantages(
        GAME, estimator(GAME, "gae", values_NS, gamma=gamma, gae_lambda=lam), 1
    )
    close(given_state_and_token(mean_NS), advantages_NS)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_mean_of_bi_level_gae_with_exact_values_is_the_advantage(gamma: float, lam: float) -> None:
    values_NS, advantages_NS = exact_values(GAME, a_turn(gamma))
    estimate = estimator(GAME, "bi_level_gae", values_NS, gamma=gamma, gae_lambda=lam)
    close(given_state_and_token(mean_advantages(GAME, estimate, 1)), advantages_NS)


def test_bi_level_gae_is_biased_if_the_last_token_ends_the_turn_by_itself() -> None:
    """If the last token itself decides that it is the last, λ < 1 is biased even with the exact V.

    The value at the end of a turn is then that of a state from which the turn could have continued.
    """
    game = Game(closed=False)
    for lam, low, high in ((1.0, 0, 1e-9), (0.5, 1e-3, 1)):
        values_NS, advantages_NS = exact_values(game, a_turn(1.0))
        estimate = estimator(game, "bi_level_gae", values_NS, gamma=1.0, gae_lambda=lam)
        mean = game.mean_gradient(mean_advantages(game, estimate, 1))
        true = game.true_gradient()
        close(game.mean_gradient(advantages_NS), true)
        assert low <= float((mean - true).norm() / true.norm()) <= high


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gae", {}), ("bi_level_gae", {"gamma": 1.0})],
    ids=lambda it: str(it),
)
def test_mean_gradient_with_lambda_one_is_exact_for_any_values(
    name: str, parameters: dict[str, Any]
) -> None:
    # A baseline may depend on everything before the token, not on the token.
    guess: dict[Any, float] = defaultdict(lambda: 3 * math.sin(5 * len(guess)))
    values_NS = torch.tensor(
        [
            [guess[play.history(s)] if s < len(play) else 99.0 for s in range(GAME.num_tokens)]
            for play in GAME.plays
        ],
        dtype=torch.float64,
    )
    mean_NS = mean_advantages(GAME, estimator(GAME, name, values_NS, **parameters), 1)
    close(GAME.mean_gradient(mean_NS), TRUE)


@pytest.mark.parametrize(
    ("name", "group_size"),
    [("rloo", 2), ("dr_grpo", 2)],
)
def test_mean_gradient_of_rloo_and_of_scaled_dr_grpo_is_exact(name: str, group_size: int) -> None:
    mean = GAME.mean_gradient(mean_advantages(GAME, estimator(GAME, name), group_size))
    close(mean * (group_size / (group_size - 1) if name == "dr_grpo" else 1), TRUE)


def with_continuations(gamma: float) -> tuple[Tensor, list[int], Tensor]:
    """All episodes with one continuation from before each turn: probability, play, and values.

    They meet the same random event: the coin in the cellar falls before the episode, and whoever
    does not see it meets either side. The values are ``(E, S)``, by token as in `vine`.
    """
    rows, weights, values = list[int](), list[float](), list[list[float]]()
    for coin, (n, play) in product((0.5, -0.5), enumerate(GAME.plays)):
        starts = [play.turns.index(k) for k in range(play.turns[-1] + 1)]
        choices = [continuations(coin, play.history(s), s, gamma) for s in starts]
        sizes = [sum(chance for chance, _ in options) for options in choices]
        for chosen in product(*choices) if chance_if(coin, n) else ():
            shares = [chance / size for (chance, _), size in zip(chosen, sizes, strict=True)]
            rows.append(n)
            weights.append(chance_if(coin, n) / 2 * math.prod(shares))
            values.append(
                [chosen[k][1] for k in play.turns] + [0.0] * (GAME.num_tokens - len(play))
            )
    assert sum(weights) == pytest.approx(1)
    return torch.tensor(weights).double(), rows, torch.tensor(values).double()


def continuations(coin: float, history: Any, s: int, gamma: float) -> list[tuple[float, float]]:
    """The probability and the return of each play on from token s, once the coin has fallen."""
    discount = a_turn(gamma)
    return [
        (
            chance_if(coin, m),
            sum(discount(play, s, i) * play.rewards[i] for i in range(s, len(play))),
        )
        for m, play in enumerate(GAME.plays)
        if len(play) > s and play.history(s) == history and chance_if(coin, m) > 0
    ]


def chance_if(coin: float, n: int) -> float:
    """The probability of a play once the coin has fallen."""
    play = GAME.plays[n]
    seen = play.luck == 1 or play.rewards[-1] == coin
    return GAME.chance_N[n].item() / play.luck if seen else 0.0


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_mean_gradient_of_vine_over_all_continuations_is_exact(gamma: float) -> None:
    weights, rows, values_ES = with_continuations(gamma)
    advantages = estimator(GAME, "vine", state_values_ES=values_ES, gamma=gamma)(rows)
    gradients = torch.einsum("es,esp->ep", advantages, GAME.token_gradients[rows]).detach()
    mean = weights @ gradients
    close(mean, GAME.mean_gradient(exact_values(GAME, a_turn(gamma))[1]))
    if gamma == 1:
        close(mean, TRUE)
        square = float(weights @ gradients.square().sum(dim=1) - mean @ mean)
        noise = (square / 2) ** 0.5 / float(mean.norm())  # of two episodes, as in the table
        assert f"{noise:.2f} for G = 2" in ALGORITHMS


@pytest.mark.slow
def test_docs_show_the_measured_bias() -> None:
    lines = [line.removeprefix("| ").split(" | ") for line in ALGORITHMS.splitlines()]
    documented = {cells[0]: " | ".join(cells[1:5]) for cells in lines if len(cells) == 9}
    for row in ROWS:
        assert documented[row.label] == shown(*measure(GAME, row, 2)), row.label


def given_state_and_token(field_NS: Tensor) -> Tensor:
    """The mean of a field over all episodes that are equal up to and including a token."""
    sums: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])
    chances = GAME.chance_N.tolist()
    keys = {
        (n, s): (play.history(s), play.draws[s])
        for n, play in enumerate(GAME.plays)
        for s in range(len(play))
    }
    for (n, s), key in keys.items():
        sums[key][0] += chances[n] * float(field_NS[n, s])
        sums[key][1] += chances[n]
    mean_NS = GAME.zeros()
    for (n, s), key in keys.items():
        mean_NS[n, s] = sums[key][0] / sums[key][1]
    return mean_NS


def _softmax(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]
