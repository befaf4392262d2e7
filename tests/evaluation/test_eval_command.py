"""`ragen eval`: endpoints, several environments and samples, and resuming without replaying."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.evaluation import evaluation
from ragen.evaluation.baselines import Budget, measure_baselines
from ragen.evaluation.evaluation import EVALS, evaluate_target
from ragen.evaluation.outcomes import Outcome, describe_failures
from ragen.evaluation.results import summarize
from ragen.evaluation.tables import evaluation_table
from ragen.evaluation.targets import outcome_settings
from ragen.models.names import hash_model_folder
from ragen.rollout import endpoint
from ragen.rollout.endpoint import Server
from ragen.settings.target import config_for
from ragen.storage.checkpoint import run_of
from ragen.storage.database import read
from ragen.storage.reader import read_evaluations
from ragen.storage.stored_episodes import read_episodes
from tests.faulty import GOOD, Answer, FaultyServer, api_error, chat_reply

Capture = pytest.CaptureFixture[str]
ROGUE = f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue"
KEY = "sk-test-0123456789abcdef"
LEFT = "<think>hm</think><answer>Left</answer>"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder per test, and waits of milliseconds between retries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoint, "TRIES", 2)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    monkeypatch.delenv(endpoint.KEY_ENV, raising=False)


def solves_by_seed(_: int, body: dict[str, Any]) -> Answer:
    """By the parity of the request's seed, a reply that solves the level or one that moves left."""
    return chat_reply(GOOD if body["seed"] % 2 else LEFT)


def eval_command(
    server: FaultyServer, *more: str, episodes: int = 8, env: str = ROGUE
) -> list[str]:
    return (
        f"eval some/model --base-url {server.url} --env {env} --episodes {episodes} --json"
    ).split() + list(more)


def without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "folder")}


