"""Setup by demo.sh and test.sh, tested with a fake Python, and the contents of the wheel."""

import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from ragen.config.reading import recipes

ROOT = Path(__file__).parents[1]
SHELL_SCRIPTS = ("demo.sh", "test.sh", "scripts/setup.sh")
SCRIPTS = (*SHELL_SCRIPTS, "scripts/set_up.py", "scripts/demo.py", "scripts/test.py")
RUN = "-n logical --maxprocesses 4 --dist worksteal"

FAKE_PYTHON = r"""#!/bin/sh
# Answers like Python $version. A virtual environment is a copy of this file; installs are logged.
version=@VERSION@ has_venv=@VENV@ log='@LOG@'
case "$*" in
    *'< (3, 11)'*) case "$version" in 3.[0-9] | 3.10 | 2.*) exit 1 ;; esac ;;
    *ensurepip*) [ "$has_venv" = yes ] ;;
    *scripts/*.py*) exec '@REAL@' -c '@AS@' "$0" "$@" ;;
    '-m venv --clear '*) shift 3; mkdir -p "$1/bin"; cp "$0" "$1/bin/python" ;;
    '-m pip --version') [ ! -e "$log.no-pip" ] ;;
    '-m pip install '*) echo "$PWD: $*" >>"$log"; sleep "${INSTALL_S:-0}"; [ ! -e "$log.fail" ] ;;
    *) echo "ran: $*" ;;
esac
"""


# Runs a script by the Python of these tests, which passes for the fake one.
AS_FAKE = """
import importlib.util, os, runpy, sys
sys.executable, *sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
sys.version_info = (*map(int, \"@VERSION@\".split(\".\")), 0)
if \"@VENV@\" == \"no\":
    importlib.util.find_spec = lambda name: None
runpy.run_path(sys.argv[0], run_name=\"__main__\")
"""


