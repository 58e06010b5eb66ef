"""Model keys of a file; every key must be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from rbln_backend.errors import CheckpointError

MAX_COUNT = (1 << 31) - 1


class ModelKeys:
    """The keys `<architecture>.*`, with a record of those that were read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        prefix = f"{architecture}."
        self._architecture = architecture
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._read_names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a key's value. Raises `CheckpointError` where layers have values of their own."""
        self._read_names.add(name)
        value = self._values.get(name, default)
        if isinstance(value, list):
            raise CheckpointError(f"{self._full(name)} differs between layers, which is not read")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number. Raises `CheckpointError` where it is missing or out of bounds."""
        value = self._present(name, default)
        if type(value) is not int or not least <= value <= MAX_COUNT:
            self._refuse(name, f"a whole number from {least} to {MAX_COUNT:,}", value)
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises `CheckpointError` for anything else."""
        value = self._present(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self._refuse(name, "a positive number", value)
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text. Raises `CheckpointError` for anything else."""
        value = self._present(name, default)
        if not isinstance(value, str):
            self._refuse(name, "a text", value)
        return str(value)

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(f"the file has no {self._full(name)}")
        return value

    def _refuse(self, name: str, wanted: str, value: object) -> NoReturn:
        raise CheckpointError(f"{self._full(name)}: {value!r:.100}; must be {wanted}")

    def only(self, name: str, wanted: Any) -> None:
        """Raise `CheckpointError` for another value than the one that the model's code has."""
        if (found := self.get(name, wanted)) != wanted:
            raise CheckpointError(f"{self._full(name)} must be {wanted}, not {found!s:.100}")

    def refuse_unread(self) -> None:
        """Raise `CheckpointError` for a key that was never read."""
        for name, value in self._values.items():
            if name not in self._read_names:
                raise CheckpointError(
                    f"{self._full(name)} = {value!s:.100}: not read from GGUF; use the model's "
                    "Hugging Face checkpoint"
                )

    def _full(self, name: str) -> str:
        return f"{self._architecture}.{name}"
