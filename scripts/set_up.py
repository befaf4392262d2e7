"""Makes `.venv` ready with all that RAGEN needs, on any system; demo.py and test.py begin with it.

pip's own environment variables and configuration files are honoured. Any Python reads this file, so
that one that is too old is told so.
"""

import hashlib
import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(extra, *arguments):
    """Run `.venv`'s Python with `arguments`, after a set-up with pip's `extra` ("dev" or "")."""
    if not is_ready(extra):
        lock = take_lock()
        if not is_ready(extra):
            install(extra)
        lock.close()
    command = [str(PYTHON), *arguments, *sys.argv[1:]]
    if os.name != "nt":
        os.execv(command[0], command)
    # On Windows no program takes another's place, and text is not UTF-8 by default.
    os.environ["PYTHONUTF8"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program
    sys.exit(subprocess.call(command))


def is_ready(extra):
    """Whether the set-up was done; one with the extra "dev" serves for everything."""
    stamps = [VENV / "ragen-ready-dev", VENV / ("ragen-ready-" + extra)]
    return PYTHON.exists() and wanted() in [each.read_text() for each in stamps if each.exists()]


def wanted():
    """A checksum of all that decides what gets installed, the place included."""
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
    parts = [*(each.read_bytes() for each in files), os.fsencode(ROOT)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def install(extra):
    """The set-up. The stamp is written last, so one that was interrupted is simply done again."""
    for stamp in VENV.glob("ragen-ready-*"):
        stamp.unlink()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if not (PYTHON.exists() and succeeds(PYTHON, "-m", "pip", "--version", **quiet)):
        require_python()
        say("Making a virtual environment in", VENV)
        if not succeeds(sys.executable, "-m", "venv", "--clear", VENV, stdout=2):
            sys.exit(f"Cannot make {VENV}; see the message above.")
    say("Installing RAGEN and what it needs (once; torch is large)")
    package = f".[{extra}]" if extra else "."
    pip = [PYTHON, "-m", "pip", "install", "-c", "constraints.txt", "-e", package]
    if not succeeds(*pip, stdout=2):
        sys.exit("The installation failed; pip's message above says why. Run this again to go on.")
    (VENV / ("ragen-ready-" + extra)).write_text(wanted())


def require_python():
    """End with one line if this Python cannot make the environment."""
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(
            f"RAGEN needs Python 3.11 or newer; this machine has {version}. "
            "See https://www.python.org/downloads"
        )
    if not all(map(importlib.util.find_spec, ("ensurepip", "venv"))):
        sys.exit(
            f"Python {version} lacks its venv module. "
            f"On Debian or Ubuntu: apt install python{version}-venv"
        )


def take_lock():
    """Let one set-up run at a time. The lock ends with its process, however that ends."""
    waited = False
    while True:
        lock = sqlite3.connect(f"{VENV}.lock", timeout=1 if waited else 0, isolation_level=None)
        try:
            lock.execute("begin exclusive")
            return lock
        except sqlite3.OperationalError as error:
            lock.close()
            if "locked" not in str(error):
                sys.exit(f"Cannot write in {ROOT}: copy RAGEN to a folder of your own. ({error})")
            if not waited:
                say("Waiting for another set-up that is running here")
            waited = True


def succeeds(*command, **streams):
    """Whether a command ends well."""
    return subprocess.call([str(each) for each in command], cwd=str(ROOT), **streams) == 0


def say(*words):
    """Tell what is done; standard output is for results."""
    sys.stderr.write(" ".join(map(str, words)) + "\n")


if __name__ == "__main__":  # set_up.py SCRIPT [ARGUMENT…]
    run("")
