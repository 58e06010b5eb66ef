"""Progress of a stream's prompt: comments, or chunks in the form of llama.cpp's server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from pydantic_core import to_json

from server.wire.endpoint import Endpoint, JsonObject

COMMENT_PERIOD_S = 1.0
"""Least time between two comments. Chunks are sent after every step."""
_OBJECTS = {Endpoint.CHAT: "chat.completion.chunk", Endpoint.COMPLETION: "text_completion"}
_IDS = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETION: "cmpl"}


class PromptProgress:
    """Latest progress of one prompt. Used from the event loop.

    `changed` is set while there are updates to take. `is_expected` is set for long prompts,
    which the engine reports.
    """

    __slots__ = ("_head", "_latest", "_pending", "changed", "is_expected")

    def __init__(self, head: JsonObject | None) -> None:
        """`head` are the fields of a chunk; None sends comments."""
        self._head = head
        self._latest = 0
        self._pending: list[Mapping[str, int]] = []
        self.changed = asyncio.Event()
        self.is_expected = False

    @property
    def sends_chunks(self) -> bool:
        """True to send chunks, False to send comments."""
        return self._head is not None

    @property
    def period_s(self) -> float:
        """Least seconds between two frames."""
        return 0.0 if self.sends_chunks else COMMENT_PERIOD_S

    def update(self, progress: Mapping[str, int]) -> None:
        """Store the engine's report: `processed`, `total` and `cache` tokens, and `time_ms`.

        Of several answers to one prompt the furthest counts.
        """
        if progress["processed"] > self._latest:
            self._latest = progress["processed"]
            self._pending.append(progress)
            self.changed.set()

    def take(self) -> list[str]:
        """Return the frames of the updates since the last call: a chunk of each, one comment."""
        self.changed.clear()
        pending, self._pending = self._pending, []
        return [self._frame(progress) for progress in pending[0 if self.sends_chunks else -1 :]]

    def _frame(self, progress: Mapping[str, int]) -> str:
        processed, total = progress["processed"], progress["total"]
        computed = max(processed - progress["cache"], 1)
        eta_ms = round(progress["time_ms"] * (total - processed) / computed)
        if self._head is None:
            return f": prompt {processed}/{total} tokens, about {eta_ms / 1000:.1f} s left\n\n"
        chunk = {**self._head, "prompt_progress": {**progress, "eta_ms": eta_ms}}
        return f"data: {to_json(chunk).decode()}\n\n"


def chunk_head(endpoint: Endpoint, request_id: str, model: str) -> JsonObject:
    """Return the fields of a chunk without choices, as in the stream that it is part of."""
    return {
        "id": f"{_IDS[endpoint]}-{request_id}",
        "object": _OBJECTS[endpoint],
        "created": int(time.time()),
        "model": model,
        "choices": [],
    }
