"""Extensions and the Python API, used as documented from a project with RAGEN installed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragen
from ragen.cli.main import main
from ragen.config.config import Config
from ragen.config.extensions import DETECTOR, ESTIMATOR, KINDS, LOSS, SCORE, TERM, TOOL_PARSER
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.plugins import load_object, reference_to
from ragen.core.types import Turn
from ragen.envs.contract import Env
from ragen.settings.code import load_code, sources
from tests.bandit_model import SETTINGS, bandit_model, settings

DOCS = Path(__file__).parents[1] / "docs"
FEW = {"rollout.num_groups": 2, "rollout.group_size": 2, "eval.episodes": 2, "threads": 1}
"""Sizes that make a page's run small."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project folder with the example files of the pages."""
    (tmp_path / "mine.py").write_text(blocks("extend.md", "python")[0], "utf-8")
    (guess,) = (each for each in blocks("environments.md", "python") if "class Guess" in each)
    (tmp_path / "my_env.py").write_text(guess, "utf-8")
    return tmp_path


def test_extend_page_runs_as_written(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands (the run with fewer episodes), what the run records, and its recipe."""
    assert len(blocks("extend.md", "python")[0].splitlines()) < 60
    (checked,) = blocks("extend.md", "text")
    check, train = (each.replace("\\\n", " ").split() for each in blocks("extend.md", "sh"))
    assert check.pop(0) == train.pop(0) == "ragen"
    assert main(check) == 0 and capsys.readouterr().out == checked
    assert main([*train, *(word for key in FEW for word in (f"--{key}", str(FEW[key])))]) == 0
    (run,) = (project / "runs").iterdir()
    saved = ragen.load_run(run)
    assert {Path(name).name for name in saved.config.sources} == {
        *("mine.py:leave_one_out", "mine.py:reinforce", "mine.py:undecided"),
        *("mine.py:long_thoughts", "mine.py:brevity"),
    }
    assert np.nanmax(saved.metrics["reward_terms/brevity"]) < 0
    assert main(["export", str(run), "--out", "policy"]) == 0
    card = (project / "policy" / "README.md").read_text("utf-8")
    assert "mine.py:leave_one_out (blake2b:" in card and str(project) not in card
    recipe = project / "own.toml"
    toml = blocks("extend.md", "toml")[0]
    recipe.write_text(f'algorithm = "starpo/grpo"\nenv.name = "bandit"\n{toml}', "utf-8")
    assert merge(recipe).advantage.name == "mine.py:leave_one_out"
    with (project / "mine.py").open("a") as file:
        file.write("\n# edited\n")
    capsys.readouterr()
    assert main(["resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert "mine.py has changed since the run began (blake2b:" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_api_page_runs_as_written(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs with fewer steps and episodes."""
    train = ragen.train

    def few(recipe: Any, overrides: dict[str, Any] | None = None, **named: Any) -> Any:
        short = {"steps": 1, "env.max_turns": 1, "rollout.max_tokens": 32}
        return train(recipe, {**(overrides or {}), **FEW, **short}, **named)

    monkeypatch.setattr(ragen, "train", few)
    monkeypatch.syspath_prepend(str(project))
    scope: dict[str, Any] = {}
    for block in blocks("api.md", "python"):
        exec(compile(block, "api.md", "exec"), scope)
    assert "grpo 0.28" in capsys.readouterr().out
    assert scope["comparison"].difference.value < 0
    assert scope["result"].run == scope["run"].path


def test_train_accepts_functions_inside_a_running_event_loop() -> None:
    """In a notebook, cells run inside an event loop that is already running."""

    def short(turn: Turn) -> float:
        return -1.0

    values = settings(steps=1)

    async def cell() -> Any:
        return ragen.train("bandit", values, rewards={short: 0.25})

    result = asyncio.run(cell())
    run = ragen.load_run(result.run)
    assert list(run.config.reward.terms) == [reference_to(short)]
    assert run.config.sources[reference_to(short)].startswith("blake2b:")
    metric = run.metrics["reward_terms/short"][1:]  # no episode is played for step 0
    assert np.all(metric == -0.25)


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


WRONG_SIGNATURES = {
    "advantage.name": ("def f(rewards, mask): ...", "f has a parameter 'rewards'; it may have"),
    "loss.name": ("def f(logprobs_N, tokens, *, temperature): ...", "a parameter 'temperature'"),
    "filter.score": ("def f(): ...", "f() cannot be called with (group)"),
    "reward.terms": ("def f(turn): ...", "annotate turn with what it judges"),
    "guard.responses": ("f = 3", "has no detector named 'f'"),
}


def test_wrong_signature_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for key, (code, words) in WRONG_SIGNATURES.items():
        Path("wrong.py").write_text(code)
        value = {"reward.terms": "0.1", "guard.responses": "log"}.get(key)
        setting = [f"--{key}", "wrong.py:f"] if value is None else [f"--{key}.wrong.py:f", value]
        assert main(["train", "bandit", *setting, "--out", "run"]) == 2, key
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, key
        assert not Path("run").exists()


TYPES = "from ragen.core.types import Episode, Turn\n"
BROKEN_CODE = {
    "def f(rewards_ES): return rewards_ES": "returned a Tensor: a Credit is expected",
    "def f(group): return float('nan')": "returned nan: a finite number is expected",
    f"{TYPES}def f(turn: Turn): return 1 / 0": "failed on an example: ZeroDivisionError",
    f"{TYPES}def f(turn: Turn): return 0.5": "it returned 0.5: of a turn, a",
    f"{TYPES}def f(episode: Episode): return 2": "it returned 2: a number from -1 to 1",
    f"{TYPES}async def f(all: list[Episode]): return [1]": "it returned 1 numbers for 2 episodes",
    "def f(history): return 3": "a Detection or None is expected",
    "def f(x): return 3": "is of no kind that RAGEN knows",
}


def test_check_reports_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for code, words in BROKEN_CODE.items():
        Path("broken.py").write_text(code)
        assert main(["check", "broken.py:f"]) == 2, code
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, (code, error)


def test_check_reports_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mixed.py").write_text("def good(group): return 1.0\ndef bad(group): return 'x'")
    names = ["bandti", "mixed.py:bad", "mixed.py:good", "no_file.py:f", "frozen-lake", "ppo_clip"]
    assert main(["check", *names]) == 2
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "mixed.py:good: passes as filter score",
        "frozen-lake: keeps the contract",
        "ppo_clip: passes as loss",
    ]
    bandit, bad, file = output.err.splitlines()
    assert "did you mean 'bandit'?" in bandit and "no file no_file.py" in file
    assert "mixed.py:bad (filter score) failed on an example: ValueError" in bad


