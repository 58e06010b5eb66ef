"""The store of one server: data folder, database, clock, and quotas of objects and bytes.

A request reserves its object before it writes; the reservation ends in the transaction that inserts
the row. Reservations are in memory, since one server has the data folder.

Invariant: for each owner and kind, rows plus reservations are at most the quota. Stored plus
reserved bytes are at most `--max-stored-bytes`. Results of accepted work (batch lines, background
responses) are always stored, and may exceed it by the size of what runs concurrently.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from server import bounds
from server.errors import StorageFullError
from server.settings import ServerSettings
from server.storage.database import Database, DataFolder, ExpiryClock, read_salt
from server.storage.jobs import BATCHES

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
        self._check_bytes(connection, size, _ADVICE[reservation.kind])
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
        self._check_bytes(connection, least, _ADVICE[reservation.kind])
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
        if not self._end(reservation):
            # The reservation was released, so the quota may be used up by now.
            self._check_objects(connection, reservation.owner, reservation.kind)
        self._check_bytes(connection, size, _ADVICE[reservation.kind])

    def release(self, reservation: Reservation) -> None:
        """End a reservation without storing its object. A repeated call does nothing."""
        self._end(reservation)

    def _end(self, reservation: Reservation) -> bool:
        """End a reservation; return whether it was held."""
        with self._lock:
            reservation.ended = True
            if not reservation.held:
                return False
            reservation.held = False
            place = reservation.owner, reservation.kind
            self._objects[place] -= 1
            if not self._objects[place]:
                del self._objects[place]
            self._bytes -= reservation.size
            return True

    def _check_objects(self, connection: sqlite3.Connection, owner: str, kind: Kind) -> None:
        most, reserved = self._max_objects[kind], self._objects[owner, kind]
        stored = _stored_objects(connection, owner, kind)
        if stored + reserved >= most:
            pending = f", {reserved} more are being stored" if reserved else ""
            raise StorageFullError(
                f"This key has {stored} {kind}{pending}; at most {most} are allowed. "
                f"{_ADVICE[kind]}"
            )

    def _check_bytes(self, connection: sqlite3.Connection, size: int, advice: str) -> None:
        stored = stored_bytes(connection)
        # A full store rejects empty objects as well.
        if stored + self._bytes + max(size, 1) > self._max_bytes:
            pending = f" and {self._bytes} are being stored" if self._bytes else ""
            raise StorageFullError(
                f"{size} bytes cannot be stored: {stored} bytes of at most {self._max_bytes} "
                f"(--max-stored-bytes) are used{pending}. {advice}"
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
        """End the reservation. A repeated call does nothing."""
        self.quotas.release(self)


def stored_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of all files and responses, and of the results of open batches."""
    (size,) = connection.execute(
        "SELECT (SELECT coalesce(sum(bytes), 0) FROM usage) + (SELECT coalesce(sum(output_bytes + "
        f"error_bytes), 0) FROM batches WHERE {BATCHES.is_open})"
    ).fetchone()
    return int(size)


def usage_of(connection: sqlite3.Connection, kind: Kind) -> tuple[int, int]:
    """Return the number of all stored objects of a kind, and their bytes."""
    count, size = connection.execute(
        "SELECT coalesce(sum(objects), 0), coalesce(sum(bytes), 0) FROM usage WHERE kind = ?",
        (kind,),
    ).fetchone()
    return int(count), int(size)


def _stored_objects(connection: sqlite3.Connection, owner: str, kind: Kind) -> int:
    row = connection.execute(
        "SELECT objects FROM usage WHERE owner = ? AND kind = ?", (owner, kind)
    ).fetchone()
    return 0 if row is None else int(row[0])


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
            self.owner_salt = self.database.run_now(read_salt)
        except Exception:
            self.folder.close()
            raise

    def close(self) -> None:
        """Finish the submitted work and release the folder."""
        self.database.close()
        self.folder.close()
