"""Storage fields of a request of the Responses API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from server.errors import InvalidTypeError, InvalidValueError, describe
from server.storage.quotas import Reservation
from server.wire.endpoint import Endpoint, JsonObject

_INPUT = "input"


@dataclass(slots=True, kw_only=True)
class StorageOptions:
    """Storage fields of a request of the Responses API.

    `store` is None where the request has no such field. `previous` is the id of the response that
    it continues; `items` is a JSON array with the items of its own input. `is_stored` says whether
    the response will be stored, within `reservation`.
    """

    store: bool | None
    background: bool
    previous: str | None
    stream: bool
    items: bytes
    is_stored: bool = False
    reservation: Reservation | None = None


def take_storage_options(
    endpoint: Endpoint, body: JsonObject, before: bytes | None
) -> StorageOptions | None:
    """Remove the storage fields from `body` and return them; None for other endpoints.

    `before` is a JSON array with the items of the conversation that the request continues; they
    are inserted before its own. Raises `InvalidTypeError`, `InvalidValueError`.
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
        raise InvalidValueError("'background': true requires 'store': true.", param="background")
    if options.previous is not None and body.get("previous_input_messages"):
        raise InvalidValueError(
            "'previous_response_id' and 'previous_input_messages' exclude each other.",
            param="previous_response_id",
        )
    if before is not None:
        body[_INPUT] = from_json(before) + _items(body.get(_INPUT))
    return options


def _items(given: object) -> list[Any]:
    """Return the items of an input; none for an invalid type, which is rejected later."""
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
