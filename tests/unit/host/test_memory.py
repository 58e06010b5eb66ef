"""The memory that a process may have: the host's, or less where a control group says so."""

from __future__ import annotations

from pathlib import Path

import psutil

from rbln_backend.host.resources import host_memory

MIB = 1 << 20


def machine(root: Path, group: str, mount: str, **files: str) -> Path:
    """A tree with one hierarchy whose ``group`` has ``files``; two underscores are a dot."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    version2 = mount == "/sys/fs/cgroup"
    (proc / "cgroup").write_text(f"{'0:' if version2 else '4:memory'}:{group}\n")
    kind = "cgroup2 cgroup2 rw" if version2 else "cgroup cgroup rw,memory"
    (proc / "mountinfo").write_text(f"30 23 0:26 / {mount} rw,nosuid - {kind}\n")
    folder = root / mount.lstrip("/") / group.lstrip("/")
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return root


def test_without_a_limit_it_is_the_hosts(tmp_path: Path) -> None:
    found = host_memory(machine(tmp_path, "/pod", "/sys/fs/cgroup", memory__max="max\n"))
    assert found.total_bytes == psutil.virtual_memory().total
    assert found.source == "the host's memory"


def test_a_limit_counts_less_what_is_used_and_could_not_be_dropped(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "/pod/container",
        "/sys/fs/cgroup",
        memory__max=f"{100 * MIB}\n",
        memory__current=f"{70 * MIB}\n",
        memory__stat=f"anon {40 * MIB}\ninactive_file {30 * MIB}\n",
    )
    found = host_memory(root)
    assert (found.total_bytes, found.available_bytes) == (100 * MIB, 60 * MIB)
    assert found.source == "the cgroup's limit"


def test_the_group_around_may_leave_less(tmp_path: Path) -> None:
    root = machine(
        tmp_path, "/pod/container", "/sys/fs/cgroup", memory__max="max", memory__current="1"
    )
    (tmp_path / "sys/fs/cgroup/pod/memory.max").write_text(str(50 * MIB))
    (tmp_path / "sys/fs/cgroup/pod/memory.current").write_text(str(60 * MIB))
    found = host_memory(root)
    assert (found.total_bytes, found.available_bytes) == (50 * MIB, 0)


def test_version_1_has_other_names(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "/docker/abc",
        "/sys/fs/cgroup/memory",
        memory__limit_in_bytes=str(64 * MIB),
        memory__usage_in_bytes=str(16 * MIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {4 * MIB}\n",
    )
    found = host_memory(root)
    assert (found.total_bytes, found.available_bytes) == (64 * MIB, 52 * MIB)


def test_no_proc_is_no_limit(tmp_path: Path) -> None:
    assert host_memory(tmp_path).source == "the host's memory"
