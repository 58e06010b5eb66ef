"""The keys of a file that describe its model; all of them must be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rbln_backend.errors import CheckpointError


class ModelKeys:
    """The keys `<architecture>.*`, of which it is remembered which were asked for."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        prefix = f"{architecture}."
        self._architecture = architecture
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a key's value. Raises `CheckpointError` where layers have values of their own."""
        self._asked.add(name)
        value = self._values.get(name, default)
        if isinstance(value, list):
            raise CheckpointError(f"{self._full(name)} differs between layers, which is not read")
        return value

    def require(self, name: str) -> Any:
        """Return a key's value. Raises `CheckpointError` where the file lacks it."""
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"the file has no {self._full(name)}")
        return value

    def only(self, name: str, wanted: Any) -> None:
        """Raise `CheckpointError` for another value than the one that the model's code has."""
        if (found := self.get(name, wanted)) != wanted:
            raise CheckpointError(f"{self._full(name)} must be {wanted}, not {found}")

    def refuse_unread(self) -> None:
        """Raise `CheckpointError` for a key whose meaning nobody has asked for."""
        for name, value in self._values.items():
            if name not in self._asked:
                raise CheckpointError(
                    f"{self._full(name)} = {value}: not read from GGUF; use the model's "
                    "Hugging Face checkpoint"
                )

    def _full(self, name: str) -> str:
        return f"{self._architecture}.{name}"
