"""Hostile settings: every file and command line gives one line and exit code 2, or a run that fits.

Training stops where the model would be loaded, after every check of the settings and of the memory
plan.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import signal
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ragen.cli.command import Parser
from ragen.cli.main import ABOUT, COMMANDS, main
from ragen.config.keys import TABLES, keys
from ragen.config.reading import dump, merge, read_config
from ragen.core.errors import RagenError, printable
from ragen.finetuning.transcripts import read_transcripts

LIMIT_S = 60
"""Seconds of a case, however busy the machine is."""
READY = "the settings allow a run"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stop each command where its work would begin, in an empty folder."""

    def ready(*arguments: Any, **_: Any) -> Any:
        for each in filter(inspect.iscoroutine, arguments):
            each.close()
        raise RagenError(READY)

    monkeypatch.chdir(tmp_path)
    for work in (
        *("ragen.training.trainer.make_engine", "ragen.evaluation.evaluation.run_async"),
        *("ragen.finetuning.sft.load_model", "ragen.bases.base.build"),
        *("ragen.studies.runner.make_runs", "ragen.viewer.server.serve"),
        "ragen.serving.openenv.serve",
        *("ragen.evaluation.baselines.measure_baselines", "ragen.cli.play.play_env"),
    ):
        monkeypatch.setattr(work, ready)
    monkeypatch.setattr("torch.set_flush_denormal", lambda _: True)  # Hypothesis refuses it


@contextlib.contextmanager
def time_limit(case: object) -> Iterator[None]:
    """Fail a case that takes longer than `LIMIT_S`."""

    def on_alarm(*_: object) -> None:
        pytest.fail(f"longer than {LIMIT_S} s: {case!r:.2000}")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_command(arguments: list[str]) -> str:
    """Run a command, and check that it succeeds or ends with one short line; return that."""
    out, err = io.StringIO(), io.StringIO()
    with time_limit(arguments), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:  # the help of a command
            code = end.code
    lines = [line for line in err.getvalue().splitlines() if line.startswith("ragen: ")]
    assert code in (0, 2), (code, arguments)
    if code == 2:
        assert len(lines) == 1, (arguments, err.getvalue())
        assert len(lines[0]) <= 2000 and lines[0] == printable(lines[0]), arguments
        return lines[0]
    return ""


DEEP = 3000
NUMBERS = [
    *("0", "-0", "-1", "1", "2", "3.0", "1e0", "nan", "-nan", "inf", "-inf", "+inf"),
    *("1e-38", "5e-324", "1e-400", "1e38", "1e40", "1e308", "1e309", "1e20", "-1e308", "0.1"),
    *("9" * 19, "9" * 60, "9" * 4300, "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 9000, "1" * 310),
    *("1_000", "1__0", "_1", "１２", "٣", "²", "1,5", "1 2", "0b1", "0o7", "007", "+5", "1e", ".5"),
    *("2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "1000000000"),
    *("65536", "1048576", "1048577", "10000000", "10000001"),
]
WORDS = [
    *("", " ", "true", "True", "false", "null", "none", "{}", "{a = 1}", "[]", "[[]]", "[1, 2]"),
    *("[" * 2000, "{a=" * 2000, "{a = {b = {}}}", "[" * 500 + "]" * 500, "[" * 30 + "]" * 30),
    *("x" * 5000, "x" * 300, "a/" * 2500, "../" * 1000 + "x", "..", ".", "~", "~/x", "~nobody"),
    *("/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem", "/etc/passwd", "/", "base", "all"),
    *("a\nb", "a\tb", "a\x1b[31mb", "a\x00b", "\udcff", "a\ud800", "é", "字" * 1000, "\u202eabc"),
    *("1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", '"text"', "'text'", '"""', "'''", "= 1"),
    *("1\nother = 2", "1 # note", "%s%n", "{0}", "{c.seed}", "$HOME", "`id`", "-", "--", "--json"),
    *("bandit", "starpo/ppo", "grpo", "gae", "bandit.toml", "no.py:Env", ":", "::", "a:b", ":b"),
    *("http://", "http://[", "http://a:99999", "vllm", "local", "float32", "stop", "rollback"),
]
MADE = (st.text(max_size=30), st.floats().map(str), st.integers().map(str))
VALUES = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), *MADE)
ENTRIES = ("env.params.x", "env.params.safe_reward", "env.params.risky_probability")
ENTRIES += ("env.params.size", "env.params.slip", "reward.terms.length", "reward.terms.x")
ENTRIES += ("guard.responses.mi_drop", "guard.responses.x", "sources.x", "x", "env", "model", "")
ENTRIES += ("update", "env.params", "world.turns", "rollout.prompts", ".", "..", "a" * 3000)
ENTRIES += (".".join("a" * DEEP), "env.params." + ".".join("a" * DEEP), "update.lr.x", "é", "a b")
NAMES = st.sampled_from([*keys(), *keys(), *ENTRIES])
EVERY = COMMANDS | ABOUT


