"""Loading code that users bring, by name: from a file, a module, or an installed package.

A reference is one of

- ``path/to/file.py:name``: an object in a Python file;
- ``package.module:name``: an object in a module that can be imported;
- ``name``: an entry point of an installed package, in a group such as ``ragen.envs``;
- ``python:name``: an object that was passed in Python and lies in no file (`reference_to`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from ragen.core.beside import package_of, run_beside, sources_of
from ragen.core.errors import RagenError, nearest
from ragen.core.user_code import UserCodeError, boundary

LOAD_S = 60.0
"""Seconds that a file or module may take to be loaded."""

_RAGEN = Path(__file__).parents[1]
_PYTHON = Path(sysconfig.get_path("stdlib")).resolve()


@dataclass(frozen=True, slots=True)
class Loaded:
    """An object that was loaded, and what identifies its code, for the record of a run.

    `source` is the hash of the file and of the user's modules that it imports (`hash_code`), or the
    distribution and version of an entry point.
    """

    object: Any
    source: str


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}


_PASSED: dict[str, Any] = {}
"""Objects that were passed in Python, by their reference."""


def reference_to(value: Any) -> str:
    """The reference by which a config names a class or function that was passed in Python.

    An object at the top level of an imported file is named by that file, so that other processes
    can load it. Any other object, such as one of a notebook or of the script that runs, is
    ``python:name`` and lives as long as this process. In this process, both stand for the object.

    Raises:
        RagenError: The object has no name.
    """
    name = getattr(value, "__qualname__", None)
    if name is None:
        raise RagenError(f"{value!r} is neither a class nor a function")
    try:
        file = Path(inspect.getsourcefile(value) or "")
    except (OSError, TypeError):  # of a notebook or of Python itself
        file = Path()
    imported = value.__module__ != "__main__" and name.isidentifier()
    in_file = imported and file.suffix == ".py" and file.is_file()
    reference = f"{file.resolve()}:{name}" if in_file else f"python:{name}"
    _PASSED[reference] = value
    return reference


def load_object(
    reference: str,
    group: str | None = None,
    *,
    kind: str = "object",
    accepts: Callable[[Any], bool] = lambda value: not isinstance(value, ModuleType),
) -> Loaded:
    """Load what a reference names.

    Args:
        reference: One of the four forms at the head of this module.
        group: Entry-point group of names without a colon; ``None`` accepts no such names.
        kind: The kind of object for messages, such as ``"loss"``.
        accepts: Tests that a value is of that kind; a message suggests only such names.

    Raises:
        RagenError: There is no such file, module, name or entry point, the code raised or took
            longer than `LOAD_S`, or the value is of another kind.
    """
    if reference in _PASSED:
        file = reference.rpartition(":")[0]
        if file.endswith(".py"):
            return Loaded(_PASSED[reference], hash_code(Path(file), Path(file).read_bytes()))
        try:
            text = inspect.getsource(_PASSED[reference])
        except (OSError, TypeError):  # Python does not know the text of every object
            text = ""
        return Loaded(_PASSED[reference], hash_bytes(text.encode()))
    if reference.startswith("python:"):
        raise RagenError(
            f"{reference} was passed in Python by another process: pass it again with ragen.resume "
            "or ragen.train, or define it in a file"
        )
    point = None
    if ":" not in reference:
        points = installed(group) if group is not None else {}
        if reference not in points:
            hint = nearest(reference, points, "path/to/file.py:name names your own")
            raise RagenError(f"unknown {kind} {reference!r}{hint}")
        point = points[reference]
    where, _, name = (point.value if point else reference).rpartition(":")
    module, source = load_module(where.strip())
    if point is not None and point.dist is not None:
        source = f"{point.dist.name} {point.dist.version}"
    value = getattr(module, name.strip(), None)
    if value is None or not accepts(value):
        names = [key for key, each in vars(module).items() if key[0] != "_" and accepts(each)]
        raise RagenError(f"{where} has no {kind} named {name!r}{nearest(name, names)}")
    return Loaded(value, source)


def load_module(where: str) -> tuple[ModuleType, str]:
    """The module of a path or a dotted name, and the hash of its code.

    Whatever program runs, modules in the working directory are found as by ``python -m``.

    Raises:
        RagenError: There is no such file or module, or its code raised or took too long.
    """
    path = Path(where)
    is_path = where.endswith(".py")
    if where.partition(".")[0] != "ragen" and not {"", str(Path.cwd())} & {*sys.path}:
        sys.path.insert(0, str(Path.cwd()))
    if is_path and not path.is_file():
        folder = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise RagenError(f"no file {path}{folder}; your own is named path/to/file.py:name")
    try:
        with boundary("being loaded", LOAD_S):
            if is_path:
                content = path.read_bytes()
                module = _load_file(path, content)
            else:
                module = importlib.import_module(where)
                path = Path(module.__file__ or "")
                content = path.read_bytes() if path.is_file() else b""
    except UserCodeError as failure:
        cause = failure.__cause__
        if isinstance(cause, RagenError):
            raise cause from None
        file = str(path) if is_path else f"{where.replace('.', '/')}.py"
        trace = cause.__traceback__ if cause else None
        places = [(f.filename, f.lineno) for f in extract_tb(trace)]
        if isinstance(cause, SyntaxError):
            places.append((cause.filename or "", cause.lineno))
        lines = [number for name, number in places if name.endswith(file)]
        line = f" (line {lines[-1]})" if lines else ""
        if isinstance(cause, ModuleNotFoundError):
            line += "; install it, or let PYTHONPATH name its folder"
        raise RagenError(f"{where} cannot be loaded: {failure.reason}{line}") from failure
    return module, hash_code(path, content)


def _load_file(path: Path, content: bytes) -> ModuleType:
    # One module for each file and content, helpers included: an edited file is loaded anew, an
    # unchanged one keeps its classes.
    own = path.resolve()
    helpers = hash_bytes(str(own.parent).encode() + _code_beside(own, content, elsewhere=False))
    digest = hash_bytes(f"{own}{helpers}".encode() + content)
    module_name = f"ragen_plugin_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look their module up
    try:
        # Not the loader's `exec_module`, which trusts compiled code of another version of the file
        # with the same size and time: what runs is what was hashed.
        run_beside(content, path, package_of(own.parent, helpers), module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def hash_code(path: Path, content: bytes) -> str:
    """The hash of a file's bytes, and of the user's own modules that it imports.

    These are modules in its folder and modules that were imported from elsewhere, except those of
    installed packages, of Python and of RAGEN. Files that are read as data are not covered.
    """
    return hash_bytes(content + _code_beside(path.resolve(), content))


def _code_beside(own: Path, content: bytes, elsewhere: bool = True) -> bytes:
    """The code of the user's modules that a file imports; without `elsewhere`, of its folder."""
    files, pending = {own: content}, [] if _is_installed(own) else [own]
    while pending:
        file = pending.pop()
        for found in _imported(file, files[file], own.parent, elsewhere) - files.keys():
            files[found] = found.read_bytes()
            pending.append(found)
    del files[own]
    return b"".join(files[file] for file in sorted(files))


