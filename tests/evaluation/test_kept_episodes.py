"""Evaluations keep their episodes in a folder like a run's."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import dump
from ragen.core.errors import RagenError
from ragen.core.types import Episode
from ragen.evaluation.evaluation import EVALS, evaluate_target
from ragen.evaluation.kept_episodes import KeptEpisodes
from ragen.rollout import endpoint
from ragen.rollout.endpoint import Server
from ragen.settings.saved import run_config
from ragen.settings.target import config_for
from ragen.storage.database import DATABASE
from ragen.storage.stored_episodes import read_episodes
from ragen.storage.stored_episodes import records as records_of
from ragen.viewer.reading import Question, Runs
from ragen.viewer.server import ROUTES
from tests import records
from tests.faulty import Answer, FaultyServer, chat_reply

ROGUE = f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue"
LEFT = "<think>hm</think><answer>Left</answer>"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoint, "TRIES", 2)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)


def ask(path: str, root: Path, **query: Any) -> Any:
    return ROUTES[path](Question(Runs(root), {k: str(v) for k, v in query.items()}))


def levels(folder: Path) -> list[tuple[int, int]]:
    return sorted((each.episode.level_seed, each.episode.member) for each in read_episodes(folder))


def test_an_endpoint_s_episodes_are_kept_with_prompts_and_what_was_wrong() -> None:
    """The second prompt is stored without the messages of the first, and read as a whole."""
    with FaultyServer(
        lambda *_: chat_reply("no\x1b[2J" if len(_[1]["messages"]) < 4 else LEFT)
    ) as s:
        values = {"env": ROGUE, "env.max_turns": 2}
        result, _ = evaluate_target("a/m", values, episodes=2, server=Server(s.url), out=EVALS)
        sent = [json.loads(json.dumps(each["messages"])) for each in s.requests]
    assert result.folder == "evals/m-Rogue-1" and result.valid_fraction == 0.5
    first, second = next(records_of(Path(result.folder)))["turns"]
    assert json.loads(first["messages"]) in sent and json.loads(second["messages"]) in sent
    assert [m["role"] for m in json.loads(second["messages"])] == [
        *("system", "user", "assistant", "user")
    ]
    assert first["reply"] == "no\x1b[2J" and "must be exactly <think>" in first["problem"]
    assert second["problem"] is None and second["valid"]
    assert [each["num_tokens"] for each in (first, second)] == [20, 20]  # the server's counts
    assert all(0 < each["completion_s"] < 60 for each in (first, second))
    with closing(sqlite3.connect(Path(result.folder, DATABASE))) as connection:
        rows = connection.execute("SELECT messages FROM turns WHERE turn = 1").fetchall()
    assert all([m["role"] for m in json.loads(text)] == ["assistant", "user"] for (text,) in rows)


def test_the_viewer_lists_an_evaluation_of_a_run_below_the_run(own_bandit_run: Path) -> None:
    run = own_bandit_run
    assert main(["eval", str(run), "--episodes", "4", "--json"]) == 0
    (folder,) = (run / "evals").iterdir()
    assert folder.name == "bandit-1" and run_config(folder).steps == 0
    listed = {each["run"]: each for each in ask("/api/runs", run)["runs"]}
    assert listed.keys() == {".", "evals/bandit-1"}
    evaluation = listed["evals/bandit-1"]
    assert (evaluation["state"], evaluation["num_episodes"]) == ("finished", 4)
    assert evaluation["success"]["step"] == 0 and evaluation["random"] == 0.5
    found = ask("/api/episode", run, run="evals/bandit-1", episode=1)
    assert found["has_tokens"] and found["turns"][0]["completion_s"] > 0
    assert any(text for text in ask("/api/tokens", run, run="evals/bandit-1", episode=1)["samples"])
    assert main(["export", str(folder), "--episodes", "episodes.jsonl"]) == 0
    assert len(Path("episodes.jsonl").read_text("utf-8").splitlines()) == 4
    # A branch plays on with the model that was evaluated.
    assert main(["branch", str(folder), "1", "--turn", "0", "--n", "1", "--json"]) == 0


def test_an_evaluation_goes_on_in_its_folder_and_another_one_gets_a_new_one() -> None:
    values = {"env": "bandit"}

    def evaluate(**options: Any) -> str:
        return evaluate_target("random", values, out=EVALS, **options)[0].folder

    assert evaluate(episodes=2) == evaluate(episodes=2) == "evals/random-bandit-1"
    before = Path("evals/random-bandit-1", DATABASE).read_bytes()
    assert evaluate(episodes=2, temperature=0.5) == "evals/random-bandit-2"
    assert Path("evals/random-bandit-1", DATABASE).read_bytes() == before
    assert evaluate(episodes=3, samples=2) == "evals/random-bandit-1"
    assert levels(Path("evals/random-bandit-1")) == [
        (k, m) for k in (123, 124, 125) for m in (0, 1)
    ]
    assert evaluate_target("random", values, episodes=2)[0].folder == ""


def test_outcomes_are_read_in_order_and_replaced_by_level_and_sample() -> None:
    config, settings = config_for("random", {"env": "bandit"}), {"seed": 1}
    agent = Path("new"), "random", "bandit", dump(config)

    def played(level: int, sample: int, **changes: Any) -> Episode:
        turns, ends = (records.turn(0.5),), {"terminated": False, "truncated": True}
        episode = Episode("bandit", level, 7, 0, sample, turns, "failed", **ends, success=False)
        return replace(episode, **changes)

    with closing(KeptEpisodes(*agent, settings)) as kept:
        kept.add(played(124, 1, error="half a pair: \ud83d"), None)
        assert not Path("new").exists()
        for level, sample in ((124, 0), (123, 0)):
            kept.add(played(level, sample), None)
    with closing(KeptEpisodes(*agent, settings)) as kept:
        assert [(o.level_seed, o.sample, o.error) for o in kept.known] == [
            *((123, 0, None), (124, 0, None), (124, 1, "half a pair: ?"))
        ]
        kept.add(played(124, 1, success=True), None)
    with closing(KeptEpisodes(*agent, settings)) as kept:
        assert [(o.success, o.reward) for o in kept.known] == [
            *((False, 0.5), (False, 0.5), (True, 0.5))
        ]
        assert kept.folder is not None and len(levels(kept.folder)) == 3
    with closing(KeptEpisodes(*agent, {"seed": 2})) as other:
        assert other.known == [] and other.folder is None


def test_an_unwritable_folder_is_reported_in_one_line() -> None:
    Path("file").write_text("")
    with pytest.raises(RagenError, match=r"cannot make .* with --out$") as caught:
        evaluate_target("random", {"env": "bandit"}, episodes=2, out=Path("file", "evals"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_valid", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reply_is_shown_where_fewer_than_half_are_valid(
    num_valid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four episodes of one turn, of which one or two have a valid reply."""

    def script(number: int, _: dict[str, Any]) -> Answer:
        return chat_reply(LEFT if number < num_valid else "<answer>\x1b[2J</answer>")

    with FaultyServer(script) as server:
        command = f"eval m --base-url {server.url} --env {ROGUE} --episodes 4 --env.max_turns 1"
        assert main(command.split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    said = r"An invalid reply: '<answer>\x1b[2J</answer>'. The reply must be exactly <think>"
    assert (said in shown) == (num_valid == 1)
    assert "ragen view evals/m-Rogue-1" in shown
