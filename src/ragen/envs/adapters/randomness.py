"""The global generators of Python and NumPy, for environments that draw from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class GlobalRandomness:
    """An environment's own states of Python's and NumPy's global generators.

    They are in place only inside `placed`: episodes that take turns draw from separate streams.
    """

    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin new streams. Python's generator takes the number itself, as `random.seed` does."""
        numpys = np.random.RandomState(seed % 2**32)
        self._states = random.Random(seed).getstate(), numpys.get_state()

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Put these states into the global generators, and at the end put back those before."""
        outside = random.getstate(), np.random.get_state()  # noqa: NPY002 - environments use it
        _place(*self._states)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()  # noqa: NPY002
            _place(*outside)


def _place(pythons: object, numpys: object) -> None:
    random.setstate(pythons)  # type: ignore[arg-type]
    np.random.set_state(numpys)  # type: ignore[arg-type]  # noqa: NPY002
