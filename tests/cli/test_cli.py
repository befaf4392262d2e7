"""The command line: what it prints, where, and with which exit code."""

import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
from rich.console import Console

import ragen
from ragen.cli import play
from ragen.cli.command import complain, terminal
from ragen.cli.help import FIRST_KEYS
from ragen.cli.main import COMMANDS, main
from ragen.cli.play import show_episode
from ragen.cli.runs import load_for_good
from ragen.config import reading as settings
from ragen.config.config import Config
from ragen.config.keys import keys
from ragen.core.errors import RagenError, printable
from ragen.core.pictures import PLACE, Picture
from ragen.core.stopping import StopRequested
from ragen.core.tables import Section, show
from ragen.core.types import Completion, Episode, Prompt, Turn
from ragen.evaluation.results import Evaluation
from ragen.training.progress import Lines, LiveTable, OfCommand, Watcher, watcher_for
from tests.pictured import seen_episodes

Capture = pytest.CaptureFixture[str]


def evaluation(success: float, temperature: float = 1.0) -> Evaluation:
    return Evaluation(
        env="bandit",
        target="run",
        temperature=temperature,
        episodes=64,
        success=success,
        success_low=success - 0.1,
        success_high=success + 0.1,
        random=0.5,
        optimal=1.0,
        mean_return=0.2,
        mean_return_low=0.1,
        mean_return_high=0.3,
        random_return=0.2,
        optimal_return=0.25,
        mean_turns=1.0,
        mean_actions=1.0,
        valid_fraction=1.0,
        completion_tokens=9.0,
        failed=0,
        first_level=123,
        seconds=0.5,
    )


