"""The code that runs in the processes which hold a model: learners and samplers."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch import nn

from ragen.config.config import Config
from ragen.core.errors import EngineLost
from ragen.core.types import Completion, Prompt
from ragen.engines.factory import load_model, make_sampler, prepare_model
from ragen.engines.hosts import Failure, Host, ServingHost, or_failure, own_address
from ragen.engines.machine import use_threads
from ragen.engines.sampler_pool import SamplerTold
from ragen.engines.sampler_vllm import VllmSampler
from ragen.engines.sampling import Stats, WeightedPolicy
from ragen.engines.sharded import Rank
from ragen.engines.weights import (
    Block,
    checksums,
    pack,
    published,
    refuse_other_names,
    take_over,
)
from ragen.rollout.setup import make_chat

T = TypeVar("T")


class LearnerHost(Host):
    """A learner process: one of the ranks that train together."""

    def address(self) -> str:
        """A ``host:port`` on this machine, where the learners can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return f"{own_address()}:{port}"

    def start(
        self, config: Config, path: str, threads: int, rank: int = 0, num: int = 1, store: str = ""
    ) -> Any:
        """Load the weights and return the tokenizer, or a `Failure`.

        `threads` is the number of threads to use, and `store` the address where `num` learners
        meet.
        """

        def work() -> Any:
            use_threads(threads)
            self._rank = Rank(config, path, rank, num, store)
            return self._rank.tokenizer

        return or_failure(work)

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of a method of the learner; only the first learner returns one."""
        answer = or_failure(lambda: getattr(self._rank, method)(*arguments))
        failed = isinstance(answer, Failure)
        return answer if failed or self._rank.ranks.rank == 0 else None

    def weights(self) -> tuple[Block | None, tuple[dict[str, int], int]]:
        """A publication, its checksums and its size in bytes; only the first learner has them."""
        tensors = self._rank.weights()
        self._rank.published()
        if not tensors:
            return None, ({}, 0)
        block = pack(tensors)
        return block, (checksums(tensors), block.num_bytes)


class SamplerHost(ServingHost):
    """A sampler process: the local sampler or vLLM."""

    def start(self, config: Config, path: str, threads: int) -> Failure | None:
        """Load the model; the learner's weights come with `load`."""

        def work() -> None:
            use_threads(threads)
            name = config.rollout.sampler
            model, tokenizer = load_model(config, path, "cpu" if name == "vllm" else "")
            self._model = prepare_model(config, path, model, critic=False)
            chat = make_chat(config, tokenizer)
            self._sampler = make_sampler(name, config, self._model, chat, path)
            self._sampler.source = path
            self._work = partial(_sample, self._sampler)
            self._names = frozenset(published(self._model))
            if name == "vllm":
                nn.Module.to(self._model, "meta")  # vLLM holds its own weights

        return or_failure(work)

    def load(self, block: Block, version: int) -> dict[str, int] | Failure:
        """Sample with these weights from now on; returns the checksums of the weights then held."""

        async def work() -> dict[str, int]:
            if not isinstance(self._sampler, VllmSampler):
                held = take_over(self._model, block)
                await self._sampler.publish(self._model, version)
                return held
            weights = dict(block.tensors())
            refuse_other_names(self._names, weights)
            # It compares what vLLM holds with these weights, so the checksums are those of both.
            await self._sampler.publish(self._model, version, weights)
            return checksums(weights.items())

        return or_failure(lambda: self._run(work()))

    def rest(self) -> None:
        """See `WeightedPolicy.rest`."""

        async def work() -> None:
            self._sampler.rest()

        self._run(work())

    def _forget(self) -> None:
        self._sampler.forget()
        self._sampler.stats = Stats()

    def _told(self) -> SamplerTold:
        self._count(0)
        return SamplerTold(self._busy_s, self._era, replace(self._sampler.stats))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return super()._run(work)
        except EngineLost as error:
            end(error)


def end(error: EngineLost) -> NoReturn:
    """End this process, because its workers are gone: it is lost, and another replaces it."""
    print(error, file=sys.stderr, flush=True)  # noqa: T201, into the process's log
    os._exit(1)


async def _sample(sampler: WeightedPolicy, prompt: Prompt) -> Completion:
    try:
        return await sampler.complete(prompt)
    except EngineLost as error:
        end(error)
