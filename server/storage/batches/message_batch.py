"""Batches and results in the format of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import Raw
from typing_extensions import TypedDict

from server.storage.batches.batch import Batch
from server.storage.raw_json import fields_of, object_of, string_of

_OK = 200
_PIECE_BYTES = 64 * 1024
_NEVER_RUN = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_ENDS = ("completed_at", "cancelled_at", "expired_at")


class RequestCounts(TypedDict):
    """Numbers of requests by result; all are `processing` until the batch has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    """Message batch object; times are in the format of RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


def shown(batch: Batch) -> MessageBatch:
    """Return the message batch object of a batch.

    `results_url` is a path, since the server does not know its public URL. Anthropic's clients
    resolve it against their base URL.
    """
    ended = next((batch.moments[name] for name in _ENDS if name in batch.moments), None)
    return MessageBatch(
        id=batch.id,
        type="message_batch",
        processing_status=_status(batch),
        request_counts=_counts(batch),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_maybe_time(ended),
        cancel_initiated_at=_maybe_time(batch.moments.get("cancelling_at")),
        archived_at=None,
        results_url=None if batch.is_open else f"/v1/messages/batches/{batch.id}/results",
    )


def results(paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield the contents of result files as Anthropic's JSON lines, in chunks of whole lines."""
    for path in paths:
        with path.open("rb") as file:
            while lines := file.readlines(_PIECE_BYTES):
                yield b"".join(map(_result, lines))


def _status(batch: Batch) -> Literal["in_progress", "canceling", "ended"]:
    if not batch.is_open:
        return "ended"
    return "canceling" if batch.status == "cancelling" else "in_progress"


def _counts(batch: Batch) -> RequestCounts:
    if batch.is_open:
        return RequestCounts(processing=batch.total, succeeded=0, errored=0, canceled=0, expired=0)
    return RequestCounts(
        processing=0,
        succeeded=batch.completed,
        errored=batch.failed - batch.never_run,
        canceled=batch.never_run if batch.status == "cancelled" else 0,
        expired=batch.never_run if batch.status == "expired" else 0,
    )


def _result(line: bytes) -> bytes:
    stored = fields_of(line, "custom_id", "response", "error")
    result = _result_of(stored["response"], stored["error"])
    return object_of({"custom_id": Raw(stored["custom_id"]), "result": result}) + b"\n"


def _result_of(response: bytes, error: bytes) -> dict[str, Any]:
    if response == b"null":
        code = string_of(fields_of(error, "code")["code"])
        return {"type": _NEVER_RUN[code or ""]}
    fields = fields_of(response, "status_code", "body")
    body = Raw(fields["body"])
    if int(fields["status_code"]) == _OK:
        return {"type": "succeeded", "message": body}
    # The body of a failed request to /v1/messages is an error object of this API.
    return {"type": "errored", "error": body}


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _maybe_time(seconds: int | None) -> str | None:
    return None if seconds is None else _time(seconds)
