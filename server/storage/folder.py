"""The data folder: one server's at a time, with room that is watched.

    <data-dir>/lock           held as long as the server lives
    <data-dir>/store.sqlite   what there is, and how far it is
    <data-dir>/files/<id>     the contents of files
    <data-dir>/parts/<name>   contents that are being written; what nobody knows is removed

Invariant: whatever is in `files` was written and synchronised before its name was there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from rbln_backend.host.replaced_files import sync_directory
from server.errors import StorageFullError
from server.settings import SettingsError
from server.storage.disk_errors import disk_errors

_MODE = 0o700


class DataFolder:
    """A folder that this process has for itself until `close`."""

    def __init__(self, root: Path, min_free_bytes: int) -> None:
        """Raises `SettingsError` where nothing can be written, or another server writes."""
        self.root = root
        self.files, self.parts = root / "files", root / "parts"
        self.database = root / "store.sqlite"
        self._min_free_bytes = min_free_bytes
        try:
            for folder in (root, self.files, self.parts):
                folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"--data-dir {root} cannot be written: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise SettingsError(
                f"--data-dir {root} belongs to another server that runs; each needs its own"
            ) from None

    def free_bytes(self) -> int:
        """Return how many bytes can be written before the floor of `--min-free-bytes`."""
        return shutil.disk_usage(self.root).free - self._min_free_bytes

    def require(self, size: int) -> None:
        """Raise `StorageFullError` unless `size` more bytes leave the floor's room."""
        with disk_errors():
            free = self.free_bytes()
        if size > free:
            raise StorageFullError(
                f"{size} bytes cannot be stored: the disk has {max(free, 0)} bytes to spare above "
                f"the floor of {self._min_free_bytes} (--min-free-bytes)."
            )

    def keep(self, part: Path, name: str) -> None:
        """Make a part that is complete a file; does nothing where that was done before a crash."""
        target = self.files / name
        if part.exists() or not target.exists():
            part.rename(target)
            sync_directory(self.files)

    def close(self) -> None:
        """Let another server have it."""
        os.close(self._lock)
