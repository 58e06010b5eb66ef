"""Table of numbers in memory that several processes share, with a lock.

A row has a name. Each process writes its own cells of a row, and the total of a field is the sum
over the processes; a row also has cells that all processes write. Rows are never removed. The lock
is a POSIX record lock, which the kernel releases when its process ends, so that a killed process
neither holds the lock nor leaves counts: `clear` zeroes its cells.

Invariant: names and cells of a row are written under the lock only; used by one thread per process.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

_MAX_ROWS = 16384
_NAME_BYTES = 128
_SHARED = 8
"""Cells of a row that all processes write."""
_CELL_BYTES = 8
_HEAD_BYTES = 4096


class CountField(enum.IntEnum):
    """The cells that each process has in a row."""

    PERMITS = 0
    FLEX_PERMITS = 1
    REQUESTS = 2
    """Requests in flight of an API key, or of the process."""
    CONNECTIONS = 3
    UNFINISHED = 4
    """Requests of the engine without a result yet."""
    QUEUED_TOKENS = 5
    """Prompt tokens that wait for the engine, but for those of the tier flex."""
    FLEX_QUEUED_TOKENS = 6


ALL = ""
"""Name of the row of the whole server."""


class SharedTable:
    """Rows of doubles in a memory file; whole numbers up to 2**53 are exact."""

    def __init__(self, processes: int, descriptor: int | None = None) -> None:
        """Make a table for `processes`, or open that of a `descriptor`, which it takes over."""
        self.processes = processes
        self._width = _SHARED + processes * len(CountField)
        self._names_at = _HEAD_BYTES
        self._cells_at = _HEAD_BYTES + _MAX_ROWS * _NAME_BYTES
        size = self._cells_at + _MAX_ROWS * self._width * _CELL_BYTES
        if descriptor is None:
            descriptor = os.memfd_create("rbln-serve-limits", os.MFD_CLOEXEC)
            # Pages that no row uses are never allocated.
            os.ftruncate(descriptor, size)
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size)
        self._cells = memoryview(self._memory)[self._cells_at :].cast("d")
        self._head = memoryview(self._memory)[:_CELL_BYTES].cast("q")
        self._rows: dict[str, int] = {}
        self._depth = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass the table to a child process that multiprocessing starts."""
        return _opened, (self.processes, DupFd(self._descriptor))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other processes for the length of the block, which must not await."""
        if not self._depth:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def add(self, process: int, name: str, field: CountField, more: float) -> None:
        """Add to a cell of `process`."""
        with self.locked():
            self._cells[self._cell(name, process, field)] += more

    def put(self, process: int, name: str, field: CountField, value: float) -> None:
        """Set a cell of `process`."""
        with self.locked():
            self._cells[self._cell(name, process, field)] = value

    def total(self, name: str, field: CountField, but: int | None = None) -> float:
        """Return the sum over the processes, without the one in `but`."""
        with self.locked():
            start = self._start(name) + _SHARED + field
            return sum(
                self._cells[start + process * len(CountField)]
                for process in range(self.processes)
                if process != but
            )

    def totals(self, prefix: str, field: CountField) -> Mapping[str, int]:
        """Return the totals by the rest of the names that begin with `prefix`."""
        with self.locked():
            self._learn()
            return {
                name.removeprefix(prefix): int(self.total(name, field))
                for name in self._rows
                if name.startswith(prefix)
            }

    def shared(self, name: str, first: int, count: int) -> memoryview[float]:
        """Return `count` cells of a row that all processes write, from the `first` on."""
        assert first + count <= _SHARED, (first, count)
        with self.locked():
            start = self._start(name) + first
        return self._cells[start : start + count]

    def clear(self, process: int) -> None:
        """Zero the cells of a process that has ended."""
        with self.locked():
            self._learn()
            for row in self._rows.values():
                start = row * self._width + _SHARED + process * len(CountField)
                for cell in range(start, start + len(CountField)):
                    self._cells[cell] = 0.0

    def _cell(self, name: str, process: int, field: CountField) -> int:
        return self._start(name) + _SHARED + process * len(CountField) + field

    def _start(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None:
            self._learn()
            row = self._rows.get(name)
        return (self._append(name) if row is None else row) * self._width

    def _learn(self) -> None:
        """Read the names of rows that other processes have added."""
        for row in range(len(self._rows), self._head[0]):
            start = self._names_at + row * _NAME_BYTES
            size = self._memory[start]
            self._rows[self._memory[start + 1 : start + 1 + size].decode()] = row

    def _append(self, name: str) -> int:
        text, row = name.encode(), len(self._rows)
        if row >= _MAX_ROWS or len(text) >= _NAME_BYTES:
            raise RuntimeError(
                f"limits of {name!r} cannot be counted: a server with several HTTP processes has "
                f"at most {_MAX_ROWS} names of {_NAME_BYTES - 1} bytes until it is restarted"
            )
        start = self._names_at + row * _NAME_BYTES
        self._memory[start : start + 1 + len(text)] = bytes([len(text)]) + text
        self._rows[name] = row
        # Last: a process that is killed in between leaves no row.
        self._head[0] = row + 1
        return row


def _opened(processes: int, descriptor: Any) -> SharedTable:
    return SharedTable(processes, descriptor.detach())
