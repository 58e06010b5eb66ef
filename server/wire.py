"""Endpoints that the engine serves, JSON objects, and frames of streams.

Nearly all frames of a stream differ in one text alone. The layers between the engine's output and
the connection make the first one. The others need none of these layers, and no wake-up of the
stream's task: the engine's output writes them to the connection (`DirectFrames`,
`server.vllm.text_stream`).
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import to_json

JsonObject = dict[str, Any]


class Endpoint(enum.Enum):
    """The endpoints that need the engine; the value is the path, the method is POST."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSES = "/v1/responses"
    INPUT_TOKENS = "/v1/responses/input_tokens"
    COMPACT = "/v1/responses/compact"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    RENDER_CHAT = "/v1/chat/completions/render"
    RENDER_COMPLETION = "/v1/completions/render"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    EMBEDDINGS = "/v1/embeddings"
    COHERE_EMBED = "/v2/embed"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"

    def __init__(self, path: str) -> None:
        self.anthropic = path.startswith("/v1/messages")
        """True where errors and events have the form of Anthropic's API."""
        self.chats = path in ("/v1/chat/completions", "/v1/chat/completions/render")
        """True where the body is that of a chat completion."""
        self.renders = path.endswith("/render")
        """True where the answer has the token ids and the sampling parameters of a request."""
        self.takes_items = path.startswith("/v1/responses")
        """True where the input is a list of items of the Responses API."""
        self.scores = path.endswith(("score", "rerank"))
        """True where each answer is about a query and a document."""
        self.pools = self.scores or path in ("/v1/embeddings", "/v2/embed", "/pooling", "/classify")
        """True for embeddings, scores and classes, which pooling models serve."""


_DATA = "\ndata: "


def named_frame(name: str, data: bytes | str) -> str:
    """Return the frame of one event with a name; `data` is JSON in one line."""
    text = data if isinstance(data, str) else data.decode()
    return f"event: {name}{_DATA}{text}\n\n"


def data_text(frame: str) -> bytes:
    return frame.partition(_DATA)[2].encode()


COMMENT_PERIOD_S = 1.0
"""Least time between two comments. Chunks are sent after every step."""
_OBJECTS = {Endpoint.CHAT: "chat.completion.chunk", Endpoint.COMPLETION: "text_completion"}
_IDS = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETION: "cmpl"}


class PromptProgress:
    """Latest progress of one prompt. Used from the event loop.

    `changed` is set while there are updates to take. `is_expected` is set for long prompts,
    which the engine reports.
    """

    __slots__ = ("_head", "_latest", "_pending", "changed", "is_expected", "sends_chunks")

    def __init__(self, head: JsonObject | None) -> None:
        """`head` are the fields of a chunk; None sends comments."""
        self._head = head
        self.sends_chunks = head is not None
        self._latest = 0
        self._pending: list[Mapping[str, int]] = []
        self.changed = asyncio.Event()
        self.is_expected = False

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


class FrameWriter(Protocol):
    """Sends frames of one response at once."""

    @property
    def is_ready(self) -> bool:
        """True if a frame can be written now; False while the client reads too slowly."""

    def write(self, frame: bytes) -> None:
        """Send a frame; call it only while ``is_ready``."""


@dataclass(slots=True)
class DirectFrames:
    """The frames of one stream that differ in their text.

    ``note_text`` is called by the maker of a chunk, ``resume`` by the response before each wait for
    a frame of its generator, and ``push`` by the engine's output while there is a ``writer``, which
    the response takes away behind each wait. Invariant: a frame is pushed only while the response
    waits and has sent all earlier frames, so that frames keep their order. The first of several
    sequences, by the number of ``claims``, may push until there is a second.
    """

    writer: FrameWriter | None = None
    claims: int = 0
    _noted: tuple[str, str] | None = None
    _head: bytes | None = None
    _tail: bytes = b""

    def note_text(self, text: str, tail: str) -> None:
        """Remember the JSON of a chunk's text and what follows it in the chunk.

        Call it only for chunks that have nothing else of their own.
        """
        if self._head is None:
            self._noted = text, tail

    def resume(self, frame: str, writer: FrameWriter) -> None:
        """Allow pushes to ``writer``; ``frame`` is the one that was sent last."""
        if self._noted is not None:
            text, tail = self._noted
            self._noted = None
            end = tail + "\n\n"
            # A layer that adds to the end of its chunks, or makes other frames of them, is needed.
            if frame.endswith(text + end):
                self._head, self._tail = frame[: -len(text + end)].encode(), end.encode()
        if self._head is not None and self.claims == 1:
            self.writer = writer

    def push(self, text: str) -> None:
        """Send the frame of a text; call it only while there is a ``writer`` that is ready."""
        assert self.writer is not None
        assert self._head is not None
        self.writer.write(b"%b%b%b" % (self._head, to_json(text), self._tail))
