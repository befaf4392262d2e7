"""Where a chat template puts a reply: in the forms of many families, as their templates write it.

Each form is a small template of its own. The facts are those of the models' templates, as the
packages `trl` and `llama-cpp-python` ship them; `scripts/chat_templates.py` tries all of these.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken

from ragen.chat.chat import NOT_EXACT, Chat
from ragen.core.errors import RagenError
from tests.chat.test_chat import assistant, user
from tests.tiny import tiny_tokenizer
from tests.tool_templates import TOOL_TEMPLATES, tool_tokenizer

ANSWER = "<answer>Up</answer>"
CONTROL = re.compile(r"<\|?[^\s<>{}]+>|\[/?[A-Z]+\]")


class Form(NamedTuple):
    """What a template writes after a user's message, before and after a reply, and to ask for one.

    `plain` is what it asks with where thinking is switched off.
    """

    closing: str
    before: str
    after: str
    asked: str
    plain: str | None = None

    def tokenizer(self) -> Any:
        made = tiny_tokenizer.__wrapped__("chatml")
        plain = self.asked if self.plain is None else self.plain
        found = sorted(set(CONTROL.findall("".join((*self[:4], plain)))) - {"<think>", "</think>"})
        made.add_tokens([AddedToken(text, special=True, normalized=False) for text in found])
        made.chat_template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            f"{{{{ {self.before!r} + m.content + {self.after!r} }}}}"
            f"{{% else %}}{{{{ '<|im_start|>' + m.content + {self.closing!r} }}}}{{% endif %}}"
            "{% endfor %}{% if add_generation_prompt %}"
            f"{{{{ {self.asked!r} if enable_thinking else {plain!r} }}}}{{% endif %}}"
        )
        return made


FORMS = {
    "gpt-oss": Form("<|end|>", "<|start|>a<|channel|>final<|message|>", "<|end|>", "<|start|>a"),
    "Solar": Form("<|end|>", "<|begin|>a<|content|>", "<|end|>", "<|begin|>a"),
    "Kimi K3": Form(
        *("<|close|>", "<|open|>a<|sep|><|open|>think<|sep|><|close|>think<|sep|>", "<|close|>"),
        "<|open|>a<|sep|><|open|>think<|sep|>",
    ),
    "Command R7B": Form(
        *("<|END|>", "<|BOT|><|RESPONSE|>", "<|/RESPONSE|><|END|>", "<|BOT|>"),
        "<|BOT|><|THINKING|><|/THINKING|>",
    ),
    "Cohere 2 MoE": Form("<|END|>", "<|BOT|><|TEXT|>", "<|/TEXT|><|END|>", "<|BOT|><|THINKING|>"),
    "functionary": Form("<|eot|>", "<|head|>a\n\n>>>all\n", "<|eot|>", "<|head|>a\n\n>>>"),
    "MiniMax M3": Form("<|end|>", "<|b|>ai\n</mm:think>", "<|end|>", "<|b|>ai\n"),
    "GLM 4.5": Form("<|user|>", "<|a|>\n<think></think>\n", "", "<|a|>", "<|a|>\n<think></think>"),
    "no prompt": Form("<|end|>", "<|start|>a\n", "<|end|>", ""),
    "no line break": Form("<|end|>", "<|start|>a\n", "<|end|>", "<|start|>a"),
}


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_a_reply_begins_where_the_template_puts_one(name: str, think: bool) -> None:
    form = FORMS[name]
    tokenizer, where = form.tokenizer(), form.before.partition("<think>")[0]
    if name == "GLM 4.5" and not think:
        where = form.plain or ""
    chat = Chat(tokenizer, think)
    assert chat.exact
    ids, num_prefill = chat.open([user("P")], "<answer>")
    assert tokenizer.decode(ids).endswith(f"P{form.closing}{where}<answer>")
    assert tokenizer.decode(ids[-num_prefill:]) == "<answer>"
    reply = (*chat.encode("Up</answer>"), chat.end)
    more, _ = chat.extend(ids + reply, [user("P"), assistant(ANSWER), user("Q")], "<answer>")
    assert more[: len(ids + reply)] == ids + reply
    assert tokenizer.decode(more).endswith(f"Q{form.closing}{where}<answer>")
    # The model itself would begin with these; they are part of the prompt, so it cannot.
    assert all(chat.encode(token)[0] in chat.control_ids for token in CONTROL.findall(chat.header))


def test_the_prompt_of_a_template_stays_if_it_has_more_than_the_history() -> None:
    """Gemma 4 asks for a reply without a thought by an empty channel, others by a phrase."""
    empty = "<|turn>model\n<|channel>thought\n<channel|>"
    gemma = Form("<turn|>\n", "<|turn>model\n", "<turn|>\n", "<|turn>model\n", empty)
    phrase = Form("<|end|>\n", "<|a|>\n", "<|end|>\n", "<|a|>\nHere are my steps:\n")
    for form, asked in ((gemma, empty), (phrase, phrase.asked)):
        tokenizer = form.tokenizer()
        chat = Chat(tokenizer, think=False)
        assert chat.exact and chat.header == ""
        ids, _ = chat.open([user("P")])
        assert tokenizer.decode(ids).endswith(f"P{form.closing}{asked}")
        reply = (*chat.encode(ANSWER), chat.end)
        more, _ = chat.extend(ids + reply, [user("P"), assistant(ANSWER), user("Q")])
        assert tokenizer.decode(more).endswith(f"Q{form.closing}{asked}")


def test_replies_inside_a_thought_of_control_tokens_are_refused() -> None:
    """The token that ends the thought would end the reply."""
    always = Form("<|end|>", "<|a|>", "<|end|>", "<|a|><|think|>")
    for think in (True, False):
        with pytest.raises(RagenError, match=r"begins replies with '<\|think\|>', a thought that"):
            Chat(always.tokenizer(), think)
    sometimes = always._replace(plain="<|a|>")
    with pytest.raises(RagenError, match=r"prompt\.think = false leaves it out in some"):
        Chat(sometimes.tokenizer())
    assert Chat(sometimes.tokenizer(), think=False).exact


def test_spaces_before_a_reply_are_sampled() -> None:
    """A token of most vocabularies begins with its space, so no prompt ends with one."""
    tokenizer = Form("[/INST]", " ", " </s>", "").tokenizer()
    chat = Chat(tokenizer)
    assert chat.exact and chat.header == ""
    ids, _ = chat.open([user("P")])
    assert tokenizer.decode(ids).endswith("P[/INST]")
    reply = (*chat.encode(f" {ANSWER}"), chat.end)
    more, _ = chat.extend(ids + reply, [user("P"), assistant(ANSWER), user("Q")])
    assert tokenizer.decode(more).endswith(f"P[/INST] {ANSWER}</s><|im_start|>Q[/INST]")


@pytest.mark.parametrize("name", ["gpt-oss", "Command R7B", "no line break"])
def test_what_a_template_adds_to_the_last_message_stays(name: str) -> None:
    """Then each turn is rendered, with the reply where the template puts one."""
    form = FORMS[name]
    tokenizer = form.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        f"m.content + {form.closing!r} }}}}{{% endif",
        f"m.content + (' Now!' if loop.last else '') + {form.closing!r} }}}}{{% endif",
    )
    chat = Chat(tokenizer)
    assert not chat.exact and chat.warning == NOT_EXACT
    text = tokenizer.decode(chat.open([user("P")])[0])
    assert text.endswith(f"P Now!{form.closing}{form.before}")


def test_calls_that_begin_in_another_way_than_answers_are_refused() -> None:
    tokenizer = tool_tokenizer.__wrapped__("hermes")
    tokenizer.chat_template = TOOL_TEMPLATES["hermes"].replace(
        "{{ m.content }}", "{% if not m.tool_calls %}{{ 'final: ' }}{% endif %}{{ m.content }}"
    )
    with pytest.raises(RagenError, match="begins a reply that calls tools in another way"):
        Chat(tokenizer, tools=[TOOL])


TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


@pytest.mark.parametrize("kind", ["template", "token", "neither"])
def test_a_chat_knows_whether_messages_lose_their_first_blanks(kind: str) -> None:
    tokenizer = tiny_tokenizer.__wrapped__("chatml")
    if kind == "template":  # Llama 3
        tokenizer = tiny_tokenizer.__wrapped__("llama3")
    if kind == "token":  # Phi-3
        tokenizer.add_tokens([AddedToken("<|user|>", rstrip=True, special=True)])
        for old, new in (("<|im_start|>' +", "<|' +"), ("m.role + '\\n'", "m.role + '|>\\n'")):
            tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    assert Chat(tokenizer).loses_blanks == (kind != "neither")
