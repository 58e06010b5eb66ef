"""The chain of an audit log, and its files: rotation, retention, repair, and what is found out."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from server.audit.log_files import AuditLogError, LogFiles, LogLimits, log_files
from server.audit.verification import ChainCheck, files_of

_LIMITS = LogLimits(file_bytes=2000, max_bytes=100_000)


def _header() -> Mapping[str, Any]:
    return {"kind": "server"}


def _fill(root: Path, count: int, limits: LogLimits = _LIMITS, size: int = 100) -> None:
    files = LogFiles(root, limits)
    for number in range(count):
        files.append({"kind": "answer", "number": number, "text": "x" * size}, _header)
    files.close()


def _breaks(root: Path) -> list[tuple[str, int, str]]:
    verification = ChainCheck(files_of(root))
    for _ in verification.records():
        pass
    return [(b.place.file.name, b.place.line, b.problem) for b in verification.breaks]


def test_a_log_of_several_files_and_starts_is_one_chain(tmp_path: Path) -> None:
    """Every file begins with a header, and only the owner can read them."""
    root = tmp_path / "audit"
    for _ in range(3):
        _fill(root, 10)
    files = log_files(root)
    assert len(files) == 6
    verification = ChainCheck(files)
    kinds = [(place.line, record["kind"]) for place, record in verification.records()]
    assert all((line == 1) == (kind == "server") for line, kind in kinds)
    assert (verification.breaks, verification.num_records) == ([], 36)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_line_can_be_verified_without_this_program(tmp_path: Path) -> None:
    """The hash is the SHA-256 of the line's other bytes, and each line is JSON."""
    _fill(tmp_path, 1)
    (path,) = log_files(tmp_path)
    first, second = path.read_bytes().splitlines()
    body, digest = first.split(b',"hash":"')
    assert hashlib.sha256(body + b"}").hexdigest().encode() == digest[:64]
    assert json.loads(second)["prev"] == json.loads(first)["hash"]


def _drop_line(lines: list[bytes]) -> list[bytes]:
    return lines[:3] + lines[4:]


def _change_line(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3].replace(b'"number":2', b'"number":7'), *lines[4:]]


def _swap_lines(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


@pytest.mark.parametrize(
    ("change", "places"),
    [(_drop_line, [4]), (_change_line, [4]), (_swap_lines, [4, 5, 6])],
)
def test_a_changed_log_is_found_at_its_line(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], places: list[int]
) -> None:
    """A removed, changed or moved line is reported with its file and line."""
    _fill(tmp_path, 20)
    file = log_files(tmp_path)[0]
    file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))
    assert [(name, line) for name, line, _ in _breaks(tmp_path)] == [(file.name, n) for n in places]


def test_a_removed_file_is_found(tmp_path: Path) -> None:
    """The record after it names the hash of one that is absent."""
    _fill(tmp_path, 30)
    gone, after = log_files(tmp_path)[1:3]
    gone.unlink()
    ((name, line, problem),) = _breaks(tmp_path)
    assert (name, line) == (after.name, 1)
    assert "belongs" in problem


@pytest.mark.parametrize("torn", [b'{"seq":9,"kind":"ans', b"\0" * 70_000])
def test_a_torn_last_line_is_removed_at_the_next_start(tmp_path: Path, torn: bytes) -> None:
    """The records before it remain, and the next one follows them."""
    _fill(tmp_path, 5)
    (file,) = log_files(tmp_path)
    before = file.read_bytes()
    file.write_bytes(before + torn)
    files = LogFiles(tmp_path, _LIMITS)
    assert files.repaired_bytes == len(torn)
    files.append({"kind": "answer"}, _header)
    files.close()
    assert file.read_bytes() == before
    assert _breaks(tmp_path) == []


def test_a_torn_header_leaves_the_file_before_it(tmp_path: Path) -> None:
    """A file without a whole line is removed."""
    _fill(tmp_path, 5)
    (tmp_path / "audit-000000000006.jsonl").write_bytes(b'{"seq":6,')
    _fill(tmp_path, 1)
    assert _breaks(tmp_path) == []


def test_a_forged_last_line_stops_the_start(tmp_path: Path) -> None:
    """No record may follow a line whose hash is wrong."""
    _fill(tmp_path, 5)
    (file,) = log_files(tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"number":4', b'"number":5'))
    with pytest.raises(AuditLogError, match=r"the last line of .*: its content has the hash"):
        LogFiles(tmp_path, _LIMITS)


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    """All files together stay within the bound, also across a start."""
    limits = LogLimits(file_bytes=2000, max_bytes=8000)
    for _ in range(2):
        _fill(tmp_path, 60, limits)
        assert sum(path.stat().st_size for path in log_files(tmp_path)) <= limits.max_bytes
    assert len(log_files(tmp_path)) > 2
    assert _breaks(tmp_path) == []


def test_files_past_their_retention_are_deleted(tmp_path: Path) -> None:
    """The last file is kept: the next record follows it."""
    _fill(tmp_path, 30)
    for path in log_files(tmp_path):
        os.utime(path, (1, 1))
    LogFiles(tmp_path, LogLimits(2000, 100_000, retention_s=60)).close()
    assert len(log_files(tmp_path)) == 1
    _fill(tmp_path, 1)
    assert _breaks(tmp_path) == []


def test_a_log_belongs_to_one_server(tmp_path: Path) -> None:
    """A second one is refused."""
    files = LogFiles(tmp_path, _LIMITS)
    with pytest.raises(AuditLogError, match="in use by another server"):
        LogFiles(tmp_path, _LIMITS)
    files.close()
