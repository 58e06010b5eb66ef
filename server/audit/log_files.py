"""Files of an audit log, locked by one server at a time: append, rotation, retention, repair.

    DIR/lock                          locked while the server runs
    DIR/audit-<first record>.jsonl    lines of `server.audit.chain`

Invariants (tests/server/audit): a failed write leaves no part of a line; each file begins with a
header record; only whole files are removed, the oldest first, and never the last one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbln_backend.host.replaced_files import sync_directory
from server.audit.chain import ChainError, Link, append_to, read_line

logger = logging.getLogger(__name__)

_MODE, _FILE_MODE = 0o700, 0o600
_PATTERN = "audit-*.jsonl"
_BLOCK_BYTES = 1 << 16


class AuditLogError(Exception):
    """The log cannot be used; the message names the directory or the file."""


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Bounds of a log: bytes of a file and of all files; seconds for which a file is kept, or 0."""

    file_bytes: int
    max_bytes: int
    retention_s: int = 0


def log_files(root: Path) -> list[Path]:
    """Return the files of a log, the oldest first."""
    return sorted(root.glob(_PATTERN))


class LogFiles:
    """A log that this process holds exclusively until `close`."""

    def __init__(self, root: Path, limits: LogLimits) -> None:
        """Lock the directory, and remove the torn last line that a crash may have left.

        Raises `AuditLogError` for a directory that is in use or cannot be written, and for a last
        line whose hash is wrong.
        """
        self._root, self._limits = root, limits
        self._descriptor: int | None = None
        self._size = 0
        self.repaired_bytes = 0
        """Bytes of the torn line that was removed at the start."""
        try:
            root.mkdir(mode=_MODE, parents=True, exist_ok=True)
            root.chmod(_MODE)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        except OSError as error:
            raise AuditLogError(f"--audit-log {root} cannot be written: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.link = self._repair()
            self._prune()
        except BlockingIOError:
            os.close(self._lock)
            raise AuditLogError(
                f"--audit-log {root} is in use by another server; each server needs its own"
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise AuditLogError(f"--audit-log {root} cannot be read: {error}") from None
        except AuditLogError:
            os.close(self._lock)
            raise

    def append(self, record: Mapping[str, Any], header: Callable[[], Mapping[str, Any]]) -> int:
        """Write a record, first that of `header` where a file begins; return the bytes written.

        Raises `OSError`; then the log is as it was before, but for a header.
        """
        line, after = append_to(self.link, record)
        written = 0
        if self._descriptor is None or self._size + len(line) > self._limits.file_bytes:
            written = self._begin(header)
            line, after = append_to(self.link, record)
        self._write(line)
        self.link = after
        return written + len(line)

    def sync(self) -> None:
        """Wait until the disk has all records. Raises `OSError`."""
        if self._descriptor is not None:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the files and release the lock."""
        self._close_file()
        os.close(self._lock)

    def total_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(path.stat().st_size for path in log_files(self._root))

    def _begin(self, header: Callable[[], Mapping[str, Any]]) -> int:
        """Begin another file with a header; return its bytes."""
        self._close_file()
        self._prune()
        # Made before the file: one that cannot be encoded leaves none without a header.
        line, after = append_to(self.link, header())
        path = self._root / f"audit-{self.link.seq:012d}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor, self._size = os.open(path, flags, _FILE_MODE), 0
        try:
            self._write(line)
        except OSError:
            self._close_file()
            path.unlink()
            raise
        sync_directory(self._root)
        self.link = after
        return len(line)

    def _write(self, line: bytes) -> None:
        """Write a whole line, or raise `OSError` and leave the file as it was."""
        assert self._descriptor is not None
        done = 0
        try:
            while done < len(line):
                done += os.pwrite(self._descriptor, line[done:], self._size + done)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)

    def _close_file(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.fdatasync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _repair(self) -> Link:
        """Remove a torn last line; return the position after the last record."""
        for path in reversed(log_files(self._root)):
            whole = _whole_bytes(path)
            torn = path.stat().st_size - whole
            if torn:
                os.truncate(path, whole)
                self.repaired_bytes += torn
                logger.warning("audit log: removed a torn line of %d bytes from %s", torn, path)
            if not whole:
                path.unlink()
                continue
            try:
                return read_line(_last_line(path, whole))[1]
            except ChainError as error:
                raise AuditLogError(
                    f"--audit-log {self._root}: the last line of {path}: {error}; `rbln-serve "
                    "replay --verify-only` shows all such places; name another directory to go on"
                ) from None
        return Link()

    def _prune(self) -> None:
        """Remove files so that one more fits into the bound, and those past their retention."""
        sizes = {path: path.stat() for path in log_files(self._root)}
        total = sum(found.st_size for found in sizes.values())
        oldest = time.time() - self._limits.retention_s
        # The last file has the hash that the next record follows.
        for path, found in [*sizes.items()][:-1]:
            is_old = bool(self._limits.retention_s) and found.st_mtime < oldest
            if not is_old and total + self._limits.file_bytes <= self._limits.max_bytes:
                break
            path.unlink()
            total -= found.st_size


def _whole_bytes(path: Path) -> int:
    """Return the bytes of a file up to its last newline, that included."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _last_line(path: Path, whole: int) -> bytes:
    """Return the last line, without its newline, of the first `whole` bytes of a file."""
    with path.open("rb") as file:
        start, found = whole, b""
        while start and b"\n" not in found[:-1]:
            start = max(0, start - _BLOCK_BYTES)
            file.seek(start)
            found = file.read(whole - start)
    return found[:-1].rpartition(b"\n")[2]
