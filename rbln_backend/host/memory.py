"""Memory available to this process: the host's, limited by its control groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from rbln_backend.host.cgroups import cgroup_folders


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes in all and free now; `source` says whose limit it is."""

    total_bytes: int
    available_bytes: int
    source: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The least of what the host and each control group around this process allow.

    A group's unused file cache counts as free: the kernel drops it first.
    """
    memory = psutil.virtual_memory()
    total, available, source = int(memory.total), int(memory.available), "the host's memory"
    for folder in cgroup_folders("memory", root):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= memory.total:
            continue
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        free = max(0, limit - used + _inactive_file(folder))
        if limit < total:
            total, source = limit, "the cgroup's limit"
        available = min(available, free)
    return HostMemory(total, available, source)


def _number(folder: Path, *names: str) -> int | None:
    """Return the limit in the first existing file; None: no limit."""
    for name in names:
        try:
            return int((folder / name).read_text())
        except OSError:
            continue
        except ValueError:
            return None
    return None


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
