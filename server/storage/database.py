"""Data folder and SQLite database of one server, with its tables, owners and clock.

    <data-dir>/lock           locked while the server runs
    <data-dir>/store.sqlite   metadata and job states
    <data-dir>/files/<id>     contents of files
    <data-dir>/parts/<name>   contents being written; unknown parts are removed at the start

Invariant: a file in `files` was written and synchronised before it got its name.

The owner of a named API key is its name, so the key can be replaced. The owner of an unnamed key
is a salted digest, so its data does not pass to another key at the same position. Without keys the
owner is "". All owners but names contain a colon.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rbln_backend.host.replaced_files import sync_directory
from server.errors import (
    NotFoundError,
    ServerError,
    StorageFullError,
    StorageUnavailableError,
    describe,
)
from server.settings import SettingsError

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PRIMARY = 0xFF
"""Mask of the primary code in SQLite's extended error codes."""
_DISK_CODES = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY),
}
_RETRY_S = 5.0


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise `StorageFullError` or `StorageUnavailableError` in place of a disk error.

    Other errors pass unchanged: missing files, timeouts, connections, and SQLite errors that are
    bugs of the server.
    """
    try:
        yield
    except (FileNotFoundError, TimeoutError, ConnectionError):
        raise
    except OSError as error:
        raise _translated(error, is_full=error.errno in _FULL) from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY
        if code not in _DISK_CODES:
            raise
        raise _translated(error, is_full=code == sqlite3.SQLITE_FULL) from error


def _translated(error: Exception, *, is_full: bool) -> ServerError:
    logger.error("The data directory cannot be used: %s", error)
    if is_full:
        return StorageFullError("The disk of the data directory is full.")
    # The full message of an OSError contains a path of the host.
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return StorageUnavailableError(
        f"The data directory cannot be used now: {reason}.", retry_after_s=_RETRY_S
    )


VERSION = 9
"""Version of the tables, in the database's `user_version`; change it with the tables."""
_OBJECTS = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, name TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
) WITHOUT ROWID;
CREATE INDEX files_by_owner ON files (owner, created_at, id);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
    status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    keep_s INTEGER NOT NULL, metadata TEXT NOT NULL, moments TEXT NOT NULL, errors TEXT NOT NULL,
    output_file TEXT, error_file TEXT, model TEXT, idempotency TEXT, asked TEXT NOT NULL,
    total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL,
    output_bytes INTEGER NOT NULL, error_bytes INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX batches_by_owner ON batches (owner, created_at, id);
