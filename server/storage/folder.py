"""Data folder, locked by one server at a time, with a limit on free disk space.

    <data-dir>/lock           locked while the server runs
    <data-dir>/store.sqlite   metadata and job states
    <data-dir>/files/<id>     contents of files
    <data-dir>/parts/<name>   contents being written; unknown parts are removed at the start

Invariant: a file in `files` was written and synchronised before it got its name.
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
    """Folder that this process holds exclusively until `close`."""

    def __init__(self, root: Path, min_free_bytes: int) -> None:
        """Lock the folder. Raises `SettingsError` if it is read-only or in use."""
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
                f"--data-dir {root} is in use by another server; each server needs its own"
            ) from None

    def free_bytes(self) -> int:
        """Return the bytes that can be written above the floor of `--min-free-bytes`."""
        return shutil.disk_usage(self.root).free - self._min_free_bytes

    def require(self, size: int) -> None:
        """Raise `StorageFullError` if `size` more bytes would go below the floor."""
        with disk_errors():
            free = self.free_bytes()
        if size > free:
            raise StorageFullError(
                f"{size} bytes cannot be stored: the disk has {max(free, 0)} bytes to spare above "
                f"the floor of {self._min_free_bytes} (--min-free-bytes)."
            )

    def keep(self, part: Path, name: str) -> None:
        """Rename a complete part to the file `name`; a repeated call does nothing."""
        target = self.files / name
        if part.exists() or not target.exists():
            part.rename(target)
            sync_directory(self.files)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
