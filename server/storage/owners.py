"""Owners of stored data.

The owner of a named API key is its name, so the key can be replaced. The owner of an unnamed key
is a salted digest, so its data does not pass to another key at the same position. Without keys the
owner is "". All owners but names contain a colon.
"""

from __future__ import annotations

import hashlib
import sqlite3

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
