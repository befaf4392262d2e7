"""A user's mistake gives one line with the remedy and exit code 2, and leaves nothing behind.

Commands run in this process.
"""

from __future__ import annotations

import io
import shutil
import socket
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.models.loading import save_model
from ragen.storage.checkpoint import write_state, writing
from tests.bandit_model import bandit_model, settings
from tests.limits import needs_timer
from tests.tiny import tiny_model, tiny_tokenizer

ROGUE = Path(__file__).parents[1] / "rogue.py"


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python writes beside a user's file is no change that a command made."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def ragen(*arguments: str | Path, cwd: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


PAPER = ("--prompt.style", "paper")
"""With it, a recipe of the embedded models takes another model."""


def error_line(cwd: Path, *arguments: str | Path) -> str:
    """The one error line of a command with a mistake; asserts that its folder is unchanged."""
    before = sorted(cwd.rglob("*"))
    code, out, err = ragen(*arguments, cwd=cwd)
    assert code == 2, (arguments, code, out, err)
    lines = [line for line in err.splitlines() if line.startswith("ragen: ")]
    assert len(lines) == 1 and err.rstrip().endswith(lines[0])
    assert sorted(cwd.rglob("*")) == before
    return lines[0]


MISTAKES = {
    "trian bandit": "unknown command 'trian'; did you mean 'train'?",
    "help kesy": "unknown command 'kesy'; did you mean 'keys'?",
    "train": "name a recipe (ragen help recipes), or an environment with --env",
    "train bandti": "unknown recipe 'bandti'; did you mean 'bandit'?",
    "train nowhere.toml": "nowhere.toml",
    "train bandit extra": "unrecognized arguments: extra",
    "train bandit --jsn": "unknown option --jsn; did you mean --json?",
    "train bandit --stpes 1": "did you mean 'steps'?",
    "train bandit --update.lr": "--update.lr needs a value: a number > 0",
    "train bandit --reward.terms.length": "--reward.terms.length needs a value",
    "train bandit --steps many": "a whole number ≥ 0",
    "train bandit --env bandti": "unknown environment 'bandti'; did you mean 'bandit'?",
    "train bandit --env nowhere.py:World": "no file nowhere.py",
    "train bandit --env.params.slip 1": "no parameter 'slip'; it has name_set",
    "train bandit --env.params.risky_probability 2.0": "less than or equal to 1",
    "train bandit --model ./no-model": "no-model",
    "train smol/bandit": "no model 'models/smollm2-bandit' here: make it first (docs/small-models",
    "eval random --env bandit --episodes 0": "from 1 to 9877",
    "eval random --env bandit --temperature=-1": "argument --temperature: expected a number ≥ 0",
    "eval random --env bandit --env.params 0": "expected a table",
    "eval human --env bandit": "ragen play",
    "resume no-run": "no-run",
    "envs --update.lr 3": "unknown option --update.lr; ragen envs --help lists them all",
    "play bandit --player random --seed -1": "≥ 0",
    "check bandti": "did you mean 'bandit'?",
    "completion csh": "argument SHELL: invalid choice: 'csh'",
    "serve": "required: ENV",
    "serve bandit --port 65536": "from 0 to 65535",
    "serve bandit --env.params.slip 1": "it has name_set",
    "serve bandit --update.lr 1": "--update.lr has no effect on a server",
    "serve bandit --tls-key key.pem": "name it with --tls-cert",
}


def test_invalid_arguments_give_one_line_with_the_remedy(tmp_path: Path) -> None:
    for arguments, remedy in MISTAKES.items():
        assert remedy in error_line(tmp_path, *arguments.split()), arguments


ENVS = {
    "import.py": ("import no_such_module_of_mine\n", "no_such_module_of_mine"),
    "syntax.py": ("def broken(:\n", "invalid syntax"),
    "value.py": ("raise ValueError('at import')\n", "at import"),
    "exit.py": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "hangs.py": ("while True: pass\n", "longer than 0.05 s"),
    "empty.py": ("", "no environment (subclass of ragen.Env)"),
    "partial.py": (
        "from ragen.envs.contract import Env\nclass World(Env): pass\n",
        "lacks actions",
    ),
}


