"""Pictures of environments: at the places of the observation, checked, and equal in every form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ragen.core.errors import RagenError
from ragen.core.pictures import PLACE, Picture
from ragen.core.user_code import UserCodeError
from ragen.envs import answers
from ragen.envs.checker import check
from ragen.envs.contract import Env
from ragen.envs.registry import make
from ragen.envs.worlds import tiles
from ragen.rollout.guarded import GuardedEnv
from tests.seeing_envs import Seen

SEEN = f"{Path(__file__).parents[1] / 'seeing_envs.py'}:Seen"
BLACK = np.zeros((2, 2, 3), np.uint8)


def played(make: Callable[[], Env]) -> list[tuple[str, tuple[Picture, ...]]]:
    """What is seen in four steps to the right, and again from a snapshot after the first."""
    seen = []
    with closing(GuardedEnv(make, 10.0)) as env:
        env.reset(7, 0)
        env.step("Right")
        seen.append((env.observation, env.pictures))
        _, state = env.state()
        for _ in range(3):
            env.step("Right")
            seen.append((env.observation, env.pictures))
        env.restore(state, seen[0][0])
        seen.append((env.observation, env.pictures))
    return seen


def test_each_place_has_its_picture_in_every_form_of_an_environment() -> None:
    """Asynchronous as well; `test_isolation` has it in a process of its own."""
    first, *later, restored = plain = played(Seen)
    assert first[0] == f"You see {PLACE}." and len(first[1]) == 1
    assert [text for text, _ in later] == [PLACE * 2] * 3
    assert first[1][0].pixels[0, :, 0].tolist() == [0] * 4 + [255] * 4 + [0] * 12
    assert [each[1][1].pixels[0, 0].tolist() for each in later] == [[7, 0, 0]] * 3
    assert restored == first and len({each[0] for _, each in plain}) == 4
    assert played(lambda: make(f"{SEEN}Later")) == plain
    check(Seen())


def test_an_observation_without_pictures_may_spell_a_place() -> None:
    class Blind(Seen):
        def pictures(self) -> Any:
            return ()

    (text, pictures), *_ = played(Blind)
    assert (text, pictures) == ("You see <image>.", ())
    check(Blind())


def test_no_text_of_an_environment_has_a_place_of_ours() -> None:
    assert answers.text(f"ä{PLACE}", "step", "observation") == "ä\ufffd"
    about = {"name": "look", "description": PLACE, "parameters": {}}
    (tool,) = answers.tools([{"type": "function", "function": about}])
    assert tool["function"]["description"] == "\ufffd"


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        (BLACK, "ndarray as its answer: a list"),
        (Image.new("RGB", (2, 2)), "Image as its answer: a list"),
        (None, "NoneType as its answer: a list"),
        (["board.png"], "a picture of type <U9"),
        ([BLACK.astype(float)], "a picture of type float64"),
        ([Image.new("RGB", (0, 3))], "pixels"),
        ([BLACK, BLACK, BLACK], "12 pixels: at most 10 are allowed"),
        ([BLACK, BLACK], "<image> at 1 places, and pictures returned 2"),
    ],
)
def test_a_wrong_answer_is_named(shown: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_PIXELS", 10)

    class Wrong(Seen):
        def pictures(self) -> Any:
            return shown

    with closing(GuardedEnv(Wrong, None)) as env, pytest.raises(UserCodeError, match=problem):
        env.reset(0, 0)
    with pytest.raises(RagenError, match=problem):
        check(Wrong())


def test_the_checker_finds_pictures_that_change_or_do_not_come_back() -> None:
    class Moving(Seen):
        looks = 0

        def pictures(self) -> Any:
            self.looks += 1
            return [np.full((2, 2), self.looks % 256, np.uint8)] * len(super().pictures())

    class Counting(Moving):
        def get_state(self) -> Any:
            return super().get_state() | {"looks": self.looks}

    class Forgetting(Seen):
        """It draws in `step` and `reset`, and its snapshot lacks the drawing."""

        def _look(self) -> str:
            self.drawn = Seen.pictures(self)
            return super()._look()

        def pictures(self) -> Any:
            return self.drawn

    for wrong, rule in (
        (Moving, "pictures must not change by looking"),
        (Counting, "pictures must not change the environment"),
        (Forgetting, "set_state must bring the pictures back"),
    ):
        with pytest.raises(RagenError, match=rule):
            check(wrong())


def test_a_state_that_comes_back_with_other_places_is_refused() -> None:
    with closing(GuardedEnv(Seen, None)) as env:
        env.reset(0, 0)
        _, state = env.state()
        with pytest.raises(UserCodeError, match=r"returned 1 after set_state, .* has 2"):
            env.restore(state, PLACE * 2)


# Boards of tiles.


@pytest.mark.parametrize(
    ("side", "expected"),
    [(8, "98dbfe6625d47a1fea0fa2dad5880104"), (16, "fef72ba94782a2f662bee6c06651dd9b")],
)
def test_all_tiles_look_different_and_the_same_everywhere(side: tiles.Tile, expected: str) -> None:
    """Two tiles differ by 50 levels of a colour or more in an eighth of their values or more."""
    drawn = tiles.tiles(side).astype(int)
    assert len(drawn) == len(tiles.TILES) == 11
    for first, second in combinations(drawn, 2):
        assert (abs(first - second) > 50).mean() >= 1 / 8
    assert Picture.of(tiles.board(["#_PXO√", "SHG@*_"], side)).hash == expected


@pytest.mark.parametrize("name", ["frozen-lake-still", "sokoban"])
@pytest.mark.parametrize("side", [8, 16])
def test_a_board_is_seen_as_it_is(name: str, side: tiles.Tile) -> None:
    """In the same play, what is seen and what is read change together; the rules name no symbol."""
    seeing, reading = make(name, observation="picture", tile=side), make(name)
    assert seeing.shows_pictures and not reading.shows_pictures and reading.pictures() == []
    keys: dict[str, str] = {}
    for each in (seeing, reading):
        each.reset(seed=123)
    for _ in range(20):
        ((pixels,), board) = seeing.pictures(), seeing.drawing() or []
        assert pixels.shape == (len(board) * side, len(board[0]) * side, 3)
        for row, symbols in enumerate(board):
            for column, symbol in enumerate(symbols):
                cell = pixels[row * side :, column * side :][:side, :side]
                assert (cell == tiles.tiles(side)[list(tiles.TILES).index(symbol)]).all()
        keys[Picture.of(pixels).hash] = seeing.state_key()
        action, *_ = reading.solve(9, 9, 1) or []
        answer, expected = seeing.step(action), reading.step(action)
        assert answer == ("<image>", *expected[1:])
        assert seeing.state_key() == reading.state_key() == expected[0]
        if answer[2]:
            break
    assert answer[4]["success"] and len(set(keys.values())) == len(keys) > 1
    assert "picture" in seeing.rules and "symbol" not in seeing.rules and "_" not in seeing.rules
    assert "symbol" in reading.rules and "picture" not in reading.rules
