"""The embedded models: preparation is deterministic, and the shipped models load and learn."""

import asyncio
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen import train
from ragen.bases import base, screen
from ragen.bases.base import LessonPlayer, new_model, prepare, save, tokenizer_of
from ragen.bases.curriculum import FAMILIES, PARTS, Lesson
from ragen.bases.demonstrations import Demonstrator, Piece, answer, look_up
from ragen.bases.env_base import prepare_env
from ragen.bases.seeing import picture_side, with_sight
from ragen.bases.tokenizer import build
from ragen.chat.chat import Chat
from ragen.core.errors import RagenError
from ragen.core.seeding import BASE_LEVELS, EVAL_LEVELS
from ragen.envs.registry import env_factory
from ragen.models.adapter_folder import hash_tensors
from ragen.models.names import EMBEDDED, base_folder
from ragen.networks.pictures import reader_of
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup

BASES = Path(__file__).parents[2] / "src" / "ragen" / "models" / "bases"


@pytest.fixture
def _few_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four demonstrations a step."""
    few = tuple(replace(stage, episodes=4) for stage in FAMILIES["bandit"])
    monkeypatch.setitem(FAMILIES, "bandit", few)


def hash_of(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return hash_tensors(model.state_dict().items())


@pytest.mark.slow
@pytest.mark.usefixtures("_few_demonstrations")
def test_a_short_preparation_is_deterministic_and_in_the_right_format(tmp_path: Path) -> None:
    lines = list[str]()
    for name in ("a", "b"):  # its stages follow each other in all processes
        prepare("bandit", tmp_path / name, steps=1, watch=lines.append, processes=2)
    assert hash_of(tmp_path / "a") == hash_of(tmp_path / "b")
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    new = (new_model(build(["a"]), 1, seed).state_dict().items() for seed in (0, 1))
    assert len(set(map(hash_tensors, new))) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert (model.config.model_type, model.config.num_key_value_heads) == ("qwen2", 2)
    assert 300_000 < model.num_parameters() < 1_000_000
    assert (tmp_path / "a" / "model.safetensors").stat().st_size < 1_200_000
    assert next(model.parameters()).dtype == torch.float16


def test_preparations_that_cannot_be_saved_are_refused_before_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LessonPlayer, "samples", lambda *_: pytest.fail("a step was taken"))
    monkeypatch.setattr(screen, "EPISODES", 4)
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    for make in (partial(prepare, "bandit"), partial(prepare_env, {"env.name": "bandit"})):
        with pytest.raises(RagenError, match=r"^cannot write .*new: not a directory; free space"):
            make(tmp_path / "file" / "new")
        with pytest.raises(RagenError, match="exists already"):
            make(tmp_path / "there")
    with pytest.raises(RagenError, match="unknown family 'lake'"):
        prepare("lake", tmp_path / "new")


@pytest.mark.usefixtures("_few_demonstrations")
def test_an_interrupted_preparation_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_model: Any, _tokenizer: Any, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(base, "save_model", interrupt)
    monkeypatch.setitem(FAMILIES, "bandit", FAMILIES["bandit"][:1])
    with pytest.raises(KeyboardInterrupt):
        prepare("bandit", tmp_path / "new", steps=1)
    assert not list(tmp_path.iterdir())


def test_a_base_is_saved_in_utf_8_whatever_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is never ASCII: it spells bytes."""
    for method in ("read_text", "write_text"):
        real = getattr(Path, method)

        def strict(path: Path, *text: str, real: Any = real, encoding: str = "ascii") -> Any:
            return real(path, *text, encoding=encoding)

        monkeypatch.setattr(Path, method, strict)
    tokenizer = build(["größer"])
    save(new_model(tokenizer, 1, 0), tokenizer, tmp_path / "base")
    again = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert again.tokenize("größer") == ["größer"]


HASHES = {
    "bandit": "6a08dd4a68bd65ee",
    "frozen-lake-still": "cff6a4d9a6af8712",
    "frozen-lake": "27de360ba9a46bcd",
    "sokoban": "48d240b8ceb47866",
    "frozen-lake-no-skill": "0467c2617e716971",
    "frozen-lake-picture": "daa886b33e835705",
    "sokoban-picture": "f854edbf97e3f179",
    "frozen-lake-parts": "c24af8b375c9bdde",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_lessons_of_the_shipped_models_stay_as_they_are(family: str) -> None:
    """A hash of each stage's first step: other demonstrations would make other models."""
    tokenizer, found = tokenizer_of(family), sha256()
    if side := picture_side(FAMILIES[family][0].lessons[0].setup.make):
        with_sight(new_model(tokenizer, 1, 0), tokenizer, side, 0)
    player = LessonPlayer(Chat(tokenizer, pictures=reader_of(tokenizer)), 0)
    for number, stage in enumerate(FAMILIES[family]):
        for sample in player.samples(stage, number, 0):
            found.update(repr((sample.token_ids, sample.loss_mask, sample.turn_index)).encode())
    assert found.hexdigest()[:16] == HASHES[family]


def test_parser_reads_a_demonstration_as_written() -> None:
    chat = Chat(build())
    demonstrator = Demonstrator(lambda *_: [Piece(" go"), Piece(answer(["Left"]))], chat)
    setup = Setup("lake", env_factory("frozen-lake-still"), turns=2, chat=chat)
    (group,) = asyncio.run(run_groups(demonstrator, setup, [5], 1, (0, "test")))
    turn = group.episodes[0].turns[0]
    assert (turn.thought, turn.actions_executed, turn.valid) == (" go", ("Left",), True)
    assert turn.completion.token_ids is not None
    assert turn.completion.token_ids[-1] in chat.end_ids


def test_demonstrations_exclude_evaluation_boards() -> None:
    make = env_factory("frozen-lake-still")
    lesson = Lesson(look_up, Setup("lake", make))
    env = make()

    def board(level: int) -> str:
        env.reset(seed=level, options={"noise_seed": 0})
        return env.state_key()

    held_out = {board(EVAL_LEVELS + number) for number in range(1024)}
    for level in islice(lesson.levels(0, 0), 50):
        assert level >= BASE_LEVELS and board(level) not in held_out


def test_the_shipped_models_are_small_and_have_cards() -> None:
    folders = sorted(BASES.iterdir())
    assert {folder.name for folder in folders} == set(EMBEDDED.values())
    assert set(FAMILIES) == {*EMBEDDED.values(), "frozen-lake-no-skill", PARTS}
    assert sum((folder / "model.safetensors").stat().st_size for folder in folders) <= 6_500_000
    for folder in folders:
        assert "ragen base" in (folder / "README.md").read_text()
    for env in EMBEDDED:
        assert base_folder(env).is_dir()


@pytest.mark.slow
def test_the_embedded_model_learns_bandit(tmp_path: Path) -> None:
    """From about 50 % success to at least 90 %: a third of the recipe's steps at twice its rate."""
    overrides = {"eval.episodes": 128, "threads": 1, "steps": 20, "update.lr": 1e-3}
    result = train("bandit", overrides, out=tmp_path / "run")
    assert result.before is not None and result.after is not None
    assert result.before.success < 0.7 and result.after.success >= 0.9
