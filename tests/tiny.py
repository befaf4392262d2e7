"""Tiny tokenizers and models for tests, created without downloads.

`tiny_tokenizer(name)` returns a lossless byte-level BPE tokenizer with one of the chat templates in
`TEMPLATES`; `tiny_model(tokenizer)` returns a random Qwen2 for that tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any


def ends(*end_ids: int, control_ids: Iterable[int] = (), decode: Callable[..., str] = str) -> Any:
    """A chat's part that samplers use."""
    ids = frozenset(end_ids)
    return SimpleNamespace(end_ids=ids, control_ids=ids | {*control_ids}, decode=decode)


_LOOP = "{% for m in messages %}"
_END = "{% endfor %}"
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
)


def _generate(start: str) -> str:
    return "{% if add_generation_prompt %}{{ '" + start + "' }}{% endif %}"


TEMPLATES: dict[str, str] = {
    "chatml": _LOOP
    + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    + _END
    + _generate("<|im_start|>assistant\\n"),
    # Adds a default system message if there is none.
    "qwen2.5": "{% if messages[0].role != 'system' %}"
    + "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    + _LOOP
    + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    + _END
    + _generate("<|im_start|>assistant\\n"),
    # Adds BOS and trims content.
    "llama3": "{{ '<|begin_of_text|>' }}"
    + _LOOP
    + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim"
    + " + '<|eot_id|>' }}"
    + _END
    + _generate("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    # No system role, roles must alternate, the assistant is called model.
    "gemma": "{{ '<bos>' }}{% if messages[0].role == 'system' %}"
    + "{{ raise_exception('System role not supported') }}{% endif %}"
    + _LOOP
    + _ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'"
    + " + m.content | trim + '<end_of_turn>\\n' }}"
    + _END
    + _generate("<start_of_turn>model\\n"),
    # Drops the thoughts of earlier turns.
    "qwen3": _LOOP
    + "{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    + "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    + "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}"
    + _END
    + _generate("<|im_start|>assistant\\n"),
    # Trims content, adds BOS, puts a space before the end token, and ignores system messages.
    "llama2": "{{ '<s>' }}"
    + _LOOP
    + "{% if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    + "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' </s><s>' }}{% endif %}"
    + _END
    + _generate(" "),
    # Opens the thought in its generation prompt and keeps earlier thoughts.
    "thinker": _LOOP
    + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    + _END
    + _generate("<|im_start|>assistant\\n<think>\\n"),
    # The next user's header ends a reply.
    "glm": "{{ '[gMASK]' }}"
    + _LOOP
    + "{{ '<|' + m.role + '|>\\n' + m.content }}"
    + _END
    + _generate("<|assistant|>\\n"),
    # Like Qwen3: tools, thoughts only after the last question, an empty thought if thinking is off.
    "reasoner": "{% if tools %}"
    + "{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}"
    + "{% endif %}{% set ns = namespace(last=0) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    + _END
    + _LOOP
    + "{% set ns.thought = '' %}{% set ns.rest = m.content %}"
    + "{% if m.role == 'assistant' %}{% if m.reasoning is string %}"
    + "{% set ns.thought = m.reasoning %}{% elif '</think>' in m.content %}"
    + "{% set ns.thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    + "{% set ns.rest = m.content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% endif %}"
    + "{{ '<|im_start|>' + m.role + '\\n' }}"
    + "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    + "{{ '<think>\\n' + ns.thought + '\\n</think>\\n\\n' }}{% endif %}"
    + "{{ ns.rest + '<|im_end|>\\n' }}"
    + _END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + "{% if enable_thinking is defined and enable_thinking is false %}"
    + "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    # Opens the thought and replaces earlier thoughts by empty ones.
    "hollow": _LOOP
    + "{% set c = m.content %}{% if m.role == 'assistant' %}"
    + "{% set c = '<think></think>' + c.split('</think>')[-1] %}{% endif %}"
    + "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}"
    + _END
    + _generate("<|im_start|>assistant\\n<think>\\n"),
    # Like Llama 3: always has a system message, which contains today's date.
    "dated": "{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nToday: ' }}"
    + "{% if date_string is defined %}{{ date_string }}{% else %}"
    + "{{ strftime_now('%d %b %Y %f') }}{% endif %}{{ '\\n\\n' }}"
    + "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    + "{% set messages = messages[1:] %}{% endif %}{{ '<|eot_id|>' }}"
    + "{% if tools is not none and tools is defined %}{{ tools | tojson }}{% endif %}"
    + _LOOP
    + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim"
    + " + '<|eot_id|>' }}"
    + _END
    + _generate("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    # Like gpt-oss: replies have a channel, which the generation prompt leaves to the model.
    "channels": _LOOP
    + "{{ '<|start|>' + m.role + ('<|channel|>final' if m.role == 'assistant' else '')"
    + " + '<|message|>' + m.content }}"
    + "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"
    + _END
    + _generate("<|start|>assistant"),
    # Like Command R7B: a marker opens and ends a reply; the generation prompt opens a thought.
    "markers": _LOOP
    + "{{ '<|START|>' + m.role + '<|SAYS|>' }}"
    + "{% if m.role == 'assistant' %}{{ '<|RESPONSE|>' + m.content + '<|/RESPONSE|>' }}"
    + "{% else %}{{ m.content }}{% endif %}{{ '<|END|>' }}"
    + _END
    + _generate("<|START|>assistant<|SAYS|><|THINKING|>"),
    # Like DeepSeek V3.2: only the end of an empty thought is left of earlier thoughts.
    "closed": _LOOP
    + "{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    + "{{ '</think>' + m.content.split('</think>')[-1] + '<|end|>' }}"
    + "{% else %}{{ m.content }}{% endif %}"
    + _END
    + "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    + "{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}",
    # No special tokens at all.
    "plain": _LOOP + "{{ m.role + ': ' + m.content + '\\n' }}" + _END + _generate("assistant: "),
}
_SPECIAL = {
    "chatml": ["<|im_end|>", "<|im_start|>"],
    "qwen2.5": ["<|im_end|>", "<|im_start|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "gemma": ["<end_of_turn>", "<start_of_turn>", "<bos>"],
    "qwen3": ["<|im_end|>", "<|im_start|>"],
    "llama2": ["</s>", "<s>"],
    "thinker": ["<|im_end|>", "<|im_start|>"],
    "glm": ["<|user|>", "<|assistant|>", "<|system|>", "[gMASK]"],
    "reasoner": ["<|im_end|>", "<|im_start|>"],
    "hollow": ["<|im_end|>", "<|im_start|>"],
    "dated": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "channels": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
    "markers": [
        *("<|START|>", "<|SAYS|>", "<|END|>", "<|THINKING|>", "<|/THINKING|>"),
        *("<|RESPONSE|>", "<|/RESPONSE|>"),
    ],
    "closed": ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<think>", "</think>"],
    "plain": [],
}
_CORPUS = (
    "<think> go up then left </think><answer> Up || Left </answer>",
    "user assistant system model turns actions max reward invalid Right Down",
    "<think>a0 P a1 G</think><answer>Right||Down</answer>\nreward 0\n#P_O√X",
)


@cache
def tiny_tokenizer(template: str = "chatml") -> Any:
    """A tokenizer of about 400 tokens with the named chat template.

    Its end-of-sequence and padding token is ``<|endoftext|>`` (id 0), which no template writes;
    `ragen.chat.chat` finds the template's own end-of-turn token. The tokenizer is cached, so do
    not change it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", *_SPECIAL[template]]
    backend.train_from_iterator(
        _CORPUS * 2,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def tiny_model(tokenizer: Any, seed: int = 0, **config: Any) -> Any:
    """A random `Qwen2ForCausalLM` (two layers of width 32) in evaluation mode, float32, CPU."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**settings)).eval()


def merged(model: Any) -> Any:
    """A copy of a model with the policy's adapter merged into its weights."""
    import copy

    from ragen.networks.lora import merge

    return merge(copy.deepcopy(model))
