"""Run the tests, up to four at a time; does its own set-up.

Options are pytest's: `python scripts/test.py -m slow`, `python scripts/test.py -n 0 tests/rollout`.
"""

import os

from set_up import ROOT, run

os.chdir(ROOT)
# Without Python's cache, each worker would prepare all test files anew: half a minute of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
run("dev", "-m", "pytest", "-n", "logical", "--maxprocesses", "4", "--dist", "worksteal")
