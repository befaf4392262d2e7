"""A running vLLM server as the policy: tokens in and out over HTTP, weights through a folder.

The user starts the server for one run, with vLLM's development endpoints enabled:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs
        --generation-config vllm --enable-prompt-tokens-details

and for adapters VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 with --enable-lora --max-lora-rank RANK. Weights
are written to Python's folder for temporary files (set by ``TMPDIR``), which the server must be
able to read.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedModel
from typing_extensions import override

from ragen.chat.chat import Chat
from ragen.core.errors import RagenError
from ragen.core.files import file_errors
from ragen.core.types import Completion, Prompt
from ragen.models.adapter_folder import save_adapter
from ragen.networks.lora import has_adapters
from ragen.rollout.endpoint import MAX_SHOWN, check_address
from ragen.rollout.endpoint_format import error_message
from ragen.sampling.vllm_engine import ADAPTER
from ragen.sampling.vllm_private import RELEASES, is_known
from ragen.sampling.weighted_policy import WeightedPolicy

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""Seconds before the server counts as lost; a completion may wait in its queue for minutes."""


class VllmServer(WeightedPolicy):
    """A `WeightedPolicy` over a vLLM server, which has the learner's weights from the start.

    `url` is its address, such as ``http://127.0.0.1:8000``.

    Raises:
        RagenError: The server cannot be reached, is not vLLM of the tested release, does not let
            weights be pushed, or serves another model.
    """

    def __init__(self, url: str, model: PreTrainedModel, chat: Chat, max_length: int) -> None:
        super().__init__(chat, max_length)
        check_address("rollout.sampler", url, "a server for training needs no key")
        self.url = url.rstrip("/").removesuffix("/v1")
        with self._reaching():
            self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT)
        self._async_http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of those connections
        try:
            self._served = self._model_of()
            self.push(model)
        except BaseException:
            self._http.close()
            raise

    @override
    async def complete(self, prompt: Prompt) -> Completion:
        """Ask the server for one completion.

        Raises:
            RagenError: The server cannot be reached, or its answer is invalid.
        """
        loop = asyncio.get_running_loop()
        if self._async_http is None or self._loop is not loop:
            limits = httpx.Limits(max_connections=None)  # the server queues and batches
            self._async_http = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT, limits=limits)
            self._loop = loop
        with self._reaching():
            response = await self._async_http.post("/v1/completions", json=self._request(prompt))
        completion, num_cached = self._read(response, prompt)
        if num_cached is not None:
            self.stats.prefilled += len(self._checked_ids(prompt)) - num_cached
            self.stats.reused += num_cached
        self.stats.sampled += len(completion.token_ids or ())
        return completion

    def ask(self, prompt: Prompt) -> Completion:
        """Sample one completion without an event loop; it does not count in `stats`."""
        with self._reaching():
            response = self._http.post("/v1/completions", json=self._request(prompt))
        return self._read(response, prompt)[0]

    def forget(self) -> None:
        """Drop all keys and values."""
        if not self._json(self._post("/reset_prefix_cache")).get("success"):
            raise RagenError(
                f"the vLLM server at {self.url} samples for another client, too; "
                "use one server per run"
            )

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._http.close()
        if self._async_http is not None and self._loop is asyncio.get_running_loop():
            await self._async_http.aclose()

    def push(self, model: PreTrainedModel) -> None:
        """Send the weights, or the adapter, through a folder.

        Raises:
            RagenError: The server cannot be reached, or refused them; or the disk is full.
        """
        with tempfile.TemporaryDirectory(prefix="ragen-weights-") as folder:
            with file_errors("write", folder, "free space there or name a folder with TMPDIR"):
                if has_adapters(model):
                    save_adapter(model, Path(folder))
                else:
                    model.save_pretrained(folder)
            if has_adapters(model):
                adapter = {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True}
                self._post("/v1/load_lora_adapter", adapter)
                self._served = ADAPTER
            else:
                path = {"weights_path": folder}
                self._post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        self.forget()

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "model": self._served,
            "prompt": list(self._checked_ids(prompt)),
            "max_tokens": prompt.max_tokens,
            "seed": prompt.seed,
            "stop_token_ids": self.stop_ids,
            "ignore_eos": True,  # only these end a completion
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            # Everything that shapes the distribution, or the model's own defaults would apply.
            "temperature": prompt.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def _read(self, response: httpx.Response, prompt: Prompt) -> tuple[Completion, int | None]:
        """The completion in an answer, and how many prompt tokens were cached, if reported."""
        answer = self._json(response)
        try:
            (choice,) = answer["choices"]
            ids = tuple(map(int, choice["token_ids"]))
            logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
            details = answer["usage"].get("prompt_tokens_details")
            num_cached = None if details is None else int(details["cached_tokens"] or 0)
            exact = choice["prompt_token_ids"] == list(self._checked_ids(prompt))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._strange(f"a completion without {error}") from error
        fits = len(ids) == len(logprobs) > 0 and all(map(math.isfinite, logprobs))
        if not (exact and fits and all(0 <= token < 2**31 for token in ids)):
            raise self._strange("a completion of other tokens")
        return self._completion(ids, logprobs), num_cached

    def _model_of(self) -> str:
        """The name of the served model, after checking that the server can be trained with."""
        with self._reaching():
            version = self._json(self._http.get("/version")).get("version")
            models = self._json(self._http.get("/v1/models")).get("data")
        try:
            base = next(model for model in models or () if model["parent"] is None)
            name, length = str(base["id"]), int(base["max_model_len"])
        except (LookupError, TypeError, ValueError, ArithmeticError, StopIteration) as error:
            raise self._strange("no list of models") from error
        if not is_known(str(version)):
            raise RagenError(
                f"the server at {self.url} runs vLLM {version}, and RAGEN knows "
                f"{' and '.join(RELEASES)}: start one of these releases"
            )
        if length < self.max_length:
            raise RagenError(
                f"the vLLM server at {self.url} takes {length} tokens: start it with "
                f"--max-model-len {self.max_length}, or lower model.max_length"
            )
        return name

    def _post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        with self._reaching():
            response = self._http.post(path, json=body)
        if response.status_code in (404, 405):
            raise RagenError(
                f"the vLLM server at {self.url} takes no weights ({path} is missing): "
                "start it with VLLM_SERVER_DEV_MODE=1, and for adapters with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
            )
        if response.is_error:
            self._json(response)
        return response

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        answer: Any = None
        with suppress(ValueError, RecursionError):
            answer = response.json()
        if not isinstance(answer, dict):
            raise self._strange(f"HTTP {response.status_code} and no JSON object")
        if response.is_error:
            first = error_message(response.content).strip().partition("\n")[0][:MAX_SHOWN]
            first = first or f"HTTP {response.status_code}"
            raise RagenError(
                f"the vLLM server at {self.url} refuses: {first}; "
                "does it serve the model that is trained? If so, restart it"
            )
        return answer

    def _strange(self, what: str) -> RagenError:
        return RagenError(
            f"what answers at {self.url} is not a vLLM server ({what}): "
            "let rollout.sampler name one, or use vllm or local"
        )

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise RagenError(
                f"the vLLM server at {self.url} cannot be reached ({reason}): start it, or use "
                'rollout.sampler = "vllm" or "local"'
            ) from error
