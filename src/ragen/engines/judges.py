"""Who answers a judge's questions: the model of an endpoint, or one on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from ragen.chat.chat import Chat
from ragen.config.config import Config
from ragen.config.extensions import JUDGE
from ragen.config.sections import JudgeConfig, ModelConfig
from ragen.core.types import Completion, Prompt, Usage
from ragen.engines.factory import load_model
from ragen.models.hub import model_folder
from ragen.models.names import base_of, resolve_model
from ragen.models.pretrained import model_config
from ragen.networks.decoder import window_of
from ragen.rollout.endpoint import ChatEndpoint
from ragen.rollout.judge import Judge, server_of
from ragen.rollout.policies import NoCompletion
from ragen.sampling.local_sampler import Sampler

MAX_LENGTH = 8192
"""Maximum number of tokens of a question and its answer for a model on this machine."""


class LocalModel:
    """A `Policy` that answers messages with a model on this machine, as a chat endpoint does.

    `path` is a folder or a hub id. The model keeps nothing of the completion before, so an answer
    depends on its question alone, and a resumed run gets the same answer, bit for bit.
    """

    def __init__(self, path: str, dtype: str) -> None:
        about = model_config(model_folder(base_of(path)), path).get_text_config()
        positions = getattr(about, "max_position_embeddings", MAX_LENGTH)
        length = int(min(positions, window_of(about) or MAX_LENGTH, MAX_LENGTH))
        settings = ModelConfig.model_validate({"dtype": dtype, "max_length": length})
        model, tokenizer = load_model(settings, path)
        self._chat = Chat(tokenizer, think=False)
        self._sampler = Sampler(model, self._chat, slots=1, max_length=length)
        self._turn = asyncio.Lock()

    async def complete(self, prompt: Prompt) -> Completion:
        """The answer to the messages of a prompt.

        Raises:
            NoCompletion: They leave no room for an answer.
            NotFiniteError: The logits are not finite.
        """
        ids, _ = self._chat.open(prompt.messages)
        room = self._sampler.max_length - len(ids)
        if room < 1:
            most = self._sampler.max_length
            raise NoCompletion(f"a question of {len(ids)} tokens, of at most {most}", "context")
        asked = replace(prompt, token_ids=ids, max_tokens=min(prompt.max_tokens, room))
        async with self._turn:
            self._sampler.forget()
            found = await self._sampler.complete(asked)
        return replace(found, usage=Usage(len(ids), len(found.token_ids or ())))

    async def close(self) -> None:
        """Free its resources."""
        await self._sampler.close()


def check_judge(judge: JudgeConfig, env: str) -> None:
    """Refuse a judge that cannot be asked, in the environment `env`; no weights are read.

    Raises:
        RagenError: The address, the key or the model is invalid.
    """
    if judge.url:
        server_of(judge)
    else:
        path = resolve_model(judge.model, env)
        model_config(model_folder(base_of(path), weights=False), judge.model)


@asynccontextmanager
async def open_judge(config: Config, folder: Path, attempt: int = 0) -> AsyncIterator[Judge | None]:
    """The judge of a run, if a reward term asks for it; its answers are kept in `folder`.

    Raises:
        RagenError: The judge cannot be asked or loaded, or the folder cannot be written.
    """
    if JUDGE not in config.reward.terms:
        yield None
        return
    settings = config.judge
    policy = (
        ChatEndpoint(server_of(settings), settings.model, think=False, own_temperature=True)
        if settings.url
        else LocalModel(resolve_model(settings.model, config.env.name), config.model.dtype)
    )
    judge = Judge(settings, policy, folder, attempt)
    try:
        yield judge
    finally:
        await judge.close()
