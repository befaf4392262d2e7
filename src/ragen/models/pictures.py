"""How a model reads pictures: its tokens for them, and the pixels that its vision tower gets.

Pixels go through the image processor of the model's folder, in its form for Pillow. A prompt shows
a picture as picture tokens, with tokens of the model around them. Their number follows from the
config, by one rule for each architecture (`RULES`). `ragen.models.loading` compares pixels and
tokens with the model's own forward.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase

from ragen.core.pictures import Picture

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a folder that describe how pictures become pixels; those that exist are kept."""

KEPT_NUMBERS = 2**24
"""Numbers of pixel tensors that a reader keeps (64 MB)."""

Part = int | str
"""A run of picture tokens by its length, or a text."""


class Rule(NamedTuple):
    """How an architecture reads pictures.

    `parts` gives the tokens and texts of a picture in a prompt, from the config and the processor's
    result. `inputs` are the tensors for the vision tower; pictures are stacked along `axis`.
    `has_grid` is true if positions have three axes (M-RoPE), and `sees_ahead` if a picture's tokens
    see all of it.
    """

    parts: Callable[[Any, Mapping[str, Any]], list[Part]]
    inputs: tuple[str, ...] = ("pixel_values",)
    axis: int = 0
    has_grid: bool = False
    sees_ahead: bool = False


def _llava(config: Any, read: Mapping[str, Any]) -> list[Part]:
    vision = config.vision_config
    height, width = read["pixel_values"].shape[-2:]
    patches = (height // vision.patch_size) * (width // vision.patch_size)
    has_class = vision.model_type == "clip_vision_model"
    return [patches + has_class - (config.vision_feature_select_strategy == "default")]


def _qwen(config: Any, read: Mapping[str, Any]) -> list[Part]:
    rows, columns = _grid(config, read)
    return ["<|vision_start|>", rows * columns, "<|vision_end|>"]


def _grid(config: Any, read: Mapping[str, Any]) -> tuple[int, int]:
    _, height, width = read["image_grid_thw"][0].tolist()
    merged = config.vision_config.spatial_merge_size
    return height // merged, width // merged


def _idefics(config: Any, read: Mapping[str, Any]) -> list[Part]:
    vision, around = config.vision_config, "<fake_token_around_image>"
    count = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    parts: list[Part] = []
    num_rows, num_columns = read["rows"][0][0], read["cols"][0][0]
    for row in range(1, num_rows + 1):
        for column in range(1, num_columns + 1):
            parts += [f"{around}<row_{row}_col_{column}>", count]
        parts.append("\n")
    return [*parts, "\n" * bool(parts), f"{around}<global-img>", count, around]


def _gemma(config: Any, read: Mapping[str, Any]) -> list[Part]:
    return ["\n\n<start_of_image>", config.mm_tokens_per_image, "<end_of_image>\n\n"]


QWEN = Rule(_qwen, ("pixel_values", "image_grid_thw"), has_grid=True)
IDEFICS = Rule(_idefics, ("pixel_values", "pixel_attention_mask"), axis=1)
RULES = {
    "llava": Rule(_llava),
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "gemma3": Rule(_gemma, sees_ahead=True),
}
"""The architectures that read pictures, by `model_type`."""


class Reader:
    """The `PictureForm` of a model's chat, and the `PictureReader` of its networks.

    `processor` is an image processor of transformers. `files` are the contents of `FILES`, which
    are saved beside the model's weights.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        files: Mapping[str, bytes],
    ) -> None:
        self._config, self._processor, self._files = config, processor, files
        self._rule = RULES[config.model_type]
        self.axis, self.has_grid = self._rule.axis, self._rule.has_grid
        self.sees_ahead = self._rule.sees_ahead
        self._tokenizer = tokenizer
        self._kept: dict[Picture, tuple[Mapping[str, Any], tuple[int, ...]]] = {}
        self._kept_numbers = 0

    def __call__(self, picture: Picture) -> tuple[int, ...]:
        """All ids of a picture in a prompt."""
        return self._read(picture)[1]

    def __deepcopy__(self, memo: object) -> Reader:
        """Itself: copies of a model read pictures alike."""
        return self

    def count(self, picture: Picture) -> int:
        """The number of its picture tokens."""
        return sum(token < 0 for token in self(picture))

    def grid(self, picture: Picture) -> tuple[int, int] | None:
        """Rows and columns of its tokens, if positions have three axes."""
        return _grid(self._config, self._read(picture)[0]) if self.has_grid else None

    def tensors(self, picture: Picture) -> dict[str, Tensor]:
        """The tensors for the vision tower."""
        read, _ = self._read(picture)
        return {name: read[name] for name in self._rule.inputs if name in read}

    def save(self, folder: Path) -> None:
        """Write the files that describe how pictures become pixels."""
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    def _read(self, picture: Picture) -> tuple[Mapping[str, Any], tuple[int, ...]]:
        """The processor's result for a picture, and its ids in a prompt."""
        if picture in self._kept:
            return self._kept[picture]
        from PIL import Image

        # Idefics3's processor tells into how many parts it cuts a picture.
        about = {"return_row_col_info": True} if "pixel_attention_mask" in self._rule.inputs else {}
        image = Image.fromarray(picture.pixels)
        read = self._processor(images=[image], return_tensors="pt", **about)
        parts = self._rule.parts(self._config, read)
        tokens = iter(picture.token_ids(sum(part for part in parts if isinstance(part, int))))
        ids: list[int] = []
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            if is_text:  # in one piece: a tokenizer may merge two line ends
                ids += self._tokenizer.encode("".join(map(str, run)), add_special_tokens=False)
            else:
                ids += islice(tokens, sum(map(int, run)))
        self._kept_numbers += sum(read[name].numel() for name in self._rule.inputs)
        if self._kept_numbers > KEPT_NUMBERS:
            self._kept_numbers = 0
            self._kept.clear()
        self._kept[picture] = dict(read), tuple(ids)
        return self._kept[picture]


def read_reader(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Reader | None:
    """The reader of a model's folder; ``None`` if the model or the folder reads no pictures.

    Raises:
        Exception: transformers cannot load it.
    """
    files = {file: (folder / file).read_bytes() for file in FILES if (folder / file).is_file()}
    if config.model_type not in RULES or not files:
        return None
    processor = AutoImageProcessor.from_pretrained(
        str(folder), backend="pil", trust_remote_code=False
    )
    return Reader(config, processor, tokenizer, files)


def token_types(model_type: str, is_picture_BT: Tensor) -> dict[str, Tensor]:
    """The argument by which the model's own forward learns which tokens are a picture's."""
    if RULES[model_type].has_grid:
        return {"mm_token_type_ids": is_picture_BT.long()}
    return {"token_type_ids": is_picture_BT.long()} if model_type == "gemma3" else {}
