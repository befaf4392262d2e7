#!/usr/bin/env bash
# Run the tests with the oldest or the newest releases that pyproject.toml allows, in an environment
# of their own: scripts/versions.sh oldest|newest FOLDER [options of pytest]
# torch stays at the version of constraints.txt. verifiers and vLLM, which pin others' versions, are
# left out; so is openenv, whose tests are skipped, and the tests marked ray, vllm and browser.
set -euo pipefail
which=$1 folder=$2
shift 2
cd "$(dirname "$0")/.."
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
grep '^torch==' constraints.txt >"$pins"
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
if [ "$which" = oldest ]; then
    "$folder/bin/python" - >>"$pins" <<'END'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
for name, version in re.findall(r"^([\w.-]+)>=([\d.]+)", "\n".join(wanted), re.M):
    if name not in ("torch", "vllm", "verifiers"):
        print(f"{name}=={version}")
END
fi
"$folder/bin/pip" install -q --upgrade -c "$pins" \
    -e '.[dev,parquet,tensorboard,wandb,minigrid,reasoning-gym,textarena,openenv,mcp,ray]'
exec "$folder/bin/python" -m pytest -n 1 "$@"
