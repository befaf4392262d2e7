"""`ragen new-world`: a file with an environment that keeps the contract at once."""

from pathlib import Path

import pytest

from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.envs.checker import check
from ragen.envs.new_world import write_new_world
from ragen.envs.registry import make
from ragen.evaluation.baselines import Budget, compute_baselines

Capture = pytest.CaptureFixture[str]


def test_a_new_world_passes_the_checker_and_names_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-world", "deep_mine"]) == 0
    first, *commands = capsys.readouterr().out.splitlines()
    assert first.startswith("deep_mine.py holds a complete environment")
    for words, command in zip(("check", "play", "base", "train"), commands, strict=True):
        assert f" {words} " in command and "deep_mine.py:DeepMine" in command
    assert main(["check", "deep_mine.py:DeepMine"]) == 0
    env = make("deep_mine.py:DeepMine", cells=5)
    assert (env.name, env.goal, env.max_turns) == ("deep_mine", "DeepMine", 3)
    check(env)
    found = compute_baselines(env, Budget(3, 3, 9), range(123, 131))
    assert found.optimal is not None and found.optimal > 0.95 > 0.75 > found.random > 0.2
    text = Path("deep_mine.py").read_text("utf-8")
    assert "orridor" not in text and "new-world" not in text


def test_a_new_world_with_pictures_is_seen_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-world", "deep_mine", "--picture"]) == 0
    assert "check deep_mine.py:SeenDeepMine" in capsys.readouterr().out
    env, plain = (make(f"deep_mine.py:{each}DeepMine") for each in ("Seen", ""))
    assert (env.name, env.shows_pictures, plain.shows_pictures) == ("seen_deep_mine", True, False)
    text, _ = env.reset(seed=0)
    assert text == "<image>" and plain.reset(seed=0)[0] == env.state_key()
    check(env)
    check(plain)
    assert "orridor" not in Path("deep_mine.py").read_text("utf-8")


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("precious", "utf-8")
    with pytest.raises(RagenError, match=r"mine.py exists already; choose"):
        write_new_world("mine", tmp_path)
    assert (tmp_path / "mine.py").read_text("utf-8") == "precious"


def test_a_name_that_no_module_can_have_is_refused(tmp_path: Path) -> None:
    for name in ("my-world", "1st", "class", "a/b", "", "wörld"):
        with pytest.raises(RagenError, match="cannot name a Python file"):
            write_new_world(name, tmp_path)
    assert list(tmp_path.iterdir()) == []
