"""Process lifetime: closed output pipes do not end a process, the end of its parent does.

Logs go where whoever started the service sends them, often into a pipe; when its reader ends, the
service goes on in silence.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READER_GONE = (errno.EPIPE, errno.EIO)


class _LastingFile(io.FileIO):
    """A descriptor that this process redirects to `/dev/null` once its reader closes."""

    def write(self, data: Buffer, /) -> int:
        """Write, or drop the data if the reader has closed."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes


def outlive_readers() -> None:
    """Survive closed readers of standard output and error; call before logging is set up.

    Streams that are not the interpreter's own any more are left alone.
    """
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _lasting(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    file = _LastingFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True
    )


def end_with_parent() -> None:
    """Kill this process when the one that started it ends, however that happens.

    For processes of `multiprocessing` alone; there the parent's end closes a pipe. The kernel's own
    signal (PR_SET_PDEATHSIG) comes too early where a thread that ended has started the process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
