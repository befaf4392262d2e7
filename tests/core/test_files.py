"""A file or folder appears complete or not at all; errors name the file, reason and remedy."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from ragen.core.errors import RagenError
from ragen.core.files import file_errors, flush, whole_file, whole_folder


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before")
    with pytest.raises(KeyError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert path.read_text() == "before"
    with whole_file(path) as temporary:
        assert temporary.suffix == ".md"
        temporary.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_symlink_is_kept_and_its_target_is_replaced(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_text("before")
    link.symlink_to(path)
    with whole_file(link) as temporary:
        temporary.write_text("after")
    assert link.is_symlink() and path.read_text() == "after"


def test_a_device_is_written_directly() -> None:
    with whole_file(Path("/dev/null")) as path:
        assert path == Path("/dev/null")


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(KeyError), whole_folder(target) as folder:
        (folder / "config.json").write_text("{}")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with whole_folder(target) as folder:
        (folder / "config.json").write_text("{}")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_an_error_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "file"
    with (
        pytest.raises(RagenError, match=r"^cannot write .*file: no such file or directory; do it$"),
        file_errors("write", path, "do it"),
        whole_file(path) as temporary,
    ):
        temporary.write_text("x")


def test_too_many_open_files_are_no_fault_of_the_file() -> None:
    with pytest.raises(OSError, match="too many"), file_errors("read", "a.txt"):
        raise OSError(errno.EMFILE, "too many")


def test_on_windows_no_folder_is_opened_and_files_are_flushed_by_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Path, int]] = []
    (tmp_path / "file").touch()
    real = os.open
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(
        os, "open", lambda path, flags: opened.append((path, flags)) or real(path, flags)
    )
    flush(tmp_path)
    flush(tmp_path / "file")
    assert opened == [(tmp_path / "file", os.O_RDWR)]
