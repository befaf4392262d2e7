#!/bin/sh
# Train an agent on the frozen lake, on any machine with Python 3.11 or newer. Does its own set-up;
# options are those of `ragen train` (./demo.sh --seed 1). On Windows: python scripts/demo.py
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/scripts/setup.sh"
python=$(find_python)
exec "$python" "$root/scripts/demo.py" "$@"
