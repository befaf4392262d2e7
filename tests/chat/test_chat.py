"""Chats never change sampled tokens, over templates that differ in all known ways."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import TEMPLATES, tiny_tokenizer

from ragen.chat.chat import Chat
from ragen.chat.template import dated
from ragen.core.errors import RagenError
from tests.chat.test_histories import FEW

KEEPING = ["chatml", "llama3", "gemma", "llama2", "thinker", "glm", "dated", "channels", "markers"]
DROPPING = ["qwen3", "reasoner", "hollow", "closed"]
"""Templates that leave out the thoughts of earlier turns."""
EXACT = KEEPING + DROPPING
END = {
    **dict.fromkeys(("chatml", "qwen2.5", "qwen3", "thinker", "reasoner", "hollow"), "<|im_end|>"),
    **{"llama3": "<|eot_id|>", "dated": "<|eot_id|>", "gemma": "<end_of_turn>"},
    **{"llama2": "</s>", "glm": "<|user|>", "channels": "<|end|>", "markers": "<|/RESPONSE|>"},
    "closed": "<|end|>",
}


HEADERS = {
    "channels": ("", "<|channel|>final<|message|>"),
    "markers": ("<|THINKING|>", "<|RESPONSE|>"),
}
"""What a generation prompt ends with and replies in the history do not, and the other way round."""


@cache
def make_chat(name: str, think: bool = True) -> Chat:
    return Chat(tiny_tokenizer(name), think)


def end(name: str) -> int:
    return int(tiny_tokenizer(name).convert_tokens_to_ids(END[name]))


def render(name: str, messages: list[dict[str, str]]) -> str:
    text = tiny_tokenizer(name).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, chat_template=dated(TEMPLATES[name])
    )
    asked, header = HEADERS.get(name, ("", ""))
    return str(text).removesuffix(asked) + header


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("name", TEMPLATES)
def test_properties_of_known_templates_are_detected(name: str) -> None:
    chat = make_chat(name)
    assert chat.exact
    assert (chat.warning is None) == (name not in DROPPING)
    assert chat.fold == (name in ("gemma", "llama2"))
    openings = {"thinker": "<think>\n", "hollow": "<think>\n", "closed": "<think>"}
    assert chat.opening == openings.get(name, "")
    asked, header = HEADERS.get(name, ("", ""))
    assert chat.header.endswith(header) and bool(chat.header) == bool(header)
    assert chat.asked.endswith(asked) and bool(chat.asked) == bool(asked)
    eos = tiny_tokenizer(name).eos_token_id
    assert chat.end_ids == ({eos, end(name)} if name in END else {eos})


def test_the_warning_says_whether_thoughts_are_kept() -> None:
    assert make_chat("chatml").warning is None
    assert "here they stay as they were sampled" in str(make_chat("qwen3").warning)
    assert make_chat("qwen3", think=False).warning is None  # there are none
    for name in TEMPLATES:
        dropping = Chat(tiny_tokenizer(name), history_thoughts="drop")
        assert not dropping.exact
        assert "left out of the prompts" in str(dropping.warning)
    without_thoughts = Chat(tiny_tokenizer("qwen3"), think=False, history_thoughts="drop")
    assert without_thoughts.exact and without_thoughts.warning is None


def test_an_empty_thought_is_part_of_the_prompt() -> None:
    """Qwen3 turns thinking off by an empty thought, which its template writes in each turn."""
    chat, decode = make_chat("reasoner", think=False), tiny_tokenizer("reasoner").decode
    assert chat.exact and chat.opening == ""
    ids, num_prefill = chat.open([user("a")], "<answer>")
    assert decode(ids).endswith("assistant\n<think>\n\n</think>\n\n<answer>")
    assert decode(ids[-num_prefill:]) == "<answer>"
    ids += (*chat.encode("Up</answer>"), end("reasoner"))
    messages = [user("a"), assistant("<answer>Up</answer>"), user("b")]
    assert decode(chat.extend(ids, messages, "<answer>")[0]) == (
        "<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<answer>Up</answer><|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<answer>"
    )
    assert "</think>" not in decode(make_chat("reasoner").open([user("a")])[0])


def test_a_prompt_does_not_depend_on_the_day() -> None:
    text = tiny_tokenizer("dated").decode(make_chat("dated").open([user("a")])[0])
    assert "Today: 01 Jan 2025" in text
    with pytest.raises(RagenError, match="writes today's date in a form that it computes"):
        dated("{% set form = '%Y' %}{{ strftime_now(form) }}")


def test_open_does_not_repeat_a_thought_that_the_template_opens() -> None:
    ids, num_prefill = make_chat("thinker").open([user("P")], "<think>")
    text = tiny_tokenizer("thinker").decode(ids)
    assert text.endswith("assistant\n<think>\n")
    assert text.count("<think>") == 1
    assert tiny_tokenizer("thinker").decode(ids[-num_prefill:]) == "<think>\n"
    assert make_chat("thinker").open([user("P")]) == (ids, num_prefill)
    repeated = make_chat("thinker").open([user("P")], "<think>\n")  # prefill = false
    assert repeated == (ids, num_prefill)


def test_extend_golden() -> None:
    """ChatML, two turns: the prompt and the reply are kept, and the bridge follows them."""
    chat, tokenizer = make_chat("chatml"), tiny_tokenizer("chatml")
    ids, _ = chat.open([user("a")], "<think>")
    reply = (*chat.encode("go</think><answer>Up</answer>"), end("chatml"))
    content = "<think>go</think><answer>Up</answer>"
    messages = [user("a"), assistant(content), user("b")]
    more, num_prefill = chat.extend(ids + reply, messages, "<think>")
    assert more[: len(ids) + len(reply)] == ids + reply
    bridge = more[len(ids) + len(reply) :]
    assert tokenizer.decode(bridge) == (
        "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    assert tokenizer.decode(more) == render("chatml", messages) + "<think>"
    assert tokenizer.decode(bridge[-num_prefill:]) == "<think>"


@pytest.mark.parametrize("name", EXACT)
def test_a_cut_reply_is_closed_with_tokens_that_were_not_sampled(name: str) -> None:
    chat = make_chat(name)
    ids, _ = chat.open([user("a")])
    reply = chat.encode("<answer>Up")
    messages = [user("a"), assistant("<answer>Up"), user("b")]
    cut, _ = chat.extend(ids + reply, messages)
    ended, _ = chat.extend((*ids, *reply, end(name)), messages)
    assert cut[: len(ids + reply)] == ended[: len(ids + reply)] == ids + reply
    gap = " " if name == "llama2" else ""  # this template writes it before its end token
    assert chat.decode(cut[len(ids + reply) :]).startswith(gap + END[name])
    assert cut[len(cut) - len(ended) + len(ids + reply) :] == ended[len(ids + reply) :]


def test_another_end_token_ends_a_turn_too() -> None:
    chat = make_chat("chatml")
    ids, _ = chat.open([user("a")])
    eos = tiny_tokenizer("chatml").eos_token_id
    more, _ = chat.extend((*ids, 50, eos), [user("a"), assistant("x"), user("b")])
    assert more[len(ids) : len(ids) + 2] == (50, eos)
    assert chat.decode(more[len(ids) + 2 :]).startswith("\n<|im_start|>user\nb")


@pytest.mark.parametrize("name", ["gemma", "llama2"])
def test_system_text_is_folded_if_there_is_no_system_role(name: str) -> None:
    ids, _ = make_chat(name).open([{"role": "system", "content": "be kind"}, user("P G")])
    assert ids == make_chat(name).open([user("be kind\n\nP G")])[0]


def test_unusable_templates_are_refused() -> None:
    with pytest.raises(RagenError, match=r"refuses a conversation of user, user \(roles must alt"):
        make_chat("gemma").open([user("a"), user("b")])
    tokenizer = _copy("chatml")
    tokenizer.chat_template = None
    with pytest.raises(RagenError, match="no chat template: choose an instruction-tuned model"):
        Chat(tokenizer)
    tokenizer = _copy("plain")
    tokenizer.eos_token = None
    with pytest.raises(RagenError, match=r"no token ends a turn.*set tokenizer\.eos_token"):
        Chat(tokenizer)
    tokenizer = _copy("chatml")
    for broken in ("{% for m in messages %}{{ m.content }", "{{ 1 + messages[0].content }}"):
        tokenizer.chat_template = broken
        with pytest.raises(RagenError, match="refuses a conversation of user"):
            Chat(tokenizer)
    for constant in ("", "Hello!"):
        tokenizer.chat_template = constant
        with pytest.raises(RagenError, match="leaves out what the user says"):
            Chat(tokenizer)


def _copy(name: str) -> Any:
    return tiny_tokenizer.__wrapped__(name)


def test_system_text_is_folded_if_the_template_moves_it() -> None:
    """Some templates put it into the *last* user message, which changes earlier turns."""
    tokenizer = _copy("chatml")
    tokenizer.chat_template = (
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>"
        "{{ s if loop.last }}{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    )
    chat = Chat(tokenizer)
    assert chat.exact
    assert chat.fold
    system = {"role": "system", "content": "be kind"}
    messages = [system, user("a"), assistant("b"), user("c")]
    ids = (*chat.open(messages[:2])[0], *chat.encode("b"), end("chatml"))
    text = tokenizer.decode(chat.extend(ids, messages)[0])
    assert text == (
        "<|im_start|>be kind\n\na<|im_end|><|im_start|>b<|im_end|>"
        "<|im_start|>c<|im_end|><|im_start|>"
    )


def test_a_template_that_numbers_its_turns_is_not_exact() -> None:
    tokenizer = _copy("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}"
        "<|im_start|>"
    )
    assert not Chat(tokenizer).exact


def test_a_minimal_tokenizer_is_enough() -> None:
    """Only the attributes of `ragen.chat.chat.Tokenizer` are needed."""

    class Minimal:
        def __init__(self, inner: Any) -> None:
            self.chat_template, self.eos_token_id = inner.chat_template, inner.eos_token_id
            self.apply_chat_template, self.encode = inner.apply_chat_template, inner.encode
            self.decode, self.get_added_vocab = inner.decode, inner.get_added_vocab

    minimal = Chat(Minimal(tiny_tokenizer("llama3")))
    assert minimal.exact
    assert minimal.open([user("P √")], "<think>") == make_chat("llama3").open(
        [user("P √")], "<think>"
    )


# Properties over random histories.

contents = st.text(max_size=12) | st.sampled_from(["P _\n_ G", "reward 0\n", " <b> ", "é√🙂"])
turns = st.lists(
    st.tuples(contents, st.text(max_size=8), st.sampled_from(["Up", "Up || Left", "é🙂"])),
    min_size=1,
    max_size=4,
)


def _reply(name: str, thought: str, answer: str) -> str:
    """A reply that no template trims; it starts after `<think>` if the template writes that."""
    start = "" if name == "thinker" else "<think>"
    return f"{start}{thought}</think><answer>{answer}</answer>"


@pytest.mark.parametrize("name", KEEPING)
@FEW
@given(history=turns, last=contents)
def test_extending_equals_rendering(
    name: str, history: list[tuple[str, str, str]], last: str
) -> None:
    """If replies are canonical, the extended sequence is the tokenisation of the full rendering."""
    chat = make_chat(name)
    messages: list[dict[str, str]] = []
    ids: tuple[int, ...] = ()
    for content, thought, answer in history:
        messages.append(user(content))
        ids = chat.extend(ids, messages)[0] if ids else chat.open(messages)[0]
        reply = _reply(name, thought, answer)
        gap = " " if name == "llama2" else ""  # this template writes it before its end token
        text = render(name, messages) + reply + gap + END[name]
        rendered = chat.encode(text)
        # Otherwise the start of the reply has merged with the end of the prompt.
        assume(rendered[: len(ids)] == ids)
        ids = rendered
        messages.append(assistant(chat.opening + reply))
    messages.append(user(last))
    ids, num_prefill = chat.extend(ids, messages)
    assert ids == chat.encode(render(name, messages))
    assert num_prefill == len(chat.encode(chat.opening))


# Text and tokens.


def test_decode_leaves_out_only_the_end_token() -> None:
    chat = make_chat("chatml")
    start = chat.encode("<|im_start|>")
    assert chat.decode((*start, *chat.encode("Up"), end("chatml"))) == "<|im_start|>Up"
    assert chat.decode((end("chatml"),)) == chat.decode(()) == ""


def test_text_of_returns_the_text_of_one_token() -> None:
    """Spaces and special tokens are included; a part of a character is U+FFFD."""
    chat = Chat(tiny_tokenizer())
    ids = chat.encode("<|im_start|>user\nP  a1 <think>")
    assert "".join(map(chat.text_of, ids)) == "<|im_start|>user\nP  a1 <think>"
    assert set(map(chat.text_of, chat.encode("🙂"))) == {"\ufffd"}, "four tokens of one byte each"
    assert chat.text_of(chat.end) == "<|im_end|>"


def test_token_span_golden() -> None:
    chat = make_chat("chatml")
    pieces = ["go", " now", "</", "think", ">"]
    ids = tuple(token for piece in pieces for token in chat.encode(piece))
    text = chat.decode(ids)
    assert text == "go now</think>"
    first, last = chat.token_span((*ids, end("chatml")), text, 0, len("go now"))
    assert first == 0
    assert chat.decode(ids[:last]) == "go now"
    assert chat.token_span(ids, text, 3, 3) == (0, 0)  # no characters, no tokens
    assert chat.token_span(ids, text, -7, 2)[0] == 0  # a span that starts in the prefill
    assert chat.token_span((), "", 0, 0) == (0, 0)


@given(st.text(min_size=1, max_size=30), st.data())
def test_token_span_covers_the_characters(text: str, data: st.DataObject) -> None:
    chat = make_chat("chatml")
    ids = chat.encode(text)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(start + 1, len(text)))
    first, last = chat.token_span(ids, text, start, stop)
    raw = [len(tiny_tokenizer("chatml").convert_ids_to_tokens(token)) for token in ids]
    begin, finish = len(text[:start].encode()), len(text[:stop].encode())
    if any(mark in text for mark in tiny_tokenizer("chatml").get_added_vocab()):
        return
    # Byte-level tokens have one character per byte, so byte positions are exact.
    assert sum(raw[:first]) <= begin < finish <= sum(raw[:last])
    # And it is the shortest such range.
    assert sum(raw[: first + 1]) > begin
    assert sum(raw[: last - 1]) < finish
