"""Mutual information between thoughts and prompts, from a matrix of cross-scores.

RAGEN-2 (arXiv:2604.06268) asks whether a policy that still reasons in varied ways still reasons
about what it sees. X is all that the model sees up to and including the opening think tag, Z the
thought's tokens with the first one of the closing tag: where a thought ends is part of it. A
thought that is never closed ends with its reply. So every opened thought has a Z, also an empty
one, and the probabilities of all Z sum to 1, without which I would be biased.

With n sampled thoughts, their M distinct prompts, prompt j's share w_j of the n, and
S_ij = log p(z_i | x_j) by teacher forcing,

    matched_i = S_i,own        marginal_i = log Σ_j w_j e^(S_ij)

    H(Z|X) = −mean matched     H(Z) = −mean marginal     I(X;Z) = mean (matched − marginal)

and 0 ≤ E[I] ≤ H(w) ≤ log M. The mixture over these M prompts is summed out, not sampled, so I is
the plain mean of n exact log-ratios. It is 0 where thoughts do not depend on prompts, also where
prompts repeat (``− log n`` in place of ``log w_j`` would report information there).

Measuring changes no weight, no stored gradient, no optimiser and no random generator: a run with it
equals the run without it, bit for bit.

Axes: **N** thoughts, **M** distinct prompts.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ragen.config.extensions import short_names
from ragen.core.metrics import Metrics, last, mean, merge, total
from ragen.core.pictures import by_key, for_people
from ragen.core.seeding import derive
from ragen.core.types import Group, Turn
from ragen.diagnostics.collapse import REGIMES, SAMPLINGS, Regime, Sampling, regime_of
from ragen.engines.engine import Engine

Tokens = tuple[int, ...]
Draw = tuple[Tokens, Tokens, Turn]
"""A prompt, a thought, and the turn that they are from."""

THOUGHTS = 64
"""Thoughts of a step that are scored at most, each under all prompts of the others."""
STD_FLOOR = 1e-3
"""Added to the standard deviation that the z-score divides by (arXiv:2604.06268), in nats per
token."""


class CrossScores(NamedTuple):
    """The input of `measure`, with the thoughts and prompts as text."""

    sampling: Sampling
    scores_NM: Tensor
    own_N: tuple[int, ...]
    thoughts: tuple[str, ...]
    prompts: tuple[str, ...]


def prompt_and_thought(turn: Turn) -> tuple[Tokens, Tokens] | None:
    """A turn's X and Z, or ``None`` if it opened no thought, or its tokens are unknown.

    If the think tag is not pre-filled, X includes the sampled tokens that open the thought. A
    pre-filled thought without an end, or with a tag inside, is all of the reply.
    """
    prompt, sampled, span = turn.prompt.token_ids, turn.completion.token_ids, turn.thought_span
    if prompt is None or not sampled or (span is None and not turn.prompt.num_prefill):
        return None
    start, stop = span or (0, len(sampled))
    return prompt + sampled[:start], sampled[start : stop + 1]


def draw_thoughts(
    groups: Sequence[Group], sampling: Sampling, count: int, seed: int
) -> tuple[list[Draw], int]:
    """Draw at most `count` thoughts, one per episode, and count the turns that have none.

    Failed episodes and episodes without a turn are ignored. Drawn turns that opened no thought are
    not replaced. `seed` decides the turns, and the thoughts if there are more than `count`.
    """
    generator = random.Random(seed)
    episodes = [e for group in groups for e in group.episodes if e.turns and not e.failed]
    turns = [e.turns[0] if sampling == "first" else generator.choice(e.turns) for e in episodes]
    drawn = [(*pair, turn) for turn in turns if (pair := prompt_and_thought(turn)) is not None]
    left_out = len(turns) - len(drawn)
    if len(drawn) > count:
        drawn = [drawn[index] for index in sorted(generator.sample(range(len(drawn)), count))]
    return drawn, left_out


_NOT_AVERAGED = ("chance_1", "chance_5", "prompt_entropy", "prompts", "thoughts", "regime")
"""Measures that follow from the drawn prompts alone, and the label: they have no moving average."""


@dataclass(frozen=True, slots=True)
class Information:
    """The information that n thoughts hold about their prompts, in nats (symbols: see the module).

    The first three are per thought. ``…_per_token`` divide a thought's matched and marginal score
    by its length, after the sum over prompts (the paper's form), and so does the z-score,
    I ÷ (std of marginal + 1e-3). ``retrieval_<k>`` is the share of thoughts whose own prompt is
    among the k of highest score, and ``chance_<k>`` is its value by chance.
    """

    mi: float
    conditional_entropy: float
    entropy: float
    mi_per_token: float
    conditional_entropy_per_token: float
    entropy_per_token: float
    mi_zscore: float
    retrieval_1: float
    chance_1: float
    retrieval_5: float
    chance_5: float
    prompt_entropy: float
    prompts: int
    thoughts: int

    @property
    def regime(self) -> Regime:
        """The regime by H(Z|X) and I(X;Z) (`collapse.regime_of`)."""
        return regime_of(self.mi, self.conditional_entropy, self.prompt_entropy, self.prompts)

    def metrics(self, path: str) -> Metrics:
        """All measures as ``path/mi`` and so on, the regime by its position in `REGIMES`."""
        measures = asdict(self) | {"regime": REGIMES.index(self.regime)}
        return {
            f"{path}/{name}": last(value) if name in _NOT_AVERAGED else mean(value, self.thoughts)
            for name, value in measures.items()
        }


def measure(
    scores_NM: Tensor, own_N: Sequence[int] | Tensor, lengths_N: Sequence[int] | Tensor
) -> Information:
    """The measures of a matrix of cross-scores.

    `scores_NM` are S_ij = log p(z_i | x_j) in nats, −∞ where the probability is 0. `own_N` is the
    prompt of each thought, and every prompt has one. `lengths_N` > 0 are the thoughts' tokens.

    Example:
        Two prompts of shares ¾ and ¼, and thoughts that copy them: I = H(w) = ¾ ln 4/3 + ¼ ln 4.

        >>> never = -torch.inf
        >>> scores = torch.tensor([[0.0, never]] * 3 + [[never, 0.0]])
        >>> information = measure(scores, own_N=[0, 0, 0, 1], lengths_N=[2, 2, 2, 2])
        >>> round(information.mi, 4), round(information.prompt_entropy, 4)
        (0.5623, 0.5623)
    """
    scores_NM = scores_NM.double()
    own_N, lengths_N = torch.as_tensor(own_N), torch.as_tensor(lengths_N)
    num_thoughts, num_prompts = scores_NM.shape
    share_M = torch.bincount(own_N, minlength=num_prompts).double() / num_thoughts
    assert bool((share_M > 0).all()), "every prompt has a thought"
    assert bool((lengths_N > 0).all()), "a thought has a token"
    matched_N = scores_NM.gather(1, own_N[:, None])[:, 0]
    marginal_N = torch.logsumexp(scores_NM + share_M.log(), dim=1)
    gain_N = matched_N - marginal_N
    spread = (marginal_N / lengths_N).std(correction=0).item()
    mi_per_token = (gain_N / lengths_N).mean().item()
    return Information(
        mi=gain_N.mean().item(),
        conditional_entropy=-matched_N.mean().item() + 0.0,
        entropy=-marginal_N.mean().item() + 0.0,
        mi_per_token=mi_per_token,
        conditional_entropy_per_token=-(matched_N / lengths_N).mean().item() + 0.0,
        entropy_per_token=-(marginal_N / lengths_N).mean().item() + 0.0,
        mi_zscore=mi_per_token / (spread + STD_FLOOR),
        retrieval_1=retrieval(scores_NM, own_N, 1),
        chance_1=min(1.0, 1 / num_prompts),
        retrieval_5=retrieval(scores_NM, own_N, 5),
        chance_5=min(1.0, 5 / num_prompts),
        prompt_entropy=-(share_M * share_M.log()).sum().item() + 0.0,
        prompts=num_prompts,
        thoughts=num_thoughts,
    )


def retrieval(scores_NM: Tensor, own_N: Tensor, k: int) -> float:
    """The share of thoughts whose own prompt is among the k of highest score.

    Ties are broken at random, in expectation, so a thought that scores the same under all M prompts
    counts k ÷ M, the value by chance.
    """
    matched_N1 = scores_NM.gather(1, own_N[:, None])
    higher_N = (scores_NM > matched_N1).sum(dim=1)
    equal_N = (scores_NM == matched_N1).sum(dim=1)
    return ((k - higher_N).double() / equal_N).clamp(0, 1).mean().item()


async def measure_envs(
    engine: Engine, groups: Sequence[Group], seed: int, step: int, mix: Collection[str]
) -> tuple[Metrics, list[CrossScores]]:
    """`measure_thoughts` within each environment, because any thought reveals its environment.

    `mix` names the environments of a mixture; the step's groups may lack some. Each environment
    has its metrics as ``env/<name>/information/…``. The whole has their means over the thoughts,
    the fewest prompts, no regime, and no cross-scores.
    """
    if not mix:
        return await measure_thoughts(engine, groups, seed, step)
    parts, metrics, names = list[Metrics](), Metrics(), short_names(mix)
    for env in dict.fromkeys(group.env for group in groups):
        played = [group for group in groups if group.env == env]
        found, _ = await measure_thoughts(engine, played, seed, step)
        metrics |= {f"env/{names[env]}/{name}": each for name, each in found.items()}
        parts.append({name: each for name, each in found.items() if each.kind != "last"})
    for sampling in SAMPLINGS:
        prompts = [each for name, each in metrics.items() if name.endswith(f"{sampling}/prompts")]
        if prompts:
            fewest = min(each.value for each in prompts)
            metrics[f"information/{sampling}/prompts"] = last(fewest)
    return metrics | merge(parts), []


async def measure_thoughts(
    engine: Engine, groups: Sequence[Group], seed: int, step: int
) -> tuple[Metrics, list[CrossScores]]:
    """The information that a step's thoughts hold about their prompts.

    The engine has the weights that played the groups. Metrics are ``information/<sampling>/…`` for
    each of `SAMPLINGS`: ``left_out`` (turns that opened no thought) and, if there are thoughts, the
    fields of `Information` and the regime. The cross-scores behind them come with them.
    """
    metrics: Metrics = {}
    matrices: list[CrossScores] = []
    for sampling in SAMPLINGS:
        path = (seed, "information", step, sampling)
        drawn, left_out = draw_thoughts(groups, sampling, THOUGHTS, derive(*path))
        metrics[f"information/{sampling}/left_out"] = total(left_out)
        if not drawn:
            continue
        # Equal prompts and equal thoughts, which a collapse makes frequent, are scored once.
        observations = {prompt: for_people(turn.observation) for prompt, _, turn in drawn}
        prompts, thoughts = list(observations), list(dict.fromkeys(z for _, z, _ in drawn))
        own_N = tuple(prompts.index(prompt) for prompt, _, _ in drawn)
        shown = by_key(chain.from_iterable(turn.prompt.pictures for _, _, turn in drawn))
        scores = await engine.cross_scores(prompts, thoughts, tuple(shown.values()))
        scores_NM = scores[[thoughts.index(thought) for _, thought, _ in drawn]]
        information = measure(scores_NM, own_N, [len(thought) for _, thought, _ in drawn])
        metrics |= information.metrics(f"information/{sampling}")
        texts = tuple(
            turn.completion.text if turn.thought is None else turn.thought for _, _, turn in drawn
        )
        matrices.append(
            CrossScores(sampling, scores_NM, own_N, texts, tuple(observations.values()))
        )
    return metrics, matrices
