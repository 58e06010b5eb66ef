"""A request and its answer as attributes of the request's span.

Without a span, the functions do nothing. Streams are searched, not parsed, and their text is not
stored.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response

from server.observability.tracing import (
    FINISH_REASONS,
    OPERATIONS,
    RESPONSE_ID,
    RESPONSE_MODEL,
    operation_attributes,
    request_attributes,
)
from server.request.record import RequestRecord
from server.wire.endpoint import Endpoint, JsonObject

_ID = re.compile(r'"id": ?"([\w.:-]{1,200})"')
# A quote inside a text of JSON has a backslash before it, so that no text of an answer matches.
_REASON = re.compile(r'"finish_reason": ?"(\w{1,40})"')
_ANTHROPIC_REASON = re.compile(r'"stop_reason": ?"(\w{1,40})"')
_INCOMPLETE = r'"incomplete_details": ?\{"reason": ?"(\w{1,40})"'
_RESPONSE_END = re.compile(
    rf"event: response\.(?:(completed|failed)\n|incomplete\n[^\n]*?{_INCOMPLETE})"
)
_MARGIN = 1000
"""Bytes at the start of an answer, where its id is, and at its end, with Anthropic's reason."""


def describe_request(record: RequestRecord, endpoint: Endpoint, fields: JsonObject) -> None:
    """Put the settings of a request on its span."""
    if record.span is not None and endpoint in OPERATIONS:
        # The path of /invocations does not say the operation.
        of_operation = operation_attributes(OPERATIONS[endpoint])
        record.span.set_attributes(of_operation | request_attributes(fields))


def name_model(record: RequestRecord, endpoint: Endpoint, model: str) -> None:
    """Name a request's span after its operation and the served model or adapter that answers."""
    operation = OPERATIONS.get(endpoint)
    if record.span is not None and operation is not None:
        record.span.update_name(f"{operation} {model}")
        record.span.set_attribute(RESPONSE_MODEL, model)


def describe_answer(record: RequestRecord, answer: object) -> None:
    """Put the id and the finish reasons of a whole answer on the span of its request."""
    if record.span is None:
        return
    if isinstance(answer, Response):
        identity, reasons = _of_body(bytes(answer.body))
    else:
        identity, reasons = getattr(answer, "id", None), _of_model(answer)
    if isinstance(identity, str):
        record.span.set_attribute(RESPONSE_ID, identity)
    if reasons:
        record.span.set_attribute(FINISH_REASONS, reasons)


def _of_body(body: bytes) -> tuple[str | None, list[str]]:
    """Return the id and the finish reasons of an answer that is JSON already."""
    head, tail = (part.decode(errors="replace") for part in (body[:_MARGIN], body[-_MARGIN:]))
    identity = _ID.search(head)
    return None if identity is None else identity[1], _ANTHROPIC_REASON.findall(tail)


def _of_model(answer: object) -> list[str]:
    choices = getattr(answer, "choices", None)
    if choices is not None:
        found = [choice.finish_reason for choice in choices]
    else:
        details = getattr(answer, "incomplete_details", None)
        found = [getattr(details, "reason", None) or getattr(answer, "status", None)]
    return [reason for reason in found if isinstance(reason, str)]


def described_frames(
    record: RequestRecord, endpoint: Endpoint, frames: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Return the frames of a stream; their id and finish reasons are set on the request's span."""
    if record.span is None or endpoint not in OPERATIONS:
        return frames
    return _described(record, endpoint, frames)


async def _described(
    record: RequestRecord, endpoint: Endpoint, frames: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    pattern = _reason_pattern(endpoint)
    named = False
    reasons: list[str] = []
    async with aclosing(frames):
        async for frame in frames:
            span = record.span
            if span is not None:
                if not named and (identity := _ID.search(frame)) is not None:
                    named = True
                    span.set_attribute(RESPONSE_ID, identity[1])
                if found := pattern.findall(frame):
                    reasons += ["".join(groups) for groups in found]
                    span.set_attribute(FINISH_REASONS, reasons)
            yield frame


def _reason_pattern(endpoint: Endpoint) -> re.Pattern[str]:
    if endpoint is Endpoint.RESPONSES:
        return _RESPONSE_END
    return _ANTHROPIC_REASON if endpoint.anthropic else _REASON
