"""Size of the process's heap, as glibc's allocator counts it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int | None:
    """Return the allocated bytes of all heaps; None without glibc 2.33 or later."""
    if (read := _reader()) is None:
        return None
    info = read()
    return int(info.uordblks) + int(info.hblkhd)


@functools.cache
def _reader() -> Callable[[], _Mallinfo] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    function.restype = _Mallinfo
    return function
