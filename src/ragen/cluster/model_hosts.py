"""The code that runs in the processes which hold a model: learners and samplers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from torch import nn

from ragen.config.config import Config
from ragen.core.errors import EngineLost
from ragen.core.types import Completion, Prompt
from ragen.engines.factory import load_model, make_sampler, prepare_model
from ragen.engines.sharded import Rank
from ragen.networks.machine import use_threads
from ragen.rollout.setup import make_chat
from ragen.sampling.pool import Answers
from ragen.sampling.vllm import VllmSampler
from ragen.sampling.weighted_policy import Stats
from ragen.sampling.weights import (
    Block,
    checksums,
    pack,
    published,
    refuse_other_names,
    take_over,
)

T = TypeVar("T")


class Host:
    """A process of an engine, which reports where its threads stand."""

    def stacks(self) -> str:
        """The Python stacks of all other threads; they change while the process works."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )


class LearnerHost(Host):
    """A learner process: one of the ranks that train together."""

    def address(self) -> str:
        """A ``host:port`` on this machine, where the learners can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return f"{own_address()}:{port}"

    def start(self, threads: int, *of_rank: Any) -> Any:
        """Load the weights and return the tokenizer; the other arguments go to `Rank`."""
        use_threads(threads)
        self._rank = Rank(*of_rank)
        return self._rank.tokenizer

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of a method of the rank or its learner; only the first learner returns one."""
        owner = self._rank if method in ("save", "load") else self._rank.learner
        answer = getattr(owner, method)(*arguments)
        return answer if self._rank.ranks.rank == 0 else None

    def weights(self) -> tuple[Block | None, tuple[dict[str, int], int]]:
        """A publication, its checksums and its size in bytes; only the first learner has them."""
        tensors = self._rank.weights()
        self._rank.learner.synced = True
        if not tensors:
            return None, ({}, 0)
        block = pack(tensors.items())
        return block, (checksums(tensors.items()), block.num_bytes)


class SamplerHost(Host):
    """A sampler process: the local sampler or vLLM, in an event loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._finished: list[tuple[int, Completion | Exception]] = []
        self._news = asyncio.Event()
        self._era = 0
        self._busy_s, self._since, self._open = 0.0, 0.0, 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True).start()

    def start(self, threads: int, config: Config, path: str) -> None:
        """Load the model; the learner's weights come with `load`.

        Raises:
            RagenError: The model cannot be loaded.
        """
        use_threads(threads)
        has_vllm = config.rollout.sampler == "vllm"
        model, tokenizer = load_model(config.model, path, "cpu" if has_vllm else "")
        self._model = prepare_model(model, path, config.lora, config.seed)
        self._sampler = make_sampler(
            self._model,
            make_chat(config, tokenizer),
            path,
            config.model,
            config.rollout,
            adapter_rank=config.lora.rank,
            tensor_parallel=config.engine.tensor_parallel,
        )
        self._names = frozenset(published(self._model))
        if has_vllm:
            nn.Module.to(self._model, "meta")  # vLLM holds its own weights

    def load(self, block: Block, version: int) -> dict[str, int]:
        """Sample with these weights from now on; returns the checksums of the weights then held.

        Raises:
            RagenError: The weights belong to another model, or vLLM does not hold them.
        """

        async def work() -> dict[str, int]:
            if not isinstance(self._sampler, VllmSampler):
                held = take_over(self._model, block)
                await self._sampler.publish(self._model, version)
                return held
            weights = dict(block.tensors())
            refuse_other_names(self._names, weights)
            # vLLM has compared its weights with these, so both have the same checksums.
            await self._sampler.publish(self._model, version, weights)
            return checksums(weights.items())

        return self._run(work())

    def rest(self) -> None:
        """Free memory that only sampling needs."""

        async def work() -> None:
            self._sampler.rest()

        self._run(work())

    def submit(self, requests: Sequence[tuple[int, Prompt]], era: int) -> None:
        """Queue numbered requests; a later era begins without keys and values."""

        async def work() -> None:
            if era > self._era:
                self._era = era
                self._sampler.forget()
                self._sampler.stats = Stats()
            for number, prompt in requests:
                self._tasks[number] = self._loop.create_task(self._answer(number, prompt))

        self._run(work())

    def collect(self) -> Answers:
        """Wait until a request is finished, and return all that are."""

        async def work() -> Answers:
            await self._news.wait()
            await asyncio.sleep(0)  # lets the other answers of the same forward arrive
            self._news.clear()
            finished, self._finished = self._finished, []
            self._count(0)
            return Answers(finished, self._busy_s, self._era, replace(self._sampler.stats))

        return self._run(work())

    def drop(self, numbers: Sequence[int]) -> None:
        """Give up requests."""

        async def work() -> None:
            for number in numbers:
                if number in self._tasks:
                    self._tasks[number].cancel()
            self._news.set()  # `collect` returns, and its caller sees whether requests are left

        self._run(work())

    async def _answer(self, number: int, prompt: Prompt) -> None:
        self._count(1)
        answer: Completion | Exception
        try:
            answer = await self._sampler.complete(prompt)
        except EngineLost as error:
            end(error)
        except Exception as error:  # noqa: BLE001 - the driver raises it
            answer = error
        finally:
            self._count(-1)
            del self._tasks[number]
        self._finished.append((number, answer))
        self._news.set()

    def _count(self, more: int) -> None:
        """Add `more` to the count of open requests, and count the time with at least one."""
        now = time.monotonic()
        if self._open:
            self._busy_s += now - self._since
        self._open, self._since = self._open + more, now

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except EngineLost as error:
            end(error)


def end(error: EngineLost) -> NoReturn:
    """End this process, because its workers are gone: the engine is lost with it."""
    print(error, file=sys.stderr, flush=True)  # noqa: T201, into the process's log
    os._exit(1)


def own_address() -> str:
    """This machine's address in its network, or the loopback address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host
