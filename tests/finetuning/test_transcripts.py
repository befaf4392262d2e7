"""Conversations from a file: exactly the assistant's replies and end-of-turn tokens are trained."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.algorithms.samples import join
from ragen.chat.chat import Chat
from ragen.chat.reply_form import Said
from ragen.core.errors import RagenError
from ragen.core.types import Sample
from ragen.envs.registry import make
from ragen.finetuning.transcripts import (
    Transcript,
    is_file,
    lost_blanks,
    read_transcripts,
    to_exchanges,
)
from tests.tiny import TEMPLATES, tiny_tokenizer
from tests.tool_templates import tool_tokenizer

CONVERSATION = (
    {"role": "user", "content": "P _ G"},
    {"role": "assistant", "content": "<think>go</think><answer>Right</answer>"},
    {"role": "user", "content": "_ P G"},
    {"role": "assistant", "content": "<think>on</think><answer>Right</answer>"},
)
REPLIES = ("go</think><answer>Right</answer>", "on</think><answer>Right</answer>")

CHATML_OPENING = "<|im_start|>user\nP _ G<|im_end|>\n<|im_start|>assistant\n"
MARKED = {
    "chatml": [
        f"{CHATML_OPENING}<think>[{REPLIES[0]}<|im_end|>]\n<|im_start|>user\n_ P G<|im_end|>\n"
        f"<|im_start|>assistant\n<think>[{REPLIES[1]}<|im_end|>]"
    ],
    "llama3": [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nP _ G<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n<think>[{REPLIES[0]}<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\n_ P G<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n<think>[{REPLIES[1]}<|eot_id|>]"
    ],
    "gemma": [
        "<bos><start_of_turn>user\nP _ G<end_of_turn>\n"
        f"<start_of_turn>model\n<think>[{REPLIES[0]}<end_of_turn>]\n"
        "<start_of_turn>user\n_ P G<end_of_turn>\n"
        f"<start_of_turn>model\n<think>[{REPLIES[1]}<end_of_turn>]"
    ],
    # The space before </s> is not part of the reply.
    "llama2": [
        f"<s>[INST] P _ G [/INST] <think>[{REPLIES[0]}</s>]<s>"
        f"[INST] _ P G [/INST] <think>[{REPLIES[1]}</s>]"
    ],
    # The template opens the thought itself, followed by a line break.
    "thinker": [
        f"{CHATML_OPENING}<think>\n[{REPLIES[0]}<|im_end|>]\n<|im_start|>user\n_ P G<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n[{REPLIES[1]}<|im_end|>]"
    ],
    # The next header ends a reply.
    "glm": [
        f"[gMASK]<|user|>\nP _ G<|assistant|>\n<think>[{REPLIES[0]}<|user|>]\n_ P G"
        f"<|assistant|>\n<think>[{REPLIES[1]}<|user|>]"
    ],
    # The template has no end-of-turn token, so the tokenizer's end of text ends a reply.
    "plain": [
        f"user: P _ G\nassistant: <think>[{REPLIES[0]}<|endoftext|>]\nuser: _ P G\n"
        f"assistant: <think>[{REPLIES[1]}<|endoftext|>]"
    ],
}
MARKED |= {"qwen3": MARKED["chatml"], "reasoner": MARKED["chatml"], "hollow": MARKED["thinker"]}
"""The text of `CONVERSATION` per template, with trained tokens in brackets."""


def samples(
    messages: Any, template: str, prefill: str = "<think>", drops: bool = False
) -> list[Sample]:
    talk, chat = Transcript("talk", tuple(messages)), make_chat(template, drops)
    return join(to_exchanges(talk, chat, prefill, drops), 0, 0)


@cache
def make_chat(template: str, drops: bool = False) -> Chat:
    history: Literal["keep", "drop"] = "drop" if drops else "keep"
    return Chat(tiny_tokenizer(template), history_thoughts=history)


def mark_trained(sample: Sample, template: str) -> str:
    """A sample's text with brackets around each run of trained tokens."""
    tokenizer, text, trained = tiny_tokenizer(template), "", False
    for token, on in zip(sample.token_ids, sample.loss_mask, strict=True):
        text += ("[" if on else "]") * (on != trained) + tokenizer.decode([token])
        trained = on
    return text + "]" * trained


@pytest.mark.parametrize("template", MARKED)
def test_trained_tokens_are_the_assistant_replies(template: str) -> None:
    (sample,) = samples(CONVERSATION, template)
    assert [mark_trained(sample, template)] == MARKED[template]
    assert sum(sample.turn_ends) == 2


