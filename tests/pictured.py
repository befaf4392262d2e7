"""A model that reads pictures, as a chat sees it: a form of pictures, and chats with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ragen.chat.chat import Chat
from ragen.core.pictures import Picture
from tests.tiny import tiny_tokenizer


def patch(shade: int, size: int = 2) -> Picture:
    """A grey picture."""
    return Picture.of(np.full((size, size), shade, np.uint8))


def form(picture: Picture) -> tuple[int, ...]:
    """A token for each row of pixels, between two words."""
    return (3, *picture.token_ids(picture.size[0]), 4)


@cache
def seeing_chat(template: str = "chatml", **options: Any) -> Chat:
    """A chat of a model that reads pictures in this `form`."""
    return Chat(tiny_tokenizer(template), pictures=form, **options)