def _imported(file: Path, content: bytes, root: Path, elsewhere: bool) -> set[Path]:
    """The user's own files that a file imports, anywhere in it; `root` is the loaded file's."""
    found = set[Path]()
    for level, names in _imports(content):
        folder = file.parents[min(max(level, 1), len(file.parents)) - 1]
        for name in filter(None, names):
            places = sources_of(folder, name)
            if not level:
                places += sources_of(root, name)
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if elsewhere and not level and loaded and Path(loaded).is_file():
                places.append(Path(loaded))
            found |= {place.resolve() for place in places}
    return {each for each in found if each.suffix == ".py" and not _is_installed(each)}


@lru_cache(maxsize=256)  # a run asks several times for the same files
def _imports(content: bytes) -> tuple[tuple[int, list[str]], ...]:
    """The imports anywhere in a file: how many dots each begins with, and the dotted names."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError):  # a module that is never imported
        return ()
    found = list[tuple[int, list[str]]]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.append((0, [alias.name for alias in node.names]))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = (f"{module}.{alias.name}".strip(".") for alias in node.names)
            found.append((node.level, [module, *names]))
    return tuple(found)


def _is_installed(file: Path) -> bool:
    is_package = {"site-packages", "dist-packages"} & set(file.parts)
    return bool(is_package) or file.is_relative_to(_RAGEN) or file.is_relative_to(_PYTHON)


def hash_bytes(content: bytes) -> str:
    """The hash of some bytes, with the name of the function."""
    return f"blake2b:{hashlib.blake2b(content, digest_size=16).hexdigest()}"
