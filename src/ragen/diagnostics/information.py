"""What a thought tells of its prompt: mutual information from a matrix of cross-scores.

RAGEN-2 (arXiv:2604.06268) asks whether a policy that still reasons in many ways still reasons about
what it sees. X is all that the model sees up to and including the opening think tag, Z the
thought's tokens, tags excluded. With n sampled thoughts, their M distinct prompts, prompt j's share
w_j of the n, and S_ij = log p(z_i | x_j) by teacher forcing,

    matched_i = S_i,own        marginal_i = log Σ_j w_j e^(S_ij)

    H(Z|X) = −mean matched     H(Z) = −mean marginal     I(X;Z) = mean (matched − marginal)

and 0 ≤ E[I] ≤ H(w) ≤ log M. The mixture over these M prompts is summed out, not sampled, so that I
is the plain mean of n exact log-ratios: nothing is told where there is nothing to tell, also where
prompts come more than once (``− log n`` in place of ``log w_j`` would report information there).

Axes: **N** thoughts, **M** distinct prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ragen.core.metrics import Metrics, last, mean
from ragen.core.types import Group, Turn
from ragen.diagnostics.regimes import INFORMED, MIN_PROMPTS, REGIMES, UNDECIDED, Regime, Sampling

Tokens = tuple[int, ...]
SPREAD = 1e-3
"""Added to the deviation that the z-score divides by (arXiv:2604.06268), in nats a token."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The thoughts that are measured, and the prompts they are scored under, each written once.

    Of thought i the tokens are ``thoughts[thought_N[i]]`` and the prompt ``prompts[prompt_N[i]]``:
    equal thoughts and equal prompts cost one forward, and what is equal is what repeats in a
    collapse. `left_out` counts the drawn turns without a valid thought. For people to read there
    are the thoughts' `texts`, and `observations`, the last that a prompt shows of the environment.
    """

    prompts: tuple[Tokens, ...]
    thoughts: tuple[Tokens, ...]
    prompt_N: tuple[int, ...]
    thought_N: tuple[int, ...]
    left_out: int
    observations: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CrossScores:
    """What `measure` was given, with every thought and every prompt as text.

    `scores_NM` is the matrix of `measure` and `own_N` says which prompt is each thought's own.
    """

    sampling: Sampling
    scores_NM: Tensor
    own_N: tuple[int, ...]
    thoughts: tuple[str, ...]
    prompts: tuple[str, ...]


def spoken(turn: Turn) -> tuple[Tokens, Tokens] | None:
    """A turn's X and Z, or ``None`` where it has no valid thought of at least one token.

    Where the think tag is not pre-filled, X holds the sampled tokens that open the thought.

    Example:
        >>> from ragen.core.types import Completion, Prompt
        >>> p = Prompt((), (1, 2), 0, 8, 1.0, 0)
        >>> c = Completion((5, 8, 9, 6), (-0.1,) * 4, "<think>go up</think>", "stop", 0)
        >>> spoken(Turn("", p, c, "go up", (1, 3), (), (), 0.0, 0.0, True, ""))
        ((1, 2, 5), (8, 9))
    """
    prompt, sampled, span = turn.prompt.token_ids, turn.completion.token_ids, turn.thought_span
    if prompt is None or sampled is None or span is None or span[0] == span[1]:
        return None
    return prompt + sampled[: span[0]], sampled[slice(*span)]


def draw(groups: Sequence[Group], sampling: Sampling, count: int, seed: int) -> Thoughts:
    """At most `count` thoughts, one an episode.

    Args:
        groups: A step's groups; failed episodes, and those without a turn, play no part.
        sampling: Which turn speaks for its episode. It is drawn before it is looked at, so that
            turns without a valid thought are left out and not replaced.
        count: Of more thoughts, so many are drawn without replacement.
        seed: Decides the turns and the thoughts.
    """
    generator = random.Random(seed)
    episodes = [e for group in groups for e in group.episodes if e.turns and not e.failed]
    turns = [e.turns[0] if sampling == "first" else generator.choice(e.turns) for e in episodes]
    said = [(*pair, turn) for turn in turns if (pair := spoken(turn)) is not None]
    left_out = len(turns) - len(said)
    if len(said) > count:
        said = [said[index] for index in sorted(generator.sample(range(len(said)), count))]
    prompts = {prompt: turn.observation for prompt, _, turn in said}
    thoughts = {thought: turn.thought or "" for _, thought, turn in said}
    prompt_place = {prompt: place for place, prompt in enumerate(prompts)}
    thought_place = {thought: place for place, thought in enumerate(thoughts)}
    return Thoughts(
        tuple(prompts),
        tuple(thoughts),
        tuple(prompt_place[prompt] for prompt, _, _ in said),
        tuple(thought_place[thought] for _, thought, _ in said),
        left_out,
        tuple(prompts.values()),
        tuple(thoughts.values()),
    )


_GIVEN = ("chance_1", "chance_5", "prompt_entropy", "prompts", "thoughts", "regime")
"""What no policy says: it follows from the drawn prompts alone, or is a label."""


@dataclass(frozen=True, slots=True)
class Information:
    """What n thoughts tell of their prompts, in nats; see the module for the symbols.

    The first three are of whole thoughts. ``…_per_token`` divide a thought's matched and marginal
    by its length, after the sum over prompts (the paper's form), and so does the z-score,
    I ÷ (std of marginal + 1e-3). `retrieval_1` says how often the own prompt has the highest score,
    `retrieval_5` how often it is among the five highest, beside `chance_1` and `chance_5`.
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
        """Which of the paper's four quarters this is: H(Z|X) high or low, I(X;Z) high or low.

        =====================  ===========  ==========
        regime                 H(Z|X) high  I(X;Z) high
        =====================  ===========  ==========
        diverse                yes          yes
        template collapse      yes          no
        compressed             no           yes
        low-entropy collapse   no           no
        =====================  ===========  ==========

        High are at least `UNDECIDED` nats a thought, and at least the share `INFORMED` of H(w).
        """
        if self.prompts < MIN_PROMPTS:
            return "undecidable"
        informed = self.mi >= INFORMED * self.prompt_entropy
        if self.conditional_entropy >= UNDECIDED:
            return "diverse" if informed else "template collapse"
        return "compressed" if informed else "low-entropy collapse"

    def metrics(self, path: str) -> Metrics:
        """All of it as ``path/mi`` and so on; the regime by its place in `REGIMES`."""
        found = asdict(self) | {"regime": REGIMES.index(self.regime)}
        return {
            f"{path}/{name}": last(value) if name in _GIVEN else mean(value, self.thoughts)
            for name, value in found.items()
        }


def measure(
    scores_NM: Tensor, own_N: Sequence[int] | Tensor, lengths_N: Sequence[int] | Tensor
) -> Information:
    """The measures of a matrix of cross-scores.

    Args:
        scores_NM: S_ij = log p(z_i | x_j) in nats, (N, M); −∞ where it cannot be.
        own_N: Each thought's own prompt; every prompt is somebody's.
        lengths_N: Tokens of each thought, at least one.

    Example:
        Two prompts of shares ¾ and ¼, and thoughts that copy them: I = H(w) = ¾ ln 4/3 + ¼ ln 4.

        >>> never = -math.inf
        >>> scores = torch.tensor([[0.0, never]] * 3 + [[never, 0.0]])
        >>> found = measure(scores, own_N=[0, 0, 0, 1], lengths_N=[2, 2, 2, 2])
        >>> round(found.mi, 4), round(found.prompt_entropy, 4), found.conditional_entropy
        (0.5623, 0.5623, 0.0)
    """
    scores_NM = scores_NM.double()
    own_N, lengths_N = torch.as_tensor(own_N), torch.as_tensor(lengths_N)
    num_thoughts, num_prompts = scores_NM.shape
    share_M = torch.bincount(own_N, minlength=num_prompts).double() / num_thoughts
    assert bool((share_M > 0).all()), "every prompt is somebody's own"
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
        mi_zscore=mi_per_token / (spread + SPREAD),
        retrieval_1=retrieval(scores_NM, own_N, 1),
        chance_1=min(1.0, 1 / num_prompts),
        retrieval_5=retrieval(scores_NM, own_N, 5),
        chance_5=min(1.0, 5 / num_prompts),
        prompt_entropy=-(share_M * share_M.log()).sum().item() + 0.0,
        prompts=num_prompts,
        thoughts=num_thoughts,
    )


def retrieval(scores_NM: Tensor, own_N: Tensor, k: int) -> float:
    """How often the own prompt is among the k of highest score; ties are broken by lot.

    Chance is k ÷ M, and what a thought that scores the same everywhere gets.

    Example:
        >>> scores = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
        >>> retrieval(scores, torch.tensor([0, 2]), k=1)  # (1 + 1/3) / 2
        0.6666666666666666
    """
    matched_N1 = scores_NM.gather(1, own_N[:, None])
    higher_N = (scores_NM > matched_N1).sum(dim=1)
    equal_N = (scores_NM == matched_N1).sum(dim=1)
    return ((k - higher_N).double() / equal_N).clamp(0, 1).mean().item()
