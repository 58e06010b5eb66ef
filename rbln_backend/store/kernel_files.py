"""Built kernel libraries on disk: what lies in a directory of `<cache_root>/rbln/kernels/`.

A directory is named by the key of its build and holds the library and `library.json`, which says
what the library is for and what its SHA-256 is. A library is code: whoever can write here decides
what the engine runs, so only what ``trusted_files`` lets pass is run or exported. Pure Python, so
that bundles can be handled without torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rbln_backend.errors import CorruptArtifactError, UntrustedFileError
from rbln_backend.host.file_locks import claimed_folder
from rbln_backend.host.trusted_files import open_trusted, trusted_folder
from rbln_backend.store.artifact_files import directory_bytes, write_file

LIBRARY = "librbln_emulator.so"
RECORD = "library.json"
KEY = re.compile(r"[0-9a-f]{32}")
"""The name of a library's directory."""

State = Literal["whole", "damaged", "untrusted", "absent"]

_READABLE_FOLDER, _READABLE_FILE = 0o755, 0o644
_LEFTOVERS = "*.*/"


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """One library; `target` is what it was built for, "" where its record does not say."""

    path: Path
    target: str
    size_bytes: int
    last_used: float

    @property
    def key(self) -> str:
        """The key of its build."""
        return self.path.name


def kernel_store(cache_root: Path) -> Path:
    """Where the libraries under a cache root lie, each in a directory named by its key."""
    return cache_root / "rbln" / "kernels"


def private_stores() -> list[Path]:
    """Where this user's own libraries lie when the cache root's cannot be trusted, if anywhere."""
    try:
        return [kernel_store(Path.home() / ".cache" / "rbln-serve")]
    except RuntimeError:
        return []


def libraries(store: Path) -> list[KernelFiles]:
    """Return all entries, intact or not, by key."""
    try:
        paths = sorted(path for path in store.iterdir() if KEY.fullmatch(path.name))
    except OSError:
        return []
    return [_describe(path) for path in paths if path.is_dir()]


def is_intact(entry: Path) -> bool:
    """Return True if the library in ``entry`` matches the digest in its record."""
    try:
        return _matches((entry / RECORD).read_bytes(), (entry / LIBRARY).read_bytes())
    except OSError:
        return False


def read_trusted(entry: Path) -> dict[str, bytes] | None:
    """Library and record by name; None where they are damaged.

    Raises ``UntrustedFileError`` where another user could have written them.
    """
    try:
        with trusted_folder(entry) as folder:
            files = {name: _read(open_trusted(folder, name)) for name in (LIBRARY, RECORD)}
    except UntrustedFileError:
        raise
    except OSError:
        return None
    return files if _matches(files[RECORD], files[LIBRARY]) else None


def open_library(entry: Path) -> int:
    """Return a descriptor of the library in ``entry``, intact and not writable by other users.

    Raises ``UntrustedFileError``, ``CorruptArtifactError`` and ``OSError``.
    """
    with trusted_folder(entry) as folder:
        record = _read(open_trusted(folder, RECORD))
        library = open_trusted(folder, LIBRARY)
    try:
        if not _matches(record, _read(os.dup(library))):
            raise CorruptArtifactError(f"the library in {entry} does not match its record")
    except BaseException:
        os.close(library)
        raise
    return library


def examine(entry: Path) -> tuple[State, str]:
    """Return the state of the library in ``entry``, and for an untrusted one the reason."""
    try:
        os.close(open_library(entry))
    except UntrustedFileError as error:
        return "untrusted", str(error)
    except (OSError, CorruptArtifactError):
        return ("damaged" if os.path.lexists(entry) else "absent"), ""
    return "whole", ""


def are_intact(files: Mapping[str, bytes]) -> bool:
    """Return True if ``files`` are exactly a library and its record."""
    return files.keys() == {LIBRARY, RECORD} and _matches(files[RECORD], files[LIBRARY])


def make_record(library: bytes, target: str) -> bytes:
    """The record of a library that was built for ``target``."""
    about = {"sha256": hashlib.sha256(library).hexdigest(), "target": target}
    return json.dumps(about, sort_keys=True).encode()


def target_of(record: bytes) -> str:
    """Return the build target named in a record, or ""."""
    return str(_decode(record).get("target", ""))


@contextmanager
def lock(entry: Path) -> Iterator[None]:
    """Hold ``entry`` between processes; raises `OSError` where no lock can be put."""
    with entry.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def staging(entry: Path) -> Iterator[Path]:
    """Yield a directory that replaces ``entry`` when the block ends well; hold the lock."""
    with claimed_folder(entry.parent, f"{entry.name}.", _LEFTOVERS) as made:
        yield made
        # Servers under other users read it, too, and none but this one may write, whatever the
        # umask says.
        for file in made.iterdir():
            file.chmod(_READABLE_FILE)
        made.chmod(_READABLE_FOLDER)
        if entry.exists():
            shutil.rmtree(entry)
        made.rename(entry)


def publish(entry: Path, files: Mapping[str, bytes]) -> bool:
    """Put an intact library at ``entry``; False if there is one to be trusted. Raises `OSError`."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with lock(entry):
        if examine(entry)[0] == "whole":
            return False
        with staging(entry) as directory:
            for name, content in files.items():
                write_file(directory / name, content)
    return True


def _matches(record: bytes, library: bytes) -> bool:
    return _decode(record).get("sha256") == hashlib.sha256(library).hexdigest()


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _decode(record: bytes) -> dict[str, Any]:
    try:
        content = json.loads(record)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _describe(path: Path) -> KernelFiles:
    try:
        target = target_of((path / RECORD).read_bytes())
        last_used = (path / RECORD).stat().st_mtime
    except OSError:
        target, last_used = "", 0.0
    return KernelFiles(path, target, directory_bytes(path), last_used)
