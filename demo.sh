#!/bin/sh
# Train an agent on the frozen lake, on any machine with Python 3.11 or newer. Does its own set-up;
# options are those of `ragen train` (./demo.sh --seed 1).
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/scripts/setup.sh"
set_up ""
exec "$python" -m ragen.cli.main train demo --json "$@"
