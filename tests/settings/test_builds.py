"""An environment may cost a container or a browser: it is built at most twice before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ragen
from ragen.cli.main import main
from ragen.training.progress import Watcher
from tests.bandit_model import settings

FILE = """
from pathlib import Path
from ragen.envs.worlds.bandit import Bandit

class Counted(Bandit):
    def __init__(self) -> None:
        super().__init__()
        with (Path(__file__).parent / "built").open("a") as file:
            file.write("x")
"""


class Begun(Exception):
    """The run begins to play."""


class StopsFirst(Watcher):
    """Ends a run before its first episode."""

    def begin(self, *about: Any) -> None:
        raise Begun


def written(value: Any) -> str:
    """A value as it is typed."""
    return value if isinstance(value, str) else json.dumps(value)


def stop_first(*_: Any) -> Watcher:
    return StopsFirst()


@pytest.mark.parametrize(
    ("door", "how"),
    [
        ("python", "recipe"),
        ("python", "mixture"),
        ("command", "environment"),
        ("command", "mixture"),
    ],
)
def test_an_environment_is_built_at_most_twice_before_the_first_episode(
    door: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE, "utf-8")
    env = f"{tmp_path / 'mine.py'}:Counted"
    keys = {k: v for k, v in settings().items() if not k.startswith(("rollout.n", "rollout.g"))}
    recipe = None
    if how == "recipe":
        recipe = tmp_path / "mine.toml"
        recipe.write_text(f'env.name = "{env}"\nprompt.style = "compact"\n', "utf-8")
    elif how == "environment":
        keys["env.name"] = env
    else:
        keys |= {"env.mix": {env: 0.5, "bandit-rev": 0.5}, "prompt.style": "compact"}
    monkeypatch.setattr("ragen.training.progress.watcher_for", stop_first)
    with pytest.raises(Begun):
        if door == "python":
            ragen.train(recipe, keys, out=tmp_path / "run", watcher=StopsFirst())
        else:
            values = {k: v for k, v in keys.items() if k != "env.mix"}
            values |= {f"env.mix.{name}": share for name, share in keys.get("env.mix", {}).items()}
            words = [word for k, v in values.items() for word in (f"--{k}", written(v))]
            main(["train", *([str(recipe)] if recipe else []), "--out", "run", *words])
    assert len((tmp_path / "built").read_text()) <= 2
