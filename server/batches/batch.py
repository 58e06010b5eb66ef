"""A batch: what was asked, how far it is, and how OpenAI's API shows it.

validating -> in_progress -> finalizing -> completed | expired | cancelled
     |             +-> cancelling -^
     +-> failed
"""

from __future__ import annotations

import enum
import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict

from server.frontend import Endpoint

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""The states of a batch that is still to be worked on."""
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


class Api(enum.Enum):
    """Whose API a batch was made by, and is seen by; the value is what its ids begin with."""

    OPENAI = "batch_"
    ANTHROPIC = "msgbatch_"


class LineError(TypedDict):
    """What is wrong with the input, and in which line; the first is 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class Counts(TypedDict):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a client asked for; times in seconds."""

    owner: str
    endpoint: str
    input_file: str
    window_s: int
    keep_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    idempotency: str | None = None

    @property
    def api(self) -> Api:
        """Whose API it came by: Anthropic's endpoint is that of its own batches alone."""
        return Api.ANTHROPIC if self.endpoint == Endpoint.MESSAGES.value else Api.OPENAI

    @property
    def fingerprint(self) -> str:
        """What two requests with one idempotency key must have in common."""
        return json.dumps(
            [self.endpoint, self.input_file, self.window_s, self.keep_s, self.metadata],
            sort_keys=True,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as the database has it."""

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
    never_run: int
    """Of `failed`, the lines that had no answer when the batch was cut."""

    @classmethod
    def of(cls, row: sqlite3.Row) -> Batch:
        """The batch of a row."""
        values = dict(row)
        for name in ("metadata", "moments", "errors"):
            values[name] = json.loads(values[name])
        return cls(fingerprint=values.pop("asked"), **values)

    @property
    def is_open(self) -> bool:
        """Whether there is still work for it."""
        return self.status in OPEN

    @property
    def unfinished(self) -> int:
        """Lines without an answer."""
        return self.total - self.completed - self.failed

    @property
    def answer_files(self) -> list[str]:
        """The files that it has left."""
        return [file for file in (self.output_file, self.error_file) if file is not None]

    @property
    def result_bytes(self) -> dict[str, int]:
        """Bytes of answers that are counted, by the kind of their file."""
        return {"output": self.output_bytes, "error": self.error_bytes}

    def shown(self) -> dict[str, Any]:
        """Return it as a client sees it; times are Unix seconds."""
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
