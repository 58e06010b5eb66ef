"""Digest of the sources that determine captured graphs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_GRAPH_SOURCES = (
    *("attention", "compiler", "emulator", "lora", "moe", "parallel", "quantization"),
    *("text_models", "core.py", "worker/draft_model.py", "worker/graph_functions.py"),
    "worker/group_inputs.py",
)


@cache
def sources_digest() -> str:
    """Return the SHA-256 of the sources, part of every graph's key against old programs."""
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
