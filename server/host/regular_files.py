"""Reads files from untrusted paths: refuses pipes, devices and files above a size limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return a file's content; `OSError` if it is not a regular file or is too large."""
    # O_NONBLOCK: opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(f"it is larger than {max_bytes} bytes")
    return content
