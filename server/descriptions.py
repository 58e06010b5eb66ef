"""Short renderings of client values, for messages and logs."""

from __future__ import annotations


def describe(value: object, limit: int = 80) -> str:
    """Return a short rendering of a request's value for a message, `limit` characters at most."""
    if isinstance(value, dict | list):
        kind = "object" if isinstance(value, dict) else "array"
        if len(value) > 4 or not _is_small(value):
            return f"an {kind} of {len(value)} items"
    # Cut first: rendering a text of megabytes is slow.
    return clip(repr(value[:limit] if isinstance(value, str) else value), limit)


def _is_small(value: object) -> bool:
    """Return True if a container is small enough to be rendered."""
    level = [value]
    for _ in range(4):
        below: list[object] = []
        for item in level:
            if isinstance(item, str) and len(item) > 80:
                return False
            below += item if isinstance(item, list) else ()
            below += (*item, *item.values()) if isinstance(item, dict) else ()
        if not below:
            return True
        if len(below) > 32:
            return False
        level = below
    return False


def clip(text: str, limit: int) -> str:
    """Return a text, cut to `limit` characters where it is longer."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
