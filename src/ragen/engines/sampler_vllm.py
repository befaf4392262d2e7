"""vLLM as the policy: a sampler with weights of its own, which every publication pushes.

It is for models that are too large for the local sampler's plain forward per token.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path

from transformers import PreTrainedModel

from ragen.core.types import Completion, Prompt
from ragen.engines.sampling import QUIET_ROUNDS, Driver, Stats, completion_of, fail
from ragen.engines.vllm_engine import Sampled, Vllm
from ragen.models.adapter_folder import save_adapter
from ragen.models.lora import has_adapters


class VllmSampler:
    """A `WeightedPolicy` over vLLM in this process.

    Logprobs are those of the distribution drawn from, as with the local sampler. A request's seed
    decides its random numbers, but the composition of a batch changes the last digits of its
    logits; so sampling is not reproducible bit for bit.

    `vllm` has the learner's weights; the other arguments are those of `Sampler`.
    """

    def __init__(
        self,
        vllm: Vllm,
        end_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
        *,
        max_length: int,
    ) -> None:
        self.version = 0
        self.stats = Stats()
        self.max_length = max_length
        self._vllm = vllm
        self.end_ids = sorted(end_ids)
        self._decode = decode
        self._names = map(str, count())
        self._open: dict[str, asyncio.Future[Sampled]] = {}  # sent and not answered
        self._driver = Driver(self._drive, lambda: bool(self._open), self._abandon)
        self._closed = False

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion; the contract is that of `Sampler.complete`."""
        self._driver.ensure()
        name, answer = self._add(prompt), asyncio.get_running_loop().create_future()
        self._open[name] = answer
        try:
            sampled = await answer
        finally:
            if self._open.pop(name, None) is not None:  # the caller was cancelled
                self._vllm.drop([name])
        self.stats.prefilled += len(prompt.token_ids or ()) - sampled.num_cached
        self.stats.reused += sampled.num_cached
        self.stats.sampled += len(sampled.token_ids)
        return self._completion(sampled)

    def ask(self, prompt: Prompt) -> Completion:
        """Sample one completion without an event loop; it does not count in `stats`."""
        assert not self._open, "no other completion may be open"
        name, finished = self._add(prompt), list[Sampled]()
        while not finished:
            finished = self._vllm.step()
        (sampled,) = finished
        assert sampled.name == name
        return self._completion(sampled)

    async def publish(self, model: PreTrainedModel, version: int) -> None:
        """See `WeightedPolicy.publish`: all weights are copied, or the adapter is read again."""
        self.push(model)
        self.version = version

    def push(self, model: PreTrainedModel) -> None:
        """Sample with these weights from now on; the version stays."""
        self._vllm.wake()
        if has_adapters(model):
            with tempfile.TemporaryDirectory(prefix="ragen-adapter-") as folder:
                save_adapter(model, Path(folder))
                self._vllm.load_adapter(Path(folder))
        else:
            self._vllm.load((name, weight.detach()) for name, weight in model.named_parameters())
        self.forget()

    def forget(self) -> None:
        """Drop all keys and values."""
        assert not self._open, "weights may not change while completions are sampled"
        self._vllm.wake()
        self._vllm.forget()

    def rest(self) -> None:
        """See `WeightedPolicy.rest`."""
        self._vllm.sleep()

    async def close(self) -> None:
        """Stop the engine and free its memory; closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._vllm.close()

    def _add(self, prompt: Prompt) -> str:
        assert prompt.token_ids, "the sampler needs token ids"
        assert len(prompt.token_ids) + prompt.max_tokens <= self.max_length, (
            "over the model's length"
        )
        name = next(self._names)
        self._vllm.wake()
        self._vllm.add(name, prompt, self.end_ids)
        return name

    def _completion(self, sampled: Sampled) -> Completion:
        ids, logprobs = sampled.token_ids, sampled.logprobs
        return completion_of(ids, logprobs, self.end_ids, self._decode, self.version)

    # The driver's task.

    async def _drive(self) -> None:
        while self._open:
            for _ in range(QUIET_ROUNDS):  # let every episode send its request
                await asyncio.sleep(0)
            for sampled in self._vllm.step() if self._open else ():
                answer = self._open.pop(sampled.name)
                if not answer.done():
                    answer.set_result(sampled)

    def _abandon(self, error: BaseException | None) -> None:
        dropped, self._open = self._open, {}
        self._vllm.drop(list(dropped))
        fail(dropped.values(), error)
