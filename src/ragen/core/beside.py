"""Modules beside a user's file: `import helper` finds the one in the file's own folder.

Python has one module of a name, and files of two folders may have helpers of the same name. So the
helpers of a loaded file belong to a package of their own, whose folder is the file's. Imports of
helpers are compiled as imports from that package, also inside functions, and in every process.
An import stays as it is where Python's own path leads to the same file.
"""

from __future__ import annotations

import ast
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
from types import CodeType, ModuleType

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


def compiled(content: bytes, path: Path, package: str) -> CodeType:
    """The code of a file whose helpers are in `package`."""
    tree = compile(content, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    tree = ast.fix_missing_locations(_FromPackage(package, path).visit(tree))
    return compile(tree, path, "exec", dont_inherit=True)


class _FromPackage(ast.NodeTransformer):
    def __init__(self, package: str, path: Path) -> None:
        self._package, self._path = package, path.resolve()
        self._folder = Path(sys.modules[package].__path__[0])

    def visit_Import(self, node: ast.Import) -> ast.Import:
        names = list[ast.alias]()
        for each in node.names:
            first = each.name.partition(".")[0]
            if not self._is_beside(first, each.name):
                names.append(each)
                continue
            inside = f"{self._package}.{each.name}"
            names.append(ast.alias(inside, each.asname or (first if first == each.name else None)))
            if each.asname is None and first != each.name:  # `import a.b` names a
                names.append(ast.alias(f"{self._package}.{first}", first))
        node.names = names
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if not node.level and node.module is not None:
            inside = (f"{node.module}.{each.name}" for each in node.names)
            if self._is_beside(node.module.partition(".")[0], node.module, *inside):
                node.module = f"{self._package}.{node.module}"
        return node

    def _is_beside(self, first: str, *names: str) -> bool:
        files = [file for name in names for file in sources_of(self._folder, name)]
        if not files or (files == [self._path] and self._path.parent == self._folder):
            return False  # also where a file has the name of a library that it imports
        known = sys.modules.get(first)
        spec = getattr(known, "__spec__", None) or PathFinder.find_spec(first)
        if spec is None:
            return True
        places = [spec.origin, *(spec.submodule_search_locations or ())]
        found = {Path(place).resolve() for place in places if place}
        own = self._folder / first
        return found.isdisjoint({own, own.with_suffix(".py"), own / "__init__.py"})


class _Loader(SourceFileLoader):
    """Reads the source only: Python's own compiled files hold the imports as they are written."""

    def exec_module(self, module: ModuleType) -> None:
        path, package = Path(self.path), module.__name__.partition(".")[0]
        exec(compiled(path.read_bytes(), path, package), vars(module))


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
