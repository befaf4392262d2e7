#!/bin/sh
# Run the tests. Does its own set-up; options are pytest's (./test.sh -m slow, ./test.sh tests/test_chat.py).
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/scripts/setup.sh"
set_up dev
cd -- "$root"
exec "$python" -m pytest "$@"
