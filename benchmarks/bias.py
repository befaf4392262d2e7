"""How far each estimator's gradient is from ∇J, exactly: every episode of a small game.

    python benchmarks/bias.py    # prints the Markdown table of docs/algorithms.md; minutes

Three states, at most three turns; a turn is an action and the end-of-turn token, and in the hall
and the cellar the policy may think before it acts. The numbers are sums over all groups that can
come up, each times its probability; nothing is sampled.

    hall      Left → door            Right → cellar, pays −1/8
    door      Left → hall            Right ends, pays 1
    cellar    Left ends, pays ±1/2   Right ends, pays 1/4

Axes: **N** possible episodes, **S** an episode's tokens, **E** the episodes of a batch.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations_with_replacement
from math import factorial
from typing import Any

import torch
from torch import Tensor

from ragen.algorithms.advantages import ADVANTAGES
from ragen.algorithms.estimator import estimate

LEFT, RIGHT, THINK = 0, 1, 2
END = 0
STATES = ("hall", "door", "cellar")
NUM_TURNS = 3

Outcome = tuple[float, float, str | None]
"""Probability, reward, next state (``None``: the episode ends)."""

RULES: dict[tuple[str, int], list[Outcome]] = {
    ("hall", LEFT): [(1.0, 0.0, "door")],
    ("hall", RIGHT): [(1.0, -0.125, "cellar")],
    ("door", LEFT): [(1.0, 0.0, "hall")],
    ("door", RIGHT): [(1.0, 1.0, None)],
    ("cellar", LEFT): [(0.5, 0.5, None), (0.5, -0.5, None)],
    ("cellar", RIGHT): [(1.0, 0.25, None)],
}

LOGITS = {
    "hall": [0.2, 0.5, -0.3],
    "hall, thought": [0.6, -0.1],
    "door": [0.4, -0.4],
    "cellar": [-0.2, 0.3, 0.1],
    "cellar, thought": [0.7, 0.0],
} | {f"{state}, end": [0.0] for state in STATES}
"""The policy: logits of the tokens at each place where one is drawn. The end follows of itself."""


@dataclass(frozen=True)
class Play:
    """One possible episode: where each token was drawn, what it was, and what came of it."""

    draws: tuple[tuple[str, int], ...] = ()
    rewards: tuple[float, ...] = ()
    turns: tuple[int, ...] = ()
    ends: tuple[bool, ...] = ()
    luck: float = 1.0

    def __len__(self) -> int:
        return len(self.draws)

    @property
    def total(self) -> float:
        return sum(self.rewards)

    @property
    def states(self) -> tuple[str, ...]:
        """The state that each token's turn began in."""
        return tuple(place.split(",")[0] for place, _ in self.draws)

    def history(self, s: int) -> tuple[Any, ...]:
        """All that is known before token s (luck shows in the state that follows)."""
        return (self.draws[:s], self.states[s])

    def then(self, place: str, token: int, turn: int) -> Play:
        """The same, one token on."""
        draws, rewards = (*self.draws, (place, token)), (*self.rewards, 0.0)
        return Play(draws, rewards, (*self.turns, turn), (*self.ends, False), self.luck)

    def answered(self, reward: float, chance: float) -> Play:
        """The same, once the environment has answered the turn."""
        rewards, ends = (*self.rewards[:-1], reward), (*self.ends[:-1], True)
        return Play(self.draws, rewards, self.turns, ends, self.luck * chance)


def plays(
    closed: bool, state: str = "hall", turn: int = 0, before: Play | None = None
) -> list[Play]:
    """Every episode that can happen; `closed` turns end with a token that says so."""
    start, found = before or Play(), []
    starts = [(start, state)]
    if state != "door":
        starts.append((start.then(state, THINK, turn), f"{state}, thought"))
    for so_far, place in starts:
        for action in (LEFT, RIGHT):
            spoken = so_far.then(place, action, turn)
            if closed:
                spoken = spoken.then(f"{state}, end", END, turn)
            for chance, reward, following in RULES[state, action]:
                play = spoken.answered(reward, chance)
                if following is None or turn + 1 == NUM_TURNS:
                    found.append(play)
                else:
                    found += plays(closed, following, turn + 1, play)
    return found


