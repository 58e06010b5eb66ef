"""Bundles: the same bytes everywhere, and nothing taken that is not what it says."""

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.errors import BundleError, CorruptArtifactError
from rbln_backend.graphs import cache
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
from rbln_backend.graphs.cache import (
    BINARIES,
    MANIFEST,
    ArtifactStore,
    CacheKey,
    JsonValue,
    StoreEvent,
    canonical_json,
    diff,
    graph_store,
)
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
    # Without trust no code is taken.
    trusted = take(tmp_path / "a.tar", tmp_path / "other", with_kernels=False)
    assert (trusted.graphs, trusted.kernels_left_out) == (2, 1)  # type: ignore[attr-defined]
    assert not kernel_store(tmp_path / "other").exists()


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
    write_folder(tmp_path / "copy", collect(root, accept))
    files, found = read_tree(tmp_path / "copy")
    assert found == digest
    assert Contents.from_files(files, accept).kernels.keys() == {KERNEL}
    with pytest.raises(BundleError, match="is not empty"):
        write_folder(folder, collect(root, accept))


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


@pytest.mark.parametrize(
    "name",
    [
        *"../outside rbln/../../outside /rbln/graphs/aa/x rbln/graphs/../x rbln//x".split(),
        *"rbln/.hidden rbln/a/b/c/d/e other/file".split(),
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match="no name of a file"):
        read_archive(evil(tmp_path / "a.tar", (tarfile.TarInfo(name), b"x")))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_only_files_are_taken(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("rbln/graphs/link")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(BundleError, match="not a regular file"):
        read_archive(evil(tmp_path / "a.tar", (member, b"")))


def test_bounds_hold_before_the_memory_is_taken(tmp_path: Path) -> None:
    name = "rbln/graphs/aa/x/y"
    path = evil(tmp_path / "a.tar", (tarfile.TarInfo(name), b"x" * 4096))
    with pytest.raises(BundleError, match="more than 1000 bytes"):
        read_archive(path, max_bytes=1000)
    with path.open("ab") as file:
        file.truncate(1 << 34)
    with pytest.raises(BundleError, match="is larger than"):
        read_archive(path)
    # It need not end.
    with pytest.raises(BundleError, match="is not a regular file"):
        read_archive(Path("/dev/zero"))
    members = [(tarfile.TarInfo("rbln/bundle.json"), b"x")] * 2
    with pytest.raises(BundleError, match="twice"):
        read_archive(evil(tmp_path / "b.tar", *members))


def swap_graphs(files: dict[str, bytes]) -> None:
    """Both are whole, under each other's names."""
    a, b = (f"rbln/graphs/{key.digest[:2]}/{key.digest}" for key in KEYS)
    for name in ("manifest.json", "program.json"):
        files[f"{a}/{name}"], files[f"{b}/{name}"] = files[f"{b}/{name}"], files[f"{a}/{name}"]


def programs(files: dict[str, bytes]) -> list[str]:
    return [name for name in files if name.endswith("program.json")]


DAMAGES: dict[str, Callable[[dict[str, bytes]], object]] = {
    "a graph": lambda files: [files.pop(n) for n in [*files] if KEYS[0].digest in n],
    "a program": lambda files: files.pop(programs(files)[0]),
    "another program": lambda files: files.update({programs(files)[0]: b"other"}),
    "a kernel": lambda files: files.update({f"rbln/kernels/{KERNEL}/{LIBRARY}": b"other code"}),
    "names": swap_graphs,
    "an unknown file": lambda files: files.update({"rbln/usage/x.json": b"{}"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_refused(tmp_path: Path, root: Path, damage: str) -> None:
    files = collect(root, accept).to_files()
    DAMAGES[damage](files)
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


# ---------------------------------------------------------------------------------------- cache key
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_the_canonical_form_is_fixed() -> None:
    value: JsonValue = {"b": [1, 2.5, None], "a": {"y": True, "x": "\u00e9"}}
    assert canonical_json(value) == b'{"a":{"x":"\\u00e9","y":true},"b":[1,2.5,null]}'
    key = CacheKey({"phase": "decode", "bucket": 8, "dtype": "bfloat16"})
    assert key.digest == "2bd60aa764dd2ddb4b467e5280f170d4"


def test_order_and_kind_of_container_do_not_matter() -> None:
    first = CacheKey({"shape": (1, 2), "nested": {"a": 1, "b": 2}})
    second = CacheKey(
        MappingProxyType({"nested": MappingProxyType({"b": 2, "a": 1}), "shape": [1, 2]})
    )
    assert first == second
    assert hash(first) == hash(second)
    assert first.digest == second.digest


@pytest.mark.parametrize(
    "changed",
    [
        {"bucket": 9},
        {"bucket": "8"},
        {"bucket": 8.0},
        {"bucket": 8, "extra": None},
        {"Bucket": 8},
        {"bucket": [8]},
        {},
    ],
)
def test_any_change_of_a_name_or_value_is_another_key(changed: dict[str, Any]) -> None:
    assert CacheKey(changed) != CacheKey({"bucket": 8})


def test_a_key_does_not_follow_later_changes_of_its_source() -> None:
    shape: list[JsonValue] = [1, 2]
    key = CacheKey({"shape": shape})
    digest = key.digest
    shape.append(3)
    assert key.fields["shape"] == [1, 2]
    assert key.digest == digest
    with pytest.raises(TypeError):
        key.fields["shape"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": {1, 2}}}, r"\$\.a\.b is a set, which JSON cannot hold"),
        ({"a": [0, object()]}, r"\$\.a\[1\] is a object"),
        ({"a": float("nan")}, r"\$\.a is nan"),
        ({"a": float("inf")}, r"\$\.a is inf"),
        ({"a": {1: 2}}, r"\$\.a has the key 1, must be a string"),
        ({"a": b"x"}, r"\$\.a is a bytes"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CacheKey(value)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_key_rebuilt_from_its_fields_is_the_same_key(fields: dict[str, Any]) -> None:
    key = CacheKey(fields)
    assert CacheKey(key.fields) == key
    assert canonical_json(key.fields) == canonical_json(fields)


def test_a_difference_names_paths_and_values() -> None:
    a = CacheKey({"torch": "2.13.0", "model": {"hidden": 64, "layers": 2}, "gone": 1})
    b = CacheKey({"torch": "2.14.0", "model": {"hidden": 64, "layers": 4}, "lora": [8, 2]})
    assert diff(a, b) == [
        "gone: removed, was 1",
        "lora: added, [8,2]",
        "model.layers: 2 -> 4",
        'torch: "2.13.0" -> "2.14.0"',
    ]
    assert diff(CacheKey({"a": {"b": {}}}), CacheKey({"a": {"b": {}}})) == []
    emptied = diff(CacheKey({"a": {"b": 1}}), CacheKey({"a": {}}))
    assert emptied == ["a: added, {}", "a.b: removed, was 1"]


# -------------------------------------------------------------------------------------- stored code
KEY = CacheKey({"phase": "binaries", "graphs": ["decode-1"]})
OWN, FOREIGN = {BINARIES: b"ours"}, {BINARIES: b"another user's"}


def store_at(root: Path, files: dict[str, bytes]) -> Path:
    store = ArtifactStore(root, max_bytes=GIB, on_event=lambda _: None)
    store.store(KEY, files)
    return root / KEY.digest[:2] / KEY.digest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A store that others may write."""
    store_at(tmp_path / "bundle", FOREIGN)
    (tmp_path / "bundle").chmod(0o777)
    return tmp_path / "bundle"


@pytest.fixture
def events() -> list[StoreEvent]:
    return []


@pytest.fixture
def store(tmp_path: Path, bundle: Path, events: list[StoreEvent]) -> ArtifactStore:
    store_at(tmp_path / "root", OWN)
    return ArtifactStore(tmp_path / "root", max_bytes=GIB, bundles=[bundle], on_event=events.append)


def test_code_comes_from_the_root_and_never_from_an_open_folder(store: ArtifactStore) -> None:
    assert store.load_code(KEY) == OWN
    store.evict(KEY.digest)
    assert store.load(KEY) == FOREIGN, "the bundle has the entry"
    assert store.load_code(KEY) is None


@pytest.mark.parametrize(
    ("name", "content"), [(BINARIES, b"damaged"), (MANIFEST, b"damaged"), (BINARIES, None)]
)
def test_a_damaged_entry_is_not_replaced_by_an_open_folders(
    store: ArtifactStore, events: list[StoreEvent], name: str, content: bytes | None
) -> None:
    entry = store.root / KEY.digest[:2] / KEY.digest
    (entry / name).unlink() if content is None else (entry / name).write_bytes(content)
    assert store.load_code(KEY) is None
    assert [event.kind for event in events] == ["corrupt"]
    assert not entry.exists()
    store.store(KEY, OWN)
    assert store.load_code(KEY) == OWN


def test_an_absent_entry_is_a_miss(tmp_path: Path, events: list[StoreEvent]) -> None:
    store = ArtifactStore(tmp_path / "empty", max_bytes=GIB, on_event=events.append)
    assert store.load_code(KEY) is None
    assert [event.kind for event in events] == ["miss"]


def test_an_unusable_entry_of_a_bundle_is_reported_and_stays(
    bundle: Path, tmp_path: Path, events: list[StoreEvent]
) -> None:
    store = ArtifactStore(
        tmp_path / "empty", max_bytes=GIB, bundles=[bundle], on_event=events.append
    )
    store.quarantine(KEY.digest, "node 3 is wrong")
    assert [(event.kind, event.detail) for event in events] == [("corrupt", "node 3 is wrong")]
    assert store.load(KEY) == FOREIGN


def test_graphs_depend_on_sources_that_exist() -> None:
    """A folder that was renamed would no longer change the keys of graphs."""
    root = Path(cache.__file__).parents[1]
    assert [name for name in cache._GRAPH_SOURCES if not (root / name).exists()] == []
