"""Digests of loaded adapters, by which their prefixes are found after a restart.

The number of an adapter means other weights in another process, and its name may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from rbln_backend.errors import AdapterError

_ENGINES: dict[str, dict[int, str]] = {}


def adapter_digests(instance_id: str) -> dict[int, str]:
    """Return the digests by number of an engine, which its worker and its scheduler share.

    ``instance_id`` is vLLM's of the configuration. Empty in a scheduler whose worker is another
    process.
    """
    return _ENGINES.setdefault(instance_id, {})


@dataclass(frozen=True)
class AdapterHasher:
    """Hashes of the prefixes of one adapter's request."""

    hash: Callable[[Any], Any]
    digest: str | None
    """In the hashes; None: they have the adapter's number instead."""

    def __call__(self, request: Any) -> Any:
        return self.hash(request)


class DigestedFiles:
    """The files of an adapter, hashed while they are read for its weights."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._before = self._states()

    def digest(self) -> str:
        """Return the digest of names and contents; ``AdapterError`` if files have changed since."""
        whole = blake3()
        for file in self._files:
            own = blake3()
            own.update_mmap(file)
            whole.update(f"{file.name}\0".encode() + own.digest())
        if self._states() != self._before:
            raise AdapterError("its files changed while they were read")
        return whole.hexdigest()

    def _states(self) -> list[tuple[int, int, int]]:
        states = [file.stat() for file in self._files]
        return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]
