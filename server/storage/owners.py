"""Owners of stored data.

The owner of a named API key is its name, so the key can be replaced. The owner of an unnamed key
is a salted digest, so its data does not pass to another key at the same position. Without keys the
owner is "". All owners but names contain a colon.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping

NO_KEY = ""
DIGEST_PREFIX = "key:"
POSITION_PREFIX = "position:"
"""Prefix for data that earlier versions stored by the position of an unnamed key."""
_TABLES = ("files", "batches", "responses")


def owner_of_digest(salt: bytes, digest: bytes) -> str:
    """Return the owner of an unnamed key with the SHA-256 `digest`.

    Takes about 40 ms, which slows down guessing a weak key from a copied database.
    """
    slow = hashlib.scrypt(digest, salt=salt, n=1 << 14, r=8, p=1, dklen=16)
    return DIGEST_PREFIX + slow.hex()


def read_salt(connection: sqlite3.Connection) -> bytes:
    """Return the salt of this database's owners."""
    return bytes(connection.execute("SELECT salt FROM owner_salt").fetchone()[0])


def count_unattributed(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the number of rows that no key owns, by position (`api-1`)."""
    each = " UNION ALL ".join(f"SELECT owner FROM {table}" for table in _TABLES)
    rows = connection.execute(
        f"SELECT substr(owner, ?), count(*) FROM ({each}) WHERE owner LIKE ? GROUP BY 1",
        (len(POSITION_PREFIX) + 1, f"{POSITION_PREFIX}%"),
    )
    return dict(rows.fetchall())


def adopt_positions(connection: sqlite3.Connection, owners: Mapping[str, str]) -> int:
    """Assign the rows of each position to its owner in `owners`; return the number of rows."""
    moved = 0
    for position, owner in owners.items():
        left = POSITION_PREFIX + position
        # Idempotency keys are unique per owner, and the new owner may have used the same one.
        connection.execute(
            "UPDATE batches SET idempotency = NULL WHERE owner = ? AND idempotency IN "
            "(SELECT idempotency FROM batches WHERE owner = ?)",
            (left, owner),
        )
        for table in _TABLES:
            moved += connection.execute(
                f"UPDATE {table} SET owner = ? WHERE owner = ?", (owner, left)
            ).rowcount
    return moved
