"""Store operations for other processes; imports nothing heavy, to spawn quickly."""

import resource
from pathlib import Path
from typing import Any

from rbln_backend.graphs.cache import ArtifactStore, CacheKey, StoreEvent

GIB = 1024**3


def open_store(
    root: Path, *, max_bytes: int = GIB, read_only: bool = False
) -> tuple[ArtifactStore, list[StoreEvent]]:
    events: list[StoreEvent] = []
    store = ArtifactStore(root, max_bytes=max_bytes, read_only=read_only, on_event=events.append)
    return store, events


def get_key(number: int) -> CacheKey:
    return CacheKey({"graph": "decode", "bucket": number})


def payload_of(number: int) -> dict[str, bytes]:
    return {"graph.json": b"{%d}" % number * 50, "bindings.bin": bytes(range(256)) * (number + 1)}


def write_many_and_verify(root: Path, rounds: int, barrier: Any, failures: Any) -> None:
    """Store and load the same keys as the other processes do, and report any wrong byte."""
    barrier.wait()
    for _ in range(rounds):
        for number in range(4):
            store, events = open_store(root)
            store.store(get_key(number), payload_of(number))
            loaded = store.load(get_key(number))
            if loaded != payload_of(number):
                failures.put((number, [event.kind for event in events]))


def churn(root: Path, rounds: int, barrier: Any, failures: Any) -> None:
    """Store and load under a bound that holds about one entry, and report any wrong byte."""
    barrier.wait()
    for turn in range(rounds):
        number = turn % 4
        store, events = open_store(root, max_bytes=1800)
        store.store(get_key(number), payload_of(number))
        loaded = store.load(get_key(number))
        kinds = {event.kind for event in events}
        if loaded not in (None, payload_of(number)) or "corrupt" in kinds:
            failures.put((number, sorted(kinds)))


def write_forever(root: Path) -> None:
    """Write one entry of very many files: a writer to be killed in the middle."""
    store, _ = open_store(root)
    store.store(get_key(0), {f"part-{i}": bytes(4096) for i in range(50_000)})


def hold_lock(root: Path, holding: Any, release: Any) -> None:
    store, _ = open_store(root)
    with store.lock(get_key(0)):
        holding.set()
        release.wait()


def compile_once(root: Path, barrier: Any, compiled: Any) -> None:
    """Do what every rank does: load, or compile under the lock."""
    store, _ = open_store(root)
    barrier.wait()
    with store.lock(get_key(0)):
        if store.load(get_key(0)) is None:
            compiled.put(1)
            store.store(get_key(0), payload_of(0))


def store_with_file_limit(root: Path, result: Any) -> None:
    """Store a file that the system stops in the middle of, as a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    store, events = open_store(root)
    store.store(get_key(0), {"big.bin": bytes(100_000)})
    result.put([event.kind for event in events])
