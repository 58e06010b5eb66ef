"""The tier in files: pages in a bounded folder, which servers of one host can share.

A page is written beside its place and renamed, so a reader meets no part of one. What a crash or a
disk leaves damaged fails its checksum: it is a miss, and its file is removed.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rbln_backend.errors import ConfigError, UntrustedFileError
from rbln_backend.host.trusted_files import make_trusted_folder
from rbln_backend.kv_tiers.page_record import HEADER_BYTES, header_of, is_page

logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
# Eviction makes room for the writes of a while, because it lists all files.
_KEPT_SHARE = 0.9
_OWN_MODE = 0o700


class FolderTier:
    """Pages of one origin below ``root``, whose pages of all origins take ``max_bytes`` at most.

    One thread lists, writes and clears; another may read meanwhile.
    """

    def __init__(self, root: Path, name: str, max_bytes: int) -> None:
        """Raise ``ConfigError`` for a folder that others can write: who writes it, answers."""
        self._root, self._folder = root, root / name
        self._max_bytes = max_bytes
        self._bytes = 0
        self.is_read_only = False
        try:
            make_trusted_folder(root)
            self._folder.mkdir(_OWN_MODE, exist_ok=True)
        except UntrustedFileError as error:
            raise ConfigError(f"KV tiers: {error}; KV caches must be this user's own") from error
        except OSError as error:
            self._read_only(error)
        if not os.access(self._folder, os.W_OK):
            self._read_only(PermissionError(f"{self._folder} cannot be written"))

    def _read_only(self, error: OSError) -> None:
        if not self._folder.is_dir():
            raise ConfigError(f"KV tiers: cannot make {self._folder}: {error}") from error
        self.is_read_only = True
        logger.warning("KV tiers: pages are read and never written: %s", error)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages below the root, as far as this process knows."""
        return self._bytes

    def known(self) -> Iterator[bytes]:
        """Yield the keys of all pages of this origin, and count the bytes of all origins."""
        self._bytes = 0
        for _, size, file in self._files():
            self._bytes += size
            if (key := self._key(file)) is not None:
                yield key

    def __contains__(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, key: bytes, page: memoryview) -> bool | None:
        """Fill ``page`` and return True; None where there is no page, False if it is damaged.

        ``page`` is undefined unless True is returned.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                whole = file.readinto(page) == page.nbytes and not file.read(1)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("KV tiers: cannot read %s: %s", path, error)
            return None
        if whole and is_page(header, key, page):
            with suppress(OSError):
                os.utime(path)
            return True
        logger.warning("KV tiers: %s is damaged and is removed", path)
        with suppress(OSError):
            path.unlink()
        return False

    def write(self, key: bytes, page: memoryview) -> list[bytes]:
        """Store ``page`` and return the keys of pages that were evicted; raises ``OSError``."""
        path = self._path(key)
        path.parent.mkdir(_OWN_MODE, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(header_of(key, page))
                file.write(page)
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        self._bytes += HEADER_BYTES + page.nbytes
        return self._evict() if self._bytes > self._max_bytes else []

    def clear(self) -> None:
        """Remove all pages of this origin."""
        for folder in self._folder.glob("*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._bytes = sum(size for _, size, _ in self._files())

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"

    def _key(self, file: Path) -> bytes | None:
        """Return the key of a page of this origin, None for any other file."""
        if file.suffix == _SUFFIX and file.parent.parent == self._folder:
            with suppress(ValueError):
                return bytes.fromhex(file.stem)
        return None

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield time of last use, bytes and path of every file, of all servers and origins."""
        for file in self._root.glob("*/*/*"):
            with suppress(OSError):
                about = file.stat()
                yield about.st_mtime, about.st_size, file

    def _evict(self) -> list[bytes]:
        """Remove the least recently used files until there is room; return own keys of these."""
        removed: list[bytes] = []
        files = sorted(self._files())
        self._bytes = sum(size for _, size, _ in files)
        for _, size, file in files:
            if self._bytes <= self._max_bytes * _KEPT_SHARE:
                break
            with suppress(OSError):
                file.unlink()
                self._bytes -= size
            if (key := self._key(file)) is not None:
                removed.append(key)
        return removed
