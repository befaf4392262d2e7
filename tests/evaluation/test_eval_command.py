"""`ragen eval`: endpoints, several environments and samples; nothing that was played is lost."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import resolve
from ragen.core.errors import RagenError
from ragen.evaluation import evaluation
from ragen.evaluation.baselines import Budget, measure_baselines
from ragen.evaluation.evaluation import EVALS, evaluate_target
from ragen.evaluation.outcomes import Outcome, describe_failures
from ragen.evaluation.results import summarize
from ragen.evaluation.tables import evaluation_table
from ragen.evaluation.targets import config_for, outcome_settings, run_of
from ragen.models.names import hash_model_folder
from ragen.rollout import endpoint
from ragen.rollout.endpoint import Server
from ragen.storage.database import DATABASE
from ragen.storage.reader import read_evaluations
from ragen.training.trainer import train
from tests.bandit_model import settings
from tests.faulty import GOOD, Answer, FaultyServer, api_error, chat_reply

Capture = pytest.CaptureFixture[str]
ROGUE = f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue"
KEY = "sk-test-0123456789abcdef"
SLOWLY = "<think>hm</think><answer>Left</answer>"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own for ``evals``, and waits of milliseconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(endpoint, "TRIES", 2)
    monkeypatch.delenv(endpoint.KEY_ENV, raising=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(resolve("bandit", settings(steps=1)), tmp_path_factory.mktemp("eval") / "run").run


def half(_: int, body: dict[str, Any]) -> Answer:
    """By the request's own seed: one that walks to the end, or one that walks the wrong way."""
    return chat_reply(GOOD if body["seed"] % 2 else SLOWLY)


def ask(server: FaultyServer, *more: str, episodes: int = 8, env: str = ROGUE) -> list[str]:
    return (
        f"eval some/model --base-url {server.url} --env {env} --episodes {episodes} --json"
    ).split() + list(more)


