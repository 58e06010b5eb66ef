"""Upload of one file in a multipart form with a few fields, read in chunks.

Memory holds one chunk and the fields. Chunks are yielded as they arrive, so fields after the file
are known only once it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from server.errors import (
    BodyTimeoutError,
    InvalidValueError,
    MediaTypeError,
    MissingFieldError,
    describe,
)
from server.request.body import ClientGoneError

_MAX_BOUNDARY_BYTES = 70
"""Limit of RFC 2046, below the one at which python-multipart raises an undocumented error."""
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_HEADER_BYTES = 4096
_MAX_NAME_CHARS = 255


class Upload:
    """Multipart form; `fields` are complete once `chunks` has ended."""

    def __init__(self, request: Request, timeout_s: float) -> None:
        """Read the content type. Raises `MediaTypeError`."""
        given = request.headers.get("content-type", "")
        kind, options = parse_options_header(given)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise MediaTypeError(
                f"The content type must be multipart/form-data with a boundary, got "
                f"{describe(given)}."
            )
        if len(boundary) > _MAX_BOUNDARY_BYTES:
            raise MediaTypeError(
                f"The boundary of a form has at most {_MAX_BOUNDARY_BYTES} bytes, got "
                f"{len(boundary)}."
            )
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self._request = request
        self._timeout_s = timeout_s
        self._part = _Part()
        self._pieces: list[bytes] = []
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the file's chunks.

        Raises `InvalidValueError`, `MissingFieldError`, `BodyTimeoutError`, `ClientGoneError`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in self._request.stream():
                    self._feed(data)
                    for piece in self._pieces:
                        yield piece
                    self._pieces.clear()
        except TimeoutError:
            raise BodyTimeoutError(
                f"The file did not arrive within {self._timeout_s:g} s.",
                headers={"connection": "close"},
            ) from None
        except ClientDisconnect:
            raise ClientGoneError from None
        if not self._ended:
            raise InvalidValueError("The form is incomplete.", param="file")
        if self.name is None:
            raise MissingFieldError("The field 'file' is missing.", param="file")

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidValueError(f"The form cannot be read: {error}.", param="file") from None

    def _begin_part(self) -> None:
        self._part = _Part()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]
        self._part.check()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += data[start:end]
        self._part.check()

    def _header_end(self) -> None:
        self._part.end_header()

    def _headers_end(self) -> None:
        self._part.name, file_name = self._part.names()
        if file_name is None:
            return
        if self._part.name != "file" or self.name is not None:
            raise InvalidValueError(
                f"The form must have one file, in the field 'file'; got another in "
                f"{describe(self._part.name)}.",
                param=self._part.name,
            )
        self._part.is_file = True
        self.name = file_name[:_MAX_NAME_CHARS]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._pieces.append(data[start:end])
            return
        self._part.content += data[start:end]
        if len(self._part.content) > _MAX_FIELD_BYTES:
            raise InvalidValueError(
                f"{describe(self._part.name)} has more than {_MAX_FIELD_BYTES} bytes.",
                param=self._part.name,
            )

    def _part_end(self) -> None:
        if self._part.is_file:
            return
        if len(self.fields) >= _MAX_FIELDS:
            raise InvalidValueError(f"The form has more than {_MAX_FIELDS} fields.")
        self.fields[self._part.name] = self._part.content.decode(errors="replace")

    def _end(self) -> None:
        self._ended = True


class _Part:
    """Header and content of the part that is being read."""

    def __init__(self) -> None:
        self.header, self.value = b"", b""
        self.content = b""
        self.is_file = False
        self.name = ""
        self._headers: dict[bytes, bytes] = {}

    def check(self) -> None:
        """Raise `InvalidValueError` if a header is too large."""
        if len(self.header) + len(self.value) > _MAX_HEADER_BYTES:
            raise InvalidValueError(
                f"A header of the form has more than {_MAX_HEADER_BYTES} bytes.", param="file"
            )

    def end_header(self) -> None:
        """Store a complete header."""
        self._headers[self.header.lower()] = self.value
        self.header, self.value = b"", b""

    def names(self) -> tuple[str, str | None]:
        """Return the name of the field, and the file name if it is a file."""
        options: dict[Any, bytes]
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        file_name = options.get(b"filename")
        name = options.get(b"name", b"").decode(errors="replace")
        return name, None if file_name is None else file_name.decode(errors="replace")
