"""Modules that are loaded for good are hidden from the garbage collector, which stays as it was."""

import gc
import sys

import pytest

from ragen.core.imports import load_for_good


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_left_as_it_was(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    (gc.enable if collects else gc.disable)()
    try:
        load_for_good("this")
        assert "this" in sys.modules
        assert gc.isenabled() == collects
        frozen = gc.get_freeze_count()
        assert frozen > 0
        load_for_good("this")  # is loaded
        assert gc.get_freeze_count() == frozen
        with pytest.raises(ImportError):
            load_for_good("no_such_module")
        assert gc.isenabled() == collects
    finally:
        gc.unfreeze()
        gc.enable()
