"""Model folders as an attacker would write them, or as a disk would damage them.

Each change of `HOSTILE` makes a known trap of a good folder. `mutate` changes bytes and JSON
fields at random, with fixed seeds. `reaction` loads a folder as a run does, and
says how that ended.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError

LIMIT_S = 240
"""Time for one folder. The trial takes at most ten seconds of processor time, or a minute."""

BIG = 10**9
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, BIG, 2**63, 10**400, 1.5, float("nan"), float("inf"), -1e308),
    *("", "x", "../../x", "é\ud800", "a" * 10_000, [], [[]], {}, {"": None}, [BIG], ["x", None]),
)
"""What a field of a JSON file is replaced by."""

TEMPLATES = {
    "memory": "{{ 'a' * 10**11 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "format": "{{ '%1000000000d' % 1 }}",
    "range": "{{ range(10**9) | list }}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "one long step": "{{ (10**100000)**1000 }}",
    "filter": "{{ lipsum(n=10000000) }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long content": "{% for a in messages[-1].content %}{% for b in messages[-1].content %}"
    "{% for c in messages[-1].content %}{% endfor %}{% endfor %}{% endfor %}{{ messages }}",
    "length": "{{ 'a' * 1000000 }}{{ messages[-1].content }}",
    "surrogate": "{{ '\\ud800' }}{{ messages[-1].content }}",
    "escape": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "include": "{% include '/etc/passwd' %}",
    "syntax": "{% for %}",
    "nothing": "",
}
"""Chat templates that are refused."""


def set_field(folder: Path, file: str, **values: Any) -> None:
    """Set keys of a JSON file."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _fields(file: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: set_field(folder, file, **values)


def _text(file: str, text: str | bytes) -> Callable[[Path], None]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / file).write_bytes(data) and None


def _replaced(file: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return change


def _index(shard: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        (folder / "pytorch_model.bin").write_bytes((folder.parent / "canary.pickle").read_bytes())
        text = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}})
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def _header(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    size = len(text) if length is None else length
    return _text("model.safetensors", size.to_bytes(8, "little") + text + b"\0" * 64)


def sparse(path: Path) -> None:
    """A terabyte of zeros that takes no space, with a header that describes it."""
    side = 2**19
    header = json.dumps(
        {
            "lm_head.weight": {
                "dtype": "F32",
                "shape": [side, side],
                "data_offsets": [0, 4 * side**2],
            }
        }
    ).encode()
    with path.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + 4 * side**2)


def _normalizer(**kind: Any) -> Callable[[Path], None]:
    return _fields("tokenizer.json", normalizer=kind)


_DOUBLING = {"type": "Replace", "pattern": {"String": "Q"}, "content": "QQ"}
_CODE = "import pathlib; pathlib.Path(__file__).with_name('executed').touch()\n"
_THEIRS = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}

