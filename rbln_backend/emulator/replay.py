"""Recordings of kernel calls, kept by the native library; see ``kernels/bindings/replay.h``."""

from __future__ import annotations

import ctypes
import weakref
from typing import Protocol


class Recording:
    """The native calls that a thread makes between creation and ``end``, to be made again.

    In a rehearsal native calls are kept but not made: their results hold anything.
    """

    def __init__(self, library: ctypes.CDLL, *, is_rehearsal: bool = False) -> None:
        self._count = library.rbln_emulator_recorded_calls
        self._count.argtypes, self._count.restype = (ctypes.c_int64,), ctypes.c_int64
        self._replay = library.rbln_emulator_replay
        self._replay.restype = ctypes.c_char_p
        self._replay.argtypes = (*(ctypes.c_int64,) * 3, ctypes.c_int)
        self._last_write = library.rbln_emulator_last_cache_write
        self._last_write.argtypes, self._last_write.restype = (ctypes.c_int64,), ctypes.c_int64
        self._end = library.rbln_emulator_end_recording
        begin = library.rbln_emulator_begin_recording
        begin.argtypes, begin.restype = (ctypes.c_int,), ctypes.c_int64
        self._number: int = begin(is_rehearsal)
        self._known = 0
        drop = library.rbln_emulator_drop_recording
        drop.argtypes = (ctypes.c_int64,)
        weakref.finalize(self, drop, self._number)

    def take_new(self) -> tuple[int, int] | None:
        """The calls made since the last look, [first, end); None if there are none to repeat."""
        known, self._known = self._known, int(self._count(self._known))
        return (known, self._known) if self._known > known else None

    def end(self) -> None:
        """Calls are made as usual from now on."""
        self._end()

    @property
    def last_cache_write(self) -> int | None:
        """The last call that writes a KV cache; None without one, or if one is not recorded."""
        call = int(self._last_write(self._number))
        return call if call >= 0 else None

    def replay(self, first: int, end: int, *, only_writes: bool = False) -> None:
        """Make the calls [first, end) again, without the interpreter's lock.

        With ``only_writes`` the last one, of attention, writes its KV cache and computes nothing.

        Raises ``RuntimeError`` as the ops do, say for a block that the cache does not have.
        """
        failure = self._replay(self._number, first, end, only_writes)
        if failure is not None:
            raise RuntimeError(failure.decode())


class StartRecording(Protocol):
    """Starts a recording on the calling thread."""

    def __call__(self, *, is_rehearsal: bool = False) -> Recording: ...
