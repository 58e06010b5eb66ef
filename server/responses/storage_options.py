"""What the body of a request says about being kept, taken off it where bodies are read."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json, to_json

from server.errors import InvalidTypeError, InvalidValueError, describe
from server.frontend import Endpoint, JsonObject, StorageOptions

_INPUT = "input"


def take_storage_options(
    endpoint: Endpoint, body: JsonObject, before: bytes | None
) -> StorageOptions | None:
    """Take off `body` what only this server can do; None for other endpoints.

    `before` are the items of the conversation that it continues, a JSON array: they are put in
    front of its own. Raises `InvalidTypeError`, `InvalidValueError`.
    """
    if not endpoint.takes_items:
        return None
    stores = endpoint is Endpoint.RESPONSES
    options = StorageOptions(
        store=_flag(body, "store") if stores else False,
        background=stores and (_flag(body, "background") or False),
        previous=_name(body, "previous_response_id"),
        stream=body.get("stream") is True,
        items=to_json(_items(body.get(_INPUT))),
    )
    if options.background and options.store is False:
        raise InvalidValueError(
            "'background': true needs 'store': true: nobody could ask for the answer.",
            param="background",
        )
    if options.previous is not None and body.get("previous_input_messages"):
        raise InvalidValueError(
            "'previous_response_id' and 'previous_input_messages' exclude each other.",
            param="previous_response_id",
        )
    if before is not None:
        body[_INPUT] = from_json(before) + _items(body.get(_INPUT))
    return options


def _items(given: object) -> list[Any]:
    """The items of an input; none of one that is neither text nor array, and is refused later."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _flag(body: JsonObject, name: str) -> bool | None:
    value = body.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise InvalidTypeError(f"'{name}' must be a boolean, got {describe(value)}.", param=name)
    return value


def _name(body: JsonObject, name: str) -> str | None:
    value = body.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise InvalidTypeError(f"'{name}' must be a string, got {describe(value)}.", param=name)
    return value