class Game:
    """All possible episodes under the policy, with the logprob of every token.

    Args:
        closed: Whether turns end with a token of their own, or with the action.
    """

    def __init__(self, closed: bool = True) -> None:
        self.plays = plays(closed)
        self.num_tokens = max(len(play) for play in self.plays)
        flat = [logit for row in LOGITS.values() for logit in row]
        self.logits = torch.tensor(flat, dtype=torch.float64, requires_grad=True)
        rows = torch.split(self.logits, [len(row) for row in LOGITS.values()])
        logprobs = {
            place: torch.log_softmax(row, dim=0) for place, row in zip(LOGITS, rows, strict=True)
        }
        self.logprobs_NS = torch.nn.utils.rnn.pad_sequence(
            [torch.stack([logprobs[at][token] for at, token in play.draws]) for play in self.plays],
            batch_first=True,
        )
        luck_N = torch.tensor([play.luck for play in self.plays], dtype=torch.float64)
        self.chance_N = luck_N * self.logprobs_NS.sum(dim=1).exp()

    def gradient(self, scalar: Tensor) -> Tensor:
        """With respect to the logits."""
        return torch.autograd.grad(scalar, self.logits, retain_graph=True)[0]

    def true_gradient(self) -> Tensor:
        """∇J of J = E[R]."""
        totals_N = torch.tensor([play.total for play in self.plays], dtype=torch.float64)
        return self.gradient((self.chance_N * totals_N).sum())

    def mean_gradient(self, advantages_NS: Tensor) -> Tensor:
        """E[Σ_t A_t ∇logprob_t] of an episode whose mean advantages are `advantages_NS`."""
        weight_NS = self.chance_N.detach()[:, None] * advantages_NS
        return self.gradient((weight_NS * self.logprobs_NS).sum())

    @cached_property
    def token_gradients(self) -> Tensor:
        """∇logprob of each token of each possible episode; the logits are the last axis."""
        rows = [self.gradient(logprob) for logprob in self.logprobs_NS.flatten()]
        return torch.stack(rows).unflatten(0, self.logprobs_NS.shape)

    def zeros(self) -> Tensor:
        """A field of one number a token."""
        return torch.zeros(len(self.plays), self.num_tokens, dtype=torch.float64)


Discount = Callable[[Play, int, int], float]
"""What a reward at token i is worth at token s ≤ i of an episode."""


def a_token(gamma: float) -> Discount:
    return lambda play, s, i: gamma ** (i - s)


def a_turn(gamma: float) -> Discount:
    return lambda play, s, i: gamma ** (play.turns[i] - play.turns[s])


def exact_values(game: Game, discount: Discount) -> tuple[Tensor, Tensor]:
    """V before each token of each possible episode, and A of the token drawn: ``(N, S)`` both."""
    sums: dict[Any, float] = defaultdict(float)
    weights: dict[Any, float] = defaultdict(float)
    for play, chance in zip(game.plays, game.chance_N.tolist(), strict=True):
        for s in range(len(play)):
            to_come = sum(discount(play, s, i) * play.rewards[i] for i in range(s, len(play)))
            for key in (play.history(s), (play.history(s), play.draws[s])):
                sums[key] += chance * to_come
                weights[key] += chance
    values_NS, advantages_NS = game.zeros(), game.zeros()
    for n, play in enumerate(game.plays):
        for s in range(len(play)):
            before, after = play.history(s), (play.history(s), play.draws[s])
            values_NS[n, s] = sums[before] / weights[before]
            advantages_NS[n, s] = sums[after] / weights[after] - values_NS[n, s]
    return values_NS, advantages_NS


def arrays(game: Game, chosen: Sequence[int]) -> dict[str, Any]:
    """Possible episodes as the estimators take them, all of one group."""

    def lay_out(rows: Sequence[Sequence[float]], padding: float, dtype: torch.dtype) -> Tensor:
        padded = [[*row, *[padding] * (game.num_tokens - len(row))] for row in rows]
        return torch.tensor(padded, dtype=dtype)

    own = [game.plays[n] for n in chosen]
    states = [[STATES.index(state) for state in play.states] for play in own]
    starts = [[play.turns.index(k) for k in play.turns] for play in own]
    return {
        "rewards_ES": lay_out([play.rewards for play in own], 0.0, torch.float64),
        "mask_ES": lay_out([[True] * len(play) for play in own], False, torch.bool),
        "turn_ES": lay_out([play.turns for play in own], -1, torch.long),
        "turn_ends_ES": lay_out([play.ends for play in own], False, torch.bool),
        "state_ES": lay_out(states, -1, torch.long),
        "starts_ES": lay_out(starts, 0, torch.long),
        "group_E": torch.zeros(len(own), dtype=torch.long),
    }


Estimate = Callable[[Sequence[int]], Tensor]
"""Advantages ``(E, S)`` of one group (a batch of its own) of possible episodes."""


