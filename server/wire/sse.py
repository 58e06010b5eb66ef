"""Frames of server-sent events with a name."""

from __future__ import annotations

_DATA = "\ndata: "


def named_frame(name: str, data: bytes | str) -> str:
    """Return the frame of one event with a name; `data` is JSON in one line."""
    text = data if isinstance(data, str) else data.decode()
    return f"event: {name}{_DATA}{text}\n\n"


def data_text(frame: str) -> bytes:
    """Return the data of a frame with a name, as its text."""
    return frame.partition(_DATA)[2].encode()
