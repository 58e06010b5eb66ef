"""The store gives back what it got or nothing, whatever happens to the disk or to a process."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rbln_backend.errors import ArtifactError
from rbln_backend.graphs.cache import (
    MANIFEST,
    QUARANTINE_KEPT,
    ArtifactStore,
    CacheKey,
    canonical_json,
)
from tests.unit import store_workers
from tests.unit.store_workers import get_key, open_store, payload_of

KEY = CacheKey({"phase": "decode", "bucket": 8})
FILES = {"graph.json": b'{"nodes":[]}', "bindings.json": b"[1,2,3]", "empty": b""}
SPAWN = get_context("spawn")
DEADLINE_S = 30.0


def entry_of(store: ArtifactStore, key: CacheKey = KEY) -> Path:
    return store.root / key.digest[:2] / key.digest


@pytest.fixture
def filled(tmp_path: Path) -> ArtifactStore:
    store, _ = open_store(tmp_path / "store")
    store.store(KEY, FILES)
    return store


@pytest.fixture
def processes() -> Iterator[list[BaseProcess]]:
    """Started processes, none of which outlives the test."""
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def start(processes: list[BaseProcess], target: Any, *args: Any) -> BaseProcess:
    process = SPAWN.Process(target=target, args=args)
    process.start()
    processes.append(process)
    return process


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the other process did not get there"
        time.sleep(0.002)


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    store, events = open_store(tmp_path / "deep" / "store")
    store.store(KEY, FILES)
    assert store.load(KEY) == FILES
    assert [event.kind for event in events] == ["stored", "hit"]
    assert events[0].num_bytes == events[1].num_bytes == sum(map(len, FILES.values()))
    assert events[0].digest == KEY.digest
    # The first stays.
    store.store(KEY, {"graph.json": b"other"})
    assert store.load(KEY) == FILES
    # A caller finds that it makes no sense.
    store.quarantine(KEY.digest, "unknown operator")
    assert (events[-1].kind, events[-1].detail) == ("corrupt", "unknown operator")
    assert store.load(KEY) is None
    # A file in place of an entry.
    entry_of(store).write_bytes(b"")
    assert store.load(KEY) is None
    store.store(KEY, FILES)
    assert store.load(KEY) == FILES


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", MANIFEST, "a" * 129, "a\n"])
def test_a_file_name_must_be_plain(tmp_path: Path, name: str) -> None:
    store, _ = open_store(tmp_path)
    with pytest.raises(ArtifactError, match="Invalid artifact file name"):
        store.store(KEY, {name: b""})


def test_any_changed_byte_and_any_truncation_of_any_file_is_noticed(filled: ArtifactStore) -> None:
    reader, events = open_store(filled.root, read_only=True)
    for path in entry_of(filled).iterdir():
        data = path.read_bytes()
        # The case of a letter, which a reader of hexadecimal digits could miss.
        flipped = (bytes([*data[:at], data[at] ^ 0x20, *data[at + 1 :]]) for at in range(len(data)))
        cut = (data[:length] for length in range(len(data)))
        for changed in (*flipped, *cut, data + b"\0"):
            path.write_bytes(changed)
            assert reader.load(KEY) is None, (path.name, changed)
        path.write_bytes(data)
    assert len(events) > 500
    assert {event.kind for event in events} == {"corrupt"}
    assert reader.load(KEY) == FILES


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["delete", "directory", "symlink", "fifo"])
def test_a_file_that_is_gone_or_no_file_is_noticed(
    filled: ArtifactStore, name: str, damage: str
) -> None:
    path = entry_of(filled) / name
    original = path.rename(filled.root / "elsewhere")
    if damage == "directory":
        path.mkdir()
    elif damage == "symlink":
        path.symlink_to(original)
    elif damage == "fifo":
        os.mkfifo(path)
    store, events = open_store(filled.root)
    assert store.load(KEY) is None
    assert [event.kind for event in events] == ["corrupt"]


def test_a_damaged_entry_is_quarantined_and_can_be_stored_again(filled: ArtifactStore) -> None:
    (entry_of(filled) / "graph.json").write_bytes(b"nonsense")
    store, events = open_store(filled.root)
    assert store.load(KEY) is None
    assert not entry_of(store).exists()
    kept = list((store.root / "quarantine").iterdir())
    assert [(path / "graph.json").read_bytes() for path in kept] == [b"nonsense"]
    store.store(KEY, FILES)
    assert store.load(KEY) == FILES
    assert [event.kind for event in events] == ["corrupt", "stored", "hit"]
    assert "graph.json has 8 bytes, not 12" in events[0].detail


def test_the_quarantine_does_not_grow_without_bound(filled: ArtifactStore) -> None:
    for _ in range(QUARANTINE_KEPT + 3):
        filled.store(KEY, FILES)
        (entry_of(filled) / "empty").write_bytes(b"x")
        filled.load(KEY)
    filled.prune()
    assert len(list((filled.root / "quarantine").iterdir())) == QUARANTINE_KEPT


@pytest.mark.parametrize(
    "body",
    [
        {"format": 1},
        {"format": 2, "key": {}, "files": {}, "created": 0},
        {"format": 1, "key": dict(KEY.fields), "files": {"../../x": {}}, "created": 0},
        {"format": 1, "key": dict(KEY.fields), "files": {"x": {"size": "y"}}, "created": 0},
        {"format": 1, "key": dict(KEY.fields), "files": [], "created": 0},
        {"format": 1, "key": dict(KEY.fields), "files": {}, "created": 10**400},
        {"format": 1, "key": list(KEY.fields), "files": {}, "created": 0},
        [],
    ],
)
def test_a_forged_manifest_with_a_right_checksum_is_refused(
    filled: ArtifactStore, body: Any
) -> None:
    if isinstance(body, dict):
        body = {**body, "checksum": hashlib.sha256(canonical_json(body)).hexdigest()}
    (entry_of(filled) / MANIFEST).write_bytes(canonical_json(body))
    assert filled.entries() == []
    assert filled.load(KEY) is None


def test_entries_describe_themselves(filled: ArtifactStore) -> None:
    (entry,) = filled.entries()
    assert entry.key == KEY
    assert entry.path == entry_of(filled)
    assert entry.files == {name: len(data) for name, data in FILES.items()}
    assert entry.size_bytes == sum(filled.sizes()) > sum(entry.files.values())
    assert abs(entry.created - time.time()) < 60
    assert filled.load(entry.key) == FILES
    # Under the wrong digest it is not given out.
    other = CacheKey({"phase": "decode", "bucket": 9})
    entry_of(filled, other).parent.mkdir(exist_ok=True)
    entry.path.rename(entry_of(filled, other))
    assert filled.load(other) is None


def test_prune_evicts_the_least_recently_used_first(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    for number in range(4):
        store.store(get_key(number), {"data": bytes(1000)})
        stamp = 1_000_000 + number
        os.utime(entry_of(store, get_key(number)) / MANIFEST, (stamp, stamp))
    store.load(get_key(0))
    bounded, events = open_store(tmp_path, max_bytes=sum(store.sizes()) // 2 + 100)
    bounded.prune()
    assert [(e.kind, e.digest) for e in events] == [
        ("evicted", get_key(1).digest),
        ("evicted", get_key(2).digest),
    ]
    assert [entry.key for entry in bounded.entries()] == [get_key(3), get_key(0)]


def test_a_store_stays_within_its_bound(tmp_path: Path) -> None:
    store, events = open_store(tmp_path, max_bytes=5000)
    for number in range(10):
        store.store(get_key(number), {"data": bytes(1000)})
        assert sum(store.sizes()) <= 5000
        assert store.load(get_key(number)) is not None
    assert "evicted" in {event.kind for event in events}


def test_what_exceeds_the_bound_alone_evicts_nothing(filled: ArtifactStore) -> None:
    store, events = open_store(filled.root, max_bytes=2000)
    store.store(get_key(1), {"data": bytes(2001)})
    assert [(e.kind, e.detail) for e in events] == [
        ("failed", "2001 bytes exceed the bound of 2000")
    ]
    assert store.load(KEY) == FILES


def test_a_read_only_store_reads_and_changes_nothing(filled: ArtifactStore) -> None:
    (filled.root / "tmp" / "leftover").mkdir()
    before = snapshot(filled.root)
    store, events = open_store(filled.root, max_bytes=1, read_only=True)
    assert store.load(KEY) == FILES
    store.store(get_key(1), {"data": b""})
    with store.lock(get_key(1)) as waited:
        assert waited == 0.0
    store.prune()
    assert [event.kind for event in events] == ["hit", "read_only"]
    assert snapshot(filled.root) == before
    (entry_of(filled) / "empty").write_bytes(b"x")
    before = snapshot(filled.root)
    assert store.load(KEY) is None
    assert events[-1].kind == "corrupt"
    assert snapshot(filled.root) == before


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}


@pytest.mark.parametrize("place", ["root", "shard"])
def test_a_folder_that_cannot_exist_fails_softly(tmp_path: Path, place: str) -> None:
    file = tmp_path / ("file" if place == "root" else KEY.digest[:2])
    file.write_text("")
    store, events = open_store(file / "store" if place == "root" else tmp_path)
    assert store.load(KEY) is None
    with store.lock(KEY):
        store.store(KEY, FILES)
    store.prune()
    assert (store.entries(), store.sizes()) == ([], [])
    assert [e.kind for e in events if e.kind != "lock_wait"] == ["miss", "failed"]


def test_a_write_cut_off_by_the_system_leaves_nothing(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    result = SPAWN.Queue()
    process = start(processes, store_workers.store_with_file_limit, tmp_path, result)
    assert result.get(timeout=DEADLINE_S) == ["failed"]
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert list((tmp_path / "tmp").iterdir()) == []
    assert open_store(tmp_path)[0].load(get_key(0)) is None


def test_a_killed_writer_leaves_no_entry_and_its_rest_is_removed(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    process = start(processes, store_workers.write_forever, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("tmp/*/part-*"))) > 20)
    living, _ = open_store(tmp_path)
    living.prune()
    assert len(list(tmp_path.glob("tmp/*/part-*"))) > 20, "a living writer lost its files"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    store, events = open_store(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert store.load(get_key(0)) is None
    store.store(get_key(0), payload_of(0))
    assert store.load(get_key(0)) == payload_of(0)
    assert [event.kind for event in events] == ["miss", "stored", "hit"]


def test_a_killed_lock_holder_does_not_block_others(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    holding, release = SPAWN.Event(), SPAWN.Event()
    process = start(processes, store_workers.hold_lock, tmp_path, holding, release)
    assert holding.wait(DEADLINE_S)
    process.kill()
    store, events = open_store(tmp_path)
    with store.lock(get_key(0)) as waited:
        assert waited < DEADLINE_S
    assert [event.kind for event in events] == ["lock_wait"]


def test_the_lock_is_held_per_key_between_processes(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    holding, release = SPAWN.Event(), SPAWN.Event()
    start(processes, store_workers.hold_lock, tmp_path, holding, release)
    assert holding.wait(DEADLINE_S)
    store, events = open_store(tmp_path)
    with store.lock(get_key(1)) as waited:
        assert waited < 0.1
    threading.Timer(0.2, release.set).start()
    with store.lock(get_key(0)) as waited:
        assert waited > 0.1
    assert [event.kind for event in events] == ["lock_wait", "lock_wait"]
    assert events[1].seconds == waited


def test_of_many_processes_one_compiles(tmp_path: Path, processes: list[BaseProcess]) -> None:
    barrier, compiled = SPAWN.Barrier(4), SPAWN.Queue()
    for _ in range(4):
        start(processes, store_workers.compile_once, tmp_path, barrier, compiled)
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * 4
    assert compiled.get(timeout=DEADLINE_S) == 1
    assert compiled.empty()


@pytest.mark.parametrize("work", [store_workers.write_many_and_verify, store_workers.churn])
def test_concurrent_processes_never_read_a_wrong_byte(
    tmp_path: Path, processes: list[BaseProcess], work: Any
) -> None:
    barrier, failures = SPAWN.Barrier(3), SPAWN.Queue()
    for _ in range(3):
        start(processes, work, tmp_path, 25, barrier, failures)
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * 3
    assert failures.empty()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "quarantine").exists()
