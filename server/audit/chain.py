"""Lines of an audit log: JSON objects, each with the digest of the one before it.

A line is `{"kind":...,"seq":N,"prev":"HEX",...,"hash":"HEX"}`. `hash` is the SHA-256 of the line's
bytes without `,"hash":"HEX"`; `prev` is the `hash` of the line before, 64 zeros in the first line
of a log. So any program can verify a line without knowing a canonical form of JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

NO_HASH = "0" * 64
"""`prev` of the first record of a log."""

_HASH = b',"hash":"'
_END = b'"}'
_TAIL_BYTES = len(_HASH) + len(NO_HASH) + len(_END)


class ChainError(Exception):
    """A line that does not belong to the chain; the message has no place."""


@dataclass(frozen=True, slots=True)
class Link:
    """Position in a chain: number of the next record, and the hash of the last one."""

    seq: int = 0
    head: str = NO_HASH


def append_to(link: Link, record: Mapping[str, Any]) -> tuple[bytes, Link]:
    """Return the line of a record after `link`, with its newline, and the position after it."""
    body = msgspec.json.encode({"seq": link.seq, "prev": link.head, **record})
    digest = hashlib.sha256(body).hexdigest()
    line = b"".join((body[:-1], _HASH, digest.encode(), _END, b"\n"))
    return line, Link(link.seq + 1, digest)


def read_line(line: bytes) -> tuple[dict[str, Any], Link]:
    """Return the record of a line without its newline, and the position after it.

    Raises `ChainError` for a line whose bytes do not have its hash.
    """
    tail = line[-_TAIL_BYTES:]
    if len(line) <= _TAIL_BYTES or not (tail.startswith(_HASH) and tail.endswith(_END)):
        raise ChainError("it is no record of an audit log")
    body = line[:-_TAIL_BYTES] + b"}"
    digest = tail[len(_HASH) : -len(_END)].decode(errors="replace")
    found = hashlib.sha256(body).hexdigest()
    if found != digest:
        raise ChainError(f"its content has the hash {found}, and it says {digest}")
    try:
        record = msgspec.json.decode(body, type=dict[str, Any])
        return record, Link(int(record["seq"]) + 1, digest)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ChainError(f"it is no record of an audit log: {error}") from None


def check_follows(record: Mapping[str, Any], link: Link) -> None:
    """Raise `ChainError` unless a record is the next one after `link`."""
    if record["seq"] != link.seq:
        raise ChainError(f"it has record {record['seq']} where record {link.seq} belongs")
    if record.get("prev") != link.head:
        raise ChainError(
            f"its record {record['seq']} follows one with the hash {record.get('prev')}, and the "
            f"one before it has {link.head}"
        )
