"""Owners of stored data.

A named API key owns by its name, so that a key can be replaced. An unnamed key owns by a salted
digest of itself, so that its data does not pass to whichever key takes its position. Without keys
everything belongs to the owner "". Names of keys hold no colon, which all other owners do.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping

NO_KEY = ""
DIGEST_PREFIX = "key:"
POSITION_PREFIX = "position:"
"""Of data that an earlier version stored for unnamed keys, by position. No key owns it."""
_TABLES = ("files", "batches", "responses")


def owner_of_digest(salt: bytes, digest: bytes) -> str:
    """Return the owner of an unnamed key with the SHA-256 `digest`.

    Takes about 40 ms: guesses of a weak key against a copied database are slow.
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
    """Give the data of each position to the owner named for it; return the number of rows."""
    moved = 0
    for position, owner in owners.items():
        left = POSITION_PREFIX + position
        # An idempotency key is the owner's only one; the new owner may have used it since.
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
