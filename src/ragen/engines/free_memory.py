"""How much memory is free: on the GPU, or on this machine within the limits of its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of a control group: its limit, its usage, and the line of ``memory.stat`` that counts the
reclaimable cache; in version 2 (empty controller name) and version 1."""


def available(device: str) -> int | None:
    """Free bytes: of the GPU, or of this machine within the limits of its container.

    ``None`` if the system does not report it.
    """
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    return min([free, *container_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def container_rooms(membership: Path, root: Path) -> Iterator[int]:
    """Bytes left in each control group around this process; cached files count as free.

    `membership` is a file with lines like ``0::/a/b`` (version 2) or ``4:memory:/a/b`` (version 1),
    `root` is where the groups are mounted; in a container often only the innermost is visible.
    """
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controller, place = line.split(":", 2)
        if controller not in GROUP_FILES:
            continue
        mount = root / controller
        inner = mount / place.strip("/")
        for group in (inner, *inner.parents):
            room = _room(group, *GROUP_FILES[controller])
            if room is not None:
                yield room
            if group == mount:
                break


def _room(group: Path, limit: str, usage: str, files: str) -> int | None:
    """Bytes left in one group; ``None`` if it has no limit or does not report it."""
    try:
        most = int((group / limit).read_text())
        stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
        used = int((group / usage).read_text()) - int(stat.get(files, 0))
    except (OSError, ValueError):  # missing, or "max"
        return None
    return max(0, most - used)
