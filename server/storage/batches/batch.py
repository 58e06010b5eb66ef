"""A batch: the request for it, its state, and its form in OpenAI's API.

validating -> in_progress -> finalizing -> completed | expired | cancelled
     |             +-> cancelling -^
     +-> failed
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from typing_extensions import TypedDict

from server.storage.jobs import BATCHES

_MOMENTS = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class LineError(TypedDict):
    """Error in the input; the first line is 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class Counts(TypedDict):
    """Numbers of lines of a batch."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Request to create a batch; times in seconds."""

    owner: str
    endpoint: str
    input_file: str
    window_s: int
    keep_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    idempotency: str | None = None

    @property
    def fingerprint(self) -> str:
        """Text that requests with the same idempotency key must have in common."""
        return json.dumps(
            [self.endpoint, self.input_file, self.window_s, self.keep_s, self.metadata],
            sort_keys=True,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Row of the table of batches."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    status: Status
    created_at: int
    expires_at: int
    keep_s: int
    metadata: dict[str, str]
    moments: dict[str, int]
    errors: list[LineError]
    output_file: str | None
    error_file: str | None
    model: str | None
    idempotency: str | None
    fingerprint: str
    total: int
    completed: int
    failed: int
    output_bytes: int
    error_bytes: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, row: sqlite3.Row) -> Batch:
        """Return the batch of a row."""
        # The fields are in the order of the columns.
        batch = cls(*row)
        texts = ("metadata", "moments", "errors")
        return replace(batch, **{name: json.loads(getattr(batch, name)) for name in texts})

    @property
    def is_open(self) -> bool:
        """True until the batch has ended."""
        return self.status in BATCHES.open_statuses

    @property
    def unfinished(self) -> int:
        """Number of lines without a result."""
        return self.total - self.completed - self.failed

    @property
    def result_bytes(self) -> dict[str, int]:
        """Bytes of counted results, by the kind of their file."""
        return {"output": self.output_bytes, "error": self.error_bytes}

    def shown(self) -> dict[str, Any]:
        """Return the batch object of OpenAI's API; times are Unix seconds."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file,
            "completion_window": f"{(self.expires_at - self.created_at) // 3600}h",
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.moments.get(name) for name in _MOMENTS},
            "request_counts": Counts(
                total=self.total, completed=self.completed, failed=self.failed
            ),
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata or None,
        }
