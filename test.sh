#!/bin/sh
# Run the tests, up to four at a time. Does its own set-up; options are pytest's (./test.sh -m slow, ./test.sh -n 0 tests/rollout).
# On Windows: python scripts/test.py
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/scripts/setup.sh"
python=$(find_python)
exec "$python" "$root/scripts/test.py" "$@"
