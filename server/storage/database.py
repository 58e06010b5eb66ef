"""SQLite database with a write-ahead log, one writing thread and several reading threads.

Each unit of work is one transaction. Reads see the last commit and do not wait for writes, so a
large write does not delay them.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from server.settings import SettingsError
from server.storage.disk_errors import disk_errors
from server.storage.schema import TABLES, VERSION

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[Concatenate[sqlite3.Connection, P], T]

_READERS = 4
_LOG_BYTES = 64 << 20
"""Size to which the write-ahead log is truncated after a checkpoint."""


class Database:
    """Runs writes in the order of submission, and reads concurrently."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `SettingsError` if it is damaged or of another version."""
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
                f"--data-dir: {path} cannot be used: {error}; to start with an empty "
                "database, move it away (the contents of files are stored beside it)"
            ) from None

    async def run(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` with the connection in one transaction; an exception rolls it back.

        Raises `StorageFullError` or `StorageUnavailableError` where the disk fails.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: self._write(work, *args, **kwargs))

    async def read(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the read-only `work` on one snapshot, as `run`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, lambda: self._read(work, *args, **kwargs))

    def run_now(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` as `run`, and block until it ends; for the server start."""
        return self._thread.submit(lambda: self._write(work, *args, **kwargs)).result()

    def _write(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with disk_errors(), self._connection:
            return work(self._connection, *args, **kwargs)

    @disk_errors()
    def _read(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _connect(self._path)
            connection.execute("PRAGMA query_only = ON")
            self._read_connections.append(connection)
        connection.execute("BEGIN")
        try:
            return work(connection, *args, **kwargs)
        finally:
            connection.rollback()

    def close(self) -> None:
        """Finish the submitted work and close the connections."""
        self._readers.shutdown()
        for connection in self._read_connections:
            connection.close()
        # The last connection to close writes the log into the database.
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
        # A commit returns once it is on the disk.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        (check,) = connection.execute("PRAGMA quick_check").fetchone()
        if check != "ok":
            raise SettingsError(f"it is damaged: {check}")
        _make_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of a new database. Raises `SettingsError` for one of another version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    elif version != VERSION:
        raise SettingsError(f"it has version {version}; this server supports version {VERSION}")
