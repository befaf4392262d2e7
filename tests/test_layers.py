"""The architecture: which module may import which, and what stays light.

`ORDER` is the house. An import may only point to an earlier layer, or to the left in its own row.
A new module is added to its row here, to the right of all that it imports.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import ragen

PACKAGE = Path(ragen.__file__).parent
ORDER: dict[str, list[str]] = {
    "L0 words": ["types", "errors", "metrics", "config", "settings", "seeding"],
    "L1 text": ["chat", "actions", "prompt"],
    "L2 worlds": ["boundary", "env", "envs"],
    "L3 experience": [
        *["policy", "players", "references", "endpoint", "context", "isolated", "reasoning"],
        *["rollout", "samples", "transcripts", "statistics", "regimes", "demonstrations"],
        "demonstrations_lake",
        "demonstrations_sokoban",
    ],
    "L4 maths": [
        *["batch", "rewards", "advantages_critic", "advantages_members", "advantages", "credit"],
        *["losses", "filters", "diagnostics", "information", "exactness"],
    ],
    "L5 learning": [
        "precision",
        "pretrained",
        "fast_blocks",
        "fast_qwen2",
        "fast_decoder",
        "decoder",
        "model",
        "cross_scores",
        "lora",
        "tokenizer",
        "sampler",
        "sampler_vllm",
        "sampler_server",
        "learner",
        "checkpoint",
    ],
    "L6 engines": ["engine", "parity", "engine_local", "engine_ray"],
    "L7 programs": [
        *["schema", "database", "rows", "recorder", "reader", "recorded", "branches"],
        "export_episodes",
        *["threads", "stopping", "watchdog", "guard", "memory", "outcomes", "targets"],
        *["evaluation", "progress", "plots", "report", "card", "scores", "compare", "base", "sft"],
        "trackers",
        *["diagnosis", "running", "collection", "recovery", "trainer", "export", "branch"],
        *["measures", "study", "studies", "viewer", "play", "doctor"],
        *["arguments", "command", "cli_runs", "cli_evaluations", "cli_viewer", "cli_tools", "cli"],
    ],
}
PLACE = {module: place for place, module in enumerate(chain(*ORDER.values()))}
NO_TORCH = ["L0 words", "L1 text", "L2 worlds", "L3 experience"]
LIGHT = [
    *(module for layer in NO_TORCH for module in ORDER[layer]),
    *["schema", "database", "rows", "recorder", "reader", "recorded", "branches"],
    "export_episodes",
    "outcomes",
    "targets",
    "evaluation",
    "report",
    "scores",
    "compare",
]
ONLY_IN = {"ray": {"engine_ray"}, "vllm": {"sampler_vllm"}, "peft": {"lora"}}
FACADE = {"__init__", "__main__"}  # `ragen` itself re-exports; it stands above all layers.

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def unit(path: Path) -> str:
    """The name under which a file stands in the order: its module, or its package's."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of all that a file imports, also inside functions and for types only."""
    package = ["ragen", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parts, *([node.module] if node.module else [])])
            if source == "ragen":
                yield from ((node.lineno, f"ragen.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, source


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_or_left(path: Path) -> None:
    own = unit(path)
    if own in FACADE:
        return
    assert own in PLACE, (
        f"ragen/{own} has no place in the house: add it to its layer in ORDER "
        "(tests/test_layers.py), to the right of all that it imports"
    )
    for line, name in imports(path):
        root, _, rest = name.partition(".")
        if root == "ragen":
            target = rest.partition(".")[0]
            assert target in PLACE, f"{path.name}:{line} imports {name}: import the module itself"
            assert PLACE[target] < PLACE[own] or (target == own and path.parent != PACKAGE), (
                f"{path.name}:{line}: {own} imports {name}, which stands to its right or above"
            )
        elif root in ("torch", "transformers"):
            layer = next(layer for layer, modules in ORDER.items() if own in modules)
            assert layer not in NO_TORCH, f"{path.name}:{line}: {layer} does without {root}"
        assert own in ONLY_IN.get(root, {own}), f"{path.name}:{line}: {root} is for {ONLY_IN[root]}"


def python(code: str) -> str:
    """Standard output of a fresh interpreter that runs `code` beside the package."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = "print([name for name in ('torch', 'transformers') if name in sys.modules])"


def test_light_modules_load_neither_torch_nor_transformers() -> None:
    present = sorted(
        {f"ragen.{module}" for module in LIGHT if (PACKAGE / f"{module}.py").exists()}
        | {
            f"ragen.{folder}.{path.stem}"
            for folder in ("envs", "viewer")
            for path in (PACKAGE / folder).glob("[!_]*.py")
        }
    )
    lines = [f"import {module}; print({module!r}, end=' '); {HEAVY}" for module in present]
    out = python("\n".join(["import sys", "import ragen", *lines]))
    assert [line for line in out.splitlines() if not line.endswith("[]")] == []
    assert len(out.splitlines()) == len(present)


@pytest.mark.skipif(not (PACKAGE / "cli.py").exists(), reason="no command line yet")
def test_help_is_light() -> None:
    code = (
        "import sys; sys.argv = ['ragen', '--help']\n"
        "from ragen.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"print(); {HEAVY}"
    )
    assert python(code).splitlines()[-1] == "[]"


def test_import_ragen_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import ragen; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


def test_a_wrong_import_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself, on a house of one wrong module."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    wrong = tmp_path / "chat.py"
    for text in (
        "from ragen import rollout",
        "from ragen.prompt import PromptBuilder",
        "def f():\n    import torch",
        "from . import cli",
        "import ray",
    ):
        wrong.write_text(text)
        with pytest.raises(AssertionError):
            test_imports_point_down_or_left(wrong)
    wrong.write_text("from ragen.types import Prompt\nimport json\nfrom ragen import errors\n")
    test_imports_point_down_or_left(wrong)
    stranger = tmp_path / "stranger.py"
    stranger.write_text("")
    with pytest.raises(AssertionError, match="add it to its layer in ORDER"):
        test_imports_point_down_or_left(stranger)
