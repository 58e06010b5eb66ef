"""Server-sent events as text: an event with a name, and JSON for its data."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

_DATA = "\ndata: "


def named_frame(name: str, data: bytes | str) -> str:
    """Return the frame of one event; `data` is JSON in one line."""
    text = data if isinstance(data, str) else data.decode()
    return f"event: {name}{_DATA}{text}\n\n"


def data_of(frame: str) -> dict[str, Any]:
    """Return the data of a frame with a name."""
    return dict(from_json(frame.partition(_DATA)[2]))
