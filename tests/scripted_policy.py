"""A policy whose replies are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragen.core.types import Completion, Prompt
from ragen.rollout.policies import written_completion


class ScriptedPolicy:
    """A policy with scripted replies: a list of them, or a function of the prompt.

    `encode` turns a reply into token ids, its end-of-turn token included. Without it completions
    have text only, like those of a chat endpoint. A reply comes after the prompt's prefill. Its
    probability is 1, so its logprobs are 0.
    """

    def __init__(
        self,
        script: Sequence[str] | Callable[[Prompt], str],
        encode: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        replies = iter(() if callable(script) else script)
        self._reply = script if callable(script) else lambda prompt: next(replies)
        self._encode = encode

    async def complete(self, prompt: Prompt) -> Completion:
        """The next reply of the list, or the function's; a list that is too short is a bug."""
        return written_completion(self._reply(prompt), self._encode)
