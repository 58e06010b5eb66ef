"""Writes a bundle: one file, or a folder that is a cache root."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rbln_backend.errors import BundleError
from rbln_backend.store.archive import digest_of, write_archive
from rbln_backend.store.bundle_contents import Contents

_READABLE = 0o644


def write_bundle(path: Path, contents: Contents) -> str:
    """Write ``path`` whole or not at all; returns its SHA-256. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = write_archive(file, contents.to_files())
            file.flush()
            os.fchmod(file.fileno(), _READABLE)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return digest


def write_folder(path: Path, contents: Contents) -> str:
    """Write a folder that is empty or new; returns the SHA-256 that its bundle would have.

    Raises ``BundleError`` for a folder with something in it, and ``OSError``.
    """
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise BundleError(f"{path} is not empty")
    files = contents.to_files()
    for name, data in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return digest_of(files)
