"""The architecture: which folder may import which, and what stays light.

An import between folders may only point down the list `FOLDERS`, and the modules of one folder
import each other without cycles.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    "evaluation": "no torch at import",
    "diagnostics": "torch",
    "engines": "torch",
    "rollout": "no torch",
    "algorithms": "torch",
    "models": "torch",
    "envs": "no torch",
    "storage": "no torch",
    "config": "no torch",
    "core": "no torch",
}
PLACE = {folder: place for place, folder in enumerate(FOLDERS)}
LIGHT_MODULES = {
    *("reports.report", "reports.facts", "reports.plots", "reports.card", "diagnostics.collapse"),
    *("studies.study", "studies.rule", "studies.measures", "studies.results", "studies.overview"),
    *("models.names", "models.model_files", "models.trial", "models.hub", "models.sizes"),
    "models.prompting",
    *("engines.machine", "engines.memory", "engines.player_host", "engines.hosts"),
}
"""Modules in folders with torch that do not load it themselves."""
HEAVY_MODULES = {"evaluation.branch"}
"""Modules that load torch at import, in folders that otherwise do not."""
ONLY_IN = {
    "ray": {"engines.ray_engine", "engines.ray_process", "engines.ray_cluster"},
    "vllm": {"engines.vllm_engine"},
    "peft": {"models.lora"},
    "minigrid": {"envs.adapters.minigrid"},
    "reasoning_gym": {"envs.adapters.reasoning_gym"},
    "textarena": {"envs.adapters.textarena"},
    "websockets": {"envs.adapters.openenv"},
    "openenv": {"envs.adapters.openenv_servers"},
    "mcp": {"envs.adapters.mcp"},
    "verifiers": {"envs.adapters.verifiers"},
    "datasets": {"envs.adapters.verifiers"},
}

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
MODULES = [path for path in FILES if path.parent != PACKAGE]


def name_of(path: Path) -> str:
    """A module's dotted name below `ragen`; for an ``__init__.py``, the name of its package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, including local and type-only imports."""
    package = ["ragen", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_has_no_import_cycles(folder: str) -> None:
    edges = {
        name_of(path): {module_of(name) for _, name in imports(path)} - {name_of(path)}
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    }
    while edges:
        free = [name for name, targets in edges.items() if not targets & edges.keys()]
        assert free, f"the modules {', '.join(edges)} import each other in a cycle"
        for name in free:
            del edges[name]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_docstring_describes_its_contents(folder: str) -> None:
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text("utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1, "the __init__.py of a folder contains only its docstring"


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


def python(code: str) -> str:
    """Standard output of a fresh interpreter that runs `code`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = "print(sorted({'torch', 'transformers', 'scipy.special'} & sys.modules.keys()))"


def test_light_modules_load_no_heavy_modules() -> None:
    present = sorted(
        f"ragen.{name}"
        for name in map(name_of, MODULES)
        if (FOLDERS[name.split(".")[0]] != "torch" and name not in HEAVY_MODULES)
        or name in LIGHT_MODULES
    )
    lines = [f"import {module}; print({module!r}, end=' '); {HEAVY}" for module in present]
    out = python("\n".join(["import sys", "import ragen", *lines]))
    assert [line for line in out.splitlines() if not line.endswith("[]")] == []
    assert len(out.splitlines()) == len(present)


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "train bandit --dry-run",
        "train --env countdown --model a/b --dry-run",
        "envs",
        "study",
    ],
)
def test_command_that_computes_nothing_loads_no_heavy_modules(command: str) -> None:
    code = (
        f"import sys; sys.argv = ['ragen', *{command.split()}]\n"
        "from ragen.cli.main import main\n"
        "try: assert not main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"print(); {HEAVY}"
    )
    assert python(code).splitlines()[-1] == "[]"


def test_import_ragen_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import ragen; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


def test_wrong_imports_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules applied to a package with one wrong module."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for name in ("rollout/chat", "rollout/prompt", "cli/main", "core/errors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    wrong = tmp_path / "rollout" / "chat.py"
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
            test_imports_point_down(wrong)
    wrong.write_text("from ragen.rollout.prompt import Limits\nimport json\n")
    test_imports_point_down(wrong)
    (tmp_path / "rollout" / "prompt.py").write_text("from ragen.rollout.chat import Chat")
    with pytest.raises(AssertionError, match="in a cycle"):
        test_folder_has_no_import_cycles("rollout")
    unknown = tmp_path / "elsewhere" / "new.py"
    unknown.parent.mkdir()
    unknown.write_text("")
    with pytest.raises(AssertionError, match="is not in FOLDERS"):
        test_imports_point_down(unknown)
