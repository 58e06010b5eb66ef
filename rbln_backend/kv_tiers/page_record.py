"""The bytes of one page in a file: a header that says what it is, then K and V of every layer."""

from __future__ import annotations

import struct

from blake3 import blake3

_MAGIC = b"RBLNKV1\n"
# Magic, key, checksum of key and payload, bytes of the payload.
_HEADER = struct.Struct("<8s32s32sQ")
HEADER_BYTES = _HEADER.size


def header_of(key: bytes, payload: memoryview) -> bytes:
    """Return the header of a page with a ``key`` of 32 bytes."""
    return _HEADER.pack(_MAGIC, key, _checksum(key, payload), payload.nbytes)


def is_page(header: bytes, key: bytes, payload: memoryview) -> bool:
    """Return whether ``payload`` is, bit by bit, what was stored under ``key``."""
    if len(header) != HEADER_BYTES:
        return False
    magic, own_key, checksum, length = _HEADER.unpack(header)
    if (magic, own_key, length) != (_MAGIC, key, payload.nbytes):
        return False
    return bool(checksum == _checksum(key, payload))


def _checksum(key: bytes, payload: memoryview) -> bytes:
    return blake3(key).update(payload).digest()
