"""The database: SQLite with a write-ahead log, used by one thread, of a known version.

Every piece of work is one transaction: it is there as a whole after a crash, or not at all.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from server.settings import SettingsError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_FILES_AND_BATCHES = """
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
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, place INTEGER NOT NULL,
    bytes INTEGER NOT NULL, shared TEXT NOT NULL, done INTEGER NOT NULL,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE UNIQUE INDEX lines_by_name ON lines (batch, custom_id);
CREATE INDEX lines_to_do ON lines (batch, shared, number) WHERE NOT done;
"""
_RESPONSES = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER,
    background INTEGER NOT NULL, streams INTEGER NOT NULL, tier TEXT NOT NULL,
    tries INTEGER NOT NULL, request BLOB, input BLOB NOT NULL, answer BLOB NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE INDEX responses_by_owner ON responses (owner);
CREATE INDEX responses_by_size ON responses (bytes);
CREATE INDEX responses_by_previous ON responses (previous) WHERE previous IS NOT NULL;
CREATE INDEX responses_by_status ON responses (status, created_at);
CREATE INDEX responses_by_end ON responses (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE response_events (
    response TEXT NOT NULL, number INTEGER NOT NULL, frame TEXT NOT NULL,
    PRIMARY KEY (response, number)
) WITHOUT ROWID;
"""
_LINES_NEVER_RUN = "ALTER TABLE batches ADD COLUMN never_run INTEGER NOT NULL DEFAULT 0;"
_STEPS = (_FILES_AND_BATCHES, _RESPONSES, _LINES_NEVER_RUN)
"""What makes a database of each version one of the next."""
VERSION = len(_STEPS)


class Database:
    """Work for it runs in a thread of its own, in the order in which it was given."""

    def __init__(self, path: Path) -> None:
        """Raises `SettingsError` for a file that is damaged, or of a later version."""
        self._thread = ThreadPoolExecutor(1, "store")
        try:
            self._connection = self._thread.submit(_open, path).result()
        except (sqlite3.Error, SettingsError) as error:
            self._thread.shutdown()
            raise SettingsError(
                f"--data-dir: {path} cannot be used: {error}; put it aside to begin anew, the "
                "contents of files stay beside it"
            ) from None

    async def run(self, work: Work[T]) -> T:
        """Do `work` in one transaction; what it raises undoes it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work)

    def _do(self, work: Work[T]) -> T:
        with self._connection:
            return work(self._connection)

    def close(self) -> None:
        """Finish what was given, and close."""
        self._thread.submit(self._connection.close)
        self._thread.shutdown()


def stored_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of all files and responses: what `--max-stored-bytes` bounds."""
    (size,) = connection.execute(
        "SELECT (SELECT coalesce(sum(bytes), 0) FROM files)"
        " + (SELECT coalesce(sum(bytes), 0) FROM responses)"
    ).fetchone()
    return int(size)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level="IMMEDIATE")
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit is on the disk before it is answered.
        connection.execute("PRAGMA synchronous = FULL")
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
    for number, step in enumerate(_STEPS[version:], version + 1):
        connection.executescript(f"BEGIN; {step} PRAGMA user_version = {number}; COMMIT;")
