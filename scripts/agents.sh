#!/bin/sh
# Make a virtual environment with the libraries of agents that the slow tests of the gateway run. The
# tests take its interpreter from an environment variable:
#
#     scripts/agents.sh ~/ragen-agents
#     RAGEN_TEST_AGENTS=~/ragen-agents/bin/python ./test.sh -m slow tests/gateway
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/setup.sh"
[ $# -eq 1 ] || die "usage: scripts/agents.sh FOLDER"
base=$(find_python)
"$base" -m venv "$1" || die "Cannot make $1; see the message above."
exec "$1/bin/python" -m pip install -r "$root/scripts/requirements-agents.txt"
