"""Modules beside a user's file: `import helper` finds the one in the file's own folder.

Python has one module of a name, and files of two folders may have helpers of the same name. So the
helpers of a loaded file belong to a package of their own, whose folder is the file's. Their code
and the file's have an ``__import__`` that imports helpers from that package, also inside functions,
and in every process. An import stays as it is where Python's own path leads to the same file.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "ragen_beside_"


def sources_of(folder: Path, name: str) -> list[Path]:
    """The files in which a module of this dotted name may be, below a folder."""
    stem = folder / name.replace(".", "/")
    return [each for each in (stem.with_suffix(".py"), stem / "__init__.py") if each.is_file()]


def package_of(folder: Path, digest: str) -> str:
    """The package of the helpers in a folder; `digest` changes with what they hold."""
    name = f"{PREFIX}{digest}".replace(":", "_")
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
    return name


def run_beside(content: bytes, path: Path, package: str, module: ModuleType) -> None:
    """Run the code of a file in its module, where the file's helpers are in `package`."""
    folder, own = Path(sys.modules[package].__path__[0]), path.resolve()

    def find(
        name: str, globals_: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0
    ) -> Any:
        names = (name, *(f"{name}.{each}" for each in wanted or ()))
        if level or not _is_beside(own, folder, names):
            return __import__(name, globals_, locals_, wanted, level)
        found = __import__(f"{package}.{name}", globals_, locals_, wanted)
        return found if wanted else sys.modules[f"{package}.{name.partition('.')[0]}"]

    vars(module)["__builtins__"] = {**vars(builtins), "__import__": find}
    exec(compile(content, path, "exec", dont_inherit=True), vars(module))


def _is_beside(own: Path, folder: Path, names: Sequence[str]) -> bool:
    """True if one of these names is a helper's in a folder, for an import of the file `own`."""
    files = [file for name in names for file in sources_of(folder, name)]
    if not files or (files == [own] and own.parent == folder):
        return False  # also where a file has the name of a library that it imports
    first = names[0].partition(".")[0]
    spec = getattr(sys.modules.get(first), "__spec__", None) or PathFinder.find_spec(first)
    if spec is None:
        return True
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    found = {Path(place).resolve() for place in places if place}
    return found.isdisjoint({folder / first, *sources_of(folder, first)})


class _Loader(SourceFileLoader):
    """Reads the source only: what runs is what was hashed, and it imports helpers."""

    def exec_module(self, module: ModuleType) -> None:
        path = Path(self.path)
        run_beside(path.read_bytes(), path, module.__name__.partition(".")[0], module)


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(PREFIX):
            return None
        kinds = (_Loader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES)
        specs = (FileFinder(folder, *kinds).find_spec(name) for folder in path or ())
        return next((spec for spec in specs if spec is not None), None)
