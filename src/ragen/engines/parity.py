"""Did the weights arrive? The sampler's logprobs beside the learner's, after each publication.

A sampler with weights of its own may keep old ones, or load them wrongly, and nothing would fail:
the run would learn from samples of another policy, corrected by importance weights that hide it.
So whenever weights were pushed, one short completion is sampled and scored.
"""

from __future__ import annotations

from typing import Protocol

from ragen.algorithms.batch import collate
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, largest
from ragen.core.types import Completion, Prompt, Sample
from ragen.engines.learner import Learner
from ragen.rollout.chat import Chat

TOLERANCES = {"float32": 1e-2, "bfloat16": 0.5}
"""Largest difference of a logprob, in nats, between two programs with the same weights.

On a CPU float32 agrees to 1e-5; on a GPU its products may be rounded to the 10 bits of TF32, some
1e-3 of a logit. A bfloat16 logit between 16 and 32 is a multiple of 1/8, and another order of
summation moves it, or one of those it competes with, by a few of these."""

QUESTION = "Count from one to ten, then say which of the numbers you like best."
NUM_TOKENS = 16
"""Tokens that are compared at most."""


class Asked(Protocol):
    """A policy that answers at once."""

    version: int
    max_length: int

    def ask(self, prompt: Prompt) -> Completion:
        """Sample one completion."""
        ...


def compared(
    policy: Asked, learner: Learner, chat: Chat, temperature: float, dtype: str
) -> Metrics:
    """Sample a completion and score it with the learner.

    Args:
        policy: Has been given the learner's weights.
        learner: Scores.
        chat: Writes the question.
        temperature: Of sampling; the learner scores under the run's.
        dtype: What both compute in.

    Returns:
        ``publish/logprob_difference``: max |sampled logprob − learner's|.

    Raises:
        RagenError: It is above what `TOLERANCES` allow.
    """
    num_tokens = min(NUM_TOKENS, policy.max_length // 2)
    ids = chat.open([{"role": "user", "content": QUESTION}])[0][: policy.max_length - num_tokens]
    prompt = Prompt((), ids, 0, num_tokens, temperature, seed=policy.version)
    completion = policy.ask(prompt)
    assert completion.token_ids is not None and completion.logprobs is not None
    num_prompt, num_sampled = len(ids), len(completion.token_ids)
    mask = (False,) * num_prompt + (True,) * num_sampled
    sampled = Sample(
        ids + completion.token_ids,
        mask,
        (0.0,) * num_prompt + completion.logprobs,
        (-1,) * num_prompt + (0,) * num_sampled,
        (False,) * (num_prompt + num_sampled - 1) + (True,),
        0,
        0,
    )
    batch = collate([sampled])
    logprobs_BT, _ = learner.logprobs(batch)
    difference = float((logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs().max())
    if not difference <= TOLERANCES[dtype]:  # NaN is no agreement either
        raise RagenError(
            f"the weights did not reach the sampler: after publication {policy.version} it gives "
            f"a token a logprob that is {difference:.2g} from the learner's (at most "
            f"{TOLERANCES[dtype]:g} in {dtype}); let it serve the model that is trained, a server "
            "with --logprobs-mode processed_logprobs"
        )
    return {"publish/logprob_difference": largest(difference)}