class Checkout:
    """A copy of the scripts under a path with a space, and a PATH with one fake Python."""

    def __init__(self, folder: Path, version: str = "3.12", has_venv: bool = True) -> None:
        self.root = folder / "my files" / "ragen"
        self.log = folder / "log"
        (self.root / "scripts").mkdir(parents=True)
        for name in (*SCRIPTS, "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.tools = folder / "bin"
        self.tools.mkdir()
        for tool in ("sh", "mkdir", "dirname", "sleep", "cp"):
            os.symlink(str(shutil.which(tool)), self.tools / tool)
        if version:
            fake = FAKE_PYTHON.replace("@AS@", AS_FAKE).replace("@REAL@", sys.executable)
            fake = fake.replace("@VERSION@", version).replace("@LOG@", str(self.log))
            python = self.tools / "python3"
            python.write_text(fake.replace("@VENV@", "yes" if has_venv else "no"))
            python.chmod(0o755)

    def start(self, script: str, *arguments: str, install_s: float = 0) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["/bin/sh", str(self.root / script), *arguments],
            cwd=self.tools,
            env={"PATH": str(self.tools), "INSTALL_S": str(install_s)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str) -> tuple[int, str, str]:
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @property
    def installs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def test_setup_installs_at_the_first_start_and_after_changes_only(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    code, out, _ = checkout.run("demo.sh", "--seed", "1")
    assert code == 0
    begun = re.fullmatch(r"ran: -m ragen.cli.main train (\S+) --json --seed 1\n", out)
    assert begun and begun[1] in recipes()
    assert checkout.installs == [f"{checkout.root}: -m pip install -c constraints.txt -e ."]
    assert checkout.run("demo.sh")[::2] == (0, "")
    assert len(checkout.installs) == 1
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("new==1.0\n")
    checkout.run("demo.sh")
    assert len(checkout.installs) == 2
    checkout.root = checkout.root.rename(tmp_path / "elsewhere")
    checkout.run("demo.sh")
    assert len(checkout.installs) == 3


def test_test_script_installs_the_dev_extra_and_the_demo_reuses_it(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.run("test.sh", "-k", "a b")[1] == f"ran: -m pytest {RUN} -k a b\n"
    assert checkout.installs[0].endswith("-e .[dev]")
    checkout.run("demo.sh")
    assert len(checkout.installs) == 1


def test_failed_or_interrupted_setup_is_repeated(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    failure = Path(f"{checkout.log}.fail")
    failure.touch()
    code, out, err = checkout.run("demo.sh")
    assert (code, out) == (1, "")
    assert "The installation failed" in err
    failure.unlink()
    process = checkout.start("demo.sh", install_s=30)
    while len(checkout.installs) < 2:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # Its lock ends with it.
    process.communicate()
    assert checkout.run("demo.sh")[0] == 0
    assert len(checkout.installs) == 3


def test_virtual_environment_without_pip_is_recreated(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    python = checkout.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert checkout.run("demo.sh")[0] == 0
    assert len(checkout.installs) == 1


def test_concurrent_setups_install_once(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    processes = [checkout.start("demo.sh", install_s=0.2) for _ in range(3)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(checkout.installs) == 1
    assert sum("Waiting for another set-up" in err for _, err in results) == 2


def test_unsuitable_python_is_reported(tmp_path: Path) -> None:
    for version, has_venv, words in (
        ("", True, "RAGEN needs Python 3.11 or newer; none was found"),
        ("3.9", True, "RAGEN needs Python 3.11 or newer; this machine has 3.9"),
        ("3.12", False, "Python 3.12 lacks its venv module. On Debian or Ubuntu: apt install"),
    ):
        checkout = Checkout(tmp_path / f"{version}-", version, has_venv)
        code, out, err = checkout.run("demo.sh")
        assert (code, out) == (1, "") and words in err


def test_constraints_pin_exact_versions_without_paths_or_urls() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert {"torch==2.13.0", "transformers==5.19.0"} <= set(pins)
    for pin in pins:
        assert pin.count("==") == 1
        assert not set(pin) & set("@/+ ")


def test_scripts_are_posix_sh() -> None:
    shell = shutil.which("dash") or "/bin/sh"
    for name in SHELL_SCRIPTS:
        subprocess.run([shell, "-n", ROOT / name], check=True)
    assert os.access(ROOT / "demo.sh", os.X_OK) and os.access(ROOT / "test.sh", os.X_OK)
    assert "./test.sh 2>&1" in (ROOT / ".ci" / "run").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``PYTHONPATH`` with the files of RAGEN's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=ignore)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True)
    (wheel,) = folder.glob("*.whl")
    ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


IN_A_PROJECT = """
import json, sys
from importlib import resources

import ragen
from ragen.cli.main import main
from ragen.config.reading import merge, presets, recipes

assert ragen.__file__.startswith(sys.argv[1]), ragen.__file__
for name in recipes():
    merge(name)
for name in presets():
    merge(None, {"algorithm": name})
assert main(["train", "bandit", "--dry-run"]) == 0  # reads the embedded model's sizes
bases = resources.files("ragen.models") / "bases"
print(json.dumps([sorted(recipes()), sorted(path.name for path in bases.iterdir())]))
"""


def components(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All components below a part of a bill of materials."""
    for inside in part.get("components", ()):
        yield inside
        yield from components(inside)


@pytest.mark.slow
def test_wheel_contains_what_runs_need_and_lists_the_files_of_others(
    installed: Path, tmp_path: Path
) -> None:
    """Recipes, presets and weights; for the viewer's libraries, hashes and licences."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROJECT, str(installed)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = ROOT / "src" / "ragen" / "config" / "recipes"
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.toml"))
    shipped = sorted(file.as_posix() for file in files)
    bases = sorted(path.name for path in (ROOT / "src" / "ragen" / "models" / "bases").iterdir())
    assert json.loads(done.stdout.splitlines()[-1]) == [shipped, bases]

    (metadata,) = installed.glob("ragen_rl-*.dist-info")
    bill = json.loads((metadata / "sboms" / "ragen-rl.cdx.json").read_text("utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    about = bill["metadata"]["component"]
    assert (about["name"], about["version"]) == (project["name"], project["version"])
    listed = list(components(bill))
    hashes = {part["name"]: part["hashes"][0] for part in listed if part["type"] == "file"}
    vendor = installed / "ragen" / "viewer" / "static" / "vendor"
    listed_files = [path for path in vendor.iterdir() if path.name != "README.md"]
    assert hashes.keys() == {path.relative_to(installed).as_posix() for path in listed_files}
    for path in listed_files:
        found = hashes[path.relative_to(installed).as_posix()]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found == {"alg": "SHA-256", "content": digest}
    libraries = {part["name"]: part for part in listed if part["type"] == "library"}
    assert libraries.keys() == {"htm", "preact", "uplot"}
    assert all(part["licenses"] and part["purl"] for part in libraries.values())
    licences = {path.name for path in (metadata / "licenses").rglob("*LICENSE")}
    assert licences == {"LICENSE"} | {path.name for path in vendor.glob("*.LICENSE")}


def test_audit_fails_for_a_vulnerability_that_has_a_fix_and_says_when_it_could_not_ask() -> None:
    verdict = runpy.run_path(str(ROOT / "scripts" / "audit.py"))["verdict"]
    clean = {"name": "a", "version": "1", "vulns": []}
    found = {"id": "X-1", "fix_versions": []}
    skipped = {"name": "c", "skip_reason": "not found"}
    assert verdict([]) == verdict([skipped]) == (75, ["no service knows these packages"])
    assert verdict([clean])[0] == 0
    status, lines = verdict([clean, clean | {"vulns": [found]}, skipped])
    assert (status, lines[0], lines[1]) == (
        0,
        "a 1: X-1, no fixed version yet",
        "not asked about: c",
    )
    status, lines = verdict([clean | {"vulns": [found | {"fix_versions": ["2", "3"]}]}])
    assert (status, lines[0]) == (1, "a 1: X-1, fixed in 2, 3")
    assert lines[-1] == "known: 1 in 1 packages, of which 1 have a fix"
