"""An engine of vLLM, by its public interface (for the rest see `vllm_private`).

vLLM is an extra, so it is imported when an engine is made, and nowhere else.
"""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ragen.core.errors import EngineLost, RagenError
from ragen.core.files import cannot
from ragen.core.types import Prompt
from ragen.models.memory import CPU_CACHE_BYTES
from ragen.sampling.vllm_private import (
    ADAPTER_ID,
    RELEASES,
    differing_adapter,
    has_failed,
    is_known,
    shut_down,
    take,
)
from ragen.sampling.weights import MEMORY, MORE_MEMORY, offered

CACHE_BLOCK = 32
"""Block size of the prefix cache on a CPU: less than the usual 128 tokens, since a turn of a small
environment is short."""

CPU_BATCH_TOKENS = 8192
"""Prompt tokens that a CPU reads at once (more only for a single longer prompt)."""

ADAPTER = "ragen"
"""The name of the policy's adapter in vLLM."""


class Sampled(NamedTuple):
    """A finished request; `num_cached` of its prompt's tokens were cached."""

    name: str
    num_prompt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached: int


class Vllm:
    """An engine of vLLM in this process; with `tensor_parallel` above 1, that many others compute.

    It pins no threads, sends no usage statistics, and ignores the model's ``generation_config``.
    Its first weights come from the folder or hub id `path`. It takes the share `gpu_memory` of
    the memory of each GPU and samples `slots` completions at once, each of at most `max_length`
    tokens with its prompt. `adapter_rank` is the rank of the adapter that is pushed instead of all
    weights, or 0.

    Raises:
        RagenError: vLLM is missing, is of an unknown release, or refuses the model.
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
        tensor_parallel: int = 1,
    ) -> None:
        self._vllm = _import()
        platform = self._vllm.platforms.current_platform
        self._packs, self._sleeps = platform.is_cpu(), platform.is_cuda()
        self._asleep, self._is_parallel = False, tensor_parallel > 1
        self._adapter: Any = None
        machine: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory,
            "enable_sleep_mode": True,
        }
        if self._packs:
            machine = {
                "kv_cache_memory_bytes": CPU_CACHE_BYTES,
                "block_size": CACHE_BLOCK,
                "enforce_eager": True,  # compiling takes longer than a small model's run
                # A prompt read in parts rewinds its seeded generator, which a CPU's cannot do.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(CPU_BATCH_TOKENS, max_length),
            }
        if adapter_rank:
            machine |= {"enable_lora": True, "max_loras": 1}
            machine["max_lora_rank"] = self._max_rank(adapter_rank)
        threads = torch.get_num_threads()
        try:
            with _weights_alone(path) as model, warnings.catch_warnings(action="ignore"):
                arguments = self._vllm.EngineArgs(
                    model=model,
                    dtype=dtype,
                    max_model_len=max_length,
                    max_num_seqs=slots,
                    distributed_executor_backend="mp" if self._is_parallel else "uni",
                    tensor_parallel_size=tensor_parallel,
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
            if (
                isinstance(error, OSError) and error.errno == errno.ENOSPC
            ):  # of its processes' queues
                raise cannot("write", MEMORY, error, MORE_MEMORY) from error
            reason = " ".join(str(error).split())[:300]
            raise RagenError(
                f"vLLM cannot serve the model '{path}': {reason}; use rollout.sampler = "
                '"local", or lower rollout.gpu_memory, model.max_length or engine.tensor_parallel'
            ) from error
        if self._is_parallel:
            torch.set_num_threads(threads)  # vLLM lowers it, because its workers compute elsewhere

    def _max_rank(self, rank: int) -> int:
        """The smallest of vLLM's maximum ranks that is not below an adapter's."""
        ranks: tuple[int, ...] = get_args(self._vllm.config.lora.MaxLoRARanks)
        if rank > max(ranks):
            raise RagenError(
                f"lora.rank = {rank}: vLLM takes adapters up to rank {max(ranks)}; lower it, or "
                'use rollout.sampler = "local"'
            )
        return min(each for each in ranks if each >= rank)

    def add(self, name: str, prompt: Prompt, stop_ids: Sequence[int]) -> None:
        """Request a completion; `step` returns it under `name`."""
        assert prompt.token_ids
        parameters = self._vllm.SamplingParams(
            temperature=prompt.temperature,
            seed=prompt.seed,
            max_tokens=prompt.max_tokens,
            stop_token_ids=list(stop_ids),
            ignore_eos=True,  # only these end a completion
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        tokens = self._vllm.inputs.tokens_input(list(prompt.token_ids))
        self._engine.add_request(name, tokens, parameters, lora_request=self._adapter)

    def step(self) -> list[Sampled]:
        """Run one forward for all requests; returns those that it finished.

        Raises:
            EngineLost: One of several workers has ended.
        """
        finished = []
        with self._working():
            requests = self._engine.step()
        for request in requests:
            (output,) = request.outputs
            drawn = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = tuple(float(known[token].logprob) for token, known in drawn)
            ids = tuple(int(token) for token in output.token_ids)
            name, num_prompt = request.request_id, len(request.prompt_token_ids)
            num_cached = request.num_cached_tokens or 0
            finished.append(Sampled(name, num_prompt, ids, logprobs, num_cached))
        return finished

    def drop(self, names: Sequence[str]) -> None:
        """Abort requests."""
        self._engine.abort_request(list(names))

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Replace its weights, named as in a checkpoint; returns the names that did not arrive.

        Raises:
            RagenError: There is too little shared memory.
            EngineLost: One of several workers has ended.
        """
        return self._in_workers(take, weights, self._packs)

    def load_adapter(
        self, folder: Path, weights: Iterable[tuple[str, Tensor]], scale: float
    ) -> list[str]:
        """Load an adapter of the scale α / r; returns the names of weights that did not arrive."""
        request = self._vllm.lora.request.LoRARequest
        # Without `load_inplace` the adapter silently stays the old one; in a completion's request
        # it would make vLLM read the adapter again for each completion.
        with self._working():
            self._engine.add_lora(request(ADAPTER, ADAPTER_ID, str(folder), load_inplace=True))
        self._adapter = request(ADAPTER, ADAPTER_ID, str(folder))
        return self._in_workers(differing_adapter, weights, scale)

    def _in_workers(
        self, work: Callable[..., list[str]], weights: Iterable[tuple[str, Tensor]], *more: Any
    ) -> list[str]:
        """The names that `work` returns in any of the workers, each of which gets the weights.

        vLLM sends no tensors to other processes, so these read them from shared memory.
        """
        call = self._engine.collective_rpc
        if self._is_parallel:
            with offered(weights) as file, self._working():
                answers = call(work, args=(file, *more))
        else:
            answers = call(work, args=(list(weights), *more))
        return sorted(set(chain.from_iterable(answers)))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Report a worker that has ended; vLLM says only that its executor failed."""
        try:
            yield
        except RuntimeError as error:
            if self._is_parallel and has_failed(self._engine):
                raise EngineLost(
                    "a worker of vLLM has ended: it was killed, perhaps for lack of memory, or has "
                    "crashed"
                ) from error
            raise

    def forget(self) -> None:
        """Drop all keys and values."""
        with self._working():
            done = self._engine.reset_prefix_cache()
        assert done, "a prefix cache may not be dropped while completions are sampled"

    def sleep(self) -> None:
        """Free the GPU's memory; the weights move to the machine's. `wake` undoes it."""
        if self._sleeps and not self._asleep:
            with self._working():
                self._engine.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Make it ready to sample or to receive weights."""
        if self._asleep:
            with self._working():
                self._engine.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Free its memory; it cannot be used afterwards."""
        shut_down(self._engine)
        del self._engine
        self._vllm.distributed.cleanup_dist_env_and_memory()


@contextmanager
def _weights_alone(path: str) -> Iterator[str]:
    """A hub id, or a model folder alone: vLLM would read a checkpoint's optimisers as weights."""
    if not Path(path).is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ragen-model-") as alone:
        for file in Path(path).iterdir():
            if file.suffix != ".safetensors" or file.name.startswith("model"):
                (Path(alone) / file.name).symlink_to(file.resolve())
        yield alone


def _import() -> Any:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # tensors are pushed within one process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner uses the same threads
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
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
            f'rollout.sampler = "vllm" needs vLLM ({error}): '
            "pip install 'ragen-rl[vllm]', or use \"local\""
        ) from error
    if not is_known(vllm.__version__):
        raise RagenError(
            f"vLLM {vllm.__version__} is installed, and RAGEN knows {' and '.join(RELEASES)}: "
            "pip install 'ragen-rl[vllm]', or use rollout.sampler = \"local\""
        )
    return vllm
