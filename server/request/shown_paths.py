"""Paths as clients see them, without the layout of the server's file system."""

from __future__ import annotations

from pathlib import Path, PurePath

from server.lora.adapter import AdapterObject
from server.wire.endpoint import JsonObject

_NO_PATHS = ("root_path",)
"""Fields that are parts of URLs and begin with a slash."""


class ShownPaths:
    """Turns absolute paths into paths below a folder that clients know, else the last part."""

    def __init__(self, known: Path | None) -> None:
        """`known` is the folder that clients load adapters from, None where they cannot."""
        self._known = None if known is None else known.resolve()

    def of(self, path: str) -> str:
        """Return the visible form of a path; names and relative paths are returned unchanged."""
        given = PurePath(path)
        if not given.is_absolute():
            return path
        if self._known is not None and given.is_relative_to(self._known):
            return str(given.relative_to(self._known))
        return given.name

    def model(self, card: JsonObject) -> JsonObject:
        """Return a model object, whose `root` may be a path."""
        return {**card, "root": self.of(card["root"])} if card.get("root") else card

    def adapter(self, described: AdapterObject) -> AdapterObject:
        """Return an adapter's description with its path replaced, in its error too."""
        path, error = described["path"], described["error"]
        shown = self.of(path)
        return {**described, "path": shown, "error": error and error.replace(path, shown)}

    def every(self, value: object) -> object:
        """Return JSON with every absolute path in it replaced."""
        if isinstance(value, dict):
            return {k: v if k in _NO_PATHS else self.every(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.every(item) for item in value]
        return self.of(value) if isinstance(value, str) else value
