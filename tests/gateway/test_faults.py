"""Faults that other gateways had: after each one, every sampled token is in one sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

from ragen.chat.chat import Chat
from ragen.core.types import Completion, Prompt, fingerprint
from tests.gateway.test_session import AGAIN, GUESS, HELLO, Agent, agent, run, said
from tests.tiny import TEMPLATES, tiny_tokenizer
from tests.tool_templates import tool_tokenizer


class Drawing(Agent):
    """An agent whose policy draws given completions, whatever their text would be encoded to."""

    def __init__(self, chat: Chat, drawn: Sequence[Completion], **budget: object) -> None:
        super().__init__(chat, (), **budget)
        self._drawn = iter(drawn)

    @override
    async def _complete(self, prompt: Prompt, is_first: bool) -> Completion:
        await asyncio.sleep(0)
        return next(self._drawn)


def drawn(chat: Chat, *texts: str, version: int = 0, cut: bool = False) -> Completion:
    """A completion of the tokens of each text, which need not be those of the texts together."""
    ids = tuple(each for text in texts for each in chat.encode_text(text))
    ids = ids if cut else (*ids, chat.end)
    logprobs = (-0.5,) * len(ids)
    finish: Any = "length" if cut else "stop"
    return Completion(ids, logprobs, "".join(texts), finish, version, fingerprint(ids, logprobs))


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_tokens_that_no_encoding_gives_stay_as_they_were_sampled(template: str) -> None:
    """``a|gain`` may be drawn where the tokenizer writes ``again``; a re-encoded one is another."""
    chat = Chat(tiny_tokenizer(template), think=False)
    letters = [*"the same word again and again"]
    one = Drawing(chat, [drawn(chat, *letters), drawn(chat, "No.")])
    assert drawn(chat, *letters).token_ids != drawn(chat, "".join(letters)).token_ids

    async def script() -> None:
        first = await one.ask(HELLO)
        await one.ask(HELLO, first.message, AGAIN)

    run(script())
    if chat.exact:
        first, second = one.turns
        whole = (first.prompt.token_ids or ()) + (first.completion.token_ids or ())
        assert (second.prompt.token_ids or ())[: len(whole)] == whole
    one.check()


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("text", ["It was cut", "<think>It was cut", " "])
def test_a_cut_reply_is_continued_after_its_own_tokens(template: str, text: str) -> None:
    """The end that it lacks is context. What was sampled has no end that was not sampled."""
    chat = Chat(tiny_tokenizer(template), think=False)
    one = Drawing(chat, [drawn(chat, text, cut=True), drawn(chat, "Done.")])

    async def script() -> None:
        first = await one.ask(HELLO)
        assert first.finish == "length"
        await one.ask(HELLO, first.message, AGAIN)

    run(script())
    first, second = one.turns
    assert not first.valid and first.completion.token_ids == chat.encode_text(text)
    assert second.call is not None and second.call.parent == 0
    if chat.exact:
        whole = (first.prompt.token_ids or ()) + (first.completion.token_ids or ())
        assert (second.prompt.token_ids or ())[: len(whole)] == whole
        rest = (second.prompt.token_ids or ())[len(whole) :]
        assert "Again." in chat.spell(rest)
        assert chat.end in rest or template == "plain"  # which writes none
    one.check()


@pytest.mark.parametrize("back", ["It is 5.", "<think></think>It is 5."])
def test_a_thought_that_the_agent_drops_begins_another_conversation(back: str) -> None:
    """What it leaves out would else be in the prompt against its will; the tokens are trained."""
    one = agent("<think>Five, I think.</think>It is 5.", "Done.")

    async def script() -> None:
        await one.ask(HELLO)
        await one.ask(HELLO, said("assistant", back), AGAIN)

    run(script())
    prompt = one.turns[1].prompt.token_ids
    assert prompt is not None and "Five" not in one.chat.spell(prompt)
    assert [turn.call.parent for turn in one.turns if turn.call] == [-1, -1]
    one.check()


@pytest.mark.parametrize("template", ["hermes", "llama3"])
def test_control_tokens_in_what_an_agent_writes_are_text(template: str) -> None:
    """A result, a message or a tool's description cannot end a turn or open another one."""

    def prompts(text: str) -> list[tuple[int, ...]]:
        chat = Chat(tool_tokenizer(template), think=False).offering([GUESS])
        assert chat.calls is not None
        call = chat.calls.write(['{"name": "guess", "arguments": {"n": 4}}'])
        call = f"I guess.</think>{call}" if chat.opening else call
        one = Agent(Chat(tool_tokenizer(template), think=False), [call, "Done."])
        tool = described(text)

        async def script() -> None:
            user = said("user", f"Hello {text}.")
            first = await one.ask(user, tools=[tool])
            result = said("tool", f"It is {text}.", call_id=first.calls[0].id)
            await one.ask(user, first.message, result, tools=[tool])

        run(script())
        return [prompt.token_ids or () for prompt in one.prompts]

    tokenizer = tool_tokenizer(template)
    control = set(tokenizer.all_special_ids)
    spelled = "".join(tokenizer.all_special_tokens)
    for plain, tried in zip(prompts("plain"), prompts(spelled), strict=True):
        assert [n for n in plain if n in control] == [n for n in tried if n in control]


def described(text: str) -> dict[str, Any]:
    """The tool ``guess`` with a description."""
    function: Any = GUESS["function"]
    return {**GUESS, "function": {**function, "description": f"It {text}."}}
