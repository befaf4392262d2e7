"""Running coroutines from functions that are none, inside and outside an event loop."""

from __future__ import annotations

from typing_extensions import override

from ragen.core.stopping import run_async


class Long:
    """A result whose text would take long to make."""

    @override
    def __repr__(self) -> str:
        raise AssertionError("nobody reads this")


def test_no_text_is_made_of_a_result() -> None:
    """`asyncio.run` makes one of what it returns, in Python 3.11: 2 ms for each episode."""

    async def work() -> Long:
        return Long()

    async def notebook() -> bool:
        return isinstance(run_async(work()), Long)

    assert isinstance(run_async(work()), Long) and run_async(notebook())
