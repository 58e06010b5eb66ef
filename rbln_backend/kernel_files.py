"""Built kernel libraries on disk: what lies in a directory of `<cache_root>/rbln/kernels/`.

A directory is named by the key of its build and holds the library and `library.json`, which says
what the library is for and what its SHA-256 is. A library is code: whoever can write here decides
what the engine runs. Pure Python, so that bundles can be handled without torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "librbln_emulator.so"
RECORD = "library.json"
KEY = re.compile(r"[0-9a-f]{32}")
"""The name of a library's directory."""

_READABLE = 0o755


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


def libraries(store: Path) -> list[KernelFiles]:
    """What is stored, intact or not, by key."""
    try:
        paths = sorted(path for path in store.iterdir() if KEY.fullmatch(path.name))
    except OSError:
        return []
    return [_describe(path) for path in paths if path.is_dir()]


def is_intact(entry: Path) -> bool:
    """Whether the library in ``entry`` has the content that its record promises."""
    try:
        return _matches((entry / RECORD).read_bytes(), (entry / LIBRARY).read_bytes())
    except OSError:
        return False


def read_intact(entry: Path) -> dict[str, bytes] | None:
    """Library and record by name; None where they are damaged."""
    try:
        files = {name: (entry / name).read_bytes() for name in (LIBRARY, RECORD)}
    except OSError:
        return None
    return files if _matches(files[RECORD], files[LIBRARY]) else None


def are_intact(files: Mapping[str, bytes]) -> bool:
    """Whether ``files`` by name are a library and its record, and nothing else."""
    return files.keys() == {LIBRARY, RECORD} and _matches(files[RECORD], files[LIBRARY])


def make_record(library: bytes, target: str) -> bytes:
    """The record of a library that was built for ``target``."""
    about = {"sha256": hashlib.sha256(library).hexdigest(), "target": target}
    return json.dumps(about, sort_keys=True).encode()


def target_of(record: bytes) -> str:
    """What a record says that its library was built for; "" where it says nothing."""
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
    for leftover in entry.parent.glob(f"{entry.name}.*/"):
        shutil.rmtree(leftover, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        yield made
        # Servers under other users read it, too; mkdtemp shuts them out.
        made.chmod(_READABLE)
        if entry.exists():
            shutil.rmtree(entry)
        made.rename(entry)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def publish(entry: Path, files: Mapping[str, bytes]) -> bool:
    """Put an intact library at ``entry``; False if there is one. Raises `OSError`."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with lock(entry):
        if is_intact(entry):
            return False
        with staging(entry) as directory:
            for name, content in files.items():
                with (directory / name).open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
    return True


def _matches(record: bytes, library: bytes) -> bool:
    return _decode(record).get("sha256") == hashlib.sha256(library).hexdigest()


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
    try:
        size = sum(item.stat(follow_symlinks=False).st_size for item in os.scandir(path))
    except OSError:
        size = 0
    return KernelFiles(path, target, size, last_used)
