"""Names of code from outside: in other folders, and after the code has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.settings.code import absolute, refuse_changed


def test_a_relative_file_in_a_name_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is then evaluated and resumed from any folder; a file of verifiers has no attribute."""
    monkeypatch.chdir(tmp_path)
    for name, expected in {
        "mine.py:Maze": f"{tmp_path}/mine.py:Maze",
        "openenv:envs/app.py:app": f"openenv:{tmp_path}/envs/app.py:app",
        "verifiers:envs/mine.py": f"verifiers:{tmp_path}/envs/mine.py",
    }.items():
        assert absolute(name) == absolute(expected) == expected
    for whole in ("sokoban", "gymnasium:CartPole-v1", "verifiers:gsm8k", "openenv:http://a/b.py"):
        assert absolute(whole) == whole


def test_a_change_of_code_names_the_code() -> None:
    """With a library, its name alone says too little."""
    pytest.importorskip("gymnasium")
    name = "gymnasium:CartPole-v1"
    config = merge(None, {"env.name": name, "sources": {name: "gymnasium 0.1"}})
    with pytest.raises(RagenError, match=f"^{name} has changed since the run began"):
        refuse_changed(config)
