"""The embedded models' tokenizer: whole words, lossless, the same when loaded by transformers."""

import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.bases.tokenizer import build, words
from ragen.chat.chat import Chat
from ragen.chat.prompt import Limits, PromptBuilder
from ragen.envs.registry import make
from ragen.models.names import EMBEDDED

BASES = Path(__file__).parents[2] / "src" / "ragen" / "models" / "bases"


@cache
def tokenizer() -> Any:
    return build()


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


@given(st.lists(st.one_of(st.text(max_size=6), st.sampled_from(words())), max_size=12))
def test_tokenizer_is_lossless(pieces: list[str]) -> None:
    text = unicodedata.normalize("NFC", "".join(pieces))
    assert tokenizer().decode(ids_of(text)) == text


def test_a_named_cell_costs_two_tokens() -> None:
    assert tokenizer().tokenize("a0 P a1 _\nb0 √ b1 G") == [
        *("a0", " P", " a1", " _", "\n", "b0", " √", " b1", " G")
    ]


@pytest.mark.parametrize("name", EMBEDDED)
def test_prompts_of_environments_with_an_embedded_model_need_no_byte_tokens(name: str) -> None:
    params = {} if "bandit" in name else {"observation": "named"}
    env = make(name, **params)
    observation, _ = env.reset(seed=123, options={"noise_seed": 0})
    builder = PromptBuilder()
    texts = [
        builder.first(env.rules, env.goal, env.actions, observation, Limits(1, 5, 10, 5)),
        builder.following(observation, -0.3, "no action", Limits(2, 4, 7, 5)),
    ]
    known = set(tokenizer().get_added_vocab())
    pieces = [t for text in texts for t in tokenizer().tokenize(text)]
    assert not [t for t in pieces if t not in known and t not in ":,"]


def test_chat_template_extends_exactly() -> None:
    chat = Chat(tokenizer())
    assert chat.exact
    assert chat.end_ids == {tokenizer().eos_token_id}


@pytest.mark.parametrize("folder", sorted(BASES.iterdir()), ids=lambda path: path.name)
def test_shipped_models_contain_this_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == tokenizer().get_vocab()
    text = "FrozenLake\na0 P a1 _ a2 O\nturns 5 actions 10 max 5"
    assert loaded.encode(text) == ids_of(text)
    assert loaded.chat_template == tokenizer().chat_template
