"""A line's answer as OpenAI's output and error files have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from server.batches.loopback import LoopbackResponse
from server.batches.table import Answer, Line
from server.storage.raw_json import fields_of, in_one_line, object_of

_OK = 200
_NEVER_RUN = {
    "expired": ("batch_expired", "This line was not run before the batch expired."),
    "cancelled": ("batch_cancelled", "This line was not run: the batch was cancelled."),
}


def answered(line: Line, answer: LoopbackResponse) -> Answer:
    """Return the answer that the service gave, its body as it is."""
    usage = msgspec.json.decode(fields_of(answer.body, "usage").get("usage", b"null"))
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": Raw(in_one_line(answer.body)),
    }
    return Answer(
        line,
        answer.status == _OK,
        _text(line, response=response, error=None),
        *_tokens(usage if isinstance(usage, dict) else {}),
    )


def never_run(line: Line, why: str) -> Answer:
    """No answer, for the batch was `expired` or `cancelled` first."""
    code, message = _NEVER_RUN[why]
    text = _text(line, response=None, error={"code": code, "message": message})
    return Answer(line, False, text, ran=False)


def _text(line: Line, *, response: Any, error: Any) -> bytes:
    name = f"batch_req_{line.batch.removeprefix('batch_')}_{line.number}"
    told = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return object_of(told) + b"\n"


def _tokens(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, those of them from the prefix cache, and of the answer."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    # Anthropic's count of the prompt has three parts, OpenAI's is one.
    read = int(usage.get("cache_read_input_tokens") or 0)
    apart = read + int(usage.get("cache_creation_input_tokens") or 0)
    return (
        int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0) + apart,
        int(details.get("cached_tokens") or 0) + read,
        int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
    )
