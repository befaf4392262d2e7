#!/bin/sh
# Run the tests, up to four at a time. Does its own set-up; options are pytest's (./test.sh -m slow, ./test.sh -n 0 tests/rollout).
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/scripts/setup.sh"
set_up dev
cd -- "$root"
# Without Python's cache, each worker would prepare all test files anew: half a minute of a core.
unset PYTHONDONTWRITEBYTECODE
exec "$python" -m pytest -n logical --maxprocesses 4 --dist worksteal "$@"
