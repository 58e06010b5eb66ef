"""File with the adapters that were loaded over HTTP, read after a restart.

Invariant: after a crash or power cut it holds the complete old or new list.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rbln_backend.host.replaced_files import replace_file, sync_directory
from server.host.files import read_regular

logger = logging.getLogger(__name__)

STATE_FILE = "adapters.json"
"""Name of the file in --lora-root."""
VERSION = 1
_MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Remembered:
    """Name of an adapter, and its path as the request wrote it."""

    name: str
    path: str


_LIST = TypeAdapter(list[Remembered])


class StateFile:
    """The list of adapters in a file. Its methods block: call them in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def writable(self) -> bool:
        """Return whether the file can be written, without changing it."""
        folder = self.path.parent
        if self.path.exists() and not (self.path.is_file() and os.access(self.path, os.W_OK)):
            return False
        # A new list is written beside the old one.
        return folder.is_dir() and os.access(folder, os.W_OK)

    def read(self) -> list[Remembered]:
        """Return the stored adapters; a damaged file is renamed, and the result is empty."""
        try:
            content = json.loads(read_regular(self.path, _MAX_BYTES))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']!r} is not {VERSION}")
            return _LIST.validate_python(content["adapters"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            logger.error("%s cannot be read (%s); kept as %s", self.path, error, aside.name)
            self._put_aside(aside)
            return []

    def write(self, adapters: Sequence[Remembered]) -> None:
        """Replace the list. Raises `OSError`."""
        content = {"version": VERSION, "adapters": [asdict(adapter) for adapter in adapters]}
        replace_file(self.path, json.dumps(content, indent=1).encode())
        sync_directory(self.path.parent)

    def _put_aside(self, aside: Path) -> None:
        try:
            self.path.replace(aside)
        except OSError as error:
            logger.error("%s cannot be renamed: %s", self.path, error)
