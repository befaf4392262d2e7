"""Model folders are data: whatever their files hold, they are loaded or refused in one line.

`HOSTILE` is a table of files as an attacker would write them, or as a disk would damage them.
Nothing in a folder is executed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragen.core.errors import RagenError
from ragen.models.adapter_folder import put_on, save_adapter
from ragen.models.loading import load_policy, load_tokenizer, save_model
from ragen.models.names import base_of
from ragen.networks.lora import attach
from tests.tiny import tiny_model, tiny_tokenizer

WORDS = tiny_tokenizer("chatml")
BIG = 10**9
CODE = "import pathlib; pathlib.Path(__file__).with_name('executed').touch()\n"
THEIRS = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
Change = Callable[[Path], Any]


def set_field(folder: Path, file: str, **values: Any) -> None:
    """Set keys of a JSON file."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def fields(file: str, **values: Any) -> Change:
    return lambda folder: set_field(folder, file, **values)


def text(file: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(data)


def header(content: bytes, length: int | None = None) -> Change:
    """Weights of 64 bytes with this header, which may lie about its length."""
    size = len(content) if length is None else length
    return text("model.safetensors", size.to_bytes(8, "little") + content + b"\0" * 64)


def instead(file: str, make: Change) -> Change:
    """The file is removed, and `make(its path)` puts something else there."""

    def change(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return change


def index(shard: Any) -> Change:
    """The weights are elsewhere, and an index names `shard` in their place."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        shutil.copy(folder.parent / "canary.pickle", folder / "pytorch_model.bin")
        content = {"metadata": {}, "weight_map": {"lm_head.weight": shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def pipe(path: Path) -> None:
    os.mkfifo(path)  # looked up here, for Windows has none


def terabyte(path: Path) -> None:
    """Zeros that take no space, with a header that describes them."""
    side = 2**19
    tensor = {"dtype": "F32", "shape": [side, side], "data_offsets": [0, 4 * side**2]}
    head = json.dumps({"lm_head.weight": tensor}).encode()
    with path.open("wb") as opened:
        opened.write(len(head).to_bytes(8, "little") + head)
        opened.truncate(8 + len(head) + 4 * side**2)


HOSTILE: dict[str, Change] = {
    "an index that names a pickle": index("pytorch_model.bin"),
    "an index that leads outside": index("../outside.safetensors"),
    "an index with an absolute path": index("/etc/hostname.safetensors"),
    "an index with a number": index(7),
    "a pickle in place of safetensors": instead(
        "model.safetensors", lambda path: shutil.copy(path.parents[1] / "canary.pickle", path)
    ),
    "weights of another name": fields("config.json", transformers_weights="adapter_model.bin"),
    "weights that are a device": instead(
        "model.safetensors", lambda path: path.symlink_to("/dev/zero")
    ),
    "weights that lead in a circle": instead(
        "model.safetensors", lambda path: path.symlink_to(path)
    ),
    "weights that are a folder": instead("model.safetensors", Path.mkdir),
    "weights of a terabyte": instead("model.safetensors", terabyte),
    **{f"a pipe: {name}": instead(name, pipe) for name in ("config.json", "tokenizer.json")},
    "an endless header": header(b"{", 2**62),
    "a deep config": text("config.json", "[" * 100_000),
    "a generation config of text": text("generation_config.json", "[]"),
    "a surrogate": text("tokenizer_config.json", '{"tokenizer_class": "\\ud800"}'),
    **{
        f"config.json: {values}": fields("config.json", **values)
        for values in (
            *({"hidden_size": 65_536}, {"vocab_size": BIG}, {"num_attention_heads": 0}),
            *({"text_config": {"a": 1}}, {"return_dict": False}, {"hidden_act": "theirs"}),
            *({"_attn_implementation": "evil/kernel"}, {"dtype": "x"}),
            {"model_type": "theirs", "auto_map": THEIRS},
        )
    },
    "a tokenizer without a class": fields("tokenizer_config.json", tokenizer_class=0),
    "an adapter beside the model": text(
        "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "theirs"}'
    ),
}
"""What is wrong with a folder, and the change that makes it so."""

WITHOUT_EFFECT: dict[str, Change] = {
    "nothing": lambda folder: None,
    "code for a known model": fields("config.json", auto_map=THEIRS),
    "code for the tokenizer": fields(
        "tokenizer_config.json",
        tokenizer_class="Theirs",
        auto_map={"AutoTokenizer": ["theirs.Theirs", None]},
    ),
    "a tokenizer in another file": fields("tokenizer_config.json", tokenizer_file="/dev/zero"),
}
"""Changes after which the folder is still loaded: what they name is not used."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder, with code and a pickle at hand that leave a file when executed."""
    folder = tmp_path_factory.mktemp("models") / "good"
    save_model(tiny_model(WORDS), WORDS, folder)
    for name in ("theirs.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE)
    command = f"import pathlib; pathlib.Path({str(folder.parent / 'executed')!r}).touch()"
    opcodes = b"cbuiltins\nexec\n(V" + command.encode() + b"\ntR."
    (folder.parent / "canary.pickle").write_bytes(opcodes)
    return folder


@contextmanager
def copied(good: Path) -> Iterator[Path]:
    """A copy of the good folder beside it, where the canaries are."""
    copy = shutil.copytree(good, good.with_name("copy"))
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


@pytest.fixture
def folder(good: Path) -> Iterator[Path]:
    with copied(good) as copy:
        yield copy


@contextmanager
def limited_memory(size: int = 8 * 2**30) -> Iterator[None]:
    """Refuse this process more than `size` bytes beyond those it has reserved."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def executed(good: Path) -> list[Path]:
    return list(good.parent.rglob("executed"))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(RagenError) as caught:
        load_policy(folder, "cpu", "float32", **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 1000
    return line


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(good: Path, folder: Path, name: str) -> None:
    HOSTILE[name](folder)
    with limited_memory():
        refusal(folder)
    assert executed(good) == []


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_names_of_code_and_files_elsewhere_have_no_effect(
    good: Path, folder: Path, name: str
) -> None:
    WITHOUT_EFFECT[name](folder)
    assert load_policy(folder, "cpu", "float32") and executed(good) == []


# What is checked before memory is taken.


def test_weights_that_are_too_large_are_refused_before_memory_is_taken(folder: Path) -> None:
    assert "use a smaller model" in refusal(folder, free=1000)
    set_field(folder, "config.json", hidden_size=2**14, intermediate_size=2**17)
    with limited_memory(2**28):
        assert re.search(r"describes \d+ numbers where", refusal(folder))


# What is not refused.


def test_truncation_and_padding_of_a_tokenizer_file_are_off(folder: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    set_field(folder, "tokenizer.json", truncation=cut, padding=pad)
    tokenizer: Any = load_tokenizer(folder, folder)
    assert 2 < len(tokenizer.backend_tokenizer.encode("go up then left").ids) < 64


# Adapters.


@pytest.fixture(scope="module")
def adapter(good: Path) -> Path:
    model, _ = load_policy(good, "cpu", "float32")
    attach(model, ("policy",), rank=3, alpha=6, targets="all-linear", seed=0, base=str(good))
    save_adapter(model, good.with_name("adapter"))
    return good.with_name("adapter")


ADAPTERS: list[tuple[dict[str, Any], str]] = [
    ({"r": "x"}, "does not fit its base"),
    ({"rank_pattern": [1]}, "does not fit its base"),
    ({"task_type": 7, "layers_to_transform": "x"}, "does not fit its base"),
    ({"base_model_name_or_path": 7}, "names no base model"),
    ({"base_model_name_or_path": "a\0b"}, "names no base model"),
]


def test_hostile_adapters_are_refused_in_one_line(
    adapter: Path, good: Path, tmp_path: Path
) -> None:
    def refused(folder: Path, reason: str) -> None:
        with pytest.raises(RagenError, match=reason) as caught:
            base_of(folder)
            put_on(base, folder)
        assert "\n" not in str(caught.value)

    base, _ = load_policy(good, "cpu", "float32")
    for number, (values, reason) in enumerate(ADAPTERS):
        folder = shutil.copytree(adapter, tmp_path / str(number))
        set_field(folder, "adapter_config.json", **values)
        refused(folder, reason)
    folder = shutil.copytree(adapter, tmp_path / "weights")
    terabyte(folder / "adapter_model.safetensors")
    refused(folder, "is of another model")
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    refused(folder, "is no regular file")
