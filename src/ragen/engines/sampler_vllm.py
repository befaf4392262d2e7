"""vLLM in the learner's process: a policy with weights of its own, which are pushed after updates.

It is for models whose completions a plain forward per token is too slow for. vLLM is an extra,
so it is imported where an engine is made; all that is called of it stands in `Vllm`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.errors import RagenError
from ragen.core.types import Completion, Prompt
from ragen.engines.sampler import QUIET_ROUNDS, Stats, completion_of
from ragen.models.adapter_folder import save_adapter
from ragen.models.lora import has_adapters

TESTED = "0.32"
"""The releases of vLLM that this was tested with: its inner calls change from one to the next."""

CACHE_BLOCK = 32
"""Tokens of which the prefix cache keeps all or none on a CPU: fewer than the usual 128, since a
turn of a small environment is short."""

CPU_CACHE_BYTES = 2**30
"""Memory for keys and values on a CPU, where no share of a card's memory can be named."""

CPU_BATCH_TOKENS = 8192
"""Prompt tokens that a CPU reads at once, or those of one prompt."""

ADAPTER = "ragen"
"""What the policy's adapter is called there."""


class Sampled(NamedTuple):
    """A finished request: its name, what was drawn, and how much of its prompt was remembered."""

    name: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached: int


class Vllm:
    """An engine of vLLM in this process, and every call of vLLM that is made.

    It binds no threads of its own, reports nothing to anyone, and takes no defaults from the
    model's ``generation_config``.

    Args:
        path: The folder or hub id of its first weights.
        dtype: ``float32`` or ``bfloat16``.
        max_length: Tokens that a prompt and its completion may have together.
        slots: Completions that are sampled at once.
        gpu_memory: Share of the GPU's memory that it takes.
        adapter_rank: Rank of the adapter that is pushed instead of all weights, or 0.

    Raises:
        RagenError: vLLM is missing, of a release that was not tested, or refuses the model.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        max_length: int,
        slots: int,
        gpu_memory: float,
        adapter_rank: int = 0,
    ) -> None:
        self._vllm = _import()
        platform = self._vllm.platforms.current_platform
        self._packs, self._sleeps = platform.is_cpu(), platform.is_cuda()
        self._asleep = False
        self._adapter: Any = None
        machine: dict[str, Any] = {"gpu_memory_utilization": gpu_memory, "enable_sleep_mode": True}
        if self._packs:
            machine = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "block_size": CACHE_BLOCK}
            machine["enforce_eager"] = True  # compiling takes longer than a small model's run
            # A prompt in parts would rewind its seeded generator, which a CPU's cannot do.
            machine |= {"enable_chunked_prefill": False}
            machine |= {"max_num_batched_tokens": max(CPU_BATCH_TOKENS, max_length)}
        if adapter_rank:
            ranks = get_args(self._vllm.config.lora.MaxLoRARanks)
            if adapter_rank > max(ranks):
                raise RagenError(
                    f"lora.rank = {adapter_rank}: vLLM takes adapters up to rank {max(ranks)}; "
                    'lower it, or use rollout.sampler = "local"'
                )
            highest = min(rank for rank in ranks if rank >= adapter_rank)
            machine |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": highest}
        try:
            with _weights_alone(path) as model, warnings.catch_warnings(action="ignore"):
                arguments = self._vllm.EngineArgs(
                    model=model,
                    dtype=dtype,
                    max_model_len=max_length,
                    max_num_seqs=slots,
                    distributed_executor_backend="uni",
                    logprobs_mode="processed_logprobs",
                    enable_prefix_caching=True,
                    generation_config="vllm",
                    skip_tokenizer_init=True,
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    **machine,
                )
                self._engine = self._vllm.LLMEngine.from_engine_args(arguments)
        except (ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise RagenError(
                f"vLLM cannot serve the model '{path}': {reason}; "
                'use rollout.sampler = "local", or lower rollout.gpu_memory or model.max_length'
            ) from error

    def add(self, name: str, prompt: Prompt, end_ids: Sequence[int]) -> None:
        """Ask for a completion; `step` returns it under `name`."""
        assert prompt.token_ids
        parameters = self._vllm.SamplingParams(
            temperature=prompt.temperature,
            seed=prompt.seed,
            max_tokens=prompt.max_tokens,
            stop_token_ids=list(end_ids),
            ignore_eos=True,  # ends are ours to name
            logprobs=0,  # of the token drawn and no other
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        tokens = self._vllm.inputs.tokens_input(list(prompt.token_ids))
        self._engine.add_request(name, tokens, parameters, lora_request=self._adapter)

    def step(self) -> list[Sampled]:
        """Compute once for all requests; those that are finished by it."""
        finished = []
        for request in self._engine.step():
            (output,) = request.outputs
            drawn = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = tuple(float(known[token].logprob) for token, known in drawn)
            ids = tuple(int(token) for token in output.token_ids)
            finished.append(
                Sampled(request.request_id, ids, logprobs, request.num_cached_tokens or 0)
            )
        return finished

    def drop(self, names: Sequence[str]) -> None:
        """Forget requests that nobody waits for any more."""
        self._engine.abort_request(list(names))

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take these weights, named as in a checkpoint, in place of its own."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if self._packs:
            self._engine.collective_rpc(_pack_output_layer)

    def load_adapter(self, folder: Path) -> None:
        """Take the adapter in `folder` in place of the one before."""
        request = self._vllm.lora.request.LoRARequest
        # Without `load_inplace` the adapter stays as it was, silently; with it in a completion's
        # request it would be read again for each of them.
        self._engine.add_lora(request(ADAPTER, 1, str(folder), load_inplace=True))
        self._adapter = request(ADAPTER, 1, str(folder))

    def forget(self) -> None:
        """Drop all keys and values."""
        done = self._engine.reset_prefix_cache()
        assert done, "a prefix cache may not be dropped while completions are sampled"

    def sleep(self) -> None:
        """Leave the GPU's memory to others, the weights kept in the machine's; `wake` undoes it."""
        if self._sleeps and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Be ready to sample or to take weights."""
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Free its memory; nothing more may be asked."""
        self._engine.engine_core.shutdown()
        del self._engine
        self._vllm.distributed.cleanup_dist_env_and_memory()


@contextmanager
def _weights_alone(path: str) -> Iterator[str]:
    """A folder's model without other tensors: vLLM would take a checkpoint's optimisers for some.

    Anything else than a folder stays what it is.
    """
    if not Path(path).is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ragen-model-") as alone:
        for file in Path(path).iterdir():
            if file.suffix != ".safetensors" or file.name.startswith("model"):
                (Path(alone) / file.name).symlink_to(file.resolve())
        yield alone


def _pack_output_layer(worker: Any) -> None:
    """Make the packed copy of the output layer anew, from which a CPU computes.

    Where its weights are those of the embedding, loading fills these and leaves the copy as it was.
    """
    head = getattr(worker.get_model(), "lm_head", None)
    if head is not None:
        head.quant_method.process_weights_after_loading(head)


def _import() -> Any:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # tensors are pushed within one process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner's threads are these too
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
        import vllm.config.lora
        import vllm.distributed
        import vllm.inputs
        import vllm.lora.request
        import vllm.platforms
        import vllm.sampling_params
    except ImportError as error:
        raise RagenError(
            f"rollout.sampler = \"vllm\" needs vLLM ({error}): pip install 'ragen-rl[vllm]' or use "
            '"local"'
        ) from error
    if not vllm.__version__.startswith(f"{TESTED}."):
        raise RagenError(
            f"vLLM {vllm.__version__} is installed, and RAGEN was tested with {TESTED}: "
            "pip install 'ragen-rl[vllm]', or use rollout.sampler = \"local\""
        )
    return vllm


class VllmSampler:
    """A `WeightedPolicy` over vLLM in this process.

    Logprobs are those of the distribution drawn from, as the local sampler's. A request's seed
    decides its random numbers; the order in which requests meet in a batch moves their last digits,
    so what is sampled twice agrees, but not bit for bit.

    Args:
        vllm: The engine, with the learner's weights.
        end_ids: Tokens that end a completion. The one drawn is part of it.
        decode: Token ids (without the end token) to text.
        max_length: Tokens that a prompt and its completion may have together; the caller keeps to
            it.
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
        self._open: dict[str, asyncio.Future[Sampled]] = {}  # asked and not answered
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion; see `Sampler.complete`, whose contract this is."""
        loop = asyncio.get_running_loop()
        if self._driver is not None and self._driver.get_loop() is not loop:
            self._abandon()  # left behind by a loop that was torn down
        name, answer = self._add(prompt), loop.create_future()
        self._open[name] = answer
        if self._driver is None:
            self._driver = loop.create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)
        try:
            sampled = await answer
        finally:
            if self._open.pop(name, None) is not None:  # whoever asked was cancelled
                self._vllm.drop([name])
        self.stats.prefilled += len(prompt.token_ids or ()) - sampled.num_cached
        self.stats.reused += sampled.num_cached
        self.stats.sampled += len(sampled.token_ids)
        return self._completion(sampled)

    def ask(self, prompt: Prompt) -> Completion:
        """Sample one completion at once, outside of any event loop and of the `stats`."""
        assert not self._open, "a question between completions"
        name, found = self._add(prompt), list[Sampled]()
        while not found:
            found = self._vllm.step()
        (sampled,) = found
        assert sampled.name == name
        return self._completion(sampled)

    async def publish(self, model: PreTrainedModel, version: int) -> None:
        """See `WeightedPolicy.publish`: all weights are copied, or the adapter is read anew."""
        self.push(model)
        self.version = version

    def push(self, model: PreTrainedModel) -> None:
        """Sample with these weights, under the version that they have already."""
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
        """End the engine and free its memory; once is enough."""
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

    # The driver: one task that lives while there are requests.

    async def _drive(self) -> None:
        while self._open:
            for _ in range(QUIET_ROUNDS):  # let everyone who can ask do so
                await asyncio.sleep(0)
            for sampled in self._vllm.step() if self._open else ():
                answer = self._open.pop(sampled.name)
                if not answer.done():
                    answer.set_result(sampled)

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        """Nobody may wait for a driver that is gone: pass its failure on to all requests."""
        if driver is not self._driver:
            return
        self._driver = None
        if driver.cancelled():
            self._abandon()
        elif (error := driver.exception()) is not None:
            self._abandon(error)
        elif self._open:  # asked between the driver's last look and its end
            self._driver = driver.get_loop().create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)

    def _abandon(self, error: BaseException | None = None) -> None:
        left, self._open, self._driver = self._open, {}, None
        self._vllm.drop(list(left))
        for answer in left.values():
            if answer.done() or answer.get_loop().is_closed():
                continue
            if error is None:
                answer.cancel()
            else:
                answer.set_exception(error)