CREATE UNIQUE INDEX batches_once ON batches (owner, idempotency) WHERE idempotency IS NOT NULL;
CREATE INDEX batches_open ON batches (created_at, id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, place INTEGER NOT NULL,
    bytes INTEGER NOT NULL, shared TEXT NOT NULL, done INTEGER NOT NULL,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE INDEX lines_to_do ON lines (batch, shared, number) WHERE NOT done;
-- Outputs have a column: conversations join them as bytes, and their length needs no decoding.
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER,
    background INTEGER NOT NULL, streams INTEGER NOT NULL, tier TEXT NOT NULL,
    tries INTEGER NOT NULL, request BLOB, input BLOB NOT NULL, answer BLOB NOT NULL,
    bytes INTEGER NOT NULL, output BLOB NOT NULL
);
CREATE INDEX responses_by_owner ON responses (owner);
CREATE INDEX responses_by_size ON responses (bytes);
CREATE INDEX responses_by_previous ON responses (previous) WHERE previous IS NOT NULL;
CREATE INDEX responses_by_status ON responses (status, created_at);
CREATE INDEX responses_by_end ON responses (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX responses_open ON responses (owner, created_at)
    WHERE status IN ('queued', 'in_progress');
CREATE TABLE response_events (
    response TEXT NOT NULL, number INTEGER NOT NULL, frame TEXT NOT NULL,
    PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE owner_salt (salt BLOB NOT NULL);
INSERT INTO owner_salt VALUES (randomblob(32));
"""
# Triggers maintain the sums, because quotas are checked for each chunk of an upload.
_USAGE = """
CREATE TABLE usage (
    owner TEXT NOT NULL, kind TEXT NOT NULL, objects INTEGER NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (owner, kind)
) WITHOUT ROWID;
""" + "".join(
    f"""
CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN
    INSERT INTO usage SELECT NEW.owner, '{table}', 0, 0 WHERE NOT EXISTS
        (SELECT 1 FROM usage WHERE owner = NEW.owner AND kind = '{table}');
    UPDATE usage SET objects = objects + 1, bytes = bytes + NEW.bytes
        WHERE owner = NEW.owner AND kind = '{table}';
END;
CREATE TRIGGER {table}_removed AFTER DELETE ON {table} BEGIN
    UPDATE usage SET objects = objects - 1, bytes = bytes - OLD.bytes
        WHERE owner = OLD.owner AND kind = '{table}';
END;
CREATE TRIGGER {table}_grown AFTER UPDATE OF bytes ON {table} BEGIN
    UPDATE usage SET bytes = bytes + NEW.bytes - OLD.bytes
        WHERE owner = NEW.owner AND kind = '{table}';
END;
"""
    for table in ("files", "responses")
)
TABLES = _OBJECTS + _USAGE
"""Statements that make the tables of an empty database."""


T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[Concatenate[sqlite3.Connection, P], T]

_READERS = 4
_LOG_BYTES = 64 << 20
"""Size to which the write-ahead log is truncated after a checkpoint."""


class Database:
    """One writing thread, in the order of submission, and several reading threads.

    Each unit of work is one transaction. Reads see the last commit and do not wait for writes, so a
    large write does not delay them.
    """

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


Conditions = Sequence[tuple[str, Any]]
"""Columns or SQL expressions with the values that they must have."""
_NOUNS = {"files": "file", "batches": "batch", "responses": "response"}


@dataclass(frozen=True, slots=True)
class Page:
    """Limit, start and order of a page of a list."""

    limit: int
    after: str | None = None
    newest_first: bool = True


def new_id(prefix: str) -> str:
    """Return a random id of 128 bits."""
    return prefix + secrets.token_hex(16)


def find_row(
    db: sqlite3.Connection,
    table: str,
    owner: str,
    row_id: str,
    param: str,
    *,
    columns: str = "*",
) -> sqlite3.Row:
    """Return columns of an owner's row. Raises `NotFoundError` for the parameter `param`."""
    row: sqlite3.Row | None = db.execute(
        f"SELECT {columns} FROM {table} WHERE owner = ? AND id = ?", (owner, row_id)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no {_NOUNS[table]} {describe(row_id)}.", param=param)
    return row


def page_of_rows(
    db: sqlite3.Connection, table: str, owner: str, page: Page, conditions: Conditions = ()
) -> tuple[list[sqlite3.Row], bool]:
    """Return a page of an owner's rows, and whether more follow. Raises `NotFoundError`."""
    order, sign = ("DESC", "<") if page.newest_first else ("ASC", ">")
    where, values = _where(owner, conditions)
    if page.after is not None:
        at = db.execute(
            f"SELECT created_at FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
        ).fetchone()
        if at is None:
            raise NotFoundError(
                f"'after' is {describe(page.after)}, which is not there.", param="after"
            )
        where += f" AND (created_at, id) {sign} (?, ?)"
        values += [at[0], page.after]
    rows = db.execute(
        f"SELECT * FROM {table} WHERE {where} ORDER BY created_at {order}, id {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit


def _where(owner: str, conditions: Conditions) -> tuple[str, list[Any]]:
    """Return an SQL condition and its values."""
    every = [("owner", owner), *conditions]
    return " AND ".join(f"{column} = ?" for column, _ in every), [value for _, value in every]


NO_KEY = ""
DIGEST_PREFIX = "key:"


def owner_of_digest(salt: bytes, digest: bytes) -> str:
    """Return the owner of an unnamed key with the SHA-256 `digest`.

    Takes about 40 ms, which slows down guessing a weak key from a copied database.
    """
    slow = hashlib.scrypt(digest, salt=salt, n=1 << 14, r=8, p=1, dklen=16)
    return DIGEST_PREFIX + slow.hex()


def read_salt(connection: sqlite3.Connection) -> bytes:
    """Return the salt of this database's owners."""
    return bytes(connection.execute("SELECT salt FROM owner_salt").fetchone()[0])


_SLACK_S = 60.0
"""Largest difference that is an ordinary clock correction."""
_GRACE_S = 3600.0


def _elapsed_s() -> float:
    # Unlike CLOCK_MONOTONIC it counts the time in which the host sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ExpiryClock:
    """Seconds since 1970, for deletions and expiries. Any thread may use it.

    A deletion cannot be undone, so a wrong jump of the system clock must not expire data. This
    clock follows elapsed time: it adopts a forward jump of the system clock after an hour, a
    backward jump at once. A lost update of the offset is harmless.
    """

    def __init__(
        self, system: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed_s
    ) -> None:
        """`system` may jump, `elapsed` never does."""
        self._system, self._elapsed = system, elapsed
        self._offset = system() - elapsed()
        self._ahead_since: float | None = None

    def now(self) -> int:
        """Return the time."""
        system, elapsed = self._system(), self._elapsed()
        jump = system - elapsed - self._offset
        if jump > _SLACK_S:
            if self._ahead_since is None:
                self._ahead_since = elapsed
                logger.warning(
                    "The system clock has jumped %.0f s forward; nothing expires by it for %.0f s.",
                    *(jump, _GRACE_S),
                )
            if elapsed - self._ahead_since < _GRACE_S:
                return int(elapsed + self._offset)
        self._offset, self._ahead_since = system - elapsed, None
        return int(system)


_MODE = 0o700


class DataFolder:
    """Folder that this process holds exclusively until `close`."""

    def __init__(self, root: Path, min_free_bytes: int) -> None:
        """Lock the folder. Raises `SettingsError` if it is read-only or in use."""
        self.root = root
        self.files, self.parts = root / "files", root / "parts"
        self.database = root / "store.sqlite"
        self._min_free_bytes = min_free_bytes
        try:
            for folder in (root, self.files, self.parts):
                folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"--data-dir {root} cannot be written: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise SettingsError(
                f"--data-dir {root} is in use by another server; each server needs its own"
            ) from None

    def free_bytes(self) -> int:
        """Return the bytes that can be written above the floor of `--min-free-bytes`."""
        return shutil.disk_usage(self.root).free - self._min_free_bytes

    def require(self, size: int) -> None:
        """Raise `StorageFullError` if `size` more bytes would go below the floor."""
        with disk_errors():
            free = self.free_bytes()
        if size > free:
            raise StorageFullError(
                f"{size} bytes cannot be stored: the disk has {max(free, 0)} bytes to spare above "
                f"the floor of {self._min_free_bytes} (--min-free-bytes)."
            )

    def keep(self, part: Path, name: str) -> None:
        """Rename a complete part to the file `name`; a repeated call does nothing."""
        target = self.files / name
        if part.exists() or not target.exists():
            part.rename(target)
            sync_directory(self.files)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
