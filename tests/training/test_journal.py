"""A step that is killed plays only what had not ended, and equals one that was not."""

from __future__ import annotations

from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen.core.pictures import Picture
from ragen.core.types import Call, Completion, Episode, Prompt, Turn
from ragen.rollout.groups import are_independent
from ragen.rollout.setup import make_setup
from ragen.storage.journal import Journal, forget_journals, read, written
from ragen.training.trainer import resume, train
from tests.scripted_policy import ScriptedPolicy
from tests.training.runs import (
    assert_same_results,
    make_config,
    recorded_results,
    rows,
    train_and_kill,
)

CODE = """
import time
from pathlib import Path
from ragen.envs.worlds.bandit import Bandit

class Slow(Bandit):
    waits = "threads"

    def reset(self, *, seed=None, options=None):
        with Path("played").open("a") as file:
            file.write(f"{seed} {(options or {}).get('noise_seed')}\\n")
        return super().reset(seed=seed, options=options)

class Fast(Slow):
    waits = "no"
"""


def played(run: Path) -> Counter[str]:
    """The training episodes of the second step that began since the last call, by their seeds."""
    lines = Path("played").read_text("utf-8").splitlines()
    Path("played").unlink()
    query = "SELECT level_seed || ' ' || noise_seed FROM episodes WHERE step = 2"
    own = {name for (name,) in rows(run, query)}
    return Counter(line for line in lines if line in own)


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(CODE, "utf-8")
    small = {"steps": 2, "rollout__group_size": 2, "rollout__slots": 3, "eval__episodes": 0}
    return small | {"env__name": str(tmp_path / "slow.py:Slow")}


def test_a_step_killed_in_its_rollout_plays_what_had_not_ended(values: dict[str, Any]) -> None:
    config, run = make_config(**values), Path("run")
    train(config, Path("whole"))
    expected = recorded_results(Path("whole"))
    assert played(Path("whole")).total() == 4
    train_and_kill(config, run, (Journal, "add"), 4)
    assert len((run / "journal-2.jsonl").read_bytes().splitlines()) == 3
    Path("played").unlink()
    resume(run)
    assert_same_results(run, expected)
    assert played(run).total() == 1 and not list(run.glob("journal-*"))


class Rounds(ScriptedPolicy):
    """A policy that answers in rounds where environments wait."""

    ordered, is_idle = False, True

    @property
    def in_rounds(self) -> bool:
        return self.ordered

    def seat(self, place: object) -> Any:
        return nullcontext(self)


def test_only_episodes_that_do_not_depend_on_others_are_kept(values: dict[str, Any]) -> None:
    """All environments wait, and the policy is not in rounds."""
    slow, fast = (
        make_setup(
            make_config(**values | {"env__name": values["env__name"].replace("Slow", kind)}), None
        )
        for kind in ("Slow", "Fast")
    )
    on, rounds = ScriptedPolicy(str), Rounds(str)
    assert are_independent(on, [slow, slow]) and not are_independent(on, [slow, fast])
    assert not are_independent(rounds, [slow, slow])


def picture(shade: int) -> Picture:
    return Picture.of(np.full((2, 3, 3), shade, np.uint8))


def turn(ids: tuple[int, ...] | None, *shown: Picture, **more: Any) -> Turn:
    texts = tuple({"role": "user", "content": f"{at} é"} for at in range(len(ids or ())))
    prompt = Prompt(texts, ids, 1, 2, 0.7, 2**62, pictures=shown)
    sampled = None if ids is None else (7, 8)
    logprobs = None if ids is None else (-1e-300, -0.1)
    completion = Completion(sampled, logprobs, "b", "stop", 3, sum(ids or ()))
    given = ("see", prompt, completion, "t", (0, 1), ("a",), (), 0.1, -0.2, True, "k")
    return Turn(*given, **more)


def episode(*turns: Turn, member: int = 0, **more: Any) -> Episode:
    return Episode("e", 2**62, 3, 0, member, turns, "solved", True, False, True, **more)


EPISODES = [
    episode(),
    episode(  # a prompt that grows, one that begins anew, one without ids
        turn((1, 2), picture(1), info={"f1": 0.1, "list": [1, "a"]}, drawing=("#", ".")),
        turn((1, 2, 7, 8, -5), picture(1), picture(2), pictures=(picture(2),)),
        turn((4, 5), snapshot={"a": [1]}, results=("r",)),
        turn(None, info={"nan": float("inf")}),
        others=(turn((4, 5, 6), call=Call(2, "exact", "auxiliary")),),
        final_pictures=(picture(3),),
    ),
]


@pytest.mark.parametrize("made", EPISODES)
def test_what_is_read_is_what_was_written(made: Episode) -> None:
    back = read(written(made))
    assert back == made
    for one, other in zip(back.turns, made.turns, strict=True):
        assert type(one.prompt.messages) is tuple
        for got, given in zip(one.pictures, other.pictures, strict=True):
            assert np.array_equal(got.pixels, given.pixels)


def test_the_size_of_a_long_episode_is_not_quadratic() -> None:
    ids = tuple(range(1000, 1400))
    sizes = [
        len(written(episode(*(turn(ids[: 10 * at]) for at in range(1, count + 1)))))
        for count in (20, 40)
    ]
    assert sizes[1] < 2.2 * sizes[0]


def test_only_whole_lines_of_the_same_origin_count(tmp_path: Path) -> None:
    def journal(origin: str = "a") -> Journal:
        return Journal(tmp_path, 3, origin)

    members = [replace(EPISODES[1], member=member) for member in range(3)]
    with closing(journal()) as first:
        assert first.begin() == {}
        for each in (*members[:2], replace(EPISODES[0], stop_reason="error", member=9)):
            first.add(each)
    path = tmp_path / "journal-3.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])  # killed inside a third line
    with closing(journal()) as second:
        assert list(second.begin().values()) == members[:2]
        second.add(members[2])
    with closing(journal()) as third:
        assert list(third.begin().values()) == members
    path.write_bytes(whole.replace(b"0.7", b"0.8", 1))
    with closing(journal()) as damaged:
        assert damaged.begin() == {} and path.read_bytes() == b""
    path.write_bytes(whole)
    with closing(journal("another attempt")) as other:
        assert other.begin() == {}
    forget_journals(tmp_path, 2)
    assert path.exists()
    forget_journals(tmp_path, 3)
    assert not path.exists()
