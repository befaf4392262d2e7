"""User code is loaded from files, modules and entry points; a failure gives one clear line."""

import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from ragen.core import plugins
from ragen.core.errors import RagenError
from ragen.core.plugins import installed, load_object, reference_to
from tests.limits import needs_timer

TEXT = "def loss(x):\n    return x + 1\n\n\nNUMBER = 3\n"


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


def test_object_is_loaded_from_a_file(user_file):
    loaded = load_object(f"{user_file}:loss", kind="loss", accepts=callable)
    assert loaded.object(1) == 2
    assert re.fullmatch("blake2b:[0-9a-f]{32}", loaded.source)


def test_unchanged_file_is_cached_and_edited_file_is_reloaded(user_file):
    first = load_object(f"{user_file}:loss")
    again = load_object(f"{user_file}:loss")
    assert again.object is first.object and again.source == first.source
    user_file.write_text(TEXT.replace("+ 1", "+ 2"))
    edited = load_object(f"{user_file}:loss")
    assert edited.object(1) == 3
    assert edited.source != first.source
    assert not list(user_file.parent.glob("__pycache__"))


def test_source_hash_depends_on_content_and_not_on_path(user_file):
    other = user_file.with_name("other.py")
    other.write_text(TEXT)
    first, second = load_object(f"{user_file}:loss"), load_object(f"{other}:loss")
    assert first.source == second.source
    assert first.object is not second.object


def test_object_is_loaded_from_a_module(user_file, monkeypatch):
    monkeypatch.syspath_prepend(user_file.parent)
    loaded = load_object("mine:NUMBER")
    assert loaded.object == 3
    assert loaded.source == load_object(f"{user_file}:NUMBER").source
    monkeypatch.delitem(sys.modules, "mine")


def test_object_is_loaded_from_an_entry_point(user_file, monkeypatch):
    monkeypatch.syspath_prepend(user_file.parent)
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


def test_entry_point_without_a_distribution_has_a_source_hash(monkeypatch):
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
def test_invalid_reference_gives_a_one_line_error(user_file, reference, message):
    with pytest.raises(RagenError, match=re.escape(message.format(user_file.parent))) as caught:
        load_object(reference.format(user_file.parent), kind="loss", accepts=callable)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\ndef f(:\n", r"SyntaxError: .* \(line 2\)"),
        ("raise KeyError('at import')\n", r"KeyError: 'at import' \(line 1\)"),
        ("import json\n\n\njson.loads('{')\n", r"JSONDecodeError: .* \(line 4\)"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", r"division by zero \(line 2\)"),
        ("import sys\nsys.exit(0)\n", r"SystemExit: 0 \(line 2\)"),
        pytest.param("while True: pass\n", "longer than 0.05 s", marks=needs_timer),
    ],
)
def test_code_that_fails_at_import_is_reported(user_file, monkeypatch, text, reason):
    monkeypatch.setattr(plugins, "LOAD_S", 0.05)
    user_file.write_text(text)
    with pytest.raises(RagenError, match=r"mine\.py cannot be loaded: .*" + reason):
        load_object(f"{user_file}:loss")
    user_file.write_text(TEXT)  # once it is corrected, it is loaded
    assert load_object(f"{user_file}:loss").object(1) == 2


def test_source_hash_covers_the_modules_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "depth_of_rules.py").write_text("DEPTH = 1\n")
    (tmp_path / "shared_rules.py").write_text("from depth_of_rules import DEPTH\nimport json\n")
    (tmp_path / "unrelated_rules.py").write_text("")
    (tmp_path / "mine.py").write_text("import shared_rules\nimport math\n\nclass Mine: pass\n")
    hashes = []
    for changed in (None, "unrelated_rules.py", "depth_of_rules.py", "shared_rules.py"):
        if changed is not None:
            (tmp_path / changed).write_text((tmp_path / changed).read_text() + "# changed\n")
        hashes.append(load_object(f"{tmp_path / 'mine.py'}:Mine").source)
    assert hashes[0] == hashes[1] and len(set(hashes[1:])) == 3


def test_helpers_of_one_name_beside_two_files_do_not_replace_each_other(tmp_path, monkeypatch):
    """Also helpers of helpers, in functions, in folders, and with a name that Python has."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rules.py").write_text("raise AssertionError('this is no helper')")
    found = []
    for folder in ("one", "two"):
        for name, text in {
            "mine.py": "from own_rules import early\nimport own_rules.late, queue\n"
            "import json as j\n"
            "early.append(j.__name__ + own_rules.late.NAME + queue.NAME)\n"
            "def lazy():\n    from own_plain import last\n    import own_rules.late as late\n"
            "    return last.NAME + late.NAME\n",
            "own_rules/__init__.py": "from own_rules.late import NAME\nearly = [NAME]\n",
            "own_rules/late.py": "import queue\nNAME = queue.NAME + '!'\n",
            "own_plain/last.py": f"NAME = 'last of {folder}'\n",
            "queue.py": f"NAME = '{folder}'\n",
        }.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(text)
        found.append(load_object(f"{tmp_path / folder / 'mine.py'}:lazy").object)
    first, second = found
    assert (first(), second()) == ("last of oneone!", "last of twotwo!")
    assert first.__globals__["early"] == ["one!", "jsonone!one"]
    assert second.__globals__["early"] == ["two!", "jsontwo!two"]
    assert not {"own_rules", "own_plain"} & sys.modules.keys() and not [*tmp_path.rglob("*.pyc")]
    assert load_object(f"{tmp_path / 'one' / 'mine.py'}:lazy").object is first
    (tmp_path / "one" / "queue.py").write_text("NAME = 'new'\n")
    assert load_object(f"{tmp_path / 'one' / 'mine.py'}:lazy").object() == "last of onenew!"


def test_a_helper_that_pythons_path_finds_is_the_one_of_every_importer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "on_the_path.py").write_text("")
    (tmp_path / "json.py").write_text("import json, on_the_path\ndumps = json.dumps\n")
    loaded = load_object(f"{tmp_path / 'json.py'}:dumps").object
    assert loaded is json.dumps  # a file may have the name of the library that it imports
    sys.modules.pop("on_the_path")


@pytest.mark.parametrize("reference", ["deep/mine.py:NUMBER", "own_package.mine:NUMBER"])
def test_the_installed_command_finds_what_python_finds(tmp_path, reference):
    """Its path begins with its own folder, and not with the working directory."""
    for folder in ("deep", "own_package"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("from own_numbers import NUMBER\n")
    (tmp_path / "own_numbers.py").write_text("NUMBER = 3\n")
    code = (
        "import sys; sys.path = [each for each in sys.path if each]; from ragen.core import plugins"
    )
    code += f"; print(plugins.load_object({reference!r}).object)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout == "3\n"


def test_a_module_that_is_nowhere_is_told_with_the_remedy(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    with pytest.raises(RagenError, match=r"\(line 1\); install it, or let PYTHONPATH name its"):
        load_object(f"{tmp_path / 'mine.py'}:loss")


def test_a_class_of_a_notebook_is_passed_in_python(monkeypatch):
    """A notebook's `__main__` has no file, so Python knows no text of its classes."""
    mine = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    reference = reference_to(mine)
    assert reference == "python:Mine" and load_object(reference).object is mine
