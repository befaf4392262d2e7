"""Looks up known vulnerabilities of the versions in constraints.txt, with pip-audit.

Exit status: 1 if a vulnerability has a fixed version, so that a newer pin mends it; 75 if no
service could be asked; else 0. Vulnerabilities without a fixed version are printed. Needs
`requirements-audit.txt`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints.txt"
SERVICES = ("pypi", "osv")
NOT_RUN = 75
"""EX_TEMPFAIL of sysexits.h."""


def ask(service: str) -> list[dict[str, Any]]:
    """What a service knows of each pin; nothing if it cannot be reached."""
    # With exact pins, and without what they depend on, pip is not needed.
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "-r", str(PINS)]
    options = ["--vulnerability-service", service, "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError, TypeError):
        return []
    return found


def verdict(packages: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """The exit status and the lines that tell why.

    Example:
        >>> found = {"id": "X-1", "fix_versions": ["2"]}
        >>> verdict([{"name": "a", "version": "1", "vulns": [found]}])
        (1, ['a 1: X-1, fixed in 2', 'known: 1 in 1 packages, of which 1 have a fix'])
        >>> verdict([{"name": "a", "skip_reason": "not found"}])[0]
        75
    """
    known = [package for package in packages if "vulns" in package]
    if not known:
        return NOT_RUN, ["no service knows these packages"]
    lines, num_fixed, num_found = [], 0, 0
    for package in known:
        for found in package["vulns"]:
            fixed = ", ".join(found["fix_versions"])
            num_found, num_fixed = num_found + 1, num_fixed + bool(fixed)
            remedy = f"fixed in {fixed}" if fixed else "no fixed version yet"
            lines.append(f"{package['name']} {package['version']}: {found['id']}, {remedy}")
    if unknown := [package["name"] for package in packages if "vulns" not in package]:
        lines.append(f"not asked about: {', '.join(unknown)}")
    lines.append(f"known: {num_found} in {len(known)} packages, of which {num_fixed} have a fix")
    return int(num_fixed > 0), lines


def main() -> int:
    """Ask one service after the other, until one knows something."""
    status, lines = NOT_RUN, [""]
    for service in SERVICES:
        status, lines = verdict(ask(service))
        if status != NOT_RUN:
            break
    print(*lines, sep="\n")  # noqa: T201
    return status


if __name__ == "__main__":
    sys.exit(main())
