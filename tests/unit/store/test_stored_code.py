"""An NPU's binaries are code: they are loaded only from folders that no other user can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from rbln_backend.graphs.artifacts import BINARIES, MANIFEST, ArtifactStore, StoreEvent
from rbln_backend.graphs.cache_key import CacheKey

KEY = CacheKey({"phase": "binaries", "graphs": ["decode-1"]})
OWN, FOREIGN = {BINARIES: b"ours"}, {BINARIES: b"another user's"}
GIB = 1 << 30


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


@pytest.mark.parametrize("name", [BINARIES, MANIFEST])
def test_a_damaged_entry_is_not_replaced_by_an_open_folders(
    store: ArtifactStore, events: list[StoreEvent], name: str
) -> None:
    entry = store.root / KEY.digest[:2] / KEY.digest
    (entry / name).write_bytes(b"damaged")
    assert store.load_code(KEY) is None
    assert [event.kind for event in events] == ["corrupt"]
    assert not entry.exists()


def test_an_entry_without_its_file_is_damaged(
    store: ArtifactStore, events: list[StoreEvent]
) -> None:
    (store.root / KEY.digest[:2] / KEY.digest / BINARIES).unlink()
    assert store.load_code(KEY) is None
    assert [event.kind for event in events] == ["corrupt"]
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
