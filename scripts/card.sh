#!/bin/sh
# Measure RAGEN on a GPU: tests, speed and memory beside plain transformers, training (docs/gpu.md).
# Needs a Python with torch for that GPU and no network. What else is missing comes from a folder of
# wheels and is installed beside that Python, not into it.
#
#     scripts/card.sh OUT [WHEELS [PHASE…]]
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && cd .. && pwd)
python=${PYTHON:-python3}
if [ $# -eq 0 ]; then
    echo "usage: scripts/card.sh OUT [WHEELS [PHASE…]]" >&2
    exit 2
fi
out=$1 wheels=${2:-}
shift "$(($# < 2 ? 1 : 2))"
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "$wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-cache-dir --target "$site" "$wheels"/*.whl
fi
cd -- "$root"
"$python" setup.py -q egg_info --egg-base "$site" # the version, which trained folders name
export PYTHONPATH="$site:$root/src:$root"
"$python" scripts/card.py "$out" "$@"
