"""Check after each publication that the sampler's logprobs agree with the learner's.

A sampler with weights of its own may keep old ones, or load new ones wrongly, without any error:
the run would learn from samples of another policy, corrected by importance weights that hide it.
So after every push one short completion is sampled and scored.
"""

from __future__ import annotations

from ragen.algorithms.batch import collate
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, largest
from ragen.core.types import Prompt, Sample
from ragen.engines.learner import Learner
from ragen.engines.sampler_server import VllmServer
from ragen.engines.sampler_vllm import VllmSampler
from ragen.rollout.chat import Chat

TOLERANCES = {"float32": 1e-2, "bfloat16": 0.5}
"""Largest allowed difference of a logprob, in nats, between two programs with the same weights.

On a CPU float32 agrees to 1e-5; on a GPU its products may be rounded to the 10 bits of TF32, some
1e-3 of a logit. A bfloat16 logit between 16 and 32 is a multiple of 1/8, and another order of
summation changes it, or a competing logit, by a few of these multiples."""

QUESTION = "Count from one to ten, then say which of the numbers you like best."
NUM_TOKENS = 16
"""Most tokens that are compared."""


def check_parity(
    policy: VllmSampler | VllmServer, learner: Learner, chat: Chat, temperature: float, dtype: str
) -> Metrics:
    """Sample a completion and score it with the learner, whose weights the policy has.

    Both use the run's temperature and compute in `dtype`. Returns ``publish/logprob_difference``:
    max |sampled logprob − learner's|.

    Raises:
        RagenError: It exceeds `TOLERANCES`.
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
    if not difference <= TOLERANCES[dtype]:  # refuses NaN too
        raise RagenError(
            f"the weights did not reach the sampler: after publication {policy.version} a token's "
            f"logprob differs by {difference:.2g} from the learner's (at most "
            f"{TOLERANCES[dtype]:g} in {dtype}); make it serve the model that is trained, a server "
            "with --logprobs-mode processed_logprobs"
        )
    return {"publish/logprob_difference": largest(difference)}
