"""Answers of the Responses API as vLLM forms them, without an engine."""

from __future__ import annotations

import itertools
import time
from typing import Any

from pydantic_core import to_json

from server.request.record import record_var

_numbers = itertools.count()


def response_of(body: dict[str, Any], extra_fields: dict[str, Any]) -> dict[str, Any]:
    """An answer that says how many items the request had."""
    given = body["input"]
    text = f"{len(given) if isinstance(given, list) else 1} items"
    record = record_var.get()
    internal = None if record is None else record.internal
    name = None if internal is None else internal.response_id
    name = name or f"resp_{time.time_ns()}{next(_numbers)}"
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": "scripted",
        "output": [{"id": f"msg_{name}", **message}],
        **extra_fields,
    }


def events_of(response: dict[str, Any]) -> list[str]:
    """The frames of its stream."""
    begun = {**response, "status": "in_progress", "output": []}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        *(
            ("response.output_text.delta", {"delta": letter})
            for letter in response["output"][0]["content"][0]["text"]
        ),
        ("response.completed", {"response": response}),
    ]
    return [
        f"event: {kind}\ndata: "
        + to_json({"type": kind, "sequence_number": number, **fields}).decode()
        + "\n\n"
        for number, (kind, fields) in enumerate(events)
    ]
