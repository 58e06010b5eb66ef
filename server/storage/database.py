"""The database: SQLite with a write-ahead log, one thread that writes and several that read.

Every piece of work is one transaction: it is there as a whole after a crash, or not at all. Reads
see the last commit and wait for no write, so that megabytes of one do not delay another.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from server.settings import SettingsError
from server.storage.disk_errors import disk_errors
from server.storage.schema import MIGRATIONS, VERSION

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_READERS = 4
_LOG_BYTES = 64 << 20
"""What the write-ahead log keeps on the disk once its contents are in the database."""


class Database:
    """Writes run in the order in which they were given, reads at once."""

    def __init__(self, path: Path) -> None:
        """Raises `SettingsError` for a file that is damaged, or of a later version."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, "store")
        self._readers = ThreadPoolExecutor(_READERS, "store-read")
        self._local = threading.local()
        self._read_connections: list[sqlite3.Connection] = []
        try:
            self._connection = self._thread.submit(_open, path).result()
        except (sqlite3.Error, SettingsError) as error:
            self._thread.shutdown()
            raise SettingsError(
                f"--data-dir: {path} cannot be used: {error}; put it aside to begin anew, the "
                "contents of files stay beside it"
            ) from None

    async def run(self, work: Work[T]) -> T:
        """Do `work` in one transaction; what it raises undoes it.

        Raises `StorageFullError` or `StorageUnavailableError` where the disk fails.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work)

    async def read(self, work: Work[T]) -> T:
        """Do `work`, which changes nothing, on one state of the database. Raises as `run` does."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._look, work)

    def run_now(self, work: Work[T]) -> T:
        """Do `work` in one transaction and wait for it; for the start, before there are clients."""
        return self._thread.submit(self._do, work).result()

    def _do(self, work: Work[T]) -> T:
        with disk_errors(), self._connection:
            return work(self._connection)

    def _look(self, work: Work[T]) -> T:
        with disk_errors():
            return self._read(work)

    def _read(self, work: Work[T]) -> T:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _connect(self._path)
            connection.execute("PRAGMA query_only = ON")
            self._read_connections.append(connection)
        connection.execute("BEGIN")
        try:
            return work(connection)
        finally:
            connection.rollback()

    def close(self) -> None:
        """Finish what was given, and close."""
        self._readers.shutdown()
        for connection in self._read_connections:
            connection.close()
        # The last to close moves the log into the database.
        self._thread.submit(self._connection.close)
        self._thread.shutdown()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level="IMMEDIATE")
    connection.row_factory = sqlite3.Row
    return connection


def _open(path: Path) -> sqlite3.Connection:
    connection = _connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit is on the disk before it is answered.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        (check,) = connection.execute("PRAGMA quick_check").fetchone()
        if check != "ok":
            raise SettingsError(f"it is damaged: {check}")
        _bring_up_to_date(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise SettingsError(f"it has version {version}, and this server knows {VERSION}")
    for number, step in enumerate(MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN; {step} PRAGMA user_version = {number}; COMMIT;")
