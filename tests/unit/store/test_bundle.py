"""Bundles: the same bytes everywhere, and nothing taken that is not what it says."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rbln_backend.errors import BundleError, CorruptArtifactError
from rbln_backend.graphs.artifacts import ArtifactStore, graph_store
from rbln_backend.graphs.bundles import (
    Contents,
    audit,
    collect,
    read_archive,
    read_tree,
    unpack,
    write_archive,
    write_bundle,
    write_folder,
)
from rbln_backend.graphs.cache_key import CacheKey
from rbln_backend.graphs.kernel_files import (
    LIBRARY,
    RECORD,
    is_intact,
    kernel_store,
    make_record,
    publish,
)

KEYS = [CacheKey({"model": {"hidden": 8}, "phase": "decode", "bucket": size}) for size in (1, 2)]
KERNEL = "0123456789abcdef" * 2
GIB = 1 << 30


def fill(root: Path) -> Path:
    store = open_store(root)
    for key in KEYS:
        store.store(key, {"program.json": f"program {key.digest}".encode()})
    library = b"\x7fELF code"
    files = {LIBRARY: library, RECORD: make_record(library, "avx2")}
    publish(kernel_store(root) / KERNEL, files)
    return root


def accept(key: CacheKey, files: Mapping[str, bytes]) -> None:
    """Of what a graph says nothing is known here."""


def open_store(root: Path) -> ArtifactStore:
    return ArtifactStore(graph_store(root), max_bytes=GIB, on_event=lambda _: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fill(tmp_path / "filled")


def pack(root: Path, path: Path) -> str:
    return write_bundle(path, collect(root, accept))


def take(bundle: Path, root: Path, *, with_kernels: bool = True) -> object:
    files, _ = read_archive(bundle)
    return unpack(
        Contents.from_files(files, accept), root, max_bytes=GIB, with_kernels=with_kernels
    )


def test_two_stores_of_the_same_content_have_one_digest(tmp_path: Path, root: Path) -> None:
    digest = pack(root, tmp_path / "a.tar")
    assert pack(fill(tmp_path / "other" / "path"), tmp_path / "b.tar") == digest
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert read_archive(tmp_path / "a.tar")[1] == digest
    take(tmp_path / "a.tar", tmp_path / "imported")
    assert pack(tmp_path / "imported", tmp_path / "c.tar") == digest


def test_nothing_of_the_host_is_in_the_archive(tmp_path: Path, root: Path) -> None:
    pack(root, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as archive:
        for member in archive:
            owner = (member.uid, member.gid, member.uname, member.gname, member.mtime)
            assert owner == (0, 0, "", "", 0)
            assert member.mode == (0o755 if member.isdir() else 0o644)


def test_what_was_imported_is_what_was_exported(tmp_path: Path, root: Path) -> None:
    pack(root, tmp_path / "a.tar")
    imported = take(tmp_path / "a.tar", tmp_path / "new")
    assert (imported.graphs, imported.graphs_present, imported.kernels) == (2, 0, 1)  # type: ignore[attr-defined]
    for key in KEYS:
        content = open_store(tmp_path / "new").load(key)
        assert content == {"program.json": f"program {key.digest}".encode()}
    assert is_intact(kernel_store(tmp_path / "new") / KERNEL)
    again = take(tmp_path / "a.tar", tmp_path / "new")
    assert (again.graphs, again.graphs_present, again.kernels) == (0, 2, 0)  # type: ignore[attr-defined]


def test_without_trust_no_code_is_taken(tmp_path: Path, root: Path) -> None:
    pack(root, tmp_path / "a.tar")
    imported = take(tmp_path / "a.tar", tmp_path / "new", with_kernels=False)
    assert (imported.graphs, imported.kernels_left_out) == (2, 1)  # type: ignore[attr-defined]
    assert not kernel_store(tmp_path / "new").exists()


def test_a_damaged_entry_is_replaced_and_a_good_one_kept(tmp_path: Path, root: Path) -> None:
    pack(root, tmp_path / "a.tar")
    entries = {entry.key: entry for entry in open_store(root).entries()}
    (entries[KEYS[0]].path / "program.json").write_bytes(b"damaged")
    before = (entries[KEYS[1]].path / "manifest.json").read_bytes()
    (kernel_store(root) / KERNEL / LIBRARY).write_bytes(b"damaged")
    imported = take(tmp_path / "a.tar", root)
    assert (imported.graphs, imported.graphs_present, imported.kernels) == (1, 1, 1)  # type: ignore[attr-defined]
    assert open_store(root).load(KEYS[0]) is not None
    assert (entries[KEYS[1]].path / "manifest.json").read_bytes() == before
    assert is_intact(kernel_store(root) / KERNEL)


def test_a_folder_is_a_cache_root_and_has_the_digest_of_its_file(
    tmp_path: Path, root: Path
) -> None:
    digest = pack(root, tmp_path / "a.tar")
    folder = tmp_path / "folder"
    assert write_folder(folder, collect(root, accept)) == digest
    assert all(open_store(folder).load(key) is not None for key in KEYS)
    files, found = read_tree(write_and_return(tmp_path / "copy", root))
    assert found == digest
    assert Contents.from_files(files, accept).kernels.keys() == {KERNEL}
    with pytest.raises(BundleError, match="is not empty"):
        write_folder(folder, collect(root, accept))


def write_and_return(folder: Path, root: Path) -> Path:
    write_folder(folder, collect(root, accept))
    return folder


def test_a_choice_must_be_there(tmp_path: Path, root: Path) -> None:
    digests = {KEYS[0].digest}
    assert set(collect(root, accept, digests=digests, kernel_keys=()).graphs) == {KEYS[0]}
    with pytest.raises(BundleError, match="not stored"):
        collect(root, accept, digests={"f" * 32})
    (graph_store(root) / KEYS[0].digest[:2] / KEYS[0].digest / "program.json").write_bytes(b"x")
    with pytest.raises(BundleError, match="damaged"):
        collect(root, accept)


def test_a_root_that_cannot_be_written_is_an_error(tmp_path: Path, root: Path) -> None:
    pack(root, tmp_path / "a.tar")
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="was not stored"):
        take(tmp_path / "a.tar", tmp_path / "file")


def evil(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def link(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("rbln/graphs/link")
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "rbln/../../outside",
        "/rbln/graphs/aa/x",
        "rbln/graphs/../x",
        "rbln//x",
        "rbln/.hidden",
        "rbln/a/b/c/d/e",
        "other/file",
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match="no name of a file"):
        read_archive(evil(tmp_path / "a.tar", (tarfile.TarInfo(name), b"x")))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_only_files_are_taken(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(BundleError, match="not a regular file"):
        read_archive(evil(tmp_path / "a.tar", (link(kind), b"")))


def test_bounds_hold_before_the_memory_is_taken(tmp_path: Path) -> None:
    name = "rbln/graphs/aa/x/y"
    path = evil(tmp_path / "a.tar", (tarfile.TarInfo(name), b"x" * 4096))
    with pytest.raises(BundleError, match="more than 1000 bytes"):
        read_archive(path, max_bytes=1000)
    with path.open("ab") as file:
        file.truncate(1 << 34)
    with pytest.raises(BundleError, match="is larger than"):
        read_archive(path)


def test_what_need_not_end_is_refused() -> None:
    with pytest.raises(BundleError, match="is not a regular file"):
        read_archive(Path("/dev/zero"))


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    members = [(tarfile.TarInfo("rbln/bundle.json"), b"x")] * 2
    with pytest.raises(BundleError, match="twice"):
        read_archive(evil(tmp_path / "a.tar", *members))


def drop_graph(files: dict[str, bytes]) -> None:
    for name in [name for name in files if KEYS[0].digest in name]:
        del files[name]


def drop_program(files: dict[str, bytes]) -> None:
    del files[next(name for name in files if name.endswith("program.json"))]


def change_program(files: dict[str, bytes]) -> None:
    files[next(name for name in files if name.endswith("program.json"))] = b"other"


def change_kernel(files: dict[str, bytes]) -> None:
    files[f"rbln/kernels/{KERNEL}/{LIBRARY}"] = b"other code"


def swap_graphs(files: dict[str, bytes]) -> None:
    """Both are whole, under each other's names."""
    a, b = (f"rbln/graphs/{key.digest[:2]}/{key.digest}" for key in KEYS)
    for name in ("manifest.json", "program.json"):
        files[f"{a}/{name}"], files[f"{b}/{name}"] = files[f"{b}/{name}"], files[f"{a}/{name}"]