@needs_timer
def test_environment_file_that_cannot_be_loaded_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen.core.plugins.LOAD_S", 0.05)
    for name, (text, reason) in ENVS.items():
        (tmp_path / name).write_text(text)
        for command in (["train", "bandit", "--out", "run", "--env"], ["check"], ["play"]):
            line = error_line(tmp_path, *command, f"{tmp_path / name}:World")
            assert reason in line and name in line


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("data")
    (tmp_path / "file").write_text("")
    for out, remedy in {
        "run": "give another --out",
        "file": "exists already",
        "file/run": "choose a writable place with --out",
    }.items():
        model = ("--model", bandit_model(), *PAPER)
        assert remedy in error_line(tmp_path, "train", "bandit", "--out", out, *model)


def test_invalid_model_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in error_line(
        tmp_path, "train", "bandit", "--model", "empty", *PAPER
    )
    shutil.copy(bandit_model() / "model.safetensors", tmp_path / "empty")
    for text, reason in (
        ("{}", "cannot load the model"),
        ("[", "config.json: Expecting value"),
    ):
        (tmp_path / "empty" / "config.json").write_text(text)
        assert reason in error_line(tmp_path, "train", "bandit", "--model", "./empty", *PAPER)
    file = ("--model", "empty/config.json", *PAPER)
    assert "is a file: name the folder" in error_line(tmp_path, "train", "bandit", *file)


def altered_model(folder: Path, **changes: str | None) -> Path:
    """A copy of a trainable model with some files changed, or removed if their text is None."""
    shutil.copytree(bandit_model(), folder)
    for name, text in changes.items():
        (found,) = folder.glob(f"{name}.*")
        if text is None:
            found.unlink()
        else:
            found.write_text(text)
    return folder


def model_error(tmp_path: Path, model: str | Path, *more: str) -> str:
    """The one error line about a model, the same in training and in evaluation."""
    (tmp_path / "cwd").mkdir(exist_ok=True)
    arguments = ("--model", model, "--rollout.max_tokens", "8", "--model.max_length", "128", *more)
    arguments += PAPER
    line = error_line(tmp_path / "cwd", "train", "bandit", *arguments)
    assert error_line(tmp_path / "cwd", "eval", model, "--env", "bandit", *arguments[2:]) == line
    return line


MODELS: list[tuple[dict[str, str | None], str]] = [
    (
        {"tokenizer": None, "tokenizer_config": None, "chat_template": None},
        "has no tokenizer; save one in its folder",
    ),
    ({"chat_template": None}, "no chat template: choose an instruction-tuned model"),
    (
        {"chat_template": "{{ raise_exception('not today') }}"},
        "the chat template refuses a conversation of user (not today): "
        "choose a model whose template takes user and assistant",
    ),
]