def without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def test_an_endpoint_is_measured_like_anyone(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two turns an episode at most, each of which may walk to the end or a step to the left."""
    monkeypatch.setenv(endpoint.KEY_ENV, KEY)
    more = shlex.split("--env.max_turns 2 --price-in 2 --price-out 10 --markdown table.md")
    with FaultyServer(half) as server:
        assert main(ask(server, *more, episodes=24)) == 0
        found = json.loads(capsys.readouterr().out)
        turns = len(server.requests)
        assert found["total_prompt_tokens"] == 100 * turns
        assert found["total_completion_tokens"] == 20 * turns
        assert found["cost"] == pytest.approx((200 * turns + 200 * turns) / 1e6)
        assert found["mean_turns"] == turns / 24
        assert 0 < found["success"] < 1 and found["success"] == found["pass_at_k"]
        assert (found["optimal"], found["failed"], found["valid_fraction"]) == (1.0, 0, 1.0)
        assert 0 < found["thought_words"] < 3 and 0 < found["effective_fraction"] < 1
        # Asked again, nothing is played.
        assert main(ask(server, *more, episodes=24)) == 0
        assert without_seconds(json.loads(capsys.readouterr().out)) == without_seconds(found)
        assert len(server.requests) == turns
    page = Path("table.md").read_text("utf-8")
    assert (
        "| random play |" in page and "| some/model, T=1 |" in page and "| optimal play |" in page
    )
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"some/model at http://127.0.0.1" in kept and KEY.encode() not in kept


def test_an_endpoint_is_asked_in_full_words() -> None:
    with FaultyServer(lambda *_: chat_reply(SLOWLY)) as server:
        values = {"env": "frozen-lake-still"}
        found, outcomes = evaluate_target("m", values, episodes=1, server=Server(server.url))
    first, second, *_ = server.requests
    system, user = first["messages"]
    assert system["role"] == "system"
    assert "exactly this form: <think> your reasoning </think><answer> action" in user["content"]
    assert "State:\n___P\n__O_\n" in user["content"], "the map, not its cells by name"
    assert first["max_tokens"] == 1024
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == SLOWLY
    assert first["seed"] != second["seed"]
    assert len(outcomes) == 1 and found.valid_fraction == 1.0
    with pytest.raises(RagenError, match="cannot continue a pre-filled reply"):
        config_for("m", {"prompt.prefill": True}, Server("http://127.0.0.1:1/v1"))


def test_partial_failure_is_shown_and_mended_by_the_same_command(capsys: Capture) -> None:
    broken = True

    def script(_: int, body: dict[str, Any]) -> Answer:
        lost = broken and body["seed"] % 3 == 0
        return api_error(500, "out of memory") if lost else half(0, body)

    with FaultyServer(script) as server:
        assert main(ask(server, "--concurrency", "1", episodes=16)) == 0
        first = json.loads(capsys.readouterr().out)
        lost = first["failed_requests"]
        assert 0 < lost < 16 and first["failed"] == lost and first["episodes"] == 16
        (line,) = first["failures"]
        assert line.startswith(f"{lost} of 16 episodes failed at the server and count as no succe")
        assert "HTTP 500: out of memory; the same command plays them again" in line
        broken, before = False, len(server.requests)
        assert main(ask(server, episodes=16)) == 0
        second = json.loads(capsys.readouterr().out)
        again = len(server.requests) - before
        assert main(ask(server, "--out", "elsewhere", episodes=16)) == 0
        whole = json.loads(capsys.readouterr().out)
    assert second["failed"] == 0 and second["failures"] == []
    assert without_seconds(second) == without_seconds(whole)
    assert again < len(server.requests) - before - again, "only those that were lost"


def test_a_server_that_fails_in_every_episode_is_one_line(capsys: Capture) -> None:
    for script in (
        lambda *_: api_error(503, "loading"),  # it never answers
        lambda _, body: (
            chat_reply("?") if len(body["messages"]) == 2 else api_error(500, "no memory")
        ),
    ):
        with FaultyServer(script) as server:
            assert main(ask(server, episodes=4)) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        assert "HTTP 50" in output.err


def test_no_more_at_once_than_asked() -> None:
    def slowly(_: int, body: dict[str, Any]) -> Answer:
        return Answer(half(0, body).body, wait_s=0.05)

    with FaultyServer(slowly) as server:
        how = Server(server.url)
        values = {"env": ROGUE, "env.max_turns": 1}
        evaluate_target("m", values, episodes=12, server=how, concurrency=3)
        assert server.max_concurrent <= 3
        evaluate_target("m", values, episodes=12, server=how, concurrency=12, seed=1)
        assert server.max_concurrent > 3


def in_a_copy(command: list[str], error: Path) -> int:
    """Start a command in a copy of this process, which has imported all; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        sys.stdout, sys.stderr = open(os.devnull, "w"), error.open("w")  # noqa: SIM115
        code = main(command)
        sys.stderr.flush()
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGKILL, -signal.SIGKILL, ""), (signal.SIGTERM, 143, "the same command continues")],
)
def test_a_stopped_evaluation_resumes(number: int, code: int, words: str, capsys: Capture) -> None:
    """Stop after some episodes, repeat the command: the numbers equal those of an unstopped one.

    The server answers eight requests and then nothing until the process has been stopped, so that
    the outcome does not depend on the speed of the machine.
    """
    stopped = threading.Event()

    def script(request: int, body: dict[str, Any]) -> Answer:
        assert request < 8 or stopped.wait(60)
        return half(0, body)

    def stored() -> int:
        if not Path("evals", DATABASE).exists():
            return 0
        with closing(sqlite3.connect(Path("evals", DATABASE))) as connection:
            try:
                return int(connection.execute("SELECT count(*) FROM outcomes").fetchone()[0])
            except sqlite3.OperationalError:  # the table is being made
                return 0

    with FaultyServer(script) as server:
        more = shlex.split("--concurrency 2 --samples 2 --env.max_turns 1")
        command = ask(server, *more, episodes=12)
        copy = in_a_copy(command, Path("error"))
        while stored() < 5 and os.waitpid(copy, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        os.kill(copy, number)
        ended = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        stopped.set()
        error = Path("error").read_text()
        assert ended == code and words in error and error.count("\n") == bool(words)
        done, asked = stored(), len(server.requests)
        assert 5 <= done <= 8
        assert main(command) == 0
        resumed = json.loads(capsys.readouterr().out)
        assert len(server.requests) - asked == 24 - done
        assert main([*command, "--out", "whole"]) == 0
        assert len(server.requests) - asked == 48 - done
    whole = json.loads(capsys.readouterr().out)
    assert without_seconds(resumed) == without_seconds(whole)
    assert (whole["episodes"], whole["samples"]) == (12, 2)


def test_players_resume_and_more_levels_cost_only_those() -> None:
    """Random play of a level does not depend on the other levels."""
    played: list[Outcome] = []

    def count(outcome: Outcome, left: int) -> None:
        played.append(outcome)
        assert 0 <= left < 24

    _, some = evaluate_target("random", {"env": "bandit"}, episodes=4, samples=2, out=EVALS)
    found, more = evaluate_target(
        "random", {"env": "bandit"}, episodes=8, samples=3, out=EVALS, on_outcome=count
    )
    fresh, whole = evaluate_target(
        "random", {"env": "bandit"}, episodes=8, samples=3, out=Path("new")
    )
    assert more == whole and len(played) == 24
    assert set(some) <= set(more) and played[:8] == some
    assert without_seconds(found.record()) == without_seconds(fresh.record())
    assert {o.success for o in more} == {True, False}
    # c of n = 3 solved: pass@3 is 1 − C(3−c, 3)/C(3, 3), so the share of levels with any.
    solved = {
        level: any(o.success for o in more if o.level_seed == level) for level in range(123, 131)
    }
    assert found.pass_at_k == sum(solved.values()) / 8 > found.success


def test_a_run_keeps_its_results_and_its_checkpoints_are_told_apart(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = read_evaluations(run)
    newest, _ = evaluate_target(str(run), {}, episodes=4, out=run)
    first, _ = evaluate_target(str(run / "checkpoints" / "step-0"), {}, episodes=4, out=run)
    assert not Path("evals").exists() and read_evaluations(run) == own
    by_step = {each["step"]: each for each in own if each["temperature"] == 1.0}
    assert (
        newest.success == by_step[1]["success"] and newest.mean_return == by_step[1]["mean_return"]
    )
    assert first.success == by_step[0]["success"] and first.mean_return == by_step[0]["mean_return"]
    # Stored: no model is loaded.
    monkeypatch.setattr(evaluation, "load_target", lambda *_: pytest.fail("it was played again"))
    again, _ = evaluate_target(str(run / "checkpoints" / "step-1"), {}, episodes=4, out=run)
    assert without_seconds(again.record()) | {"target": str(run)} == without_seconds(
        newest.record()
    )


def test_whose_run_a_target_is(run: Path) -> None:
    assert run_of(str(run)) == run_of(str(run / "checkpoints" / "step-1")) == run
    assert run_of("random") is run_of(str(run / "checkpoints")) is None
    assert config_for(str(run / "checkpoints" / "step-1"), {}) == config_for(str(run), {})


def test_what_a_key_depends_on(tmp_path: Path) -> None:
    env = tmp_path / "env.py"
    env.write_text(Path(ROGUE.partition(":")[0]).read_text("utf-8"), "utf-8")

    def key(server: Server | None = None, seed: int = 0, **values: Any) -> dict[str, Any]:
        named = {key.replace("__", "."): value for key, value in values.items()}
        config = config_for("random", {"env": f"{env}:Rogue", **named}, server)
        return outcome_settings("random", config, server, seed, 1.0)

    assert key() == key(rollout__slots=3) == key(seed=0, steps=7)
    served = "http://127.0.0.1:8000"  # is left alone: the local sampler plays
    assert key() == key(rollout__sampler=served) != key(rollout__sampler="vllm")
    assert (
        key() != key(env__max_turns=3)
        and key() != key(seed=1)
        and key() != key(prompt__think=False)
    )
    one, other = Server("http://127.0.0.1:1/v1"), Server("http://127.0.0.1:2/v1")
    assert key(one) != key(other) and key(one) == key(Server("http://127.0.0.1:1/v1/", timeout_s=9))
    before = key()
    env.write_text(env.read_text("utf-8").replace("reward: Any = 0.25", "reward: Any = 0.5"))
    assert key() != before


def test_a_model_goes_by_what_it_plays_with(tmp_path: Path) -> None:
    files = {"model.safetensors": "w", "tokenizer.json": "t", "chat_template.jinja": "c"}
    for name, text in (files | {"critic.safetensors": "v", "state.json": "s"}).items():
        (tmp_path / name).write_text(text)
    before = hash_model_folder(tmp_path)
    for name in ("critic.safetensors", "state.json"):
        (tmp_path / name).unlink()
    assert hash_model_folder(tmp_path) == before
    for name in files:
        (tmp_path / name).write_text("another")
        assert hash_model_folder(tmp_path) != before
        before = hash_model_folder(tmp_path)


def test_several_environments_and_samples_in_tables(capsys: Capture) -> None:
    line = "eval solver --env bandit,frozen-lake-still --env sokoban --episodes 4 --samples 2"
    assert main([*line.split(), "--markdown", "all.md"]) == 0
    shown = capsys.readouterr().out
    for env in ("bandit", "frozen-lake-still", "sokoban"):
        assert f"{env}, 4 held-out levels × 2" in shown
    assert "pass@2" in shown and shown.count("random play") == shown.count("optimal play") == 3
    assert Path("all.md").read_text("utf-8").count("| solver, T=1 |") == 3
    assert main([*line.split(), "--json"]) == 0
    envs = [json.loads(each)["env"] for each in capsys.readouterr().out.splitlines()]
    assert envs == ["bandit", "frozen-lake-still", "sokoban"]


def test_a_table_by_hand() -> None:
    """Two levels of two samples, 1 and 0 solved; 3 turns of which 2 valid, 4 actions, 2 of use."""
    found, _ = evaluate_target("solver", {"env": "bandit"}, episodes=2, samples=2)
    outcomes = [
        Outcome("bandit", 123, 0, True, 1.0, 1, 2, 1, 1, 6, 10, 5, "solved"),
        Outcome("bandit", 123, 1, False, 0.0, 1, 1, 1, 1, 3, 10, 5, "failed"),
        Outcome("bandit", 124, 0, False, 0.0, 1, 1, 0, 0, 0, 10, 5, "failed"),
        Outcome("bandit", 124, 1, False, 0.0, 0, 0, 0, 0, 0, 0, 0, "request", "it said HTTP 500"),
    ]
    reference = measure_baselines("bandit", {}, Budget(1, 1, 1), [123, 124])
    made = summarize(outcomes, reference, "m", 0.0, 1.0)
    assert (made.success, made.pass_at_k, made.mean_return) == (0.25, 0.5, 0.25)
    assert made.pass_at["1"] == pytest.approx([0.25, 0.0, 1.0]) and made.pass_at["2"][0] == 0.5
    assert (made.valid_fraction, made.effective_fraction) == (2 / 3, 2 / 4)
    assert (made.thought_words, made.completion_tokens, made.mean_turns) == (3.0, 5.0, 0.75)
    section = evaluation_table(made, outcomes, (1000.0, 2000.0))
    assert section.rows[1][:2] == ("m, greedy", "25.0%") and section.columns[4] == "pass@2"
    assert section.rows[0][:2] == ("random play", "50.0%")
    # Half of one of two levels, drawn beside a 0 and a 1; k = 2 is Wilson's of 1 of 2.
    passed = "pass@1 25.0% [0.0%, 100.0%], pass@2 50.0% [9.5%, 90.5%]"
    assert section.lines[2] == f"At least one of k episodes of a level: {passed}."
    # 30 tokens at 1000 and 15 at 2000 a million: 0.03 + 0.03.
    assert section.lines[3] == "Tokens: 30 read, 15 written; at the given prices they cost 0.06."
    assert section.lines[4:] == tuple(describe_failures(outcomes)) and len(section.lines) == 5
    assert found.samples == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--samples 0", "samples = 0: expected a whole number ≥ 1"),
        ("--concurrency 0", "concurrency = 0: expected a whole number ≥ 1"),
        ("--seed=-1", "seed = -1: expected a whole number ≥ 0"),
        ("--env bandit,sokobann", "unknown environment 'sokobann'; did you mean 'sokoban'?"),
        ("--base-url nowhere", "--base-url 'nowhere' is no address"),
        ("--key-env NO_SUCH_KEY --base-url http://127.0.0.1:1/v1", "NO_SUCH_KEY: that environment"),
        ("--rpm 5", "configure an endpoint: add --base-url URL"),
        ("--price-in=-1", "--price-in and --price-out: expected numbers ≥ 0"),
        ("--slip 5", "unknown key 'slip'"),
        ("--markdown no/such/folder.md", "cannot write no/such/folder.md: there is no such folder"),
        ("--markdown .", "cannot write .: is a folder; name a file with --markdown FILE"),
    ],
)
def test_mistakes_are_one_line(arguments: str, words: str, capsys: Capture) -> None:
    assert main(["eval", "random", "--env", "bandit", "--episodes", "2", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert os.listdir() == []


def test_a_page_that_cannot_be_written_in_the_end_is_one_line(capsys: Capture) -> None:
    """What was played is kept all the same."""
    line = "eval random --env bandit --episodes 2 --markdown /dev/full"
    assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.err == "ragen: cannot write /dev/full: no space left on device\n"
    assert "random play" in output.out and os.listdir() == ["evals"]


def test_killed_before_its_result_was_kept(capsys: Capture) -> None:
    command = shlex.split("eval random --env bandit --episodes 4 --samples 2 --json")
    assert main(command) == 0
    with closing(sqlite3.connect(Path("evals", DATABASE))) as connection, connection:
        connection.execute("DELETE FROM evaluations")  # as if it had come to the last episode
    for _ in range(2):
        assert main(command) == 0
    first, *others = map(json.loads, capsys.readouterr().out.splitlines())
    assert [without_seconds(each) for each in others] == [without_seconds(first)] * 2
    assert list(first["pass_at"]) == ["1", "2"]
    with closing(sqlite3.connect(Path("evals", DATABASE))) as connection:
        ((record,),) = connection.execute("SELECT record FROM evaluations").fetchall()
    assert json.loads(record)["pass_at"] == first["pass_at"]
