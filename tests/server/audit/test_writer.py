"""The writer of audit records on a disk that is full, and behind its queue."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.audit.log_files import LogFiles, LogLimits
from server.audit.verification import ChainCheck, files_of
from server.audit.writer import AuditWriter
from server.errors import AuditUnavailableError

_LIMITS = LogLimits(file_bytes=1 << 20, max_bytes=1 << 22)
_TEXT = "x" * 300


def _header() -> Mapping[str, Any]:
    return {"kind": "server"}


def _answer(number: int) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"kind": "answer", "number": number, "text": _TEXT}


@contextmanager
def _full_disk(num_bytes: int) -> Iterator[None]:
    """Let no file grow above a size: the kernel writes a part of a line, then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def _read(root: Path) -> tuple[ChainCheck, list[dict[str, Any]]]:
    verification = ChainCheck(files_of(root))
    return verification, [record for _, record in verification.records()]


def test_stop_refuses_requests_and_loses_no_record(tmp_path: Path) -> None:
    """Records of running requests wait until the disk has space again."""
    writer = AuditWriter(LogFiles(tmp_path, _LIMITS), _header, "stop", 100)
    with _full_disk(2000):
        for number in range(10):
            writer.put(_answer(number))
        _wait_for(lambda: writer.counts().is_failing)
        with pytest.raises(AuditUnavailableError, match="cannot be written"):
            writer.require_space()
        assert writer.counts().waiting
    _wait_for(lambda: not writer.counts().is_failing)
    writer.require_space()
    writer.close(10)
    verification, records = _read(tmp_path)
    assert verification.breaks == []
    numbers = [record["number"] for record in records if record["kind"] == "answer"]
    assert numbers == list(range(10))
    assert (writer.counts().dropped, writer.counts().records) == (0, 10)


def test_continue_drops_records_and_says_how_many(tmp_path: Path) -> None:
    """A `gap` record is where they are absent; the chain is whole."""
    writer = AuditWriter(LogFiles(tmp_path, _LIMITS), _header, "continue", 100)
    with _full_disk(2000):
        for number in range(10):
            writer.put(_answer(number))
        _wait_for(lambda: writer.counts().is_failing and not writer.counts().waiting)
        writer.require_space()
    writer.put(_answer(10))
    writer.close(10)
    verification, records = _read(tmp_path)
    assert verification.breaks == []
    written = [record["number"] for record in records if record["kind"] == "answer"]
    assert written[-1] == 10
    assert verification.num_gaps == writer.counts().dropped == 11 - len(written) > 0
    assert records[-2]["kind"] == "gap"


@pytest.mark.parametrize("on_full", ["stop", "continue"])
def test_a_full_queue(tmp_path: Path, on_full: Any) -> None:
    """`stop` refuses the next request, `continue` drops the next record."""
    started, go_on = threading.Event(), threading.Event()

    def slow() -> Mapping[str, Any]:
        started.set()
        go_on.wait(10)
        return _answer(0)()

    writer = AuditWriter(LogFiles(tmp_path, _LIMITS), _header, on_full, 3)
    writer.put(slow)
    assert started.wait(10)
    for number in range(1, 5):
        writer.put(_answer(number))
    if on_full == "stop":
        with pytest.raises(AuditUnavailableError, match=r"5 records wait .* limit is 3"):
            writer.require_space()
    go_on.set()
    writer.close(10)
    verification, records = _read(tmp_path)
    assert verification.breaks == []
    written = [record["number"] for record in records if record["kind"] == "answer"]
    assert written == list(range(5 if on_full == "stop" else 3))
    assert writer.counts().dropped == 5 - len(written)


def test_a_repair_is_recorded(tmp_path: Path) -> None:
    """A torn line is data that was lost."""
    AuditWriter(LogFiles(tmp_path, _LIMITS), _header, "stop", 3).close(10)
    for _ in range(2):
        writer = AuditWriter(LogFiles(tmp_path, _LIMITS), _header, "stop", 3)
        writer.put(_answer(0))
        writer.close(10)
        with files_of(tmp_path)[-1].open("ab") as file:
            file.write(b'{"seq":')
    _, records = _read(tmp_path)
    assert [r["removed_bytes"] for r in records if r["kind"] == "repair"] == [7]


def _unencodable() -> Mapping[str, Any]:
    return {"kind": "answer", "number": 1, "text": "\ud800"}


def test_a_record_that_cannot_be_encoded_is_a_gap_and_the_next_are_written(tmp_path: Path) -> None:
    writer = AuditWriter(LogFiles(tmp_path, _LIMITS), _header, "continue", 100)
    for record in (_answer(0), _unencodable, _answer(2)):
        writer.put(record)
    _wait_for(lambda: not writer.counts().waiting and not writer.counts().is_failing)
    counts = writer.counts()
    writer.close(10)
    verification, records = _read(tmp_path)
    assert verification.breaks == []
    assert [record["kind"] for record in records] == ["server", "answer", "gap", "answer"]
    assert (counts.failures, counts.dropped) == (1, 1)


def test_stop_refuses_requests_after_a_record_that_cannot_be_encoded(tmp_path: Path) -> None:
    writer = AuditWriter(LogFiles(tmp_path, _LIMITS), _header, "stop", 100)
    writer.put(_unencodable)
    _wait_for(lambda: writer.counts().failures > 0)
    with pytest.raises(AuditUnavailableError, match="cannot be written"):
        writer.require_space()
    assert writer.counts().waiting == 1
    writer.close(0)