def test_model_without_what_a_conversation_needs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub is unreachable: nothing listens on that port."""
    for number, (changes, words) in enumerate(MODELS):
        assert words in model_error(tmp_path, altered_model(tmp_path / f"{number}", **changes))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = model_error(tmp_path, "nobody/has-this-model")
    assert "'nobody/has-this-model' is not in the local cache" in line and "network" in line


def test_max_length_must_fit_the_model_and_the_prompt(tmp_path: Path) -> None:
    line = model_error(tmp_path, bandit_model(), "--model.max_length", "4096")
    assert "knows 2048 positions; set model.max_length to 2048 or less" in line
    keys = ("--model", bandit_model(), "--rollout.max_tokens", "24", "--model.max_length", "26")
    line = error_line(tmp_path, "train", "bandit", *keys, *PAPER)
    assert "raise model.max_length from 26" in line
    assert "raise model.max_length" in error_line(tmp_path, "eval", *keys[1:], "--env", "bandit")


def test_weights_with_nan_or_infinity_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tiny_tokenizer("chatml"))
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    save_model(model, tiny_tokenizer("chatml"), tmp_path / "model")
    line = model_error(tmp_path, tmp_path / "model")
    assert "are damaged: model.norm.weight holds NaN or infinity" in line


def test_run_that_exceeds_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen.models.memory.available", lambda _: 4 * 2**20)
    line = error_line(tmp_path, "train", "bandit")
    assert "MiB, and 4 MiB are free on the cpu; the largest are" in line


PLAY = ("play", "--player", "solver")
FAULTY = [
    ("raise in init", ("train", "bandit", "--env"), "cannot be made: KeyError"),
    ("raise in init", ("eval", "random", "--env"), "cannot be made: KeyError"),
    ("raise in init", PLAY, "cannot be made: KeyError"),
    ("raise", PLAY, "run `ragen check` on it"),
    ("hang", PLAY, "run `ragen check` on it"),
    ("text as reward", PLAY, "run `ragen check` on it"),
    ("raise in solve", PLAY, "run `ragen check` on it"),
    ("raise in reset", ("serve",), "failed: LookupError: no such level; run `ragen check` on it"),
    ("hang in reset", ("eval", "random", "--episodes", "2", "--env"), "failed in every episode"),
]


def test_environment_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen.serving.openenv.find_spec", lambda name: True)
    for misdeed, command, words in FAULTY:
        keys = ("--env.params.misdeed", misdeed, "--env.timeout_s", "0.05")
        assert words in error_line(tmp_path, *command, f"{ROGUE}:Rogue", *keys), misdeed


def test_environment_that_fails_in_every_episode_ends_the_run(tmp_path: Path) -> None:
    values = settings(eval__episodes=2, env__timeout_s=0.05, env__name=f"{ROGUE}:Rogue")
    keys = [text for key, value in values.items() for text in (f"--{key}", str(value).lower())]
    keys[keys.index("--model.path") + 1] = str(bandit_model())
    keys[keys.index("--env.name") + 1] = f"{ROGUE}:Rogue"
    keys += ["--env.params.misdeed", "hang in reset"]
    code, _, err = ragen("train", "bandit", *keys, "--out", "run", cwd=tmp_path)
    assert code == 2, err
    assert "failed in every episode" in err.splitlines()[-1]


def test_environment_that_fails_during_check_is_reported(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(
        "from tests.rogue import Rogue\n"
        "class Breaks(Rogue):\n    def __init__(self): super().__init__('raise')\n"
    )
    line = error_line(tmp_path, "check", "breaks.py:Breaks")
    assert "raised while it was checked: ZeroDivisionError" in line


def test_damaged_run_is_reported(tmp_path: Path, own_bandit_run: Path) -> None:
    for state in own_bandit_run.glob("checkpoints/step-*/state.json"):
        state.write_text("{")
    assert "is damaged" in error_line(tmp_path, "resume", own_bandit_run)
    (own_bandit_run / "config.toml").write_text("steps = [")
    assert "not valid TOML" in error_line(tmp_path, "eval", own_bandit_run)


def test_removed_working_directory_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    with chdir(gone):
        gone.rmdir()
        assert main(["envs"]) == 2
        gone.mkdir()  # to leave it
    assert capsys.readouterr().err.startswith("ragen: cannot find the working directory")


def test_full_disk_error_explains_how_to_continue(tmp_path: Path) -> None:
    def disk_error(step: int) -> str:
        with pytest.raises(RagenError) as caught, writing(tmp_path, step, keep=2):
            raise OSError(28, "No space left on device")
        return str(caught.value)

    assert f"start the run again, with another --out: {tmp_path} holds no step yet" in disk_error(0)
    with writing(tmp_path, 0, keep=2) as folder:
        write_state(folder, {"step": 0})
    assert f"then continue with: ragen resume {tmp_path}" in disk_error(1)


def test_a_server_that_cannot_be_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen.serving.openenv.find_spec", lambda name: None)
    line = error_line(tmp_path, "serve", "bandit")
    assert line.endswith("ragen serve needs websockets: pip install 'ragen-rl[openenv]'")
    monkeypatch.setattr("ragen.serving.openenv.find_spec", lambda name: True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = error_line(tmp_path, "serve", "bandit", "--port", port)
    assert f"port {port}: address already in use; choose another one with --port" in line
    for token in ("short", "no token ä"):
        monkeypatch.setenv("OPENENV_TOKEN", token)
        line = error_line(tmp_path, "serve", "bandit")
        assert line == "ragen: OPENENV_TOKEN: expected at least 8 ASCII characters"