def add_unknown_file(files: dict[str, bytes]) -> None:
    files["rbln/usage/x.json"] = b"{}"


@pytest.mark.parametrize(
    "damage",
    [drop_graph, drop_program, change_program, change_kernel, swap_graphs, add_unknown_file],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, root: Path, damage: Callable[[dict[str, bytes]], None]
) -> None:
    files = collect(root, accept).to_files()
    damage(files)
    with (tmp_path / "a.tar").open("wb") as file:
        write_archive(file, files)
    with pytest.raises(BundleError):
        take(tmp_path / "a.tar", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_cut_short_is_refused(tmp_path: Path, root: Path) -> None:
    pack(root, tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    for length in (0, 100, len(data) // 2, len(data.rstrip(b"\0")) - 1):
        (tmp_path / "cut.tar").write_bytes(data[:length])
        with pytest.raises(BundleError):
            take(tmp_path / "cut.tar", tmp_path / "new")


def test_a_graph_that_fails_its_check_is_neither_imported_nor_exported(root: Path) -> None:
    def refuse(key: CacheKey, files: Mapping[str, bytes]) -> None:
        if key == KEYS[1]:
            raise CorruptArtifactError(f"{len(files)} files, and node 3 is wrong")

    with pytest.raises(BundleError, match=rf"{KEYS[1].digest}: 1 files, and node 3 is wrong"):
        Contents.from_files(collect(root, accept).to_files(), refuse)
    with pytest.raises(BundleError, match=r"not exported: .*node 3.*cache verify"):
        collect(root, refuse)
    assert {reason for _, reason in audit(graph_store(root), refuse)} == {
        None,
        "1 files, and node 3 is wrong",
    }
