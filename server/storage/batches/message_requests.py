"""Body of `POST /v1/messages/batches`, and its conversion to an input file."""

from __future__ import annotations

import difflib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec import Raw, Struct

from server.errors import (
    InvalidJsonError,
    InvalidTypeError,
    InvalidValueError,
    MissingFieldError,
    RequestError,
    UnknownFieldError,
    describe,
)
from server.storage.batches.batch import LineError
from server.storage.batches.input_lines import MAX_ID_CHARS
from server.storage.raw_json import (
    JsonSyntaxError,
    MissingNameError,
    ShapeError,
    UnknownNameError,
    decode,
    described,
    in_one_line,
)
from server.wire.endpoint import Endpoint

logger = logging.getLogger(__name__)

_LINES = 1000
"""Lines in one chunk of the file."""
_SHOWN_NAME = 100
_REST = f',"method":"POST","url":"{Endpoint.MESSAGES.value}","body":'.encode()
BODY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "requests": {
            "type": "array",
            "description": "At most --max-batch-lines items, within --max-body-bytes.",
            "items": {
                "type": "object",
                "properties": {
                    "custom_id": {
                        "type": "string",
                        "description": f"1 to {MAX_ID_CHARS} characters, unique in the batch.",
                    },
                    "params": {
                        "type": "object",
                        "description": "The body of `POST /v1/messages`; no `stream`.",
                    },
                },
                "required": ["custom_id", "params"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["requests"],
    "additionalProperties": False,
}
"""JSON schema of the body of `POST /v1/messages/batches`."""


class _Request(Struct, gc=False):
    """Request of a batch; its values are validated later."""

    custom_id: Raw
    params: Raw


class _StrictRequest(_Request, forbid_unknown_fields=True, gc=False):
    """Request of a batch, without unknown fields."""


class _Body(Struct):
    requests: list[_Request]


class _StrictBody(Struct, forbid_unknown_fields=True):
    requests: list[_StrictRequest]


def lines_of(raw: bytes, max_lines: int, *, warn: bool) -> list[bytes]:
    """Convert the requests of a body to lines of an input file. Raises a `RequestError`.

    With `warn`, unknown fields are logged and dropped.
    """
    requests = _requests(raw, warn=warn)
    if not 0 < len(requests) <= max_lines:
        raise InvalidValueError(
            f"'requests' must have 1 to {max_lines} items (--max-batch-lines), "
            f"got {len(requests)}.",
            param="requests",
        )
    return [_line(request, number) for number, request in enumerate(requests)]


def _requests(raw: bytes, *, warn: bool) -> Sequence[_Request]:
    try:
        return decode(raw, _StrictBody).requests
    except UnknownNameError as error:
        if not warn:
            raise _request_error(error) from None
        logger.warning("Ignored: %s", _request_error(error).message)
    except (JsonSyntaxError, ShapeError) as error:
        raise _request_error(error) from None
    try:
        return decode(raw, _Body).requests
    except (JsonSyntaxError, ShapeError) as error:
        raise _request_error(error) from None


def _request_error(error: JsonSyntaxError | ShapeError) -> RequestError:
    if not isinstance(error, ShapeError):
        return InvalidJsonError(f"The request body is not valid JSON: {error}.")
    if not error.path and not error.name:
        return InvalidJsonError(f"The request body must be a JSON object: {error}.")
    place = ".".join(part for part in (error.path, error.name) if part)
    if isinstance(error, MissingNameError):
        return MissingFieldError(f"The field '{place}' is missing.", param=place)
    if isinstance(error, UnknownNameError):
        known = ("custom_id", "params") if error.path else ("requests",)
        near = difflib.get_close_matches(error.name[:_SHOWN_NAME], known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        return UnknownFieldError(f"Unknown field {describe(place)}{hint}", param=place)
    return InvalidTypeError(f"Invalid type for '{place}': {error}.", param=place)


def _line(request: _Request, number: int) -> bytes:
    custom_id, params = bytes(request.custom_id), bytes(request.params)
    for name, value, begin, kind in (
        ("custom_id", custom_id, b'"', "a string"),
        ("params", params, b"{", "an object"),
    ):
        if value[:1] != begin:
            place = f"requests[{number}].{name}"
            raise InvalidTypeError(
                f"'{place}' must be {kind}, got {described(value)}.", param=place
            )
    return b'{"custom_id":' + custom_id + _REST + in_one_line(params) + b"}\n"


class WrittenInput:
    """Input file of a batch of Anthropic's API, an `UploadSource` for `FileStore`."""

    name: str | None = "message_batch.jsonl"

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.fields: dict[str, str] = {}
        self._lines = lines

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the content."""
        for begin in range(0, len(self._lines), _LINES):
            yield b"".join(self._lines[begin : begin + _LINES])


def body_error(error: LineError) -> InvalidValueError:
    """Convert an error of an input line to an error of the request body."""
    if error["line"] is None:
        return InvalidValueError(error["message"], param="requests")
    place = f"requests[{error['line'] - 1}]"
    field = (error["param"] or "").replace("body", "params")
    return InvalidValueError(
        f"'{place}': {error['message']}", param=f"{place}.{field}" if field else place
    )
