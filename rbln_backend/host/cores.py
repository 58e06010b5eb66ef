"""Which processor cores this process may keep busy: its affinity mask, SMT and cgroup quotas.

Only files below ``root`` and the mask are looked at, so that a test can describe another machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rbln_backend.host.cgroups import cgroup_folders


@dataclass(frozen=True, slots=True)
class CoreBudget:
    """CPU resources that the operating system grants this process."""

    cores: tuple[int, ...]
    """One processor number of every core in the mask: the siblings of an SMT core count once."""
    quota: float | None
    """Processors' worth of time that the cgroups allow; None: no limit."""

    def share(self, local_rank: int, num_ranks: int) -> tuple[int, ...]:
        """The cores of one of the ranks on this host; ranks share only if there are too few."""
        count = len(self.cores)
        if num_ranks >= count:
            return (self.cores[local_rank % count],)
        return self.cores[local_rank * count // num_ranks : (local_rank + 1) * count // num_ranks]

    def threads(self, local_rank: int, num_ranks: int) -> int:
        """Return the number of threads of one rank that can run all the time.

        A quota is rounded down: with more threads than it pays for, the kernel stops all of them
        for the rest of each period.
        """
        cores = len(self.share(local_rank, num_ranks))
        paid = cores if self.quota is None else math.floor(self.quota / num_ranks)
        return max(1, min(cores, paid))


def core_budget(mask: Collection[int] | None = None, root: Path = Path("/")) -> CoreBudget:
    """The budget of this process; ``mask`` defaults to its affinity mask."""
    allowed = os.sched_getaffinity(0) if mask is None else mask
    return CoreBudget(_one_per_core(allowed, root), _cpu_quota(root))


def parse_cores(text: str) -> tuple[int, ...]:
    """The processors of a list like ``0-3,8``, ascending; ``ValueError`` for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = int(first)
        high = int(last) if dash else low
        if not 0 <= low <= high < 1 << 16:
            raise ValueError(f"{part.strip()!r} is no range of processors")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def _one_per_core(allowed: Collection[int], root: Path) -> tuple[int, ...]:
    """The lowest allowed processor of each core; one without a topology is a core by itself."""
    seen: set[int] = set()
    cores = []
    for cpu in sorted(allowed):
        if cpu in seen:
            continue
        cores.append(cpu)
        folder = root / "sys/devices/system/cpu" / f"cpu{cpu}" / "topology"
        try:
            seen.update(parse_cores((folder / "thread_siblings_list").read_text()))
        except (OSError, ValueError):
            continue
    return tuple(cores)


def _cpu_quota(root: Path) -> float | None:
    """The least of the quotas of this process's cgroups and of those around them."""
    quotas = [_quota_in(folder) for folder in cgroup_folders("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_in(folder: Path) -> float | None:
    """Of version 2 ``cpu.max`` holds quota and period, of version 1 each has a file."""
    try:
        fields = (folder / "cpu.max").read_text().split()
    except OSError:
        try:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            fields = [(folder / name).read_text().strip() for name in names]
        except OSError:
            return None
    try:
        quota, period = (int(value) for value in fields)
    except ValueError:
        # "max": no limit at this level.
        return None
    return quota / period if quota > 0 and period > 0 else None
