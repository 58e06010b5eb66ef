"""The field `undeclared_properties` of requests, whose default is the server's."""

from __future__ import annotations

from server.errors import InvalidValueError, describe
from server.structured_outputs.constraint import Undeclared
from server.wire.endpoint import JsonObject

UNDECLARED = "undeclared_properties"
WORDS = tuple(word.value for word in Undeclared)


def take_undeclared(body: JsonObject, default: Undeclared) -> Undeclared:
    """Remove the field from `body` and return its value. Raises `InvalidValueError`."""
    given = body.pop(UNDECLARED, None)
    if given is None:
        return default
    if given not in WORDS:
        raise InvalidValueError(
            f"'{UNDECLARED}' must be 'omit' or 'allow', got {describe(given)}.", param=UNDECLARED
        )
    return Undeclared(given)
