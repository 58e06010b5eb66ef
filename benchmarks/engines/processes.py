"""CPU time and memory of a server's processes: the one that answers HTTP and all below it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSeconds:
    """CPU time that a server has used; `engine` is that of all processes but the HTTP one."""

    http: float
    engine: float

    def since(self, earlier: CpuSeconds) -> CpuSeconds:
        """Return what was used between `earlier` and now."""
        return CpuSeconds(http=self.http - earlier.http, engine=self.engine - earlier.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes over all processes of a server; `pss` divides shared pages among their users."""

    pss: int
    rss: int
    private: int


def descendants(root: int) -> list[int]:
    """Return `root` and every living process below it."""
    children: dict[int, list[int]] = {}
    for pid, fields in _all_stats():
        children.setdefault(int(fields[1]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> CpuSeconds:
    """Return the CPU time of the tree below `root`; that of ended children has 10 ms ticks."""
    tree, http, engine = set(descendants(root)), 0.0, 0.0
    for pid, fields in _all_stats():
        if pid in tree:
            own, ended = _process_cpu_seconds(pid), int(fields[13]) + int(fields[14])
            http, engine = (http + own, engine) if pid == root else (http, engine + own)
            engine += ended / _TICKS_PER_SECOND
    return CpuSeconds(http=http, engine=engine)


def _process_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its ended threads, 0 if it is gone."""
    try:
        # The clock that clock_getcpuclockid of the C library names, which Python lacks.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def memory(root: int) -> Memory:
    """Return what the tree below `root` has in memory, from smaps_rollup."""
    totals = dict.fromkeys(("Pss", "Rss", "Private_Clean", "Private_Dirty"), 0)
    for pid in descendants(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in text.splitlines():
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0]) * 1024
    return Memory(
        pss=totals["Pss"],
        rss=totals["Rss"],
        private=totals["Private_Clean"] + totals["Private_Dirty"],
    )


def _all_stats() -> list[tuple[int, list[str]]]:
    """Return (pid, the fields of /proc/pid/stat after the name) of every living process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name comes in parentheses and may contain anything, blanks included.
        found.append((int(stat.parent.name), text.rpartition(")")[2].split()))
    return found
