"""Translation of disk errors under `--data-dir` into errors for clients."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import ServerError, StorageFullError, StorageUnavailableError

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
