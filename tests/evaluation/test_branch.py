"""Branching an episode at a recorded turn: the same past and environment, and a new future."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.chat.chat import Chat
from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, FinishReason, Group, Prompt, Turn, fingerprint
from ragen.evaluation import branch as branching
from ragen.evaluation.branch import branch, branch_specs
from ragen.models.loading import save_model
from ragen.rollout.episode import play_episode, require_unchanged
from ragen.rollout.setup import BranchSpec, EpisodeSpec, Setup
from ragen.storage.branches import FILE, Request
from ragen.storage.database import DATABASE
from ragen.storage.recorder import Recorder
from ragen.storage.stored_episodes import Recorded, read_episode
from tests.bandit_model import bandit_model
from tests.records import edit_settings
from tests.records import episode as made_episode
from tests.rogue import Rogue
from tests.shared import own
from tests.tiny import TEMPLATES, tiny_model, tiny_tokenizer
from tests.tolerance import LOGPROB

Capture = pytest.CaptureFixture[str]
Reply = tuple[str, FinishReason]
SPEC = EpisodeSpec(7, 2, 1, (0, "train", 4))
REPLIES: list[Reply] = [
    ("go</think><answer>Right</answer>", "stop"),
    ("no idea", "stop"),
    ("back</think><answer>Left || Right</answer>", "stop"),
    ("on</think><answer>Fly || Right</answer>", "stop"),
    ("I think that", "length"),
]


class ScriptedReplies:
    """A policy with one scripted reply per turn, which it finds by the seed of the prompt."""

    def __init__(self, chat: Chat | None, replies: Sequence[Reply], spec: EpisodeSpec) -> None:
        self.chat = chat
        self.replies = {spec.request_seed(turn): reply for turn, reply in enumerate(replies)}

    async def complete(self, prompt: Prompt) -> Completion:
        text, finish = self.replies[prompt.seed]
        if self.chat is None:
            return Completion(None, None, text, finish, 3)
        ids = (*self.chat.encode(text), *((self.chat.end,) if finish == "stop" else ()))
        logprobs = (-0.5,) * len(ids)
        return Completion(ids, logprobs, text, finish, 3, fingerprint(ids, logprobs))


def make_setup(template: str | None = "chatml", **more: Any) -> Setup:
    drops = bool(more.get("drops_thoughts"))
    chat = template and Chat(tiny_tokenizer(template), history_thoughts="drop" if drops else "keep")
    setup = Setup("corridor", partial(Rogue, slip=0.5), timeout_s=5.0, chat=chat or None)
    return replace(setup, **{"max_length": 4096, "max_tokens": 64, **more})


def play(setup: Setup, replies: Sequence[Reply], spec: EpisodeSpec = SPEC) -> Episode:
    return asyncio.run(play_episode(ScriptedReplies(setup.chat, replies, spec), setup, spec))


def branch_at(episode: Episode, turn: int, **more: Any) -> BranchSpec:
    turns = tuple(
        replace(t, prompt=Prompt((), t.prompt.token_ids, 0, 0, 0, 0)) for t in episode.turns
    )
    branch = BranchSpec(7, 2, 1, SPEC.path, episode.noise_seed, turns[: turn + 1])
    return replace(branch, **more)


# Rollouts that start at a turn.

PROMPTS: list[tuple[str | None, dict[str, Any]]] = [
    *((template, {}) for template in (None, *TEMPLATES)),
    (None, {"window": 2}),
    ("chatml", {"window": 2}),
    ("qwen3", {"drops_thoughts": True}),
    ("llama3", {"max_length": 420}),
    ("chatml", {"style": "paper", "prefilled": False}),
]


@pytest.mark.parametrize(("template", "more"), PROMPTS, ids=str)
def test_a_branch_with_the_same_replies_repeats_the_episode(
    template: str | None, more: dict[str, Any]
) -> None:
    """With the original's replies from any turn on, episode and prompts equal the original's."""
    setup = make_setup(template, **more)
    original = play(setup, REPLIES)
    assert len(original.turns) >= 3
    for turn in range(len(original.turns)):
        assert play(setup, REPLIES, branch_at(original, turn)) == original


@given(st.lists(st.sampled_from(REPLIES), min_size=5, max_size=5), st.data())
def test_a_branch_continues_with_the_budget_and_feedback_of_its_turn(
    replies: list[Reply], data: Any
) -> None:
    setup = make_setup(None, actions=data.draw(st.integers(2, 7)), actions_per_turn=2)
    original = play(setup, replies)
    turn = data.draw(st.integers(0, len(original.turns) - 1))
    other = data.draw(st.lists(st.sampled_from(REPLIES), min_size=5, max_size=5))
    again = play(setup, [*replies[:turn], *other[turn:]], branch_at(original, turn))
    assert again == play(setup, [*replies[:turn], *other[turn:]])
    assert again.turns[:turn] == original.turns[:turn]
    assert sum(len(t.actions_executed) for t in again.turns) <= setup.actions


def test_a_branch_meets_the_noise_of_the_original() -> None:
    setup = make_setup(None, turns=3)
    move: Reply = ("t</think><answer>Right || Right</answer>", "stop")
    futures = set()
    for noise in range(12):
        original = play(setup, [move] * 3, replace(SPEC, group=noise, path=(noise, "x")))
        elsewhere = branch_at(original, 1, path=(1, "other"), member=5)
        again = play(setup, [move] * 3, elsewhere)
        assert [t.observation for t in again.turns] == [t.observation for t in original.turns]
        assert again.noise_seed == original.noise_seed
        futures.add(tuple(t.observation for t in again.turns))
    assert len(futures) > 2  # the noise does differ between episodes


def test_a_conversation_without_token_ids_is_rebuilt_from_its_text() -> None:
    setup = make_setup("chatml")
    original = play(setup, REPLIES)
    silent = [
        replace(t, prompt=Prompt((), None, 0, 0, 0, 0), completion=replace(t.completion, **NO_IDS))
        for t in original.turns
    ]
    again = play(setup, REPLIES, branch_at(original, 0, turns=tuple(silent[:4])))
    assert [t.prompt for t in again.turns] == [t.prompt for t in original.turns]
    assert again.turns[0].completion.token_ids is None  # unknown token ids stay unknown


NO_IDS: dict[str, Any] = {"token_ids": None, "logprobs": None, "fingerprint": None}


def test_a_changed_prompt_is_refused() -> None:
    original = play(make_setup("chatml"), REPLIES)
    ids = original.turns[2].prompt.token_ids or ()
    turns = [*branch_at(original, 2).turns]
    turns[2] = replace(
        turns[2], prompt=replace(turns[2].prompt, token_ids=(*ids[:9], 1, *ids[10:]))
    )
    with pytest.raises(RagenError, match="prompt of turn 2 cannot be rebuilt: its tokens differ"):
        require_unchanged(make_setup("chatml"), branch_at(original, 2, turns=tuple(turns)))
    with pytest.raises(RagenError, match="prompt of turn 0 cannot be rebuilt"):
        require_unchanged(make_setup("llama3"), branch_at(original, 2))
    require_unchanged(make_setup("chatml"), branch_at(original, 2))


def test_a_changed_environment_is_refused() -> None:
    class Forgets(Rogue):
        def set_state(self, state: Any) -> None:
            super().set_state({**state, "where": 3})

    class Breaks(Rogue):
        def set_state(self, state: Any) -> None:
            raise KeyError("no such thing")

    original = play(make_setup("chatml"), REPLIES)
    with pytest.raises(RagenError, match="turn 1 in another state than was recorded"):
        require_unchanged(make_setup("chatml", make=Forgets), branch_at(original, 1))
    with pytest.raises(RagenError, match=r"cannot go back to turn 1: KeyError: 'no such thing'"):
        require_unchanged(make_setup("chatml", make=Breaks), branch_at(original, 1))
    lost = replace(original.turns[1], snapshot=None)
    with pytest.raises(RagenError, match="no snapshot of the environment is kept of turn 1"):
        branch_at(original, 1, turns=(original.turns[0], lost))


# The database.


def test_an_episode_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    episodes = [play(make_setup(template), REPLIES) for template in (None, "chatml", "qwen3")]
    episodes.append(replace(made_episode(stop="error"), error="KeyError: 1"))
    with Recorder.create(tmp_path, "") as recorder:
        recorder.episodes(5, [Group(tuple(episodes[:2]))])
        recorder.episodes(5, [Group(tuple(episodes[2:]))], phase="eval")
    for number, episode in enumerate(episodes, 1):
        result = read_episode(tmp_path, number)
        assert (result.step, result.phase) == (5, "train" if number < 3 else "eval")
        shown = replace(episode, turns=tuple(map(as_stored, episode.turns)))
        assert replace(result.episode, turns=tuple(map(as_stored, result.episode.turns))) == shown
        assert all(result.exact(turn) for turn in range(len(episode.turns))) is (number != 1)


def as_stored(turn: Turn) -> Turn:
    """The turn as the database stores it."""
    prompt = Prompt((), turn.prompt.token_ids, 0, 0, 0, 0)
    return replace(
        turn, prompt=prompt, completion=replace(turn.completion, fingerprint=None), info={}
    )


# Branches of a trained run.


@pytest.fixture
def run(own_bandit_run: Path) -> Path:
    """A run of episodes of one turn, in which branches are stored."""
    return own_bandit_run


@pytest.fixture
def lake(lake_run: Path, tmp_path: Path) -> Path:
    """A run of longer episodes."""
    return own(lake_run, tmp_path)


def rows(run: Path, query: str, file: str = FILE) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(run / file)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def episode_of(run: Path, phase: str, step: int, turns: int) -> int:
    """The id of the episode of a step with the fewest tokens among those of at least `turns`."""
    query = f"SELECT id FROM episodes WHERE phase = '{phase}' AND step = {step}"
    ids = rows(run, f"{query} AND num_turns >= {turns} ORDER BY num_turns, num_tokens", DATABASE)
    return int(ids[0][0])


def tokens(episode: Episode) -> list[Any]:
    return [(t.prompt.token_ids, t.completion.token_ids) for t in episode.turns]


def test_a_greedy_branch_repeats_the_episode(lake: Path) -> None:
    episode = episode_of(lake, "eval greedy", 1, 3)
    result = branch(lake, episode, 1, n=1, checkpoint=1, temperature=0)
    (again,), original = result.episodes, result.original.episode
    assert result.exact and tokens(again) == tokens(original)
    assert [as_stored(t).snapshot for t in again.turns] == [t.snapshot for t in original.turns]
    assert again.stop_reason == original.stop_reason
    assert again.reward == original.reward


def recorded_specs(request: Request, recorded: Recorded, seed: int) -> list[BranchSpec]:
    """Specs with the original's sampling seeds, which repeat the original."""
    played = ("train", recorded.step - 1) if recorded.phase == "train" else ("eval",)
    origin = {"member": recorded.episode.member, "path": (seed, *played)}
    return [replace(spec, **origin) for spec in branch_specs(request, recorded, seed)]