def test_a_reward_that_raises_fails_its_episode() -> None:
    Path("bad.py").write_text(f"{TYPES}def f(turn: Turn): return {{}}['x']")
    with pytest.raises(
        RagenError, match=r"every episode: the reward term .*bad.py:f failed: KeyError: 'x'"
    ):
        ragen.train("bandit", settings(steps=1), rewards={"bad.py:f": 1.0}, out="run")


def test_entry_points_are_resolved_recorded_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An entry point is named by one word; the run records the version of its distribution."""
    site = Path("site")
    info = site / "others-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.2\n")
    points = "number = others_module:number\nwrong = others_module:wrong"
    (info / "entry_points.txt").write_text(f"[ragen.filters]\n{points}\n")
    (site / "others_module.py").write_text(
        "def number(group): return float(len(group.episodes))\ndef wrong(turn, other): return 1.0"
    )
    monkeypatch.syspath_prepend(str(site.resolve()))
    config = merge("bandit", {"filter.rule": "top_k", "filter.score": "number"})
    assert sources(config) == {"number": "others 1.2"}
    assert main(["check", "others_module:number", "number"]) == 0
    capsys.readouterr()
    assert main(["check", "wrong"]) == 2
    assert "wrong is no filter score: " in capsys.readouterr().err


def test_nothing_is_sent_anywhere_and_what_reads_a_run_loads_no_code_that_it_names() -> None:
    """A run folder of somebody else is data to the report, the viewer and the list of episodes.

    In a fork, since an audit hook stays for good. Its exit code is 3 after a connection.
    """

    def refuse(event: str, arguments: object) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
            os.write(2, f"{event} {arguments}\n".encode())
            os._exit(3)

    def work() -> None:
        file, marker, model = Path("their_env.py"), Path("executed"), str(bandit_model())
        file.write_text(
            "from ragen.envs.worlds.bandit import Bandit\n\nclass Theirs(Bandit):\n    pass\n"
        )
        keys = {key: str(value).lower() for key, value in (SETTINGS | {"steps": 1}).items()}
        options = [word for key, value in keys.items() for word in (f"--{key}", value)]
        options += ["--model", model, "--env", "their_env.py:Theirs"]
        assert main(["train", "bandit", *options, "--quiet", "--out", "run"]) == 0
        file.write_text(f"open({str(marker)!r}, 'w').close()\n{file.read_text('utf-8')}", "utf-8")
        assert main(["report", "run"]) == 0
        assert main(["export", "run", "--episodes", "episodes.jsonl"]) == 0
        assert main(["view", "run", "--export", "run.html"]) == 0
        assert not marker.exists()
        assert main(["eval", "run", "--episodes", "2"]) == 0 and marker.exists()
        assert main(["export", "run"]) == 0

    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.addaudithook(refuse)
            work()
            code = 0
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_entry_point_groups_and_kinds_are_documented() -> None:
    groups = {kind.group for kind in KINDS.values()}
    assert groups == {
        *("ragen.envs", "ragen.advantages", "ragen.losses", "ragen.filters"),
        *("ragen.detectors", "ragen.rewards", "ragen.tool_parsers"),
    }
    nouns = [kind.noun for kind in (ESTIMATOR, LOSS, SCORE, TERM, DETECTOR, TOOL_PARSER)]
    page = (DOCS / "extend.md").read_text("utf-8")
    assert all(f"| {noun} |" in page for noun in nouns) and all(f"`{g}`" in page for g in groups)


def test_object_passed_by_another_process_cannot_be_loaded() -> None:
    class Local(Env):
        """Not at the top level of any file."""

    reference = reference_to(Local)
    assert reference.startswith("python:") and load_object(reference).object is Local
    with pytest.raises(RagenError, match="was passed in Python by another process"):
        load_object("python:Nobody")


def test_two_functions_with_the_same_name_are_refused() -> None:
    """Both would be ``python:<lambda>``, and the later one would stand for both."""
    refused = pytest.raises(RagenError, match=r"two functions are named python:.*<lambda>; rename")
    with refused:
        rewards = {lambda turn: -1.0: 0.1, lambda turn: 0.0: 0.1}
        ragen.train("bandit", rewards=rewards, out="run")
    with refused:
        ragen.train("bandit", loss=lambda _: 0.0, advantage=lambda _: [0.0], out="run")
    assert not Path("run").exists()


def test_a_config_is_not_trained_with_a_later_function_of_the_same_name() -> None:
    def config_with(term: Callable[[Turn], float]) -> Config:
        return load_code(merge("bandit", {"reward.terms": {term: 0.1}}))

    def first_term(turn: Turn) -> float:
        return -1.0

    def later_term(turn: Turn) -> float:
        return -0.5

    later_term.__qualname__ = first_term.__qualname__
    first = config_with(first_term)
    assert load_code(first) == first
    assert config_with(later_term).sources != first.sources
    with pytest.raises(RagenError, match=r"^python:.*first_term of this config has lost its name"):
        ragen.train(first, out="run")
    assert not Path("run").exists()


def test_a_loss_that_returns_no_loss_is_named_in_training() -> None:
    for result in ("None", "Loss(logprobs_N, {})"):
        Path("mine.py").write_text(
            "from ragen.algorithms.losses import Loss\n\n\n"
            f"def mine(logprobs_N, tokens):\n    return {result}\n"
        )
        values = settings(steps=1, eval__episodes=0, rollout__num_groups=1)
        with pytest.raises(RagenError, match=r"the loss mine returned .*: a Loss with a scalar"):
            ragen.train("bandit", values, loss="mine.py:mine", out=f"run-{result[:4]}")
