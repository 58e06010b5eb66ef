"""Partial decoding of JSON texts: values that are only passed on stay bytes.

msgspec skips 4 MB in 4 to 8 ms. Building 4 MB of `[[],[],…]` takes a second and holds the GIL.
Skipped values are checked against JSON's grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Raw

from server.errors import describe

T = TypeVar("T")
JsonText: TypeAlias = bytes

_ABSENT = Raw(b"")
_SHOWN_BYTES = 256
_TYPES = {
    "{": "an object",
    "[": "an array",
    '"': "a string",
    "t": "true",
    "f": "false",
    "n": "null",
}
_NO_BREAKS = bytes(0x20 if byte in b"\r\n" else byte for byte in range(256))
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `([^`]*)`)?", re.DOTALL)
_WRONG = re.compile(r"(Expected .*?)(?: - at `([^`]*)`)?", re.DOTALL)


class JsonSyntaxError(ValueError):
    """The text is not JSON; the message has the position."""


class ShapeError(ValueError):
    """The text is JSON, but does not match the expected type.

    `path` is the location, such as `requests[3]`, empty for the whole text. `name` is the unknown
    or missing field at that location.
    """

    def __init__(self, message: str, path: str, name: str = "") -> None:
        super().__init__(message)
        self.path, self.name = path, name


class UnknownNameError(ShapeError):
    """An object has a field that its type does not define."""


def decode(raw: bytes, kind: type[T]) -> T:
    """Decode a text as `kind`; its parts of type `Raw` stay bytes.

    Raises `JsonSyntaxError`, `ShapeError`.
    """
    try:
        # msgspec does not check the UTF-8 of skipped values.
        if not raw.isascii():
            raw.decode()
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        if found := _UNKNOWN.fullmatch(message):
            raise UnknownNameError(message, _path(found[2]), found[1]) from None
        found = _WRONG.fullmatch(message)
        if found is None:
            raise ShapeError(message, "") from None
        raise ShapeError(found[1], _path(found[2])) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JsonSyntaxError(str(error)) from None
    except RecursionError:
        raise JsonSyntaxError("it is nested too deep") from None


def get_fields(raw: bytes, *names: str) -> dict[str, bytes]:
    """Return the texts of those fields in `names` that an object has.

    Raises `JsonSyntaxError`, `ShapeError`.
    """
    found = decode(raw, _object_with(names))
    values = ((name, getattr(found, name)) for name in names)
    return {name: bytes(value) for name, value in values if value is not _ABSENT}


def get_all_fields(raw: bytes) -> dict[str, Raw]:
    """Return the texts of all fields of an object that this server wrote."""
    return decode(raw, dict[str, Raw])


def make_object(fields: Mapping[str, Any]) -> bytes:
    """Encode an object; values of type `Raw` are inserted unchanged."""
    return msgspec.json.encode(fields)


def with_fields(raw: bytes, fields: Mapping[str, Any]) -> bytes:
    """Append fields to the text of a non-empty object.

    Decoders take the last of two values for a name.
    """
    return raw.rstrip()[:-1] + b"," + make_object(fields)[1:]


def first_item(raw: bytes | None) -> bytes | None:
    """Return the first item of an array, None if it is empty or `raw` is no array."""
    if raw is None or raw[:1] != b"[":
        return None
    first = decode(raw, _First).item
    return None if first is _ABSENT else bytes(first)


def joined(arrays: Iterable[bytes]) -> bytes:
    parts: list[bytes | memoryview] = []
    for array in arrays:
        # A view avoids copies of megabytes.
        items = memoryview(array.strip())[1:-1]
        if bytes(items[:_SHOWN_BYTES]).strip() or bytes(items).strip():
            parts += (items, b",")
    return b"".join((b"[", *parts[:-1], b"]"))


def get_string(raw: bytes | None) -> str | None:
    """Decode a string; return None for any other value. Raises `JsonSyntaxError`."""
    return decode(raw, str) if raw is not None and raw[:1] == b'"' else None


def described(raw: bytes | None) -> str:
    """Return a short description of a value for a message."""
    if raw is None:
        return describe(None)
    if len(raw) <= _SHOWN_BYTES:
        return describe(msgspec.json.decode(raw))
    kind = _TYPES.get(raw[:1].decode(errors="replace"), "a number")
    return f"{kind} of {len(raw)} bytes"


def in_one_line(raw: bytes) -> bytes:
    """Replace the line breaks of a text, which JSON has only between values, by spaces."""
    return raw.translate(_NO_BREAKS) if b"\n" in raw or b"\r" in raw else raw


class _First(msgspec.Struct, array_like=True):
    item: Raw = _ABSENT


@cache
def _object_with(names: tuple[str, ...]) -> type[msgspec.Struct]:
    return msgspec.defstruct("Fields", [(name, Raw, _ABSENT) for name in names])


def _path(place: str | None) -> str:
    return (place or "").removeprefix("$").removeprefix(".")
