"""Built kernel libraries on disk, in directories of `<cache_root>/rbln/kernels/`.

A directory is named by the key of its build and holds the library and `library.json` with the
library's target and SHA-256. A library is code, and users who can write here control what the
engine runs: only files that pass ``trusted_files`` are run or exported. Pure Python, so that
bundles need no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rbln_backend.errors import CorruptArtifactError, UntrustedFileError
from rbln_backend.graphs.cache import directory_bytes, write_file
from rbln_backend.host.files import claimed_folder, locked_file, open_trusted, trusted_folder

LIBRARY = "librbln_emulator.so"
RECORD = "library.json"
KEY = re.compile(r"[0-9a-f]{32}")
"""Pattern of a library's directory name."""

State = Literal["whole", "damaged", "untrusted", "absent"]

_READABLE_FOLDER, _READABLE_FILE = 0o755, 0o644
_LEFTOVERS = "*.*/"


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """One library; `target` is its build target, "" if the record has none."""

    path: Path
    target: str
    size_bytes: int
    last_used: float

    @property
    def key(self) -> str:
        """Key of the build."""
        return self.path.name


def kernel_store(cache_root: Path) -> Path:
    """Return the folder of the libraries under a cache root."""
    return cache_root / "rbln" / "kernels"


def private_stores() -> list[Path]:
    """Return this user's own library folder, used if the cache root's is not trusted."""
    try:
        return [kernel_store(Path.home() / ".cache" / "rbln-serve")]
    except RuntimeError:
        return []


def libraries(store: Path) -> list[KernelFiles]:
    """Return all entries, intact or not, sorted by key."""
    try:
        paths = sorted(path for path in store.iterdir() if KEY.fullmatch(path.name))
    except OSError:
        return []
    found = []
    for path in (path for path in paths if path.is_dir()):
        try:
            target = get_target((path / RECORD).read_bytes())
            last_used = (path / RECORD).stat().st_mtime
        except OSError:
            target, last_used = "", 0.0
        found.append(KernelFiles(path, target, directory_bytes(path), last_used))
    return found


def is_intact(entry: Path) -> bool:
    """Return True if the library in ``entry`` matches the digest in its record."""
    try:
        return _matches((entry / RECORD).read_bytes(), (entry / LIBRARY).read_bytes())
    except OSError:
        return False


def read_trusted(entry: Path) -> dict[str, bytes] | None:
    """Return library and record by name; None if they are damaged.

    Raises ``UntrustedFileError`` if another user could have written them.
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
    """Return the record of a library that was built for ``target``."""
    about = {"sha256": hashlib.sha256(library).hexdigest(), "target": target}
    return json.dumps(about, sort_keys=True).encode()


def get_target(record: bytes) -> str:
    """Return the build target named in a record, or ""."""
    return str(_decode(record).get("target", ""))


def lock(entry: Path) -> AbstractContextManager[None]:
    """Hold ``entry`` between processes; raises `OSError` if no lock file can be created."""
    return locked_file(entry.with_suffix(".lock"))


@contextmanager
def staging(entry: Path) -> Iterator[Path]:
    """Yield a directory that replaces ``entry`` at the end; the caller holds the lock."""
    with claimed_folder(entry.parent, f"{entry.name}.", _LEFTOVERS) as made:
        yield made
        # Readable for servers of other users, writable for this user only, whatever the umask.
        for file in made.iterdir():
            file.chmod(_READABLE_FILE)
        made.chmod(_READABLE_FOLDER)
        if entry.exists():
            shutil.rmtree(entry)
        made.rename(entry)


def publish(entry: Path, files: Mapping[str, bytes]) -> bool:
    """Store an intact library; False if a trusted one is present. Raises `OSError`."""
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
