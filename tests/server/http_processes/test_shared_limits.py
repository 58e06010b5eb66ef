"""Limits in a table that several processes share, with real processes and signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from server.admission import Admission, Capacity
from server.errors import OverloadedError, RateLimitError
from server.host.shared_table import ALL, CountField, SharedTable
from server.key_limits.counts import SharedCounts
from server.key_limits.ledger import KeyLedger
from server.key_limits.limits import KeyLimits

_SPAWN = multiprocessing.get_context("spawn")


def _admission(table: SharedTable, process: int, limit: int) -> Admission:
    admission = Admission(limit, counts=SharedCounts(table, process))
    admission.open(Capacity(4, None))
    return admission


def _flood(table: SharedTable, process: int, pipe: Connection) -> None:
    """Take permits and requests of a key until both are refused; answer how many, and wait."""
    counts = SharedCounts(table, process)
    admission, keys = _admission(table, process, 500), KeyLedger(lambda: 0.0, counts)
    pipe.send("ready")
    pipe.recv()
    permits = uses = 0
    for _ in range(1000):
        try:
            admission.acquire("alice")
            permits += 1
        except OverloadedError:
            pass
        try:
            keys.use("alice", "alice", KeyLimits(requests_per_minute=300)).enter(None)
            uses += 1
        except RateLimitError:
            pass
    pipe.send((permits, uses))
    pipe.recv()
    with table.locked():
        pipe.send("locked")
        time.sleep(60)


def test_processes_take_exactly_the_limits_and_leave_nothing_when_killed() -> None:
    table, processes, pipes = SharedTable(4), [], []
    for number in range(1, 4):
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_flood, args=(table, number, theirs), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    for pipe in pipes:
        pipe.send("go")
    taken = [pipe.recv() for pipe in pipes]
    assert sum(permits for permits, _ in taken) == 500
    assert sum(uses for _, uses in taken) == 300
    for pipe in pipes:
        pipe.send("lock")
    # One of them holds the lock; the next one gets it when the first is killed.
    waiting = dict(zip(pipes, processes, strict=True))
    while waiting:
        for pipe in [pipe for pipe in waiting if pipe.poll(0.2)]:
            assert pipe.recv() == "locked"
            process = waiting.pop(pipe)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    main = _admission(table, 0, 500)
    with pytest.raises(OverloadedError):
        main.acquire("alice")
    for number, (permits, _) in enumerate(taken, 1):
        before = main.in_flight
        table.clear(number)
        assert before - main.in_flight == permits
    assert main.in_flight == 0
    assert SharedCounts(table, 0).by_key(CountField.REQUESTS) == {"alice": 0}
    assert table.total(ALL, CountField.PERMITS) == 0


def test_a_rate_is_one_for_all_processes_and_follows_a_new_limit() -> None:
    table = SharedTable(2)
    now = [100.0]
    first, second = (KeyLedger(lambda: now[0], SharedCounts(table, n)) for n in range(2))
    few, many = KeyLimits(tokens_per_minute=60), KeyLimits(tokens_per_minute=120)
    use = first.use("alice", "alice", few)
    use.enter(None)
    use.reserve(50)
    other = second.use("alice", "alice", few)
    other.enter(None)
    with pytest.raises(RateLimitError, match="10 are left"):
        other.reserve(20)
    use.end(20)
    assert other.rates()["tokens"].remaining == 40
    assert second.use("alice", "alice", many).rates()["tokens"].remaining == 100
    assert first.in_flight == second.in_flight == {"alice": 1}


def test_too_many_names_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.host.shared_table._MAX_ROWS", 1)
    table = SharedTable(1)
    table.add(0, ALL, CountField.PERMITS, 1)
    with pytest.raises(RuntimeError, match="at most 1 names"):
        table.add(0, "owner:alice", CountField.PERMITS, 1)
