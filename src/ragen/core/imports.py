"""Loading modules that stay until the process ends."""

from __future__ import annotations

import gc
import sys
from importlib import import_module


def load_for_good(name: str) -> None:
    """Import a module, and hide every object that exists then from Python's garbage collector.

    torch and transformers make half a million objects. While they are loaded, the collector would
    search these again and again, in a quarter of the time, and free none of them. Objects of other
    modules are hidden, too, so this is for a process that a command has just begun.
    """
    if name in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        import_module(name)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
