"""The model of an uploaded batch file: the one that its first line names."""

from __future__ import annotations

import re

import msgspec

from server.errors import InvalidValueError

_FILE_PART = re.compile(
    rb"content-disposition:[^\r\n]*\bfilename\*?=[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n", re.IGNORECASE
)


class _LineBody(msgspec.Struct):
    model: str | None = None


class _ModelLine(msgspec.Struct):
    body: _LineBody = msgspec.field(default_factory=_LineBody)


class _MessageParams(msgspec.Struct):
    params: _LineBody = msgspec.field(default_factory=_LineBody)


class _MessageBatch(msgspec.Struct):
    requests: list[_MessageParams] = []


class _Batch(msgspec.Struct):
    input_file_id: str | None = None


def first_line_of(form: bytes, *, complete: bool) -> bytes | None:
    """Return the first line of the file in a multipart form, None while more bytes are needed."""
    part = _FILE_PART.search(form)
    if part is None:
        return None
    line, newline, _ = form[part.end() :].lstrip(b"\r\n").partition(b"\n")
    return line if newline or complete else None


def model_of_line(line: bytes) -> str | None:
    """Return the model that a line of a batch names, None for none."""
    try:
        return msgspec.json.decode(line, type=_ModelLine).body.model
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def model_of_message_batch(body: bytes) -> str | None:
    """Return the model of the first request of a message batch, None for none."""
    try:
        requests = msgspec.json.decode(body, type=_MessageBatch).requests
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return requests[0].params.model if requests else None


def input_file_of(body: bytes) -> str:
    """Return the id of a new batch's file. Raises `InvalidValueError` without one."""
    try:
        found = msgspec.json.decode(body, type=_Batch).input_file_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if found is None:
        raise InvalidValueError("'input_file_id' must name a file.", param="input_file_id")
    return found
