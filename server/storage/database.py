"""The store of one server: data folder, SQLite database, tables, owners, clock and quotas.

    <data-dir>/lock           locked while the server runs
    <data-dir>/store.sqlite   metadata and job states
    <data-dir>/files/<id>     contents of files
    <data-dir>/parts/<name>   contents being written; unknown parts are removed at the start

Invariant: a file in `files` was written and synchronised before it got its name.

The owner of a named API key is its name, so the key can be replaced. The owner of an unnamed key
is a salted digest, so its data does not pass to another key at the same position. Without keys the
owner is "". All owners but names contain a colon.

A request reserves its object before it writes; the reservation ends in the transaction that inserts
the row. Reservations are in memory, since one server has the data folder.

Invariant: for each owner and kind, rows plus reservations are at most the quota. Stored plus
reserved bytes are at most `--max-stored-bytes`. Results of accepted work (batch lines, background
responses) are always stored, and may exceed it by the size of what runs concurrently.
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
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from rbln_backend.host.files import sync_directory
from server import bounds
from server.errors import (
    NotFoundError,
    ServerError,
    StorageFullError,
    StorageUnavailableError,
    describe,
)
from server.settings import ServerSettings, SettingsError

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PRIMARY = 0xFF
"""Mask of the primary code in SQLite's extended error codes."""
_DISK_CODES = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
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
            self._connection = _open(path)
            (self.owner_salt,) = self._connection.execute("SELECT salt FROM owner_salt").fetchone()
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
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise SettingsError(f"it has version {version}; this server supports version {VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass(frozen=True, slots=True)
class JobTable:
    """A table with columns `id`, `owner` and `status`; the statuses of open and of ended rows."""

    name: str
    open_statuses: tuple[str, ...]
    ended_statuses: tuple[str, ...]

    @property
    def is_open(self) -> str:
        return f"status IN ({', '.join(repr(status) for status in self.open_statuses)})"

    def no_rows(self) -> dict[str, int]:
        return dict.fromkeys((*self.open_statuses, *self.ended_statuses), 0)

    def count_by_status(self, db: sqlite3.Connection) -> dict[str, int]:
        query = f"SELECT status, count(*) FROM {self.name} GROUP BY status"
        return self.no_rows() | dict(db.execute(query).fetchall())

    def count_open(self, db: sqlite3.Connection, owner: str | None = None) -> int:
        query = f"SELECT count(*) FROM {self.name} WHERE {self.is_open}"
        if owner is not None:
            query += " AND owner = :owner"
        (count,) = db.execute(query, {"owner": owner}).fetchone()
        return int(count)


BATCHES = JobTable(
    "batches",
    ("validating", "in_progress", "finalizing", "cancelling"),
    ("completed", "failed", "expired", "cancelled"),
)
RESPONSES = JobTable(
    "responses", ("queued", "in_progress"), ("completed", "incomplete", "failed", "cancelled")
)


_NOUNS = {"files": "file", "batches": "batch", "responses": "response"}


@dataclass(frozen=True, slots=True)
class Page:
    """Limit, start and order of a page of a list."""

    limit: int
    after: str | None = None
    newest_first: bool = True


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def find_row(
    db: sqlite3.Connection, table: str, owner: str, row_id: str, param: str, *, columns: str = "*"
) -> sqlite3.Row:
    """Return columns of an owner's row. Raises `NotFoundError` for the parameter `param`."""
    row: sqlite3.Row | None = db.execute(
        f"SELECT {columns} FROM {table} WHERE owner = ? AND id = ?", (owner, row_id)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no {_NOUNS[table]} {describe(row_id)}.", param=param)
    return row


def page_of_rows(
    db: sqlite3.Connection, table: str, owner: str, page: Page, **conditions: Any
) -> tuple[list[sqlite3.Row], bool]:
    """Return a page of an owner's rows, and whether more follow. Raises `NotFoundError`.

    `conditions` are columns with the values that they must have.
    """
    order, sign = ("DESC", "<") if page.newest_first else ("ASC", ">")
    conditions["owner"] = owner
    where, values = " AND ".join(f"{name} = ?" for name in conditions), [*conditions.values()]
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


NO_KEY = ""
DIGEST_PREFIX = "key:"


def owner_of_digest(salt: bytes, digest: bytes) -> str:
    """Return the owner of an unnamed key with the SHA-256 `digest`.

    Takes about 40 ms, which slows down guessing a weak key from a copied database.
    """
    slow = hashlib.scrypt(digest, salt=salt, n=1 << 14, r=8, p=1, dklen=16)
    return DIGEST_PREFIX + slow.hex()


_SLACK_S = 60.0
"""Largest difference that is an ordinary clock correction."""
_GRACE_S = 3600.0
_elapsed_s = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Unlike CLOCK_MONOTONIC it counts the time in which the host sleeps."""


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
        system, elapsed = self._system(), self._elapsed()
        jump = system - elapsed - self._offset
        if jump > _SLACK_S:
            if self._ahead_since is None:
                self._ahead_since = elapsed
                logger.warning(
                    "The system clock has jumped %.0f s forward; nothing expires by it for %.0f s.",
                    jump,
                    _GRACE_S,
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
        os.close(self._lock)


Kind = Literal["files", "responses"]
_ADVICE: dict[Kind, str] = {
    "files": "Delete some.",
    "responses": "Delete some, or send 'store': false.",
}


class StorageQuotas:
    """Quota checks and reservations of one server.

    Methods that take a connection run in transactions of `Database.run`, so one at a time.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._max_bytes = settings.max_stored_bytes
        self._max_objects: dict[Kind, int] = {
            "files": bounds.MAX_FILES_PER_KEY,
            "responses": bounds.MAX_RESPONSES_PER_KEY,
        }
        # `release` runs in the event loop, the other methods in threads of the database. Whoever
        # holds the lock does not wait for the disk: values that were checked can only fall.
        self._lock = threading.Lock()
        self._objects: Counter[tuple[str, Kind]] = Counter()
        self._bytes = 0

    def reserve(
        self, connection: sqlite3.Connection, reservation: Reservation, size: int = 0
    ) -> None:
        """Reserve one object of `size` bytes. Raises `StorageFullError`.

        Does nothing for a reservation that was released before its transaction began.
        """
        if reservation.ended:
            return
        self._check_objects(connection, reservation.owner, reservation.kind)
        self._check_bytes(connection, size, reservation.kind)
        with self._lock:
            if not reservation.ended:
                self._objects[reservation.owner, reservation.kind] += 1
                self._bytes += size
                reservation.size, reservation.held = size, True

    def has_room(self, connection: sqlite3.Connection) -> bool:
        """Return whether at least one more byte may be stored."""
        return stored_bytes(connection) + self._bytes < self._max_bytes

    def extend(
        self, connection: sqlite3.Connection, reservation: Reservation, least: int, most: int
    ) -> None:
        """Reserve between `least` and `most` more bytes for an object, as many as are available.

        Raises `StorageFullError`.
        """
        if not reservation.held:
            return
        self._check_bytes(connection, least, reservation.kind)
        available = self._max_bytes - stored_bytes(connection) - self._bytes
        size = max(least, min(most, available))
        with self._lock:
            if reservation.held:
                reservation.size += size
                self._bytes += size

    def settle(self, connection: sqlite3.Connection, reservation: Reservation, size: int) -> None:
        """End a reservation in the transaction that inserts its object of `size` bytes.

        Raises `StorageFullError` if the object exceeds its reservation and does not fit.
        """
        if not self.release(reservation):
            # The reservation was released, so the quota may be used up by now.
            self._check_objects(connection, reservation.owner, reservation.kind)
        self._check_bytes(connection, size, reservation.kind)

    def release(self, reservation: Reservation) -> bool:
        """End a reservation; return whether it was held. A repeated call does nothing."""
        with self._lock:
            reservation.ended = True
            if not reservation.held:
                return False
            reservation.held = False
            key = reservation.owner, reservation.kind
            self._objects[key] -= 1
            if not self._objects[key]:
                del self._objects[key]
            self._bytes -= reservation.size
            return True

    def _check_objects(self, connection: sqlite3.Connection, owner: str, kind: Kind) -> None:
        most, reserved = self._max_objects[kind], self._objects[owner, kind]
        row = connection.execute(
            "SELECT objects FROM usage WHERE owner = ? AND kind = ?", (owner, kind)
        ).fetchone()
        stored = 0 if row is None else row[0]
        if stored + reserved >= most:
            pending = f", {reserved} more are being stored" if reserved else ""
            raise StorageFullError(
                f"This key has {stored} {kind}{pending}; at most {most} are allowed. "
                f"{_ADVICE[kind]}"
            )

    def _check_bytes(self, connection: sqlite3.Connection, size: int, kind: Kind) -> None:
        stored = stored_bytes(connection)
        # A full store rejects empty objects as well.
        if stored + self._bytes + max(size, 1) > self._max_bytes:
            pending = f" and {self._bytes} are being stored" if self._bytes else ""
            raise StorageFullError(
                f"{size} bytes cannot be stored: {stored} bytes of at most {self._max_bytes} "
                f"(--max-stored-bytes) are used{pending}. {_ADVICE[kind]}"
            )


@dataclass(eq=False, slots=True)
class Reservation:
    """Reservation of one object, from `StorageQuotas.reserve` until it is stored or released."""

    quotas: StorageQuotas
    owner: str
    kind: Kind
    size: int = 0
    held: bool = False
    ended: bool = False

    def release(self) -> None:
        self.quotas.release(self)


def stored_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of all files and responses, and of the results of open batches."""
    (size,) = connection.execute(
        "SELECT (SELECT coalesce(sum(bytes), 0) FROM usage) + (SELECT coalesce(sum(output_bytes + "
        f"error_bytes), 0) FROM batches WHERE {BATCHES.is_open})"
    ).fetchone()
    return int(size)


def get_usage(connection: sqlite3.Connection, kind: Kind) -> tuple[int, int]:
    """Return the number of all stored objects of a kind, and their bytes."""
    count, size = connection.execute(
        "SELECT coalesce(sum(objects), 0), coalesce(sum(bytes), 0) FROM usage WHERE kind = ?",
        (kind,),
    ).fetchone()
    return int(count), int(size)


class Store:
    """Open data folder with its database, quotas and clock."""

    def __init__(self, settings: ServerSettings) -> None:
        """Open `--data-dir`. Raises `SettingsError`."""
        assert settings.data_dir is not None
        self.folder = DataFolder(settings.data_dir, settings.min_free_bytes)
        self.quotas = StorageQuotas(settings)
        self.clock = ExpiryClock()
        try:
            self.database = Database(self.folder.database)
        except Exception:
            self.folder.close()
            raise

    def close(self) -> None:
        self.database.close()
        self.folder.close()
