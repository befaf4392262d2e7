"""Loading user code: from files, modules and entry points, and one clear line where it fails."""

import re
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from ragen.core import plugins
from ragen.core.errors import RagenError
from ragen.core.plugins import installed, load_object

TEXT = "def loss(x):\n    return x + 1\n\n\nNUMBER = 3\n"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


def test_an_object_in_a_file(mine):
    loaded = load_object(f"{mine}:loss", kind="loss", accepts=callable)
    assert loaded.object(1) == 2
    assert re.fullmatch("blake2b:[0-9a-f]{32}", loaded.source)


def test_an_unchanged_file_keeps_its_objects_and_an_edited_one_is_loaded_anew(mine):
    first = load_object(f"{mine}:loss")
    again = load_object(f"{mine}:loss")
    assert again.object is first.object and again.source == first.source
    mine.write_text(TEXT.replace("+ 1", "+ 2"))
    edited = load_object(f"{mine}:loss")
    assert edited.object(1) == 3
    assert edited.source != first.source
    assert not list(mine.parent.glob("__pycache__"))


def test_the_hash_is_that_of_the_bytes_whatever_the_path(mine):
    other = mine.with_name("other.py")
    other.write_text(TEXT)
    first, second = load_object(f"{mine}:loss"), load_object(f"{other}:loss")
    assert first.source == second.source
    assert first.object is not second.object


def test_an_object_in_a_module(mine, monkeypatch):
    monkeypatch.syspath_prepend(mine.parent)
    loaded = load_object("mine:NUMBER")
    assert loaded.object == 3
    assert loaded.source == load_object(f"{mine}:NUMBER").source
    monkeypatch.delitem(sys.modules, "mine")


def test_an_entry_point(mine, monkeypatch):
    monkeypatch.syspath_prepend(mine.parent)
    point = SimpleNamespace(
        name="mine", value="mine:loss", dist=SimpleNamespace(name="my-package", version="1.2")
    )
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [point] if group == "ragen.losses" else []
    )
    assert installed("ragen.losses") == {"mine": point}
    loaded = load_object("mine", "ragen.losses", kind="loss")
    assert loaded.object(1) == 2
    assert loaded.source == "my-package 1.2"
    with pytest.raises(RagenError, match="unknown loss 'mime'; did you mean 'mine'"):
        load_object("mime", "ragen.losses", kind="loss")
    monkeypatch.delitem(sys.modules, "mine")


def test_an_entry_point_is_an_entry_point(monkeypatch):
    point = EntryPoint("error", "ragen.core.errors:RagenError", "ragen.x")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    loaded = load_object("error", "ragen.x")
    assert loaded.object is RagenError and loaded.source.startswith("blake2b:")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{}/nowhere.py:loss", "no file {}/nowhere.py; your own is named path/to/file.py:name"),
        ("{}/mine.py:los", "{}/mine.py has no loss named 'los'; did you mean 'loss'?"),
        ("{}/mine.py:NUMBER", "{}/mine.py has no loss named 'NUMBER'"),
        ("{}/mine.py:", "{}/mine.py has no loss named ''"),
        ("no_such_module:loss", "no_such_module cannot be loaded: ModuleNotFoundError"),
        (":loss", " cannot be loaded: ValueError: Empty module name"),
        ("word", "unknown loss 'word'; path/to/file.py:name names your own"),
    ],
)
def test_mistakes_are_one_line(mine, reference, message):
    with pytest.raises(RagenError, match=re.escape(message.format(mine.parent))) as caught:
        load_object(reference.format(mine.parent), kind="loss", accepts=callable)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\ndef f(:\n", r"SyntaxError: .* \(line 2\)"),
        ("raise KeyError('at import')\n", r"KeyError: 'at import' \(line 1\)"),
        ("import json\n\n\njson.loads('{')\n", r"JSONDecodeError: .* \(line 4\)"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", r"division by zero \(line 2\)"),
        ("import sys\nsys.exit(0)\n", r"SystemExit: 0 \(line 2\)"),
        ("while True: pass\n", "longer than 0.05 s"),
    ],
)
def test_code_that_fails_while_it_is_loaded(mine, monkeypatch, text, reason):
    monkeypatch.setattr(plugins, "LOAD_S", 0.05)
    mine.write_text(text)
    with pytest.raises(RagenError, match=r"mine\.py cannot be loaded: .*" + reason):
        load_object(f"{mine}:loss")
    mine.write_text(TEXT)  # and is loaded once it is mended
    assert load_object(f"{mine}:loss").object(1) == 2