def test_a_system_message_is_not_trained() -> None:
    (sample,) = samples([{"role": "system", "content": "Be brief."}, *CONVERSATION], "chatml")
    before, _, after = mark_trained(sample, "chatml").partition("Be brief.<|im_end|>\n")
    assert "[" not in before and after == MARKED["chatml"][0]


@pytest.mark.parametrize("template", ["chatml", "qwen3"])
def test_dropped_thoughts_make_each_turn_a_sample(template: str) -> None:
    first, second = samples(CONVERSATION, template, drops=True)
    assert mark_trained(first, template) == f"{CHATML_OPENING}<think>[{REPLIES[0]}<|im_end|>]"
    assert mark_trained(second, template) == (
        f"{CHATML_OPENING}<answer>Right</answer><|im_end|>\n<|im_start|>user\n_ P G<|im_end|>\n"
        f"<|im_start|>assistant\n<think>[{REPLIES[1]}<|im_end|>]"
    )


def test_reply_without_the_prefill_is_trained_from_its_first_token() -> None:
    (sample,) = samples(CONVERSATION, "chatml", prefill="")
    assert "assistant\n[<think>go" in mark_trained(sample, "chatml")
    messages = [CONVERSATION[0], {"role": "assistant", "content": "<answer>Right</answer>"}]
    (sample,) = samples(messages, "chatml")
    assert mark_trained(sample, "chatml") == f"{CHATML_OPENING}[<answer>Right</answer><|im_end|>]"


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.sampled_from([name for name in TEMPLATES if not make_chat(name).opening]),
    st.lists(st.tuples(WORDS, WORDS.map(str.strip).filter(bool)), min_size=1, max_size=3),
)
def test_trained_tokens_decode_to_the_replies_of_any_conversation(
    template: str, turns: list[tuple[str, str]]
) -> None:
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    tokenizer, end = tiny_tokenizer(template), make_chat(template).end
    trained_tokens: dict[int, list[int]] = {}
    for sample in samples(messages, template):
        for token, turn, on in zip(
            sample.token_ids, sample.turn_index, sample.loss_mask, strict=True
        ):
            assert on == (turn >= 0)
            if on:
                trained_tokens.setdefault(turn, []).append(token)
    assert [tokenizer.decode(ids[:-1]) for _, ids in sorted(trained_tokens.items())] == [
        reply for _, reply in turns
    ]
    assert all(ids[-1] == end for ids in trained_tokens.values())


def test_replies_that_the_model_could_not_generate_are_refused() -> None:
    messages = [CONVERSATION[0], {"role": "assistant", "content": "<answer>Right</answer>"}]
    with pytest.raises(RagenError, match=r"talk: this model's chat template begins .* <think>"):
        samples(messages, "thinker")
    for token in ("<|im_end|>", "<|im_start|>"):
        messages = [CONVERSATION[0], {"role": "assistant", "content": f"Right{token} and on"}]
        with pytest.raises(RagenError, match=re.escape(f"contains the token {token}, which ends")):
            samples(messages, "chatml")


# Thoughts and calls beside the content.


CALLS = [
    {"id": name, "type": "function", "function": {"name": "compare", "arguments": arguments}}
    for name, arguments in (("a", {"first": "A", "second": "B"}), ("b", '{"first": "</think>"}'))
]
CALLED = "<tool_call>\n{}\n</tool_call>"
WRITTEN = (
    CALLED.format('{"name": "compare", "arguments": {"first": "A", "second": "B"}}'),
    CALLED.format('{"name": "compare", "arguments": {"first": "</think>"}}'),
)
WEIGHED = [
    {"role": "user", "content": "Which is heavier?", "name": None},
    {
        "role": "assistant",
        "content": "I weigh.",
        "reasoning_content": "A or B?",
        "tool_calls": CALLS,
    },
    {"role": "tool", "content": "A is heavier.", "tool_call_id": "a"},
    {"role": "tool", "content": "Equal."},
    {"role": "assistant", "content": "A", "tool_calls": None, "reasoning": " It is A.\n"},
]


def weighing_chat(think: bool = True, knows: bool = True) -> Chat:
    """The chat of a template in Qwen's form, which `knows` a thought beside the content."""
    tokenizer = copy.deepcopy(tool_tokenizer("hermes"))
    thought = "{% if m.thinking %}{{ '<think>\\n' + m.thinking + '\\n</think>\\n\\n' }}{% endif %}"
    if knows:
        written = "{{ m.content }}" + "{% for c in m.tool_calls %}"
        assert written in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(written, thought + written)
    return Chat(tokenizer, think, tools=make("sorting").tools)


