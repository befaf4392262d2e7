"""vLLM as the policy: a sampler with weights of its own, which every publication pushes.

It is for models that are too large for the local sampler's plain forward per token.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from ragen.chat.chat import Chat
from ragen.core.errors import RagenError
from ragen.core.files import file_errors
from ragen.core.types import Completion, Prompt
from ragen.models.adapter_folder import save_adapter
from ragen.networks.lora import has_adapters, scale_of
from ragen.sampling.vllm_engine import Sampled, Vllm
from ragen.sampling.weighted_policy import QUIET_ROUNDS, QueuedPolicy
from ragen.sampling.weights import MEMORY, MORE_MEMORY, published, some

Weights = Mapping[str, Tensor]


class VllmSampler(QueuedPolicy):
    """A `WeightedPolicy` over an engine of vLLM.

    `vllm` has the learner's weights. A request's seed decides its random numbers, but the
    composition of a batch changes the last digits of its logits, so sampling is not reproducible
    bit for bit.
    """

    def __init__(self, vllm: Vllm, chat: Chat, max_length: int) -> None:
        super().__init__(chat, max_length)
        self._vllm = vllm
        self._names = map(str, count())
        self._closed = False
        self._accepts = asyncio.Event()
        self._accepts.set()

    def ask(self, prompt: Prompt) -> Completion:
        """Sample one completion without an event loop; it does not count in `stats`."""
        assert not self._open, "no other completion may be open"
        name, finished = self._send(prompt), list[Sampled]()
        while not finished:
            finished = self._vllm.step()
        (sampled,) = finished
        assert sampled.name == name
        return self._completion(sampled.token_ids, sampled.logprobs)

    @override
    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion; it waits while weights are published."""
        await self._accepts.wait()
        return await super().complete(prompt)

    @override
    async def publish(
        self, model: PreTrainedModel, version: int, weights: Weights | None = None
    ) -> None:
        """Push the weights to vLLM, once the open completions are finished.

        vLLM would keep the keys and values of an open completion for later requests, although
        earlier weights computed a part of them.
        """
        self._accepts.clear()
        try:
            if self._open:
                await asyncio.wait(self._open.values())
            self.push(model, weights)
            self.version = version
        finally:
            self._accepts.set()

    def push(self, model: PreTrainedModel, weights: Weights | None = None) -> None:
        """Copy all weights, or let vLLM read the adapter again.

        `weights` are those that are published, if they are not in `model`.

        Raises:
            RagenError: vLLM does not hold them afterwards; or there is too little shared memory.
        """
        assert not self._open, "open completions have keys and values of earlier weights"
        self._vllm.wake()
        weights = {name: each.detach() for name, each in (weights or published(model)).items()}
        if has_adapters(model):
            folders = MEMORY if os.access(MEMORY, os.W_OK) else None  # None: Python's own place
            with tempfile.TemporaryDirectory(prefix="ragen-adapter-", dir=folders) as folder:
                with file_errors("write", folder, f"free space there, or {MORE_MEMORY}"):
                    save_adapter(model, Path(folder), tensors=weights)
                scale = scale_of(model)
                others = self._vllm.load_adapter(Path(folder), weights.items(), scale)
        else:
            others = self._vllm.load(weights.items())
        if others:
            raise RagenError(
                f"the weights did not reach vLLM, which holds others in {some(others)}: "
                'use rollout.sampler = "local"'
            )
        self.forget()

    def forget(self) -> None:
        """Drop all keys and values, unless completions are open, which need them."""
        if not self._open:
            self._vllm.wake()
            self._vllm.forget()

    @override
    def rest(self) -> None:
        self._vllm.sleep()

    async def close(self) -> None:
        """Stop the engine and free its memory; closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._vllm.close()

    def _send(self, prompt: Prompt) -> str:
        self._checked_ids(prompt)
        name = next(self._names)
        self._vllm.wake()
        self._vllm.add(name, prompt, self.stop_ids)
        return name

    async def _drive(self) -> None:
        while self._open:
            for _ in range(QUIET_ROUNDS):  # let every episode send its request
                await asyncio.sleep(0)
            for sampled in self._vllm.step() if self._open else ():
                self.stats.prefilled += sampled.num_prompt - sampled.num_cached
                self.stats.reused += sampled.num_cached
                self.stats.sampled += len(sampled.token_ids)
                completion = self._completion(sampled.token_ids, sampled.logprobs)
                self._answer(sampled.name, completion)

    def _drop(self, requests: Iterable[Any]) -> None:
        self._vllm.drop(list(requests))
