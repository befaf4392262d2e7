"""A viewer of trained runs, and a browser in which every complaint is a failure.

Three runs are trained in under a minute: ``lake`` (FrozenLake with all diagnostics), ``lake-again``
(the same with another seed) and ``collapse`` (Bandit with a policy that collapses). `ragen view`
serves them in a separate process, as a user starts it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from viewer import BROWSER_OPTIONS, chromium, serve

from tests.browser.visitor import RUNS, WIDE, Visitor, ragen, succeed

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a browser."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the trained runs."""
    folder = tmp_path_factory.mktemp("viewer") / "runs"
    for name, arguments in RUNS.items():
        succeed(ragen("train", *arguments, "--out", folder / name, "--quiet"))
    return folder


@pytest.fixture
def newcomer(runs: Path) -> Iterator[Path]:
    """The folder of a run that a test writes itself; it is deleted after the test.

    A test requests it before its visitor, whose pages are then closed before the folder is deleted.
    """
    folder = runs / "newcomer"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def viewer(runs: Path) -> Iterator[str]:
    """The address of a viewer of `runs`."""
    with serve(runs) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here; install one, or name it in RAGEN_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def visitors(browser: Any, viewer: str) -> Iterator[Callable[..., Visitor]]:
    """Opens visitors with other options: an address, a phone, a colour scheme."""
    opened: list[Visitor] = []

    def new(address: str = viewer, size: tuple[int, int] = WIDE, **options: Any) -> Visitor:
        width, height = size
        options.setdefault("viewport", {"width": width, "height": height})
        opened.append(Visitor(browser, address, **options))
        return opened[-1]

    yield new
    for visitor in opened:
        visitor.close()


@pytest.fixture
def visitor(visitors: Callable[..., Visitor]) -> Visitor:
    """A visitor at a laptop, 1280 × 720."""
    return visitors()
