"""The cores of a process: its mask, SMT siblings and quotas, on machines described by files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rbln_backend.host.resources import (
    CoreBudget,
    core_budget,
    parse_cores,
)

V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "32 31 0:29 {root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
GROUPS, MOUNTS = "proc/self/cgroup", "proc/self/mountinfo"


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def smt(*siblings: str) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
        for text in siblings
        for cpu in parse_cores(text)
    }


def test_siblings_of_a_core_count_once(tmp_path: Path) -> None:
    root = machine(tmp_path, smt("0,4", "1,5", "2,6", "3,7"))
    assert core_budget(range(8), root) == CoreBudget((0, 1, 2, 3), None)
    # One thread of core 2 and both of core 3.
    assert core_budget([6, 3, 7], root).cores == (3, 6)


def test_without_a_topology_every_processor_is_a_core(tmp_path: Path) -> None:
    assert core_budget([0, 1, 5], tmp_path) == CoreBudget((0, 1, 5), None)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({GROUPS: "0::/\n", MOUNTS: V2_MOUNT, "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({GROUPS: "0::/\n", MOUNTS: V2_MOUNT, "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        # The group around it grants less.
        (
            {
                GROUPS: "0::/pod/box\n",
                MOUNTS: V2_MOUNT,
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                GROUPS: "3:memory:/\n1:cpu,cpuacct:/box\n0::/\n",
                MOUNTS: V1_MOUNT.format(root="/"),
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                GROUPS: "1:cpu:/\n",
                MOUNTS: V1_MOUNT.format(root="/"),
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        # A container that sees the host's name of its group, and only the group itself.
        (
            {
                GROUPS: "1:cpu,cpuacct:/docker/abc\n",
                MOUNTS: V1_MOUNT.format(root="/docker/abc"),
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_the_quota_of_the_cgroups(
    tmp_path: Path, files: Mapping[str, str], quota: float | None
) -> None:
    assert core_budget([0], machine(tmp_path, files)).quota == quota


@pytest.mark.parametrize(
    ("cores", "quota", "num_ranks", "shares", "threads"),
    [
        (2, None, 1, [(0, 1)], [2]),
        (5, None, 2, [(0, 1), (2, 3, 4)], [2, 3]),
        # Fewer cores than ranks: they take turns.
        (2, None, 3, [(0,), (1,), (0,)], [1, 1, 1]),
        # 3.9 processors' worth of time keep three threads busy, not four.
        (8, 3.9, 1, [tuple(range(8))], [3]),
        (8, 4.0, 2, [(0, 1, 2, 3), (4, 5, 6, 7)], [2, 2]),
        (4, 0.5, 1, [(0, 1, 2, 3)], [1]),
    ],
)
def test_ranks_divide_the_cores(
    cores: int,
    quota: float | None,
    num_ranks: int,
    shares: list[tuple[int, ...]],
    threads: list[int],
) -> None:
    budget = CoreBudget(tuple(range(cores)), quota)
    assert [budget.share(rank, num_ranks) for rank in range(num_ranks)] == shares
    assert [budget.threads(rank, num_ranks) for rank in range(num_ranks)] == threads


def test_lists_of_processors() -> None:
    assert parse_cores("8, 0-3,2") == (0, 1, 2, 3, 8)
    for wrong in ("", "a", "3-1", "-1", "1-", "0,,1", "0-99999999"):
        with pytest.raises(ValueError):
            parse_cores(wrong)
