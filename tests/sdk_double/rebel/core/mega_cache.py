"""Binaries of a process as one file, to be carried to another host."""

from __future__ import annotations

import json
import os
import stat
from typing import BinaryIO

from rebel import log
from rebel.core.binaries import IN_MEMORY

_MAGIC = b"SDK double bundle\n"


def set_dir(path: str) -> None:
    """Where binaries are looked for and put."""
    log.write("mega_cache", action="set_dir", path=str(path))


def read_bundle(file: BinaryIO) -> dict[str, int] | None:
    """Take the binaries of a bundle; None where it is not one."""
    _require_file(file)
    data = file.read()
    if not data.startswith(_MAGIC):
        log.write("mega_cache", action="read", entries=None)
        return None
    entries = json.loads(data.removeprefix(_MAGIC))
    IN_MEMORY.update({key: text.encode() for key, text in entries.items()})
    log.write("mega_cache", action="read", entries=len(entries))
    return {"entries": len(entries)}


def write_bundle(file: BinaryIO) -> bool:
    """Write all binaries of this process; False, and nothing written, where there are none."""
    _require_file(file)
    log.write("mega_cache", action="write", entries=len(IN_MEMORY))
    if not IN_MEMORY:
        return False
    entries = {key: binary.decode() for key, binary in sorted(IN_MEMORY.items())}
    file.write(_MAGIC + json.dumps(entries).encode())
    return True


def _require_file(file: BinaryIO) -> None:
    """The vendor's runner hands over files of a file system."""
    # Raises for what has no descriptor.
    assert stat.S_ISREG(os.fstat(file.fileno()).st_mode), file