def marked(sample: Sample, chat: Chat) -> str:
    """A sample's text with brackets around each run of trained tokens."""
    text, trained = "", False
    for token, on in zip(sample.token_ids, sample.loss_mask, strict=True):
        text += ("[" if on else "]") * (on != trained) + chat.spell((token,))
        trained = on
    return text + "]" * trained


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_beside_the_content_is_trained_as_the_template_writes_it(
    tmp_path: Path, key: str
) -> None:
    said = {"role": "assistant", "content": "<answer>Right</answer>", key: "\ngo <b>"}
    (talk,) = read_transcripts(write_jsonl(tmp_path / "talks.jsonl", [USER, said]))
    assert talk.messages[1]["content"] == "<think>go <b></think><answer>Right</answer>"
    (sample,) = join(to_exchanges(talk, make_chat("reasoner"), "<think>"), 0, 0)
    assert mark_trained(sample, "reasoner") == (
        f"{CHATML_OPENING}<think>[\ngo <b>\n</think>\n\n<answer>Right</answer><|im_end|>]"
    )


def test_calls_and_their_results_are_placed_as_in_a_rollout(tmp_path: Path) -> None:
    chat = weighing_chat()
    path = write_jsonl(
        tmp_path / "talks.jsonl", json.dumps({"messages": WEIGHED, "tools": [*chat.tools]})
    )
    (sample,) = join(to_exchanges(read_transcripts(path)[0], chat, ""), 0, 0)
    _, _, shown = marked(sample, chat).partition("<|im_start|>user\n")
    assert shown == (
        "Which is heavier?<|im_end|>\n<|im_start|>assistant\n"
        f"[<think>\nA or B?\n</think>\n\nI weigh.\n{WRITTEN[0]}\n{WRITTEN[1]}<|im_end|>]\n"
        "<|im_start|>user\n<tool_response>\nA is heavier.\n</tool_response>\n<tool_response>\n"
        "Equal.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "[<think>\nIt is A.\n</think>\n\nA<|im_end|>]"
    )


def test_what_a_template_does_not_write_is_refused_with_the_key(tmp_path: Path) -> None:
    thought = [USER, REPLY | {"content": "Up", "thinking": "go"}]
    quoting = [USER, REPLY | {"content": "Up", "thinking": "go </think> on"}]
    call = [USER, {"role": "assistant", "tool_calls": CALLS[:1]}]
    cases: list[tuple[Any, Chat, str]] = [
        (
            thought,
            make_chat("chatml"),
            "template leaves out thinking: write it into the content, as",
        ),
        (thought, make_chat("hollow"), "template leaves out thinking"),
        (thought, weighing_chat(knows=False), "template leaves out thinking"),
        (
            thought,
            weighing_chat(think=False),
            "thinking holds a thought, and prompt.think is false",
        ),
        (
            quoting,
            weighing_chat(),
            "thinking: this model's chat template writes .* no such thought",
        ),
        (call, make_chat("chatml"), "there are tool_calls, and the environment has no tools"),
        (
            [USER, call[1] | {"content": WRITTEN[0]}],
            weighing_chat(),
            "tool_calls: .* reads other calls: the content has a call, too",
        ),
        (
            json.dumps({"messages": call, "tools": []}),
            weighing_chat(),
            "tools: these are not the tools of the environment",
        ),
    ]
    for line, chat, said in cases:
        path = write_jsonl(tmp_path / "talks.jsonl", line)
        with pytest.raises(RagenError, match=f"line 1: .*{said}") as error:
            to_exchanges(read_transcripts(path)[0], chat, "")
        assert "\n" not in str(error.value)
    tokenizer = copy.deepcopy(tool_tokenizer("hermes"))
    start = "{{ '<|im_start|>' + m.role + '\\n' }}"
    assert start in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        start, "{% if m.thinking %}{{ '[' + m.thinking + ']' }}{% endif %}" + start
    )
    with pytest.raises(RagenError, match="begins a reply with thinking in another way"):
        Chat(tokenizer, tools=make("sorting").tools).write(Said("A", "thinking", "go"))
    mistral = Chat(tool_tokenizer("mistral"), False, tools=make("sorting").tools)
    with pytest.raises(RagenError, match="leaves out the content beside tool_calls: leave it out"):
        mistral.write(Said("I look.", calls=('{"name": "compare", "arguments": {}}',)))


