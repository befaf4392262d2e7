"""Chat templates with tools, small ones in the forms of Qwen, Llama 3 and Mistral, and tokenizers.

`tool_tokenizer(name)` is a `tiny_tokenizer` with one of the `TOOL_TEMPLATES` and its tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.tiny import tiny_tokenizer

_CHATML_TOOLS = (
    "{% if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{{ '\\n# Tools\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls %}"
    "{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_RESULTS = (
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_MESSAGES = (
    "{% for m in messages %}"
    + _RESULTS
    + "{% elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' }}"
)

TOOL_TEMPLATES: dict[str, str] = {
    # Qwen 2.5: everything that was said stays.
    "hermes": _CHATML_TOOLS
    + _MESSAGES
    + "{{ m.content }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    # Qwen 3: drops the thoughts before the last user message; writes an empty one if it is off.
    "qwen3": _CHATML_TOOLS
    + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    + "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _MESSAGES
    + "{% if m.role == 'assistant' and '</think>' in m.content %}"
    + "{% if loop.index0 > ns.last %}{{ m.content.split('</think>')[0] + '</think>' }}{% endif %}"
    + "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    # Opens the thought in its generation prompt, and writes an empty one in the history.
    "thinker": _CHATML_TOOLS
    + _MESSAGES
    + "{% if m.role == 'assistant' and '</think>' not in m.content %}"
    + "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
    # Llama 3: tools in the first user message, one call in a message, results as JSON texts.
    "llama3": "{{ '<|begin_of_text|>' }}{% set ns = namespace(shown=false) %}"
    + "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    + "{{ raise_exception('one call at once') }}{% endif %}"
    + "{% set f = m.tool_calls[0].function %}"
    + '{{ \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + f.name }}'
    + "{{ '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}"
    + "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    + "{{ m.content | tojson }}{{ '<|eot_id|>' }}{% else %}"
    + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    + "{% if m.role == 'user' and tools and not ns.shown %}{% set ns.shown = true %}"
    + "{{ 'Functions: ' }}{{ tools | tojson }}{{ '\\n\\n' }}{% endif %}"
    + "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    + "{% endif %}",
    # Mistral: tools before the last user message, calls and results have ids of nine characters.
    "mistral": "{% set start = messages[0].role == 'system' %}{% set said = messages[start:] %}"
    + "{% for m in said | rejectattr('role', 'equalto', 'tool')"
    + " | selectattr('tool_calls', 'undefined') %}"
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    + "{% set asked = said | selectattr('role', 'equalto', 'user') | list %}{{ '<s>' }}"
    + "{% for m in said %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}"
    + "{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    + "{{ '[INST]' }}{% if loop.last and start %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    + "{{ m.content + '[/INST]' }}{% elif m.tool_calls is defined %}{{ '[TOOL_CALLS][' }}"
    + "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    + "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    + "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</s>' }}"
    + "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    + "{{ raise_exception('id') }}{% endif %}{{ '[TOOL_RESULTS]{\"content\": ' + m.content }}"
    + "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    + "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
}
# Numbers the results, so that the text after a reply depends on all before.
TOOL_TEMPLATES["counting"] = TOOL_TEMPLATES["hermes"].replace(
    "<tool_response>\\n' +", "<tool_response>\\n' + (loop.index | string) + ' ' +"
)

_CHATML = ["<|im_start|>", "<|im_end|>"]
_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_OWN = {
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": [
        *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ],
}


@cache
def tool_tokenizer(name: str) -> Any:
    """The tokenizer of a template; it is cached, so do not change it."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer.__wrapped__("plain")
    special = _OWN.get(name, _CHATML)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if name not in _OWN:  # Qwen does not flag these
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _TAGS])
    tokenizer.chat_template = TOOL_TEMPLATES[name]
    return tokenizer
