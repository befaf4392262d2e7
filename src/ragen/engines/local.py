"""The local engine: a learner and a sampler in one process, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ragen.algorithms.batch import Batch
from ragen.chat.chat import Chat
from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, largest
from ragen.core.pictures import Picture
from ragen.core.types import Prompt, Role, TokenRows
from ragen.engines.engine import Engine, assert_sampled
from ragen.engines.factory import TOLERANCES, make_sampler
from ragen.engines.sharded import Rank
from ragen.learning.learner import Learner
from ragen.learning.saving import QUESTION, one_turn
from ragen.networks.precision import Masters
from ragen.sampling.local_sampler import Sampler
from ragen.sampling.server import VllmServer
from ragen.sampling.vllm import VllmSampler
from ragen.sampling.weighted_policy import Stats

NUM_TOKENS = 16
"""Maximum number of tokens that `check_parity` samples and compares."""


class LocalEngine(Engine):
    """The `Engine` of one process, on CPU or one GPU.

    The local sampler reads the learner's weights in place, so publishing only drops the cache of
    keys and values. vLLM has weights of its own, so publishing pushes the learner's and checks that
    they arrived (`check_parity`). `path` is the folder or hub id of the policy's first weights. As
    one of several processes (`ragen.cluster.process_engine`) it gets the arguments of its `Rank`.

    Raises:
        RagenError: The model cannot be loaded or has no usable chat template, vLLM cannot serve
            it, or the KL reference would not be the policy that the run begins with.
    """

    def __init__(self, config: Config, path: str, *of_rank: Any) -> None:
        self.rank = Rank(config, path, *of_rank)
        self.model, self.chat = self.rank.model, self.rank.chat
        self.learner = self.rank.learner
        self.version = 0
        self.policy = make_sampler(
            self.model,
            self.chat,
            path,
            config.model,
            config.rollout,
            adapter_rank=config.lora.rank,
            tensor_parallel=config.engine.tensor_parallel,
        )
        self._dtype, self._temperature = config.model.dtype, config.rollout.temperature
        self._parity = self._check_parity()

    @override
    async def score(self, batch: Batch, role: Role) -> Batch:
        self.policy.rest()
        return self.learner.score(batch, role)

    @override
    async def update(self, batch: Batch, step: int) -> Metrics:
        assert_sampled(batch)
        self.policy.rest()
        return self.learner.update(batch, step)

    @override
    async def cross_scores(
        self, prompts: TokenRows, thoughts: TokenRows, pictures: Sequence[Picture] = ()
    ) -> Tensor:
        self.policy.rest()
        return self.learner.cross_scores(prompts, thoughts, pictures)

    @override
    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        self.policy.rest()
        return self.learner.gradient_norms(batch, bucket_B)

    @override
    async def publish(self) -> None:
        self.version += 1
        await self._push()

    async def _push(self) -> None:
        await self.policy.publish(self.model, self.version)
        self.learner.synced = True
        self._parity = self._check_parity()

    def _check_parity(self) -> Metrics:
        """The difference between sampler and learner, if the sampler has weights of its own."""
        if isinstance(self.policy, Sampler):
            return {}
        return check_parity(self.policy, self.learner, self.chat, self._temperature, self._dtype)

    @override
    def forget(self) -> None:
        self.policy.forget()
        self.policy.stats = Stats()

    @override
    def metrics(self) -> Metrics:
        return self.policy.metrics() | self._parity

    @override
    async def save(self, folder: Path) -> dict[str, Any]:
        return {"version": self.version, **self.rank.save(folder)}

    @override
    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        self.rank.load(folder, state)
        self.version = int(state["version"])
        await self._push()

    @override
    async def close(self) -> None:
        await self.policy.close()
        self.rank.close()
        learner = self.learner
        for module in filter(None, (self.model, learner.critic, learner.reference)):
            nn.Module.to(module, "meta")  # frees the storage
        for optimizer in learner.named_optimizers().values():
            optimizer.state.clear()
            optimizer.param_groups.clear()
        learner.masters = learner.critic_masters = Masters(())


def check_parity(
    policy: VllmSampler | VllmServer, learner: Learner, chat: Chat, temperature: float, dtype: str
) -> Metrics:
    """Sample a short completion and score it with the learner. Both should have equal weights.

    A sampler with its own weights may keep old ones or load new ones wrongly, and raise no error.
    The run would then learn from samples of another policy, and importance weights would hide this.

    Returns:
        ``publish/logprob_difference``: max |sampled logprob − learner's|, in nats.

    Raises:
        RagenError: The difference exceeds `TOLERANCES`.
    """
    num_tokens = min(NUM_TOKENS, policy.max_length // 2)
    ids = chat.open([{"role": "user", "content": QUESTION}])[0][: policy.max_length - num_tokens]
    prompt = Prompt((), ids, 0, num_tokens, temperature, seed=policy.version)
    completion = policy.ask(prompt)
    assert completion.token_ids is not None and completion.logprobs is not None
    batch = one_turn(ids, completion.token_ids, completion.logprobs)
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
