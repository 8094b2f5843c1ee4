"""How much memory a process may still take on this host: containers and services are often given less."""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_memory(own: Path = OWN_CGROUPS, mount: Path = CGROUPS) -> int:
    """Bytes that are free or can be freed, by the host and by every control group that bounds this process.

    Args:
        own: lists the groups of this process, as the kernel does.
        mount: where the groups' files lie.
    """
    lines = own.read_text().splitlines() if own.exists() else []
    return min([psutil.virtual_memory().available, *(left for line in lines for left in _left(line, mount))])


def _left(line: str, mount: Path) -> Iterator[int]:
    """What is left in a group and in those around it; a group that bounds nothing is left out."""
    number, controllers, path = line.split(":", maxsplit=2)
    if number == "0":
        base, limit, usage, cache = mount, "memory.max", "memory.current", "inactive_file"
    elif "memory" in controllers.split(","):
        base = mount / "memory"
        limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    else:
        return
    group = base / path.strip("/")  # in a container the path may be the host's, and lead nowhere here
    for folder in (group, *group.parents):
        if (folder / limit).is_file() and (bound := (folder / limit).read_text().strip()) != "max":
            stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            yield int(bound) - int((folder / usage).read_text()) + int(stat[cache])
        if folder == base:
            return
