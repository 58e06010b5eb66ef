"""Short renderings of client values, for messages and logs."""

from __future__ import annotations

from collections.abc import Mapping

_JSON_TYPES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def describe(value: object, limit: int = 80) -> str:
    """Return a short rendering of a request's value for a message, `limit` characters at most."""
    if isinstance(value, dict | list):
        kind = "object" if isinstance(value, dict) else "array"
        if len(value) > 4 or not _is_small(value):
            return f"an {kind} of {len(value)} items"
    # Cut first: rendering a text of megabytes is slow.
    return clip(_words(value[:limit] if isinstance(value, str) else value), limit)


def json_type(value: object) -> str:
    """Return the JSON type of a decoded value with its article, for messages."""
    return _JSON_TYPES.get(type(value), type(value).__name__)


def _words(value: object) -> str:
    """Return a value as Python writes it, but with JSON's words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_words, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_words(inner)}' for name, inner in value.items())}}}"
    return repr(value)


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