def test_an_endpoint_is_evaluated_once_with_its_tokens(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At most two turns per episode, each of which solves the level or moves one step left."""
    monkeypatch.setenv(endpoint.KEY_ENV, KEY)
    more = shlex.split("--env.max_turns 2 --markdown table.md")
    with FaultyServer(solves_by_seed) as server:
        assert main(eval_command(server, *more, episodes=12)) == 0
        result = json.loads(capsys.readouterr().out)
        turns = len(server.requests)
        assert result["total_prompt_tokens"] == 100 * turns
        assert result["total_completion_tokens"] == 20 * turns
        assert result["mean_turns"] == turns / 12
        assert 0 < result["success"] < 1
        assert (result["optimal"], result["failed"], result["valid_fraction"]) == (1.0, 0, 1.0)
        assert 0 < result["thought_words"] < 3 and 0 < result["effective_fraction"] < 1
        # The same command plays nothing again.
        assert main(eval_command(server, *more, episodes=12)) == 0
        assert without_seconds(json.loads(capsys.readouterr().out)) == without_seconds(result)
        assert len(server.requests) == turns
    page = Path("table.md").read_text("utf-8")
    assert (
        "| random play |" in page and "| some/model, T=1 |" in page and "| optimal play |" in page
    )
    stored_bytes = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"some/model at http://127.0.0.1" in stored_bytes and KEY.encode() not in stored_bytes


def test_an_endpoint_gets_the_full_prompt() -> None:
    with FaultyServer(lambda *_: chat_reply(LEFT)) as server:
        values = {"env": "frozen-lake-still"}
        result, outcomes = evaluate_target("m", values, episodes=1, server=Server(server.url))
    first, second, *_ = server.requests
    system, user = first["messages"]
    assert system["role"] == "system"
    assert "exactly this form: <think> your reasoning </think><answer> action" in user["content"]
    assert "State:\n___P\n__O_\n" in user["content"], "the map, not the named cells"
    assert first["max_tokens"] == 1024
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == LEFT
    assert first["seed"] != second["seed"]
    assert len(outcomes) == 1 and result.valid_fraction == 1.0
    with pytest.raises(RagenError, match="cannot continue a pre-filled reply"):
        config_for("m", {"prompt.prefill": True}, Server("http://127.0.0.1:1/v1"))


def test_failed_requests_are_reported_and_repeated_by_the_same_command(capsys: Capture) -> None:
    failing, more = True, ("--env.max_turns", "2")

    def script(_: int, body: dict[str, Any]) -> Answer:
        fails = failing and body["seed"] % 3 == 0
        return api_error(500, "out of memory") if fails else solves_by_seed(0, body)

    with FaultyServer(script) as server:
        assert main(eval_command(server, "--concurrency", "1", *more)) == 0
        first = json.loads(capsys.readouterr().out)
        num_failed = first["failed_requests"]
        assert 0 < num_failed < 8 and first["failed"] == num_failed and first["episodes"] == 8
        (line,) = first["failures"]
        assert line.startswith(
            f"{num_failed} of 8 episodes failed at the server and count as no succe"
        )
        assert "HTTP 500: out of memory; the same command plays them again" in line
        failing, before = False, len(server.requests)
        assert main(eval_command(server, *more)) == 0
        second = json.loads(capsys.readouterr().out)
        assert 0 < len(server.requests) - before < before, "only the failed episodes"
    assert second["failed"] == 0 and second["failures"] == []
    assert second["success"] > first["success"]


def test_a_server_that_fails_in_every_episode_is_reported_in_one_line(capsys: Capture) -> None:
    def script(_: int, body: dict[str, Any]) -> Answer:
        return chat_reply("?") if len(body["messages"]) == 2 else api_error(500, "no memory")

    with FaultyServer(script) as server:
        assert main(eval_command(server, episodes=2)) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "HTTP 500" in output.err


def test_episodes_that_ended_before_the_server_died_are_kept(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After eight requests the port is closed, which ends the command and fails no episode."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)

    def script(number: int, body: dict[str, Any]) -> Answer:
        if number == 7:
            server._server.socket.shutdown(socket.SHUT_RDWR)
        return replace(solves_by_seed(0, body), headers={"Connection": "close"})

    start = time.monotonic()
    with FaultyServer(script) as server:
        command = eval_command(server, "--env.max_turns", "1", "--concurrency", "1", episodes=99)
        assert main(command) == 2
    assert time.monotonic() - start < 20
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "no longer answers: ConnectError" in output.err
    assert "what was played is kept" in output.err
    stored = read(Path("evals", "model-Rogue-1"), "SELECT stop_reason FROM outcomes")
    assert len(stored) == 8 and ("request",) not in stored


def test_concurrency_limits_requests_at_once() -> None:
    def slowly(_: int, body: dict[str, Any]) -> Answer:
        return Answer(solves_by_seed(0, body).body, wait_s=0.03)

    with FaultyServer(slowly) as server:
        served = Server(server.url)
        values = {"env": ROGUE, "env.max_turns": 1}
        evaluate_target("m", values, episodes=8, server=served, concurrency=3)
        assert 1 < server.max_concurrent <= 3


def fork_command(command: list[str], error: Path) -> int:
    """Run a command in a fork, which needs no imports; returns the id of the process."""
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


def test_a_stopped_evaluation_resumes(capsys: Capture) -> None:
    """After a kill, the same command gives the result of an uninterrupted evaluation.

    The server answers five requests and then nothing until the process has been stopped, so that
    the outcome does not depend on the speed of the machine.
    """
    stopped = threading.Event()

    def script(request: int, body: dict[str, Any]) -> Answer:
        assert request < 5 or stopped.wait(60)
        return solves_by_seed(0, body)

    def stored() -> int:
        with suppress(RagenError):  # the folder or its database is not there yet
            return len(read(Path("evals", "model-Rogue-1"), "SELECT 1 FROM outcomes"))
        return 0

    with FaultyServer(script) as server:
        more = shlex.split("--concurrency 2 --env.max_turns 1")
        command = eval_command(server, *more, episodes=8)
        process = fork_command(command, Path("error"))
        while stored() < 3 and os.waitpid(process, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        stopped.set()
        assert exit_code == -signal.SIGKILL
        done, num_requests = stored(), len(server.requests)
        assert 3 <= done <= 5
        assert main(command) == 0
        resumed = json.loads(capsys.readouterr().out)
        assert len(server.requests) - num_requests == 8 - done
        assert main([*command, "--out", "complete"]) == 0
        assert len(server.requests) - num_requests == 16 - done
    complete = json.loads(capsys.readouterr().out)
    assert without_seconds(resumed) == without_seconds(complete)
    assert complete["episodes"] == 8
    kept = {
        (e.episode.level_seed, e.episode.member) for e in read_episodes(Path(resumed["folder"]))
    }
    assert len(kept) == 8, "the episodes from before and after the stop are in one folder"


def test_an_evaluation_of_more_levels_and_samples_plays_only_the_new_ones() -> None:
    """Random play of a level does not depend on the other levels."""
    played: list[Outcome] = []

    def count(outcome: Outcome, left: int) -> None:
        played.append(outcome)
        assert 0 <= left < 24

    _, before = evaluate_target("random", {"env": "bandit"}, episodes=4, samples=2, out=EVALS)
    result, more = evaluate_target(
        "random", {"env": "bandit"}, episodes=8, samples=3, out=EVALS, on_outcome=count
    )
    fresh, uninterrupted = evaluate_target(
        "random", {"env": "bandit"}, episodes=8, samples=3, out=Path("new")
    )
    assert more == uninterrupted and len(played) == 24
    assert set(before) <= set(more) and played[:8] == before
    assert without_seconds(result.record()) == without_seconds(fresh.record())
    assert {o.success for o in more} == {True, False}
    # c of n = 3 solved: pass@3 is 1 − C(3−c, 3)/C(3, 3), so the share of levels with any.
    solved = {
        level: any(o.success for o in more if o.level_seed == level) for level in range(123, 131)
    }
    assert result.pass_at["3"][0] == sum(solved.values()) / 8 > result.success


def test_evaluations_of_checkpoints_are_stored_in_the_run_and_reused(
    own_bandit_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_bandit_run
    own, first_step = read_evaluations(run), str(run / "checkpoints" / "step-0")
    newest, _ = evaluate_target(str(run), {}, episodes=4, out=run)
    first, _ = evaluate_target(first_step, {}, episodes=4, out=run)
    assert not Path("evals").exists() and read_evaluations(run) == own
    by_step = {each["step"]: each for each in own if each["temperature"] == 1.0}
    for result, step in ((newest, 3), (first, 0)):
        assert result.success == by_step[step]["success"]
        assert result.mean_return == by_step[step]["mean_return"]
    # Outcomes are stored, so that no model is loaded.
    monkeypatch.setattr(evaluation, "load_target", lambda *_: pytest.fail("it was played again"))
    again, _ = evaluate_target(str(run / "checkpoints" / "step-3"), {}, episodes=4, out=run)
    assert without_seconds(again.record()) | {"target": str(run)} == without_seconds(
        newest.record()
    )
    assert run_of(str(run)) == run_of(first_step) == run
    assert run_of("random") is run_of(str(run / "checkpoints")) is None
    assert config_for(first_step, {}) == config_for(str(run), {})


def test_outcome_settings_depend_on_what_changes_outcomes(tmp_path: Path) -> None:
    env = tmp_path / "env.py"
    env.write_text(Path(ROGUE.partition(":")[0]).read_text("utf-8"), "utf-8")

    def key(server: Server | None = None, seed: int = 0, **values: Any) -> dict[str, Any]:
        named = {key.replace("__", "."): value for key, value in values.items()}
        config = config_for("random", {"env": f"{env}:Rogue", **named}, server)
        return outcome_settings("random", config, server, seed, 1.0)

    before = key()
    served = "http://127.0.0.1:8000"  # not contacted: the local sampler plays
    assert before == key(rollout__slots=3, steps=7, rollout__sampler=served)
    for changes in ({"env__max_turns": 3}, {"seed": 1}, {"prompt__think": False}):
        assert key(**changes) != before
    assert key(rollout__sampler="vllm") != before
    one, other = Server("http://127.0.0.1:1/v1"), Server("http://127.0.0.1:2/v1")
    assert key(one) != key(other) and key(one) == key(Server("http://127.0.0.1:1/v1/", timeout_s=9))
    env.write_text(env.read_text("utf-8").replace("reward: Any = 0.25", "reward: Any = 0.5"))
    assert key() != before


def test_hash_of_a_model_folder_covers_weights_tokenizer_and_template(tmp_path: Path) -> None:
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


def test_several_environments_and_samples_are_shown_in_tables(capsys: Capture) -> None:
    line = "eval solver --env bandit,frozen-lake-still --env sokoban --episodes 2 --samples 2"
    assert main([*line.split(), "--markdown", "all.md"]) == 0
    printed = capsys.readouterr().out
    for env in ("bandit", "frozen-lake-still", "sokoban"):
        assert f"{env}, 2 held-out levels × 2" in printed
    assert (
        "pass@2" in printed and printed.count("random play") == printed.count("optimal play") == 3
    )
    assert Path("all.md").read_text("utf-8").count("| solver, T=1 |") == 3


def test_evaluation_table_equals_values_computed_by_hand() -> None:
    """Two levels, two samples each, 1 and 0 solved; 3 turns, 2 valid; 4 actions, 2 effective."""
    result, _ = evaluate_target("solver", {"env": "bandit"}, episodes=2, samples=2)
    outcomes = [
        Outcome("bandit", 123, 0, True, 1.0, 1, 2, 1, 1, 6, 10, 5, "solved"),
        Outcome("bandit", 123, 1, False, 0.0, 1, 1, 1, 1, 3, 10, 5, "failed"),
        Outcome("bandit", 124, 0, False, 0.0, 1, 1, 0, 0, 0, 10, 5, "failed"),
        Outcome("bandit", 124, 1, False, 0.0, 0, 0, 0, 0, 0, 0, 0, "request", "it said HTTP 500"),
    ]
    reference = measure_baselines("bandit", {}, Budget(1, 1, 1), [123, 124])
    summary = summarize(outcomes, reference, "m", 0.0, 1.0)
    assert (summary.success, summary.mean_return) == (0.25, 0.25)
    assert (
        summary.pass_at["1"] == pytest.approx([0.25, 0.0, 1.0]) and summary.pass_at["2"][0] == 0.5
    )
    assert (summary.valid_fraction, summary.effective_fraction) == (2 / 3, 2 / 4)
    assert (summary.thought_words, summary.completion_tokens, summary.mean_turns) == (
        3.0,
        5.0,
        0.75,
    )
    section = evaluation_table(summary, outcomes)
    assert section.rows[1][:2] == ("m, greedy", "25.0%") and section.columns[4] == "pass@2"
    assert section.rows[0][:2] == ("random play", "50.0%")
    # k = 1: .5 and 0, with an added 0 and 1; k = 2: Wilson's interval for 1 of 2.
    passed = "pass@1 25.0% [0.0%, 100.0%], pass@2 50.0% [9.5%, 90.5%]"
    assert section.lines[2] == f"At least one of k episodes of a level: {passed}."
    assert section.lines[3] == "Tokens: 30 read, 15 written."
    assert section.lines[4:] == tuple(describe_failures(outcomes)) and len(section.lines) == 5
    assert result.samples == 2


def test_wrong_arguments_are_reported_in_one_line(capsys: Capture) -> None:
    start = "eval random --env bandit --episodes 2 "
    for arguments, words in (
        ("--samples 0", "argument --samples: expected a whole number from 1"),
        ("--concurrency 0", "argument --concurrency: expected a whole number from 1"),
        ("--seed=-1", "argument --seed: expected a whole number ≥ 0"),
        ("--env bandit,sokobann", "unknown environment 'sokobann'; did you mean 'sokoban'?"),
        ("--base-url nowhere", "--base-url 'nowhere' is not an address"),
        ("--key-env NO_SUCH_KEY --base-url http://127.0.0.1:1/v1", "NO_SUCH_KEY: that environmen"),
        ("--rpm 5", "configure an endpoint: add --base-url URL"),
        ("--slip 5", "unknown key 'slip'"),
        ("--env.mix.sokoban 0.5 --env.mix.bandit 0.5", "name it with --env: sokoban, bandit"),
        ("--markdown no/such/page.md", "cannot write no/such/page.md: there is no such folder"),
        ("--markdown .", "cannot write .: is a folder; name a file with --markdown FILE"),
    ):
        assert main((start + arguments).split()) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert os.listdir() == []