def result(run: Path) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        run=run,
        env="bandit",
        before=evaluation(0.5),
        after=evaluation(0.875),
        evaluations={
            "before": evaluation(0.5),
            "after": evaluation(0.875),
            "before_greedy": evaluation(0.5, 0.0),
            "after_greedy": evaluation(0.9375, 0.0),
        },
        seconds=12.34,
        signs=(),
        alarms=("step 3, grad_spike: the gradient norm jumped to 9, usual is 1",),
    )


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Replace the trainer, which would load torch and take long."""

    def install(work: Callable[..., Any]) -> None:
        fake = types.ModuleType("ragen.training.trainer")
        fake.train = work  # type: ignore[attr-defined]
        fake.resume = work  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ragen.training.trainer", fake)

    return install


def test_every_command_is_in_the_overview_and_has_help(capsys: Capture) -> None:
    for arguments in ([], ["--help"], ["help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in COMMANDS)
    for name in COMMANDS:
        shown = []
        for arguments in ([name, "--help"], ["help", name]):
            with pytest.raises(SystemExit) as stopped:
                main(arguments)
            assert stopped.value.code == 0
            shown.append(capsys.readouterr().out)
        assert f"usage: ragen {name}" in shown[0] == shown[1]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ragen {ragen.__version__}\n"


def test_train_help_shows_the_recipes_and_the_first_keys(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  --{key} " in shown for key in FIRST_KEYS)
    assert all(name in shown for name in settings.recipes())
    assert "ragen help keys" in shown and shown.count("\n") < 88


def test_help_topics_list_everything(capsys: Capture) -> None:
    assert main(["help", "keys"]) == 0
    shown = capsys.readouterr().out
    assert [key for key in set(keys()) if f"--{key}" not in shown] == ["recipe"]
    for topic, names in (("recipes", settings.recipes()), ("algorithms", settings.presets())):
        assert main(["help", topic]) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in names)


def test_shells_complete_commands_recipes_and_keys(capsys: Capture, tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "ragen.bash"
    script.write_text(capsys.readouterr().out)
    code = """
        source "$0"
        for line in "ragen tr" "ragen train ban" "ragen train --update.l" "ragen help k"; do
            COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            _shtab_ragen; echo "${COMPREPLY[@]}"
        done"""
    done = subprocess.run(["bash", "-c", code, script], capture_output=True, text=True, check=True)
    trains, recipes, keys, topics = done.stdout.splitlines()
    assert (trains, set(recipes.split()), topics) == ("train", {"bandit", "bandit-rev"}, "keys")
    assert {"--update.lr", "--update.lr_end"} <= set(keys.split())
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        shown = capsys.readouterr().out
        assert "sokoban-large" in shown and "rollout.group_size" in shown


def test_dry_run_prints_a_config_and_writes_nothing(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "train --update.lr 3e-4 bandit --model there --seed=7 --prompt.think false --dry-run"
    line += " --prompt.style compact"
    assert main([*line.split(), "--env.params.risky-probability", ".5"]) == 0
    shown = capsys.readouterr().out
    assert "#   update.lr = 0.0003  (preset: 1e-06)" in shown
    config = Config.model_validate(tomllib.loads(shown))
    assert (config.update.lr, config.model.path, config.seed) == (3e-4, "there", 7)
    assert (config.prompt.think, config.env.params) == (False, {"risky_probability": 0.5})
    assert os.listdir(tmp_path) == []


def test_hyphens_in_the_entries_of_a_table_are_kept(capsys: Capture, tmp_path: Path) -> None:
    """They may be part of a path or of a name; elsewhere a hyphen may stand for an underscore."""
    (tmp_path / "my-folder").mkdir()
    file = tmp_path / "my-folder" / "my-terms.py"
    file.write_text("from ragen.core.types import Turn\ndef brevity(turn: Turn): return -1.0")
    shares = {"frozen-lake": 0.7, "frozen-lake-still": 0.3}
    words = [word for name, share in shares.items() for word in (f"--env.mix.{name}", str(share))]
    words += [f"--reward.terms.{file}:brevity", "0.1", "--rollout.num-groups", "8"]
    assert main(["train", "mixed", "--dry-run", *words]) == 0
    config = Config.model_validate(tomllib.loads(capsys.readouterr().out))
    assert {name: mixed.share for name, mixed in config.env.mix.items()}.items() >= shares.items()
    assert config.reward.terms == {f"{file}:brevity": 0.1} and config.rollout.num_groups == 8


def test_dry_run_ends_with_the_memory_plan_unless_the_model_is_missing(capsys: Capture) -> None:
    assert main(["train", "bandit", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    *_, total, certain, most = shown.splitlines()
    assert total.startswith("# memory: up to ") and "optimiser" in certain and "cache" in most
    assert Config.model_validate(tomllib.loads(shown)).model.path == "base"
    assert main(["train", "paper/bandit", "--model", "./typo", "--dry-run"]) == 0
    assert "./typo is neither a folder nor in the Hub's cache" in capsys.readouterr().out


def test_a_run_ends_with_table_and_json(
    trainer: Callable[[Any], None], capsys: Capture, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def train(config: Config, out: Path, *, watcher: Watcher) -> types.SimpleNamespace:
        seen.append((config.steps, out))
        watcher.begin(out, config, 0)
        watcher.step(1, {"success/mean": 0.5, "reward/std_in_group": 0.25, "entropy/mean": 0.125})
        watcher.evaluated(1, evaluation(0.875))
        return result(out)

    trainer(train)
    out = tmp_path / "run"
    assert main(["train", "bandit", "--steps", "3", "--out", str(out), "--json"]) == 0
    assert seen == [(3, out)]
    output = capsys.readouterr()
    printed = json.loads(output.out)
    assert printed.pop("command_seconds") > 0
    assert printed == {
        "env": "bandit",
        "before": 0.5,
        "after": 0.875,
        "random": 0.5,
        "optimal": 1.0,
        "seconds": 12.3,
        "run": str(out),
        "before_greedy": 0.5,
        "after_greedy": 0.9375,
        "alarms": ["step 3, grad_spike: the gradient norm jumped to 9, usual is 1"],
    }
    for words in ("random play", "before, T=1", "after, greedy", "77.5% – 97.5%", "optimal play"):
        assert words in output.err
    assert re.search(
        r"all took \d+ s with start-up and evaluations, the run's steps 12 s", output.err
    )
    assert "step 1/3  success 50%  reward std 0.25  entropy 0.12" in output.err
    assert f"ragen play bandit --player {out}" in output.err


def test_quiet_run_shows_the_result_only(
    trainer: Callable[[Any], None], capsys: Capture, tmp_path: Path
) -> None:
    trainer(lambda run, watcher, _: watcher.step(1, {}) or result(run))
    (tmp_path / "run.sqlite").touch()
    assert main(["resume", str(tmp_path), "--quiet"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "after, greedy" in output.out


def test_a_module_that_is_loaded_for_good_is_hidden_from_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    try:
        load_for_good("this")
        assert gc.get_freeze_count() > 0 and gc.isenabled()
        with pytest.raises(ImportError):
            load_for_good("no_such_module")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_run_prints_how_to_resume(
    number: int, code: int, trainer: Callable[[Any], None], capsys: Capture, tmp_path: Path
) -> None:
    def train(config: Config, out: Path, *, watcher: Watcher) -> None:
        watcher.begin(out, config, 0)
        (out / "checkpoints" / "step-0").mkdir(parents=True)
        (out / "checkpoints" / "step-0" / "state.json").touch()
        raise StopRequested(number)

    trainer(train)
    assert main(["train", "bandit", "--out", str(tmp_path / "run")]) == code
    assert f"ragen resume {tmp_path / 'run'}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "sigint_handler"),
    [
        (signal.SIGINT, 130, signal.default_int_handler),
        (signal.SIGTERM, 143, signal.default_int_handler),
        (signal.SIGTERM, 143, signal.SIG_IGN),
    ],
)
def test_signal_outside_the_training_loop_sets_the_exit_code(
    number: int,
    code: int,
    sigint_handler: Any,
    set_sigint: Callable[[Any], None],
    trainer: Callable[[Any], None],
    capsys: Capture,
) -> None:
    set_sigint(sigint_handler)
    before = signal.getsignal(signal.SIGTERM)
    trainer(lambda *_, **__: signal.raise_signal(number) or time.sleep(5))
    assert main(["train", "bandit", "--quiet"]) == code
    assert capsys.readouterr().err == "ragen: interrupted at once; nothing was saved\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_mistake_in_an_exception_group_gives_one_line(
    trainer: Callable[[Any], None], capsys: Capture
) -> None:
    def train(*_: object, **__: object) -> None:
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [RagenError("no\nsolver")])])

    trainer(train)
    assert main(["train", "bandit"]) == 2
    assert capsys.readouterr().err == "ragen: no solver\n"


def test_a_bug_keeps_its_traceback(trainer: Callable[[Any], None]) -> None:
    def train(*_: object, **__: object) -> None:
        raise ExceptionGroup("tasks", [RagenError("mistake"), ZeroDivisionError()])

    trainer(train)
    with pytest.raises(ExceptionGroup):
        main(["train", "bandit"])
    trainer(lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "bandit"])


def test_envs_lists_every_environment_with_its_baselines(capsys: Capture) -> None:
    assert main(["envs", "--json", "--episodes", "2"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"bandit", "frozen-lake", "frozen-lake-still", "sokoban"} <= rows.keys()
    assert (rows["bandit"]["random"], rows["bandit"]["optimal"]) == (0.5, 1.0)
    assert main(["envs", "--episodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "random  optimal" in shown
    assert max(map(len, shown.splitlines())) <= 80, "it fits a narrow terminal"
    assert any(line.startswith("sokoban-new-symbols") for line in shown.splitlines())


def test_envs_with_a_name_shows_the_card_of_the_class(capsys: Capture) -> None:
    assert main(["envs", "sokoban-large", "--episodes", "2"]) == 0
    card = capsys.readouterr().out.partition("\nsokoban-large: Push all boxes onto targets.")[2]
    assert "Ends when:\n    All boxes are on targets (a success)." in card
    assert ">>>" not in card
    assert main(["envs", "bandit", "--episodes", "2"]) == 0  # a name shorter than the heading
    heads, row, *_ = capsys.readouterr().out.splitlines()
    assert len(heads) == len(row) and row.endswith("1        1")


def test_check_accepts_registered_environments(capsys: Capture) -> None:
    assert main(["check", "bandit", "frozen-lake"]) == 0
    assert capsys.readouterr().out.count("keeps the contract") == 2


def test_check_takes_parameters_of_the_environment_alone(capsys: Capture) -> None:
    assert main(["check", "sokoban", "--env.params.observation", "picture"]) == 0
    assert main(["check", "bandit", "--env.params.observation", "picture"]) == 2
    assert main(["check", "bandit", "--env.max_turns", "2"]) == 2
    assert "env.max_turns has no effect on a check" in capsys.readouterr().err


def test_person_can_play_and_quit(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Dragon\n"))
    assert main(["play", "bandit"]) == 0
    assert "> Dragon" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))  # Ctrl-D
    assert main(["play", "bandit"]) == 0


def test_play_with_the_solver_solves_the_level(capsys: Capture) -> None:
    assert main(["play", "frozen-lake-still", "--player", "solver"]) == 0
    assert "solved, reward 1" in capsys.readouterr().out
    assert main(["play", "paper/bandit", "--player", "solver"]) == 0, "by recipe"
    assert "Phoenix" in capsys.readouterr().out


def test_play_cuts_the_turn_of_a_solver_that_asks_for_too_much(
    tmp_path: Path, capsys: Capture
) -> None:
    hasty = "    def solve(self, *budgets):\n        return ['Left'] * 4\n"
    text = f"from ragen.envs.worlds.sokoban import Sokoban\nclass Hasty(Sokoban):\n{hasty}"
    (tmp_path / "hasty.py").write_text(text)
    name, budgets = f"{tmp_path / 'hasty.py'}:Hasty", ["--env.actions_per_turn", "3"]
    assert main(["play", name, "--player", "solver", *budgets, "--env.max_actions", "5"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("> Left") == 5 and "out of actions" in shown


def test_doctor_passes_on_this_machine(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"two steps of bandit in \d+\.\d s", found["end to end"])


def test_doctor_reports_why_training_fails(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its training fails because the embedded model cannot be read."""

    def broken(*_: object) -> Never:
        raise RagenError("cannot load the model 'base'")

    monkeypatch.setattr("ragen.training.trainer.make_engine", broken)
    assert main(["doctor"]) == 1
    assert "NO  end to end               cannot load the model 'base'" in capsys.readouterr().out