def options_of(command: str) -> list[str]:
    """The options of a command, without its help."""
    parser = Parser("ragen")
    EVERY[command].options(parser)
    return [action.option_strings[0] for action in parser._actions if action.option_strings][1:]


OPTIONS = {name: options_of(name) for name in EVERY if name not in ("doctor", "new-world")}
TARGETS = st.one_of(
    st.sampled_from(["bandit", "sokoban", "frozen-lake", "random", "base", "solver", "human"]),
    st.sampled_from(["bandit", "random", "base"]),
    VALUES,
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with hostile targets, options and keys."""
    command = draw(st.sampled_from([*OPTIONS, *["train"] * 12, *["eval"] * 4]))
    arguments = [command]
    if draw(st.booleans()) and command == "train":
        arguments.append("--dry-run")
    few = 2 if command in ("compare", "branch") else 1
    arguments += [draw(TARGETS) for _ in range(few if draw(st.integers(0, 9)) else 0)]
    required = ["--out", "made"] if command in ("sft", "base") and draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        names = st.sampled_from([*OPTIONS[command], "--x"])
        if EVERY[command].takes_keys and draw(st.integers(0, 3)):
            names = NAMES.map("--{}".format)
        name, value = draw(names), draw(VALUES)
        arguments += [f"{name}={value}"] if draw(st.booleans()) else [name, value]
    return arguments + required


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    """The bytes of a recipe with hostile lines."""
    lines = []
    for _ in range(draw(st.integers(0, 6))):
        name, value = draw(NAMES), draw(VALUES)
        shape = draw(st.integers(0, 9))
        quoted = '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        if shape == 0:
            lines.append(f"[{name}]")
        elif shape == 1:
            lines.append(value)
        elif shape == 2:
            lines += [f"[[{name}]]", f"x = {value}"]
        else:
            lines.append(f"{name} = {value if shape < 7 else quoted}")
    end = draw(st.sampled_from(["\n", "\r\n", "\r", "\n\n"]))
    text = end.join(lines).encode("utf-8", "surrogatepass")
    kind = draw(st.integers(0, 9))
    start = {0: b"\xef\xbb\xbf", 1: b"\xff\xfe", 2: b"\x00"}.get(kind, b"")
    return start + text + draw(st.sampled_from([b"", b"\n", b"\xff", b"\x00"] + [b"\n"] * 6))


REUSED = settings(
    suppress_health_check=[
        *(HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)
    ]
)


@REUSED
@seed(13)
@given(command_lines())
def test_hostile_command_line_gives_one_line(arguments: list[str]) -> None:
    check_command(arguments)


@REUSED
@seed(13)
@given(recipes(), st.sampled_from([[], ["--dry-run"]]))
def test_hostile_recipe_gives_one_line(content: bytes, more: list[str]) -> None:
    Path("hostile.toml").write_bytes(content)
    check_command(["train", "hostile.toml", *more])


def test_empty_table_on_the_command_line_is_refused() -> None:
    for table in TABLES:
        line = check_command(["train", "bandit", f"--{table}={{}}"])
        assert f"set --{table}.NAME" in line or "RAGEN fills in sources" in line
    assert check_command(["train", "bandit", "--sources.x", "y"]).endswith("leave it out")


def test_unknown_empty_section_of_a_recipe_is_refused() -> None:
    for text in ("[rolout]\n", "rolout = {}\n", "[update.lr]\n", "[update]\nlr.x = 1\n"):
        Path("mine.toml").write_text(text)
        line = check_command(["train", "mine.toml", "--dry-run"])
        assert "rolout" in line or "update.lr" in line
    Path("mine.toml").write_text("[env.params]\n[update]\n[reward.terms]\n")
    assert check_command(["train", "mine.toml", "--dry-run"]) == ""


NONSENSE = [
    ("rollout.num_groups", "1000000000", "a whole number ≥ 1 and ≤ 1048576"),
    ("rollout.num_groups", "1048576", "expected at most 1048576"),
    ("threads", "1e20", "a whole number ≥ 0 and ≤ 1024"),
    ("threads", "9" * 20, "a whole number ≥ 0 and ≤ 1024"),
    ("lora.alpha", "9" * 4300, "a number of more than 60 digits"),
    ("update.lr", "9" * 5000, "expected a number > 0 and ≤ 1"),
    ("update.lr", "[" * 2000, "expected a number"),
    ("rollout.temperature", "1e-38", "≥ 0.001"),
    ("eval.temperature", "1e-38", "at least 0.001, or 0"),
    ("env.params.safe_reward", "1e308", "safe_reward"),
    ("env.params.safe_reward", "nan", "safe_reward"),
    ("model.path", "x" * 5000, "at most 4096 characters, not 5000"),
    ("env.name", "a\x1b[31m", "without control characters"),
]


def test_value_that_makes_no_sense_is_refused_with_its_key() -> None:
    for key, value, reason in NONSENSE:
        line = check_command(["train", "bandit", f"--{key}", value])
        assert key.rpartition(".")[2] in line and reason in line


def test_levels_of_a_run_do_not_repeat() -> None:
    keys = ["--steps", "1000000", "--rollout.num_groups", "1000"]
    assert "no level is trained on twice" in check_command(["train", "bandit", *keys])


def hostile_values() -> list[Any]:
    deep: Any = 1
    for _ in range(DEEP):
        deep = {"a": deep}
    nested: Any = []
    for _ in range(DEEP):
        nested = [nested]
    own: list[Any] = []
    own.append(own)
    odd = [math.nan, math.inf, -math.inf, 5e-324, 1e308, 10**400, -(10**5000), 2**63, True, None]
    odd += ["x" * 5000, "a\0b", "\ud800", b"bytes", date(2026, 1, 1), {1, 2}, object(), 1j]
    return [*odd, deep, nested, own, {}, {1: 2}, {"a": {}}, [], [[]], Path("x"), "９", "nan"]


def test_saved_settings_read_back_whatever_they_hold() -> None:
    for value in hostile_values():
        try:
            text = dump(config := merge("bandit", {"env.params.x": value}))
        except RagenError:
            continue
        Path("config.toml").write_text(text, encoding="utf-8")
        assert read_config(Path("config.toml")) == config


ODD = {
    b'\xef\xbb\xbf[env]\r\nname = "bandit"\r\n': "",  # as Windows' editors write it
    'recipe = "x"'.encode("utf-16"): "not UTF-8",
    b"#" * 2**21: "larger than 1 MiB",
    b"steps = 1\nsteps = 2\n": "not valid TOML",
    b"steps = " + b"[" * 2000: "not valid TOML",
}


def test_odd_recipe_file_is_read_or_refused_at_once() -> None:
    for content, reason in ODD.items():
        Path("odd.toml").write_bytes(content)
        line = check_command(["train", "odd.toml", "--dry-run"])
        assert reason in line and bool(reason) == bool(line), content[:40]


def test_odd_conversation_is_reported_with_its_line() -> None:
    for line in (
        "[" * 100_000,
        '{"messages": ' + "9" * 5000 + "}",
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ):
        Path("chats.jsonl").write_text(line + "\n")
        with pytest.raises(RagenError, match=r"chats\.jsonl, line 1") as caught:
            read_transcripts(Path("chats.jsonl"))
        assert len(str(caught.value)) < 2000


def test_conversations_may_come_from_a_pipe_but_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragen.finetuning.transcripts.MOST_BYTES", 2**20)
    with pytest.raises(RagenError, match="larger than 1 MiB"):
        read_transcripts(Path("/dev/zero"))
