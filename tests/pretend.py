"""Stand-ins for vLLM: an engine with its own weights, and a server with scripted answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ragen.core.types import Prompt
from ragen.sampling.vllm_engine import Sampled

REQUESTS_PER_STEP = 4


class PretendVllm:
    """Samples like `vllm_engine.Vllm`, a few requests per step, with plain forward passes.

    `calls` lists the names of the methods called, in order. If `deaf` is true, pushed weights are
    ignored. It says that the weights `differing` did not arrive. If `fault` is set, the next step
    raises it.
    """

    def __init__(self, path: str, **options: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.path, self.options = path, options
        self.waiting: dict[str, tuple[Prompt, Sequence[int]]] = {}
        self.calls: list[str] = []
        self.adapters: list[list[str]] = []
        self.deaf = False
        self.differing: list[str] = []
        self.fault: Exception | None = None

    def add(self, name: str, prompt: Prompt, end_ids: Sequence[int]) -> None:
        self.calls.append("add")
        assert self.calls.count("sleep") <= self.calls.count("wake")
        self.waiting[name] = (prompt, end_ids)

    def step(self) -> list[Sampled]:
        self.calls.append("step")
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return [
            self._sampled(name, *self.waiting.pop(name))
            for name in [*self.waiting][:REQUESTS_PER_STEP]
        ]

    @torch.no_grad()
    def _sampled(self, name: str, prompt: Prompt, end_ids: Sequence[int]) -> Sampled:
        generator = torch.Generator().manual_seed(prompt.seed)
        ids, logprobs = list(prompt.token_ids), []
        while len(logprobs) < prompt.max_tokens:
            logits_V = self.model(torch.tensor([ids])).logits[0, -1] / (prompt.temperature or 1.0)
            log_p_V = logits_V.log_softmax(-1)
            token = int(log_p_V.argmax())
            if prompt.temperature:
                token = int(torch.multinomial(log_p_V.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(log_p_V[token]))
            if token in end_ids:
                break
        num_prompt = len(prompt.token_ids or ())
        return Sampled(name, num_prompt, tuple(ids[num_prompt:]), tuple(logprobs), 1)

    def drop(self, names: Sequence[str]) -> None:
        self.calls.append("drop")
        for name in names:
            self.waiting.pop(name, None)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        self.calls.append("load")
        arrived = {name: weight.clone() for name, weight in weights}
        if not self.deaf:
            missing, unknown = self.model.load_state_dict(arrived, strict=False)
            assert not unknown and set(missing) <= {"lm_head.weight"}
        return self.differing

    def load_adapter(
        self, folder: Path, weights: Iterable[tuple[str, Tensor]], scale: float
    ) -> list[str]:
        self.calls.append("load_adapter")
        self.adapters.append(sorted(path.name for path in folder.iterdir()))
        return self.differing

    def forget(self) -> None:
        self.calls.append("forget")
        assert not self.waiting

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None:
        self.calls.append("close")


Answer = tuple[int, Any]
"""An HTTP status, and a JSON value or plain bytes."""


@contextmanager
def pretend_server(answers: dict[str, Answer | Callable[[Any], Answer]]) -> Iterator[str]:
    """A server on loopback with one answer per path; a function gets the request's JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            answer = answers.get(self.path, (404, {"detail": "Not Found"}))
            status, value = answer(body) if callable(answer) else answer
            payload = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
