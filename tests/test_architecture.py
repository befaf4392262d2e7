"""The architecture: which folder may import which, and what stays light.

An import between folders may only point down the list `FOLDERS`, and the modules of one folder
import each other without cycles.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ragen

PACKAGE = Path(ragen.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
FOLDERS = {  # Top to bottom, with the use of torch that each folder may make.
    "cli": "no torch at import",
    "viewer": "no torch",
    "serving": "no torch",
    "studies": "torch",
    "reports": "torch",
    "training": "torch",
    "finetuning": "torch",
    "bases": "torch",
    "evaluation": "no torch at import",
    "diagnostics": "torch",
    "cluster": "torch",
    "engines": "torch",
    "learning": "torch",
    "sampling": "torch",
    "settings": "no torch",
    "rollout": "no torch",
    "gateway": "no torch",
    "chat": "no torch",
    "algorithms": "torch",
    "models": "torch",
    "networks": "torch",
    "envs": "no torch",
    "web": "no torch",
    "storage": "no torch",
    "config": "no torch",
    "core": "no torch",
}
PLACE = {folder: place for place, folder in enumerate(FOLDERS)}
LIGHT_MODULES = {
    *("reports.report", "reports.facts", "reports.plots", "reports.card", "diagnostics.collapse"),
    *("studies.study", "studies.rule", "studies.measures", "studies.results", "studies.overview"),
    *("models.names", "models.model_files", "models.hub", "models.memory"),
    *("networks.sizes", "networks.machine"),
}
"""Modules in folders with torch that do not load it themselves."""
HEAVY_MODULES = {"evaluation.branch"}
"""Modules that load torch at import, in folders that otherwise do not."""
ELSEWHERE = {"envs.adapters.verifiers_host"}
"""Modules for an interpreter with packages that ours may lack."""
ONLY_IN = {
    "ray": {"cluster.ray_engine", "cluster.ray_process", "cluster.ray_cluster"},
    "vllm": {"sampling.vllm_engine"},
    "peft": {"networks.lora"},
    "minigrid": {"envs.adapters.minigrid"},
    "reasoning_gym": {"envs.adapters.reasoning_gym"},
    "textarena": {"envs.adapters.textarena"},
    "websockets": {"envs.adapters.openenv"},
    "mcp": {"envs.adapters.mcp"},
    "verifiers": {"envs.adapters.verifiers_host"},
}

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
MODULES = [path for path in FILES if path.parent != PACKAGE]


def name_of(path: Path) -> str:
    """A module's dotted name below `ragen`; for an ``__init__.py``, the name of its package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of every import in a file, including local and type-only imports."""
    return imports_of(path.read_text("utf-8"), ("ragen", *path.relative_to(PACKAGE).parts[:-1]))


@cache
def imports_of(text: str, package: tuple[str, ...]) -> list[tuple[int, str]]:
    found = []
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*parts, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a module, which are quicker to visit than all of its nodes."""
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            yield child
            yield from statements(child)


@cache
def module_of(name: str) -> str | None:
    """The module below `ragen` that contains an imported name; None for another package."""
    root, _, rest = name.partition(".")
    if root != "ragen":
        return None
    parts = rest.split(".")
    while parts:
        path = PACKAGE.joinpath(*parts)
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return ".".join(parts)
        parts.pop()
    return ""


def check_imports(path: Path) -> None:
    own = name_of(path)
    folder = own.split(".")[0]
    assert folder in PLACE, f"ragen/{folder} is not in FOLDERS of this file"
    for line, name in imports(path):
        target = module_of(name)
        if target is not None:
            assert target, f"{own}:{line} imports {name}: import the module itself"
            other = target.split(".")[0]
            assert PLACE[other] >= PLACE[folder], f"{own}:{line} imports {target}, which is above"
        root = name.partition(".")[0]
        if root in ("torch", "transformers"):
            assert FOLDERS[folder] != "no torch", f"{own}:{line}: {folder} must not import {root}"
        assert own in ONLY_IN.get(root, {own}), f"{own}:{line}: {root} belongs in {ONLY_IN[root]}"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """While many files are parsed, the collector would search all objects again and again."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_imports_point_down() -> None:
    assert len(MODULES) > 100
    for path in MODULES:
        check_imports(path)


def check_cycles(folder: str) -> None:
    edges = {
        name_of(path): {module_of(name) for _, name in imports(path)} - {name_of(path)}
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    }
    while edges:
        free = [name for name, targets in edges.items() if not targets & edges.keys()]
        assert free, f"the modules {', '.join(edges)} import each other in a cycle"
        for name in free:
            del edges[name]


def test_folders_have_no_import_cycles() -> None:
    for folder in FOLDERS:
        check_cycles(folder)


def test_docstring_of_each_folder_describes_its_contents() -> None:
    for folder in FOLDERS:
        tree = ast.parse((PACKAGE / folder / "__init__.py").read_text("utf-8"))
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1, f"{folder}/__init__.py contains only its docstring"


