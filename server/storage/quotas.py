"""Quotas of stored objects and bytes, which hold under any concurrency.

A request reserves its place before it writes, and its reservation ends in the transaction that
inserts its row. Reservations are in memory: this server alone has the data folder, and a crash
leaves no row without its bytes counted. Invariant: for each owner and kind, rows and reservations
together are at most the quota; all bytes, stored and reserved, are at most `--max-stored-bytes`.
Answers of what was accepted before (lines of batches, responses in the background) are always
stored, and may go beyond it by as much as runs at once.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from server.errors import StorageFullError
from server.settings import ServerSettings

Kind = Literal["files", "responses"]
_FLAGS: dict[Kind, str] = {
    "files": "--max-files-per-key",
    "responses": "--max-responses-per-key",
}
_ADVICE: dict[Kind, str] = {
    "files": "Delete some.",
    "responses": "Delete some, or send 'store': false.",
}


class StorageQuotas:
    """Checks and reservations of one server.

    Methods that take a connection run in transactions of `Database.run`, one after the other.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._max_bytes = settings.max_stored_bytes
        self._max_objects: dict[Kind, int] = {
            "files": settings.max_files_per_key,
            "responses": settings.max_responses_per_key,
        }
        # Reservations end in the event loop as well.
        self._lock = threading.Lock()
        self._objects: Counter[tuple[str, Kind]] = Counter()
        self._bytes = 0

    def reserve(
        self, connection: sqlite3.Connection, reservation: Reservation, size: int = 0
    ) -> None:
        """Hold a place for one object of `size` bytes. Raises `StorageFullError`.

        Does nothing for a reservation that was released before its transaction began.
        """
        with self._lock:
            if reservation.ended:
                return
            self._check_objects(connection, reservation.owner, reservation.kind)
            self._check_bytes(connection, size, _ADVICE[reservation.kind])
            self._objects[reservation.owner, reservation.kind] += 1
            self._bytes += size
            reservation.size, reservation.held = size, True

    def has_room(self, connection: sqlite3.Connection) -> bool:
        """Whether any byte more may be stored."""
        with self._lock:
            return stored_bytes(connection) + self._bytes < self._max_bytes

    def extend(
        self, connection: sqlite3.Connection, reservation: Reservation, least: int, most: int
    ) -> None:
        """Reserve at least `least` more bytes for an object, `most` where there is room.

        Raises `StorageFullError`.
        """
        with self._lock:
            if not reservation.held:
                return
            self._check_bytes(connection, least, _ADVICE[reservation.kind])
            room = self._max_bytes - stored_bytes(connection) - self._bytes
            size = max(least, min(most, room))
            reservation.size += size
            self._bytes += size

    def settle(self, connection: sqlite3.Connection, reservation: Reservation, size: int) -> None:
        """End a reservation in the transaction that inserts its object of `size` bytes.

        Raises `StorageFullError` where the object is larger than was reserved and does not fit.
        """
        with self._lock:
            if not self._end(reservation):
                # Its request ended meanwhile, and another may have its place.
                self._check_objects(connection, reservation.owner, reservation.kind)
            self._check_bytes(connection, size, _ADVICE[reservation.kind])

    def release(self, reservation: Reservation) -> None:
        """End a reservation whose object is not stored; may be called again."""
        with self._lock:
            self._end(reservation)

    def _end(self, reservation: Reservation) -> bool:
        """End a reservation; return whether it held a place until now."""
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
            coming = f", {reserved} more are being stored" if reserved else ""
            raise StorageFullError(
                f"This key has {stored} {kind}{coming}; at most {most} are allowed "
                f"({_FLAGS[kind]}). {_ADVICE[kind]}"
            )

    def _check_bytes(self, connection: sqlite3.Connection, size: int, advice: str) -> None:
        stored = stored_bytes(connection)
        # A store that is full takes no empty object either.
        if stored + self._bytes + max(size, 1) > self._max_bytes:
            coming = f" and {self._bytes} are being stored" if self._bytes else ""
            raise StorageFullError(
                f"{size} bytes cannot be stored: {stored} bytes of at most {self._max_bytes} "
                f"(--max-stored-bytes) are used{coming}. {advice}"
            )


@dataclass(eq=False, slots=True)
class Reservation:
    """One object's place, from `StorageQuotas.reserve` until it is stored or given up."""

    quotas: StorageQuotas
    owner: str
    kind: Kind
    size: int = 0
    held: bool = False
    ended: bool = False

    def release(self) -> None:
        """End the reservation; may be called again."""
        self.quotas.release(self)


def stored_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of all files, responses, and answers of batches that have not ended."""
    (size,) = connection.execute(
        "SELECT (SELECT coalesce(sum(bytes), 0) FROM usage) + (SELECT coalesce(sum(output_bytes + "
        "error_bytes), 0) FROM batches WHERE status IN ('validating', 'in_progress', 'finalizing', "
        "'cancelling'))"
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
