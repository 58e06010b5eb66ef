"""Read-ahead of a checkpoint's weights, which come from the disk while processes import modules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rbln_backend.host.memory import host_memory

_MOST_OF_MEMORY = 0.5
"""Share of the free memory up to which files are read ahead; more could displace one another."""


def read_ahead(argv: Sequence[str]) -> list[Path]:
    """Ask the kernel to read the safetensors files of the folder that `argv` begins with.

    Returns these files: none for a model of the hub, dummy weights or too large a checkpoint. Files
    that are in the page cache cost nothing. May take as long as the disk's queue is full.
    """
    if not argv or argv[0].startswith("-") or "dummy" in argv:
        return []
    files = sorted(Path(argv[0]).expanduser().glob("*.safetensors"))
    try:
        size = sum(path.stat().st_size for path in files)
        if size > _MOST_OF_MEMORY * host_memory().available_bytes:
            return []
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    except OSError:
        # The check of the weights reports files that cannot be read.
        return []
    return files
