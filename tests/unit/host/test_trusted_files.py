"""Code is executed only from files that no other user can have written."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rbln_backend.errors import CorruptArtifactError, UntrustedFileError
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


@AS_ROOT
def test_what_root_has_made_is_for_everybody_and_what_another_has_is_not(entry: Path) -> None:
    """The image: its user is an arbitrary one, its bundle root's, its cache a third one's."""
    os.seteuid(OTHER_UID)
    try:
        assert examine(entry) == ("whole", "")
    finally:
        os.seteuid(0)
    os.chown(entry, 10_001, -1)
    os.seteuid(OTHER_UID)
    try:
        assert examine(entry)[0] == "untrusted"
    finally:
        os.seteuid(0)


@AS_ROOT
def test_a_sticky_folder_is_roots(entry: Path, root: Path) -> None:
    root.chmod(0o1777)
    for path in (root, *root.rglob("*")):
        os.chown(path, OTHER_UID, -1)
    os.seteuid(OTHER_UID)
    try:
        assert examine(entry) == ("untrusted", f"others may write {root} (mode 1777)")
    finally:
        os.seteuid(0)


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
def test_a_file_is_no_link(entry: Path, root: Path, name: str) -> None:
    (entry / name).rename(root / name)
    (entry / name).symlink_to(root / name)
    assert examine(entry)[0] == "damaged"


def test_a_pipe_is_not_waited_for(entry: Path) -> None:
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


def test_nothing_is_made_where_others_may_write(root: Path) -> None:
    before = os.umask(0o002)
    try:
        make_trusted_folder(root / "a" / "b")
        assert (root / "a").stat().st_mode & 0o777 == 0o755
        root.chmod(0o2775)
        with pytest.raises(UntrustedFileError, match="others may write"):
            make_trusted_folder(root / "c" / "d")
    finally:
        os.umask(before)
    assert not (root / "c").exists()


def test_what_is_published_is_closed_to_the_group_whatever_the_umask(root: Path) -> None:
    before = os.umask(0o002)
    try:
        entry = kernel_store(root) / KEY
        make_trusted_folder(entry.parent)
        publish(entry, {LIBRARY: CODE, RECORD: make_record(CODE, "avx2")})
    finally:
        os.umask(before)
    assert examine(entry) == ("whole", "")


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
        cwd=Path(__file__).parents[3],
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