def test_watcher_depends_on_terminal_and_quiet() -> None:
    assert type(watcher_for(Console(), quiet=True)) is OfCommand
    assert type(watcher_for(Console(force_terminal=False))) is Lines
    assert type(watcher_for(Console(force_terminal=True))) is LiveTable


@pytest.mark.parametrize("color", ["", "1"])
def test_text_from_outside_gives_the_terminal_no_commands(
    color: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observations, replies, errors and names are escaped; colours of our own stay."""
    hostile = "\x1b]0;title\x07\x1b[2J \u202eslave\u2066 \ud83d \x9b31m"
    monkeypatch.setenv("FORCE_COLOR", color)
    completion = Completion(None, None, hostile, "stop", 0)
    prompt = Prompt((), None, 0, 8, 1.0, 0)
    words = (hostile,)
    turn = Turn(hostile, prompt, completion, hostile, None, words, words, 0.0, 0.0, False, hostile)
    episode = Episode("x", 1, 2, 0, 0, (turn,), "error", False, True, False, error=hostile)
    show_episode(terminal(), episode)
    show(terminal(), [Section(hostile, (hostile,), ("a", hostile), ((hostile, "1"),))])
    watcher_for(terminal(stderr=True)).alarm(1, hostile)
    complain(f"{hostile}\n{hostile}")
    out, err = capsys.readouterr()
    allowed = r"\x1b\[[0-9;]*m" if color else "(?!)"
    assert out.count("\\x1b[2J") >= 8 and err.count("\\x1b[2J") == 3
    assert err.count("\n") == 2 and "\\u202eslave\\u2066 \\ud83d \\x9b31m" in out
    assert printable(re.sub(allowed, "", out + err)) == re.sub(allowed, "", out + err)
    assert not color or "\x1b[1m" in out


def watch(watcher: Watcher, run: Path, steps: int = 2) -> None:
    """Send the events of a short run to a watcher."""
    watcher.begin(run, settings.merge("bandit", {"steps": steps}), 0)
    watcher.evaluated(0, evaluation(0.5))
    watcher.evaluated(0, evaluation(0.25, temperature=0.0))
    episode = Episode("bandit", 1, 2, 0, 0, (), "solved", True, False, True)
    for step in range(1, steps + 1):
        watcher.episode(episode)
        metrics = {"success/mean": step / steps, "reward/std_in_group": 0.25, "entropy/mean": 0.125}
        speed = {"time/tokens_per_s": 5000.0}
        watcher.step(step, metrics | speed | {"gradient/policy_norm": 1.5})
    watcher.alarm(2, "step 2, grad_spike: 30, usual is 1")
    watcher.end()
    watcher.end()


@pytest.mark.parametrize("width", [80, 120])
def test_live_table_shows_signals_with_the_baselines(width: int, tmp_path: Path) -> None:
    console = Console(force_terminal=True, record=True, width=width, file=io.StringIO())
    watch(LiveTable(console), tmp_path)
    shown = console.export_text()
    assert "! step 2, grad_spike: 30, usual is 1\n" in shown
    above = (
        "T=1: success 50.0% [40.0%, 60.0%] on 64 levels (random play 50.0%, optimal play 100.0%)"
    )
    assert f"step 0  {above}\n" in shown
    table = [line.strip() for line in shown.splitlines()[-7:]]
    assert table[0].startswith("bandit ━━━") and table[0].endswith("step 2 of 2 00:00")
    assert [" ".join(line.split()) for line in table[1:]] == [
        "evaluated 50.0% ▁ [40.0%, 60.0%] T=1, step 0",  # the greedy one is only in the log above
        "success 100% ▁█ random play 50.0%, optimal 100.0%",
        "reward std 0.25 ▁▁",
        "entropy 0.12 ▁▁",
        "gradient norm 1.50 ▁▁",
        "tokens/s 5.0k ▁▁",
    ]


@pytest.mark.parametrize(("start_step", "updates"), [(0, (3, 6)), (5, (20, 23))])
def test_progress_is_shown_in_updates_with_a_budget_of_updates(
    start_step: int, updates: tuple[int, int], tmp_path: Path
) -> None:
    now = 0.0
    console = Console(
        force_terminal=True, record=True, width=80, file=io.StringIO(), get_time=lambda: now
    )
    table = LiveTable(console)
    table.begin(tmp_path, settings.merge("bandit", {"steps": 30, "budget": "updates"}), start_step)
    for number, done in enumerate(updates, 1):
        now += 30.0  # for 3 updates
        table.step(start_step + number, {"success/mean": 0.5, "progress/updates": float(done)})
    table.end()
    left = {6: "04:00", 23: "01:10"}[updates[-1]]
    assert f"step {start_step + 2}, {updates[-1]} of 30 updates {left}" in console.export_text()


def test_lines_show_the_same_without_a_terminal(tmp_path: Path) -> None:
    console = Console(force_terminal=False, record=True, width=80, file=io.StringIO())
    watch(Lines(console), tmp_path)
    signals = "reward std 0.25  entropy 0.12  gradient norm 1.50  tokens/s 5.0k"
    assert console.export_text().splitlines()[1:] == [
        "step 0/2  T=1: success 50.0% [40.0%, 60.0%] on 64 levels "
        "(random play 50.0%, optimal play 100.0%)",
        "step 0/2  greedy: success 25.0% [15.0%, 35.0%] on 64 levels "
        "(random play 50.0%, optimal play 100.0%)",
        f"step 1/2  success 50%  {signals}",
        f"step 2/2  success 100%  {signals}",
        "! step 2, grad_spike: 30, usual is 1",
    ]


def test_printed_commands_quote_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run, model = tmp_path / "my run", tmp_path / "my model"
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    (run / "checkpoints" / "step-2" / "state.json").touch()

    def stopped(config: Config, out: Path, watcher: Watcher) -> Never:
        watcher.begin(run, config, 0)
        raise StopRequested(signal.SIGTERM)

    monkeypatch.setattr("ragen.training.trainer.train", stopped)
    assert main(["train", "bandit", "--quiet"]) == 128 + signal.SIGTERM
    assert f"resume '{run}'" in capsys.readouterr().err
    monkeypatch.setattr("ragen.bases.env_base.prepare_env", lambda *_: "made")
    assert main(["base", "--env", "bandit", "--out", str(model)]) == 0
    assert f"--env bandit --model '{model}'" in capsys.readouterr().out


def test_a_picture_is_half_blocks_in_a_terminal_with_colours() -> None:
    """Two rows of pixels a line, the last of an odd number twice; wide pictures are shrunk."""
    pixels = np.zeros((3, 2, 3), np.uint8)
    pixels[0], pixels[2] = (255, 0, 0), (0, 0, 9)
    console = Console(
        force_terminal=True, color_system="truecolor", file=(out := io.StringIO()), width=70
    )
    play._show(console, PLACE, [Picture.of(pixels)])
    red, blue = (
        f"\x1b[38;2;{above};48;2;{below}m"
        for above, below in (("255;0;0", "0;0;0"), ("0;0;9",) * 2)
    )
    mark, *lines = out.getvalue().splitlines()
    assert mark == "<image>" and [line.count("▀") for line in lines] == [2, 2]
    assert lines[0].startswith(red) and lines[1].startswith(blue)
    wide = play._in_blocks(Picture.of(np.zeros((100, 400), np.uint8)), 64)
    assert wide.plain.split("\n") == ["▀" * 64] * 8


def test_a_picture_is_a_mark_in_the_terminal(capsys: Capture) -> None:
    episode = seen_episodes()[2]
    show_episode(terminal(), episode)
    shown = capsys.readouterr().out
    assert "Look: <image>" in shown and "page 1: <image>" in shown and PLACE not in shown
    game = ["play", "frozen-lake-still", "--player", "random"]
    assert main([*game, "--env.params.observation", "picture"]) == 0
    shown = capsys.readouterr().out
    assert "<image>" in shown and PLACE not in shown


def test_a_player_of_an_agent_outside_says_where_programs_fetch_the_task(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def played(target: str, overrides: object, *, seed: int, note: Callable[[str], None]) -> Any:
        note("programs fetch tasks with POST")
        return seen_episodes()[2]

    monkeypatch.setattr("ragen.evaluation.evaluation.play_target", played)
    assert main(["play", "agent:outside", "--player", "full"]) == 0
    assert "programs fetch tasks" in capsys.readouterr().err
