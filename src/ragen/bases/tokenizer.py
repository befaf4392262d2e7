"""The embedded models' tokenizer: whole words where it knows them, bytes everywhere else.

Decoding restores any text (in Unicode's composed form, NFC, like every Qwen2 tokenizer). A word of
the vocabulary is one token with the space before it, so that a named cell and its symbol cost two
tokens. In Hugging Face's terms it is Qwen2's byte-level tokenizer without merges, with the words as
added tokens, because for every model of that architecture `AutoTokenizer` splits text as Qwen2
does, and only added tokens take precedence.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from ragen.envs.worlds.bandit import NAMES

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""One token opens a message. The end-of-turn token ends a reply; other messages have no end."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ACTIONS = ("Left", "Down", "Right", "Up")
SYMBOLS = tuple("#_O√XPSGW.CBA@")
CELLS = tuple(f"{row}{col}" for row in "abcdefgh" for col in range(8))
NUMBERS = tuple(str(number) for number in range(21))
REWARDS = (*(f"{tenths / 10:g}" for tenths in range(-20, 20) if tenths % 10), "-1", "-2")
ARMS = tuple(
    arm for splits in NAMES.values() for pairs in splits.values() for pair in pairs for arm in pair
)
WORDS = (
    "FrozenLake Sokoban Bandit Arms reward invalid turns actions max push at to go no stop risk "
    "safe risky high low try then "
)
PART_WORDS = (
    *("<observation>", "</observation>", "<prediction>", "</prediction>"),
    *(" state", " transition", " world"),
)
"""Words of thoughts in parts and of prompts that ask for them."""
PROMPT_WORDS = ("reward", "invalid", "turns", "actions", "max", "at")
"""Words of compact prompts and of look-ups."""
PUNCTUATION = ("||", ":", ",", "=", "?", "-", ">", "<", "|")


def words() -> list[str]:
    """The vocabulary's words: most follow a space, some begin a line or an answer."""
    others = tuple(WORDS.split())
    spaced = ACTIONS + SYMBOLS + CELLS + NUMBERS + REWARDS + ARMS + others + PUNCTUATION
    bare = ("\n", "||", *ACTIONS, *(c for c in CELLS if c[1] in "01"), *ARMS, *others)
    return [*TAGS, *dict.fromkeys(" " + word for word in spaced), *dict.fromkeys(bare)]


def words_for(pieces: Iterable[str], highest: int) -> list[str]:
    """A vocabulary of pieces of text, numbers up to `highest` and what prompts are made of."""
    found = dict.fromkeys([*PROMPT_WORDS, *pieces])
    numbers = map(str, range(highest + 1))
    spaced = dict.fromkeys(f" {word}" for word in (*found, *PUNCTUATION, *numbers))
    # A single ASCII character is in the byte alphabet, so it is a token already.
    bare = [word for word in found if len(word.encode()) > 1]
    return [*TAGS, *spaced, *dict.fromkeys(["\n", *bare, "||"])]


def build(vocabulary: Iterable[str] | None = None) -> Qwen2Tokenizer:
    """The tokenizer with its chat template, for a `vocabulary` or RAGEN's own (`words`)."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={byte: index for index, byte in enumerate(alphabet)},
        merges=[],
        unk_token=END,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=TEMPLATE,
    )
    known = words() if vocabulary is None else vocabulary
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in known])
    return tokenizer
