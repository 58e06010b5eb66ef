"""The field `return_progress`, by llama.cpp's name. Pure functions."""

from __future__ import annotations

from server.errors import InvalidValueError, describe
from server.request.fields.lookup import obeys
from server.wire.endpoint import Endpoint, JsonObject

FIELD = "return_progress"


def take_progress(endpoint: Endpoint, body: JsonObject) -> tuple[bool, list[str]]:
    """Remove the field from `body`; return its value, and the fields without effect.

    Only a stream can have progress. Raises `InvalidValueError`.
    """
    if not obeys(endpoint, FIELD):
        return False, []
    wanted = body.pop(FIELD, None)
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidValueError(
            f"'{FIELD}' must be a boolean, got {describe(wanted)}.", param=FIELD
        )
    streams = bool(body.get("stream"))
    return bool(wanted) and streams, [FIELD] if wanted and not streams else []