HOSTILE: dict[str, Callable[[Path], None]] = {
    **{f"template: {name}": _text("chat_template.jinja", t) for name, t in TEMPLATES.items()},
    "an index that names a pickle": _index("pytorch_model.bin"),
    "an index that leads outside": _index("../outside.safetensors"),
    "an index with an absolute path": _index("/etc/hostname.safetensors"),
    "an index with a number": _index(7),
    "an index of nothing": lambda folder: (
        _index("x")(folder) or _text("model.safetensors.index.json", "[]")(folder)
    ),
    "weights of another name": _fields("config.json", transformers_weights="adapter_model.bin"),
    "weights that are a pipe": _replaced("model.safetensors", os.mkfifo),
    "weights that are a folder": _replaced("model.safetensors", Path.mkdir),
    "weights that are a device": _replaced(
        "model.safetensors", lambda p: p.symlink_to("/dev/zero")
    ),
    "weights that lead in a circle": _replaced("model.safetensors", lambda p: p.symlink_to(p)),
    "an index whose metadata is a list": lambda folder: (
        _index("lm_head.safetensors")(folder)
        or set_field(folder, "model.safetensors.index.json", metadata=[])
    ),
    "weights of a terabyte": _replaced("model.safetensors", sparse),
    "an endless header": _header(b"{", 2**62),
    "a header of another length": _header(
        b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'
    ),
    "a header of an unknown dtype": _header(
        b'{"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]}}'
    ),
    "a header that overlaps": _header(
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}'
    ),
    "a header of a huge shape": _header(
        b'{"a":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,4]}}'
    ),
    "a pickle in place of safetensors": lambda folder: (
        shutil.copy(folder.parent / "canary.pickle", folder / "model.safetensors") and None
    ),
    "a config that is a pipe": _replaced("config.json", os.mkfifo),
    "a tokenizer that is a pipe": _replaced("tokenizer.json", os.mkfifo),
    "a template that is a pipe": _replaced("chat_template.jinja", os.mkfifo),
    "a note that is a pipe": lambda folder: os.mkfifo(folder / "added_tokens.json"),
    "a config in another encoding": _text(
        "config.json", '{"model_type": "qwen2é"}'.encode("latin1")
    ),
    "a config with a mark of order": _text("config.json", b"\xef\xbb\xbf{}"),
    "a deep config": _text("config.json", "[" * 100_000),
    "a deep object": _text("config.json", '{"a":' * 50_000 + "1" + "}" * 50_000),
    "a config of one number": _text("config.json", "1" * 5000),
    "a long number": _text("config.json", '{"vocab_size": ' + "1" * 4301 + "}"),
    "a billion layers": _fields("config.json", num_hidden_layers=BIG),
    "a billion labels": _fields("config.json", num_labels=BIG),
    "a wide model": _fields("config.json", hidden_size=65_536),
    "a large vocabulary": _fields("config.json", vocab_size=BIG),
    "no heads": _fields("config.json", num_attention_heads=0),
    "heads of one number": _fields("config.json", num_attention_heads=32),
    "half of the rotation": _fields(
        "config.json",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "a surrogate in the settings": _text(
        "tokenizer_config.json", '{"backend": "\\ud800", "tokenizer_class": "TokenizersBackend"}'
    ),
    "heads below zero": _fields("config.json", num_key_value_heads=-2),
    "a large padding id": _fields("config.json", pad_token_id=BIG),
    "a billion positions": _fields("config.json", max_position_embeddings=BIG),
    "a billion positions by another name": _fields("config.json", max_seq_len=BIG),
    "outputs without names": _fields("config.json", return_dict=False),
    "a part that the model does not have": _fields("config.json", text_config={"a": 1}),
    "a part that is a number": _fields("config.json", decoder=3),
    "a length that is text": _fields("tokenizer_config.json", model_max_length="x"),
    "a method of the library": _fields("config.json", to_dict={}),
    "a table of the library": _fields("config.json", sub_configs={"a": 1}),
    "labels that are text": _fields("config.json", id2label="x"),
    "an unknown dtype": _fields("config.json", dtype="x"),
    "kernels by number": _fields("config.json", _attn_implementation=1),
    "a quantisation of text": _fields("config.json", quantization_config="x"),
    "a tokenizer class of a number": _fields("tokenizer_config.json", tokenizer_class=0),
    "added tokens that are a list": _fields("tokenizer_config.json", added_tokens_decoder=[1]),
    "an argument of the library": _fields("tokenizer_config.json", tokenizer_object="x"),
    "a padding id of text": _fields("generation_config.json", pad_token_id="x"),
    "an unknown activation": _fields("config.json", hidden_act="theirs"),
    "a kernel of the Hub": _fields("config.json", _attn_implementation="evil/kernel"),
    "another kernel of the Hub": _fields("config.json", attn_implementation={"": "evil/kernel"}),
    "code of its own": _fields("config.json", model_type="theirs", auto_map=_THEIRS),
    "code for a known model": _fields("config.json", auto_map=_THEIRS),
    "code for the tokenizer": _fields(
        "tokenizer_config.json",
        tokenizer_class="Theirs",
        auto_map={"AutoTokenizer": ["theirs.Theirs", None]},
    ),
    "a generation config of text": _text("generation_config.json", "[]"),
    "a tokenizer in another file": _fields("tokenizer_config.json", tokenizer_file="/dev/zero"),
    "an endless normaliser": _normalizer(type="Sequence", normalizers=[_DOUBLING] * 60),
    "an endless pattern": _normalizer(type="Replace", pattern={"Regex": "(([^x])*)*x"}, content=""),
    "a normaliser that erases": _normalizer(
        type="Replace", pattern={"Regex": "[^<>|]"}, content=""
    ),
    "a model whose words are all unknown": _fields(
        "tokenizer.json",
        model={"type": "WordLevel", "vocab": {"?": 1, "!": 2}, "unk_token": "?"},
    ),
    "a token far away": _fields(
        "tokenizer.json", model={"type": "BPE", "vocab": {"a": BIG}, "merges": []}
    ),
    "padding to a billion": _fields(
        "tokenizer.json",
        padding={
            "strategy": {"Fixed": 10**11},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    ),
    "an added token far away": _fields(
        "tokenizer_config.json",
        added_tokens_decoder={str(BIG): {"content": "<far>", "special": True}},
    ),
    "an adapter beside the model": _text(
        "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "theirs"}'
    ),
}
"""What is wrong with a folder, and the change that makes it so."""

LOADED = {
    *("code for a known model", "code for the tokenizer", "a tokenizer in another file"),
    *("an endless pattern", "half of the rotation"),
}
"""Traps without effect: what they name is not used, or ends after all."""
SLOW = {
    *(
        f"template: {name}"
        for name in ("loop", "format", "one long step", "filter", "long content")
    ),
    "an endless normaliser",
}
"""Traps that the trial's processor time ends."""


def good_folder(folder: Path) -> Path:
    """A tiny model's folder, with code and a pickle at hand that leave a file when executed."""
    from ragen.models.loading import save_model
    from tests.tiny import tiny_model, tiny_tokenizer

    words = tiny_tokenizer("chatml")
    save_model(tiny_model(words), words, folder)
    for name in ("theirs.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(_CODE)
    command = f"import pathlib; pathlib.Path({str(folder.parent / 'executed')!r}).touch()"
    opcodes = b"cbuiltins\nexec\n(V" + command.encode() + b"\ntR."
    (folder.parent / "canary.pickle").write_bytes(opcodes)
    return folder


def mutate(folder: Path, seed: int) -> str:
    """Change one or two things in a good folder; returns what was done."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.glob("*.*") if path.suffix != ".py")
    done = []
    for _ in range(draw.choice((1, 1, 2))):
        path = draw.choice(files)
        if not path.exists():
            continue
        if path.suffix == ".json" and draw.random() < 0.75:
            done.append(_change_json(path, draw))
        else:
            done.append(_change_bytes(path, draw))
    return f"seed {seed}: {', '.join(done)}"


def _change_json(path: Path, draw: random.Random) -> str:
    content = json.loads(path.read_text("utf-8"))
    places = list(_places(content))
    if path.name == "tokenizer.json":  # a vocabulary has many entries, which say little
        places = draw.sample(places, 40) + [place for place in places if len(place[2]) <= 2]
    holder, key, where = draw.choice(places)
    value = draw.choice(VALUES)
    action = draw.random()
    if action < 0.15:
        del holder[key]
        name = "removed"
    elif action < 0.3 and isinstance(holder, dict):
        holder[key + "x"] = holder.pop(key)
        name = "renamed"
    else:
        holder[key] = value
        name = f"= {str(value)[:20]!a}" if not isinstance(value, int) else "= an integer"
    path.write_text(json.dumps(content), "utf-8")
    return f"{path.name} {'.'.join(map(str, where))} {name}"


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in entries:
        yield value, key, (*above, key)
        if isinstance(each, dict | list):
            yield from _places(each, (*above, key))


def _change_bytes(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    end = draw.choice((len(data), min(len(data), 400)))  # the head of a file matters most
    start = draw.randrange(max(1, end))
    kind = draw.choice(("cut", "flip", "insert", "remove", "empty", "repeat"))
    if kind == "cut":
        del data[start:]
    elif kind == "flip":
        for _ in range(draw.choice((1, 8))):
            if data:
                data[draw.randrange(max(1, end))] ^= 1 << draw.randrange(8)
    elif kind == "insert":
        data[start:start] = draw.randbytes(draw.choice((1, 5, 1000)))
    elif kind == "remove":
        del data[start : start + draw.choice((1, 8, 100))]
    elif kind == "empty":
        data = bytearray()
    else:
        data[start:start] = data[start : start + 200] * 3
    path.write_bytes(bytes(data))
    return f"{path.name} {kind} at {start}"


class TooLongError(BaseException):
    """A folder took more than `LIMIT_S`."""


def reaction(folder: Path, whole_run: bool = False) -> tuple[str, str]:
    """Load a folder as a run does, and use it; `whole_run` trains a step.

    Returns ``loaded``, ``refused`` (with the message), ``traceback`` or ``hang``.
    """
    from ragen.config.config import Config
    from ragen.config.reading import resolve
    from ragen.engines import memory

    def expire(*_: object) -> None:
        raise TooLongError

    config: Config = resolve(
        "bandit",
        {
            **{"steps": 1, "eval.episodes": 0, "model.path": str(folder), "threads": 1},
            **{"rollout.num_groups": 2, "rollout.group_size": 2, "rollout.max_tokens": 8},
            **{"checkpoint.every": 1, "model.max_length": 512},
        },
    )
    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(LIMIT_S)
    try:
        if whole_run:
            from ragen.training.trainer import train

            train(config, run_folder(folder))
        else:
            memory.refuse_too_large(config, lambda _: None)
            use(config, folder)
    except RagenError as error:
        text = str(error)
        is_line = "\n" not in text and len(text) < 1000
        if run_folder(folder).exists() or not is_line:
            return "traceback", f"the run's folder is left, or not one line: {text}"
        return "refused", text
    except TooLongError:
        return "hang", traceback.format_exc()
    except BaseException:  # noqa: BLE001 (a panic of Rust is no Exception)
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return "loaded", ""


def run_folder(folder: Path) -> Path:
    """Where `reaction` trains the model in `folder`."""
    return folder.with_name(f"run-{folder.name}")


def use(config: Any, folder: Path) -> None:
    """Load a model and its chat, sample a reply, and save everything."""
    import torch

    from ragen.engines.factory import load_model, prepare_model
    from ragen.models.loading import save_model
    from ragen.rollout.chat import Chat

    model, tokenizer = load_model(config, str(folder))
    model = prepare_model(config, str(folder), model, critic=True)
    chat = Chat(tokenizer, config.prompt.think, config.prompt.history_thoughts)
    ids, _ = chat.open([{"role": "user", "content": "Up or down?"}])
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    if bool(torch.isfinite(logits).all()):
        chat.decode(logits[0].argmax(-1).tolist())
    save_model(model, tokenizer, folder.parent / "saved")
    shutil.rmtree(folder.parent / "saved")


@contextmanager
def limited_memory(size: int = 8 * 2**30) -> Iterator[None]:
    """Refuse this process more than `size` bytes beyond those it has reserved."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main(base: Path, first: int, last: int, report: Path) -> None:
    """React to the mutations of seeds `first` to `last`; each appends a JSON line to `report`."""
    import peft  # noqa: F401
    import torch  # noqa: F401 (loaded before memory is limited)

    with limited_memory(), report.open("a") as lines:
        for seed in range(first, last):
            folder = base.with_name(f"mutated-{seed}")
            shutil.copytree(base, folder)
            what = mutate(folder, seed)
            kind, text = reaction(folder, whole_run=seed % 25 == 0)
            lines.write(json.dumps([seed, kind, what, text]) + "\n")
            lines.flush()
            shutil.rmtree(folder)


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