# The file.


def write_jsonl(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps({"messages": line}) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_conversations_are_read_from_a_file(tmp_path: Path) -> None:
    padded = [CONVERSATION[0], {"role": "assistant", "content": " \n<think>go</think>\n"}]
    unanswered = [*CONVERSATION, {"role": "user", "content": "_ _ √"}]
    # JSON strings may contain characters that `str.splitlines` takes for line ends.
    odd = '{"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", '
    odd += '"content": "c", "weight": 1}]}'
    path = write_jsonl(tmp_path / "talks.jsonl", CONVERSATION, "", padded, unanswered, odd, "\n")
    path.write_text("\ufeff" + path.read_text("utf-8"), "utf-8")
    first, second, third, fourth = read_transcripts(path)
    assert first == Transcript(f"{path}, line 1", CONVERSATION)
    assert second.messages[1]["content"] == "<think>go</think>"
    assert second.where.endswith("line 3")
    assert third.messages == CONVERSATION
    assert fourth.messages[0]["content"] == "a\u2028b"


USER, REPLY = CONVERSATION[:2]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ("[1, 2]", r"expected \{"),
        ([], "the roles are none"),
        (
            [USER, "hello"],
            r'messages.1: .* expected {"messages": .*{"role": text, "content": text}',
        ),
        ([USER, {"role": "assistant"}], "messages.1.content: Field required; expected"),
        ([REPLY], "the roles are assistant; user and assistant must alternate"),
        ([{"role": "system", "content": ""}, USER, USER], "the roles are system, user, user;"),
        (
            [{"role": "developer", "content": ""}],
            "messages.0.role: Input should be 'system', 'user', ",
        ),
        ([USER, REPLY | {"weight": 0}], "messages.1.weight: Input should be 1"),
        ([USER], "the roles are user; "),
        ([USER, {"role": "assistant", "content": " \n"}], "message is empty"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "hex escape"),
        ([USER, REPLY | {"thinking": "a", "reasoning": "b"}], "reasoning and thinking hold diff"),
        ([USER | {"tool_calls": CALLS}, REPLY], "messages.0: tool_calls has no effect in the role"),
        ([*WEIGHED[:2], REPLY], "each call of tool_calls has a result in the role tool"),
        ([*WEIGHED[:2], WEIGHED[2] | {"tool_call_id": "b"}], "tool_call_id 'b': expected 'a'; res"),
        (
            [USER, REPLY | {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages.1.tool_calls.0.function.arguments: Input should be an object",
        ),
        (
            [USER, REPLY | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.1.tool_calls.0.function.arguments: Expecting property name",
        ),
        ([USER, REPLY | {"train": False}], r"messages.1.train: this key is not .*; remove it"),
        ([USER | {"name": "ann"}, REPLY], "messages.0: name has no effect in the role user; re"),
        ('{"messages": [], "chat_template_kwargs": {}}', "chat_template_kwargs: this key is not"),
        ('{"messages": [], "weight": 1, "weight": 1}', "the key 'weight' comes twice"),
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
            "the key 'content' comes twice",
        ),
    ],
)
def test_invalid_line_is_reported_with_its_number(
    tmp_path: Path, line: Any, complaint: str
) -> None:
    path = write_jsonl(tmp_path / "talks.jsonl", CONVERSATION, line)
    with pytest.raises(RagenError, match=complaint) as caught:
        read_transcripts(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_white_space_that_a_chat_drops_is_told() -> None:
    indented = [Transcript("", ({"role": "user", "content": "  P\n###"}, CONVERSATION[1]))]
    assert "begin with white space" in str(lost_blanks(indented, make_chat("llama3")))
    assert lost_blanks(indented, make_chat("chatml")) is None
    assert lost_blanks([Transcript("", tuple(CONVERSATION))], make_chat("llama3")) is None


def test_invalid_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RagenError, match=r"cannot read .*none: no such file"):
        read_transcripts(tmp_path / "none")
    with pytest.raises(RagenError, match="holds no conversation"):
        read_transcripts(write_jsonl(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(RagenError, match="is not UTF-8"):
        read_transcripts(tmp_path / "bytes")


def test_a_file_with_the_name_of_a_player_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("solver", "talks"):
        Path(name).touch()
    assert [is_file(name) for name in ("solver", "./solver", "talks")] == [False, True, True]