def estimator(game: Game, name: str, values_NS: Tensor | None = None, **how: Any) -> Estimate:
    """One of the package's, with its constants."""
    constants = {"gamma": 1.0, "gae_lambda": 1.0, "step_weight": 1.0, "whiten": False}

    def advantages(chosen: Sequence[int]) -> Tensor:
        given = arrays(game, chosen) | constants | how
        if values_NS is not None:
            values_ES = values_NS[list(chosen)]
            starts_ES = given["starts_ES"]
            given |= {"values_ES": values_ES, "state_values_ES": values_ES.gather(1, starts_ES)}
        return estimate(ADVANTAGES[name], **given).advantages_ES

    return advantages


def groups(game: Game, members: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every multiset of `members` possible episodes, behind its probability."""
    chance = game.chance_N.tolist()
    for chosen in combinations_with_replacement(range(len(game.plays)), members):
        weight = float(factorial(members))
        for n in set(chosen):
            weight *= chance[n] ** chosen.count(n) / factorial(chosen.count(n))
        yield weight, chosen


def mean_advantages(game: Game, estimate: Estimate, members: int) -> Tensor:
    """The mean of the estimate for each token of each possible episode, over the other members."""
    mean_NS = game.zeros()
    for weight, chosen in groups(game, members):
        mean_NS.index_add_(0, torch.tensor(chosen), weight * estimate(chosen))
    return mean_NS / (members * game.chance_N.detach()[:, None])


def gradient_moments(game: Game, estimate: Estimate, members: int) -> tuple[Tensor, float]:
    """E g and E |g|² of the gradient g of one group, a mean over its episodes."""
    mean, square = torch.zeros_like(game.logits), 0.0
    for weight, chosen in groups(game, members):
        of_tokens = game.token_gradients[list(chosen)]
        gradient = torch.einsum("es,esp->p", estimate(chosen), of_tokens) / members
        mean += weight * gradient
        square += weight * float(gradient @ gradient)
    return mean.detach(), square


@dataclass(frozen=True)
class Row:
    """A line of the table: an estimator with its constants and its critic."""

    label: str
    name: str
    how: dict[str, Any] = field(default_factory=dict)
    critic: str = "exact"


ROWS = [
    Row("`gae`, λ = 1, any critic", "gae", critic="none"),
    Row("`gae`, λ = .95, exact critic", "gae", {"gae_lambda": 0.95}),
    Row("`gae`, λ = .95, critic 0", "gae", {"gae_lambda": 0.95}, "none"),
    Row("`gae`, λ = 1, exact critic, whitened", "gae", {"whiten": True}),
    Row("`bi_level_gae`, γ = 1, exact critic", "bi_level_gae"),
    Row("`bi_level_gae`, γ = .95, exact critic", "bi_level_gae", {"gamma": 0.95}),
    Row("`rloo`", "rloo"),
    Row("`dr_grpo`", "dr_grpo"),
    Row("`grpo`", "grpo"),
    Row("`reinforce_pp`", "reinforce_pp"),
    Row("`reinforce_pp_baseline`", "reinforce_pp_baseline"),
    Row("`gigpo`, ω = 1, γ = .95", "gigpo", {"gamma": 0.95}),
    Row("`vine`, γ = 1, countless continuations", "vine"),
]


def measure(game: Game, row: Row, members: int) -> tuple[float, float, float, float]:
    """|E g − ∇J| ÷ |∇J|, |E g| ÷ |∇J|, the cosine of the angle between the two, and the noise.

    The noise is √(E |g − E g|²) ÷ |E g|.
    """
    by_turn = row.name in ("bi_level_gae", "vine")
    discount = a_turn(row.how.get("gamma", 1.0)) if by_turn else a_token(1.0)
    values_NS = exact_values(game, discount)[0] * (row.critic == "exact")
    advantages = estimator(game, row.name, values_NS, **row.how)
    mean, square = gradient_moments(game, advantages, members)
    true = game.true_gradient()
    size = true.norm()
    return (
        float((mean - true).norm() / size),
        float(mean.norm() / size),
        float(mean @ true / (mean.norm() * size)),
        float((square - mean @ mean).sqrt() / mean.norm()),
    )


def shown(bias: float, length: float, cosine: float, noise: float) -> str:
    """The cells of a row for one number of members."""
    return f"{bias:.1%} | {length:.3f} | {cosine:.4f} | {noise:.2f}"


def table(sizes: Sequence[int]) -> str:
    """One line an estimator; bias, length, cosine and noise for each number of members."""
    game = Game()
    head = " | ".join(f"bias, G = {g} | length | cosine | noise" for g in sizes)
    lines = [f"| estimator | {head} |", "|---|" + "---|" * 4 * len(sizes)]
    for row in ROWS:
        cells = [shown(*measure(game, row, members)) for members in sizes]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--members", type=int, nargs="*", default=[2, 4])
    print(table(parser.parse_args().members))


if __name__ == "__main__":
    main()
