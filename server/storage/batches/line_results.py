"""Results of lines, in the format of OpenAI's output and error files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from server.storage.loopback import LoopbackResponse
from server.storage.raw_json import fields_of, in_one_line, object_of

_OK = 200
_NEVER_RUN = {
    "expired": ("batch_expired", "This line was not run before the batch expired."),
    "cancelled": ("batch_cancelled", "This line was not run: the batch was cancelled."),
}


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a batch without a result; `place` and `bytes` locate it in the input file."""

    batch: str
    number: int
    custom_id: str
    place: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of a line: a line of JSON, and its token counts."""

    line: Line
    succeeded: bool
    text: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def kind(self) -> str:
        """Kind of its result file, a key of `Batch.result_bytes`."""
        return "output" if self.succeeded else "error"


def result_of(line: Line, answer: LoopbackResponse) -> LineResult:
    """Return the result of a line that ran, with the unchanged body of the response."""
    usage = msgspec.json.decode(fields_of(answer.body, "usage").get("usage", b"null"))
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": Raw(in_one_line(answer.body)),
    }
    return LineResult(
        line,
        answer.status == _OK,
        _text(line, response=response, error=None),
        *_tokens(usage if isinstance(usage, dict) else {}),
    )


def never_run(line: Line, why: str) -> LineResult:
    """Return the result of a line that did not run: its batch was `expired` or `cancelled`."""
    code, message = _NEVER_RUN[why]
    text = _text(line, response=None, error={"code": code, "message": message})
    return LineResult(line, False, text)


def _text(line: Line, *, response: Any, error: Any) -> bytes:
    name = f"batch_req_{line.batch.removeprefix('batch_')}_{line.number}"
    result = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return object_of(result) + b"\n"


def _tokens(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of prompt tokens, cached prompt tokens and completion tokens."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return (
        int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
    )
