"""A viewer of trained runs, and a browser in which every complaint is a failure.

One run is trained: ``lake`` (FrozenLake with all diagnostics). ``lake-again`` is a copy of it under
other settings, and ``collapse`` the suite's run of Bandit with an alarm. `ragen view` serves them
in a separate process, as a user starts it. All visitors with the same options share a context of
the browser, and with it what it has loaded of the front end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from viewer import BROWSER_OPTIONS, chromium, serve

from ragen.diagnostics.guard import Alarm
from ragen.storage.recorder import Recorder
from tests.browser.visitor import LAKE, WIDE, Visitor
from tests.records import edit_settings
from tests.shared import once, own

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a browser."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


def make_runs(folder: Path, bandit_run: Path) -> None:
    from ragen.config.reading import merge
    from ragen.training.trainer import train

    train(merge("frozen-lake-still", LAKE), folder / "lake")
    again = shutil.copytree(folder / "lake", folder / "lake-again")
    edit_settings(again, "\nseed = 0\n", "\nseed = 1\n")
    edit_settings(again, "\nsteps = 4\n", "\nsteps = 3\n")
    alarm = Alarm("grad_spike", 2, 2, 9.0, 1.0)
    with Recorder.open(shutil.copytree(bandit_run, folder / "collapse")) as recorder:
        recorder.event(2, "alarm", str(alarm), asdict(alarm))


@pytest.fixture(scope="session")
def runs(bandit_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs, a copy of this worker's own."""
    made = once("browser-runs", lambda folder: make_runs(folder, bandit_run))
    return own(made, tmp_path_factory.mktemp("viewer"))


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


@pytest.fixture(scope="session")
def contexts(browser: Any) -> Callable[..., Any]:
    """A context of the browser for each set of options."""
    made: dict[str, Any] = {}

    def context(**options: Any) -> Any:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = browser.new_context(**options)
            made[key].set_default_timeout(10_000)
        return made[key]

    return context


@pytest.fixture
def visitors(
    contexts: Callable[..., Any], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Visitor]]:
    """Opens visitors with other options: an address, a phone, a colour scheme."""
    opened: list[Visitor] = []

    def new(address: str = "", size: tuple[int, int] = WIDE, **options: Any) -> Visitor:
        width, height = size
        options.setdefault("viewport", {"width": width, "height": height})
        address = address or request.getfixturevalue("viewer")
        opened.append(Visitor(contexts(**options), address))
        return opened[-1]

    yield new
    for visitor in opened:
        visitor.close()


@pytest.fixture
def visitor(visitors: Callable[..., Visitor]) -> Visitor:
    """A visitor at a laptop, 1280 × 720."""
    return visitors()