def test_architecture_page_lists_every_module() -> None:
    rows = re.findall(
        r"^\| `(\w+)/` \| [^|]* \| ([^|]*) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    shown = {folder: re.findall(r"`([\w/]+)`", modules) for folder, modules in rows}
    assert list(shown) == list(FOLDERS), "the page lists the folders in this order"
    for folder, modules in shown.items():
        paths = (PACKAGE / folder).rglob("[!_]*.py")
        files = {path.relative_to(PACKAGE / folder).with_suffix("").as_posix() for path in paths}
        assert sorted(modules) == sorted(files), folder


@pytest.mark.usefixtures("no_collector")
def test_functions_take_their_section_and_not_the_whole_config() -> None:
    whole = [
        f"{name_of(path)}.{node.name}"
        for path in FILES
        for node in statements(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.annotation and ast.unparse(argument.annotation).startswith("Config")
    ]
    assert len(whole) < 60, whole


def test_no_folder_has_more_files_than_a_reader_keeps_in_mind() -> None:
    folders = {path.parent for path in FILES}
    assert {f.name: n for f in folders if (n := len([*f.glob("[!_]*.py")])) > 18} == {}


LIGHT = sorted(
    f"ragen.{name}"
    for name in set(map(name_of, MODULES)) - ELSEWHERE
    if (FOLDERS[name.split(".")[0]] != "torch" and name not in HEAVY_MODULES)
    or name in LIGHT_MODULES
)
COMMANDS = (
    *("train bandit --dry-run", "train --env countdown --model a/b --dry-run", "envs --episodes 1"),
    "study",
    "train --help",
)
"""Commands that compute nothing."""
MISTAKES = {
    "eval empty": "no model",
    "compare empty base": "no model",
    "play bandit --player empty": "no model",
    "train bandit --model solver": "no model",
    "train bandit --advantage.name wrong.py:f": "a parameter 'rewards'",
}
"""Commands in a folder with `empty` and `wrong.py`, and a part of the one line that they give."""
FRESH = """
import contextlib, importlib, io, json, sys, time

def loaded(*names):
    return sorted({*names} & sys.modules.keys())

def told(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line.split())
        except SystemExit as stop:
            code = stop.code
    return code, err.getvalue()

begun = time.process_time()
import ragen
found = {"import_s": time.process_time() - begun}
from ragen.cli.main import main
found["help"] = told("--help")[0]
found["help_modules"] = loaded("torch", "transformers", "numpy", "gymnasium", "pydantic", "rich")
found["help_s"] = time.process_time()
heavy = "torch", "transformers", "scipy.special"
found["modules"] = {}
for name in LIGHT:
    importlib.import_module(name)
    found["modules"][name] = loaded(*heavy)
found["commands"] = {line: [told(line)[0], loaded(*heavy)] for line in COMMANDS}
found["mistakes"] = {line: [*told(line), loaded("torch")] for line in MISTAKES}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a new interpreter finds that imports RAGEN, asks for help, and goes on from there."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "empty").mkdir()
    (folder / "wrong.py").write_text("def f(rewards): ...")
    values = f"{LIGHT=}\n{COMMANDS=}\n{MISTAKES=}\n"
    command = [sys.executable, "-c", values + FRESH]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_import_and_help_are_quick_and_load_nothing_large(fresh: dict[str, Any]) -> None:
    """CPU seconds, which a busy machine does not change; the help's are those since the start."""
    assert fresh["import_s"] < 0.3
    assert (fresh["help"], fresh["help_modules"]) == (0, [])
    assert fresh["help_s"] < 0.5


def test_light_modules_load_no_heavy_modules(fresh: dict[str, Any]) -> None:
    assert [*fresh["modules"]] == LIGHT
    assert {name: heavy for name, heavy in fresh["modules"].items() if heavy} == {}


asks_torch = pytest.mark.skipif(
    sys.platform == "win32", reason="only torch knows whether Windows has a GPU for it"
)


@asks_torch
def test_commands_that_compute_nothing_load_no_heavy_modules(fresh: dict[str, Any]) -> None:
    assert fresh["commands"] == {line: [0, []] for line in COMMANDS}


@asks_torch
def test_mistakes_are_found_before_torch_is_imported(fresh: dict[str, Any]) -> None:
    for line, (code, message, loaded) in fresh["mistakes"].items():
        assert (code, message.count("\n"), loaded) == (2, 1, []), (line, message)
        assert MISTAKES[line] in message
    assert "random" not in fresh["mistakes"]["train bandit --model solver"][1]


def test_wrong_imports_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules applied to a package with one wrong module."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "module_of", module_of.__wrapped__)
    for name in ("chat/chat", "chat/prompt", "cli/main", "core/errors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    wrong = tmp_path / "chat" / "chat.py"
    for text in (
        "from ragen.cli import main",
        "from ragen.cli.main import run",
        "def f():\n    import torch",
        "from ..cli import main",
        "import ray",
        "from ragen import train",
    ):
        wrong.write_text(text)
        with pytest.raises(AssertionError):
            check_imports(wrong)
    wrong.write_text("from ragen.chat.prompt import Limits\nimport json\n")
    check_imports(wrong)
    (tmp_path / "chat" / "prompt.py").write_text("from ragen.chat.chat import Chat")
    with pytest.raises(AssertionError, match="in a cycle"):
        check_cycles("chat")
    unknown = tmp_path / "elsewhere" / "new.py"
    unknown.parent.mkdir()
    unknown.write_text("")
    with pytest.raises(AssertionError, match="is not in FOLDERS"):
        check_imports(unknown)
