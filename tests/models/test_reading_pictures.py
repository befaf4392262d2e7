"""Folders of models that see: what stands for a picture, and what is refused in one line."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from ragen.config.sections import EngineConfig, ModelConfig, RolloutConfig
from ragen.core.errors import RagenError
from ragen.models.hub import read_sizes
from ragen.models.loading import load_policy, load_tokenizer
from ragen.models.memory import Run, rows_of
from ragen.models.pictures import FILES
from tests.seeing import board, folder_of, model_folder, seeing
from tests.shared import own

PARTS = {
    "llava": (16, ""),
    "llava-clip": (16, ""),
    "idefics3": (
        20,
        "<fake_token_around_image><row_1_col_1>*<fake_token_around_image><row_1_col_2>*\n"
        "<fake_token_around_image><row_2_col_1>*<fake_token_around_image><row_2_col_2>*\n\n"
        "<fake_token_around_image><global-img>*<fake_token_around_image>",
    ),
    "qwen2_5_vl": (4, "<|vision_start|>*<|vision_end|>"),
    "qwen3_vl": (4, "<|vision_start|>*<|vision_end|>"),
    "gemma3": (4, "\n\n<start_of_image>*<end_of_image>\n\n"),
}
"""How many picture tokens a board has, and what is around its runs of them."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "llava" else pytest.mark.slow) for kind in PARTS],
)
def test_a_picture_has_the_tokens_that_its_model_expects(kind: str) -> None:
    _, tokenizer = seeing(kind)
    reader, (count, around) = tokenizer.picture_reader, PARTS[kind]
    ids = reader(board(1))
    assert reader.count(board(1)) == count
    assert tuple(token for token in ids if token < 0) == board(1).token_ids(count)
    marks = [
        "*" if token < 0 else tokenizer.decode([token])
        for at, token in enumerate(ids)
        if at == 0 or token >= 0 or ids[at - 1] >= 0
    ]
    assert "".join(marks) == (around or "*")
    assert load_tokenizer(folder_of(kind), "it").picture_reader(board(1)) == ids


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    def refusal(name: str, change: dict[str, object]) -> str:
        folder = own(folder_of("llava"), tmp_path)
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(RagenError) as refused:
            load_policy(folder, "cpu", "float32")
        folder.rename(tmp_path / str(len(list(tmp_path.iterdir()))))
        return str(refused.value)

    processor = FILES[0]
    assert "does not fit its weights" in refusal(processor, {"size": {"height": 64, "width": 64}})
    assert "its picture processor" in refusal(processor, {"image_processor_type": "NoSuch"})
    assert "does not fit its weights" in refusal("config.json", {"image_token_id": 10**6})
    with pytest.raises(RagenError, match=r"\(paligemma\) reads pictures in a way"):
        load_policy(model_folder("paligemma", tmp_path / "prefix"), "cpu", "float32")


def test_a_folder_without_a_picture_processor_reads_text(tmp_path: Path) -> None:
    folder = own(folder_of("llava"), tmp_path)
    (folder / FILES[0]).unlink()
    assert load_tokenizer(folder, "it").picture_reader is None


def test_the_plan_counts_what_is_trained_of_a_tower() -> None:
    sizes = read_sizes(str(folder_of("llava")))

    def gradients(**model: bool) -> int:
        about = ModelConfig(**model), RolloutConfig(), EngineConfig()
        run = Run(sizes, [], *about, "cpu", 1, 800, False, False)
        return next(row.bytes for row in rows_of(run) if row.what == "gradients")

    assert gradients() == 4 * sizes.numbers
    assert gradients(train_vision=False) == 4 * sum(map(prod, sizes.language.values()))