@pytest.mark.parametrize("phase", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_branch_with_the_original_seeds_and_weights_repeats_the_episode(
    lake: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step samples with the weights of the step before, an evaluation with its own."""
    weights = 0 if phase == "train" else 1
    monkeypatch.setattr(branching, "branch_specs", recorded_specs)
    episode = episode_of(lake, phase, 1, 3)
    result = branch(lake, episode, 1, n=1, checkpoint=weights, temperature=1.0)
    (again,), original = result.episodes, result.original.episode
    assert tokens(again) == tokens(original)
    assert again.reward == original.reward
    for one, other in zip(again.turns, original.turns, strict=True):
        assert one.completion.policy_version == other.completion.policy_version == weights
        # Batches of another shape add in another order, so the last bits may differ.
        assert one.completion.logprobs == pytest.approx(other.completion.logprobs, abs=LOGPROB)
        assert one.state_key == other.state_key


def test_branches_share_the_past_and_differ_in_sampled_tokens(lake: Path) -> None:
    episode = episode_of(lake, "train", 1, 2)
    result = branch(lake, episode, 1, n=2, checkpoint=0)
    assert len({str(tokens(each)) for each in result.episodes}) > 1
    for each in result.episodes:
        assert tokens(each)[0] == tokens(result.original.episode)[0]
        assert each.turns[1].prompt.token_ids == result.original.episode.turns[1].prompt.token_ids
        assert each.turns[1].state_key == result.original.episode.turns[1].state_key
    second_turn = tokens(result.episodes[0])[1]
    texts = dict(rows(lake, "SELECT id, text FROM tokens"))
    assert all(token in texts for part in second_turn for token in part)


def test_the_same_request_gives_the_same_branches(run: Path) -> None:
    result = branch(run, 1, 0, n=6, checkpoint=1)
    other = branch(run, 1, 0, n=6, checkpoint=1, seed=1).episodes
    assert list(map(tokens, other)) != list(map(tokens, result.episodes))
    assert branch(run, 1, 0, n=6, checkpoint=1).episodes == result.episodes
    assert rows(run, "SELECT episode, turn, checkpoint, n, seed, exact FROM branches") == [
        (1, 0, 1, 6, seed, 1) for seed in (1, 0)
    ]
    stored = rows(run, 'SELECT phase, step, member FROM episodes WHERE "group" = 2')
    assert stored == [("branch", 1, member) for member in range(6)]


def test_branching_does_not_change_the_database_of_an_active_run(run: Path) -> None:
    def hashed() -> dict[str, str]:
        files = (run / name for name in (DATABASE, f"{DATABASE}-wal"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    with Recorder.open(run) as recorder:
        recorder.event(3, "note", "in the middle of a step")
        before = hashed()
        result = branch(run, 1, 0, n=2)
        assert result.request.checkpoint == 3  # the newest
        assert hashed() == before
        recorder.event(3, "note", "the run continues")


def test_without_checkpoints_the_initial_model_plays(run: Path) -> None:
    with_checkpoint = branch(run, 1, 0, n=3, checkpoint=0)
    shutil.rmtree(run / "checkpoints")
    without = branch(run, 1, 0, n=3)
    assert without.request.checkpoint == 0 and without.episodes == with_checkpoint.episodes


def test_an_episode_without_token_ids_is_branched_from_its_text(run: Path, capsys: Capture) -> None:
    episode = episode_of(run, "eval greedy", 3, 1)
    connection = sqlite3.connect(run / DATABASE)
    ids = ("prompt_ids", "prompt_joins", "completion_ids", "logprobs")
    connection.execute(f"UPDATE turns SET {', '.join(f'{name} = NULL' for name in ids)}")
    connection.commit()
    connection.close()
    line = f"branch {run} {episode} --turn 0 --n 1 --checkpoint 3 --temperature 0"
    assert main(line.split()) == 0
    assert "was rebuilt from text" in capsys.readouterr().out
    assert rows(run, "SELECT exact FROM branches") == [(0,)]
    assert rows(run, "SELECT reply FROM turns") == rows(
        run, f"SELECT reply FROM turns WHERE episode_id = {episode}", DATABASE
    )


def test_branch_command_prints_a_record_or_a_table(run: Path, capsys: Capture) -> None:
    arguments = ["branch", str(run), "1", "--turn", "0", "--n", "3", "--checkpoint", "1"]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["episode"], record["turn"], record["checkpoint"], record["n"]) == (1, 0, 1, 3)
    assert record["id"] == rows(run, "SELECT id FROM branches")[0][0]
    success = [each["success"] for each in record["branches"]]
    assert record["success"]["value"] == pytest.approx(sum(success) / 3)
    assert record["branches"][0]["continuation"][0]["turn"] == 0
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Episode 1 from turn 0 on, checkpoint 1" in shown and "meet the same noise" in shown
    assert [line.split()[0] for line in shown.splitlines()[-4:]].count("original") <= 1


def refusal(capsys: Capture, arguments: str) -> str:
    """What the command says in one line as it exits with 2."""
    assert main(["branch", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_wrong_arguments_are_reported_in_one_line(bandit_run: Path, capsys: Capture) -> None:
    for arguments, words in (
        ("nowhere 1 --turn 0", "nowhere is not a run folder"),
        ("RUN 100000 --turn 0", "has no episode 100000 in its run.sqlite"),
        ("RUN 1 --turn 9", "turn = 9: episode 1 has turns 0 to"),
        ("RUN 1 --turn -1", "--turn: expected a whole number ≥ 0"),
        ("RUN 1 --turn 0 --checkpoint 7", "of step 7; it has those of steps 0, 1, 2, 3"),
        ("RUN 1 --turn 0 --n 0", "--n: expected a whole number from 1 to 64"),
        ("RUN 1 --turn 0 --temperature 1e-4", "temperature = 0.0001: expected 0.001 to 100"),
        ("RUN 1 --turn 0 --temperature nan", "--temperature: expected a number"),
        ("RUN one --turn 0", "argument EPISODE: expected a whole number"),
        ("RUN 1", "the following arguments are required: --turn"),
    ):
        assert words in refusal(capsys, arguments.replace("RUN", str(bandit_run)))
    assert not (bandit_run / FILE).exists()


def test_missing_or_damaged_weights_and_environments_are_reported_in_one_line(
    run: Path, capsys: Capture
) -> None:
    (run / "checkpoints" / "step-3" / "model.safetensors").write_bytes(b"damaged")
    assert "step-3" in refusal(capsys, f"{run} 1 --turn 0")
    shutil.rmtree(run / "checkpoints")
    tokenizer = tiny_tokenizer("llama3")
    save_model(tiny_model(tokenizer), tokenizer, run / "other")
    name, path = 'name = "{}"', 'path = "{}"'
    for form, old, new, words in (
        (name, "bandit", f"{run}/gone.py:World", "no file"),
        (path, str(bandit_model()), f"{run}/gone", "there is no model or run"),
        (path, str(bandit_model()), f"{run}/other", "prompt of turn 0 cannot be rebuilt"),
    ):
        edit_settings(run, form.format(old), form.format(new))
        assert words in refusal(capsys, f"{run} 1 --turn 0")
        edit_settings(run, form.format(new), form.format(old))
    assert not (run / FILE).exists()
