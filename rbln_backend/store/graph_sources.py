"""The sources that shape graphs: which version of this project made a stored one."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

# Those whose text decides what a captured graph holds.
_GRAPH_SOURCES = (
    *("attention", "compiler", "emulator", "lora", "moe", "parallel", "quantization"),
    *("core.py", "worker/graphs/functions.py", "worker/step/group_inputs.py"),
)


@cache
def sources_digest() -> str:
    """SHA-256 over them, a part of every graph's key: an upgrade never reads old programs."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for entry in _GRAPH_SOURCES:
        path = root / entry
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
