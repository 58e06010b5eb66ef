"""The events of a response, made from vLLM's.

vLLM gives each item one id in the events and another in the response that ends the stream, which
it parses again from the whole text. Here an item is opened once, grows and is closed; the response
at the end has those items. Invariant: every id, text and argument of the last event is that of the
events before it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from server.errors import ServerError
from server.request.record import RequestRecord
from server.vllm.responses.answer import response_of, with_summary
from server.vllm.responses.items import OutputItem, TextItem, output_item
from server.wire.endpoint import JsonObject
from server.wire.sse import named_frame

_SNAPSHOTS = ("response.created", "response.in_progress")


async def response_frames(
    events: AsyncGenerator[Any, None], stamp: JsonObject, record: RequestRecord | None
) -> AsyncGenerator[str, None]:
    """Yield the SSE frames for vLLM's events; each response in them has the fields of `stamp`.

    The record's `failure_frames` end a stream that fails.
    """
    stream = _ResponseStream(stamp, record)
    if record is not None:
        record.failure_frames = stream.fail
    async with aclosing(events):
        async for event in events:
            for frame in stream.take(event):
                yield frame


class _ResponseStream:
    """One streamed response; at most one item is open."""

    def __init__(self, stamp: JsonObject, record: RequestRecord | None) -> None:
        self._stamp = stamp
        self._record = record
        self._custom_tools = () if record is None else record.custom_tools
        self._begun: JsonObject = {}
        self._number = 0
        self._items: list[JsonObject] = []
        self._open: OutputItem | None = None

    def take(self, event: Any) -> Iterator[str]:
        """Yield the frames of one of vLLM's events.

        Its events that end an item are passed over: whether the item is complete is known when
        the next one begins, or the response ends, which is in the same step of the engine.
        """
        kind = event.type
        compacts = self._record is not None and self._record.compacts
        if compacts and kind == "response.completed":
            response = with_summary(self._response(event))
            self._items = response["output"]
            shown = {"output_index": 0, "item": self._items[0]}
            yield self._frame({"type": "response.output_item.added", **shown})
            yield self._frame({"type": "response.output_item.done", **shown})
            yield self._frame({"type": kind, "response": response})
        elif compacts and kind not in _SNAPSHOTS:
            return
        elif kind == "response.output_item.added":
            yield from self._close(cut=False)
            yield from self._begin(output_item(event.item, self._custom_tools))
            yield from self._grow(event)
        elif kind in _SNAPSHOTS:
            self._begun = self._response(event)
            yield self._frame({"type": kind, "response": self._begun})
        elif kind == "response.completed":
            yield from self._end(event)
        else:
            yield from self._grow(event)

    def _begin(self, item: OutputItem) -> Iterator[str]:
        self._open = item
        yield from self._within(item.opening())

    def _grow(self, event: Any) -> Iterator[str]:
        if self._open is not None:
            yield from self._within(self._open.grow(event))

    def _close(self, *, cut: bool) -> Iterator[str]:
        if self._open is None:
            return
        yield from self._within(self._open.closing(cut=cut))
        self._items.append(self._open.final())
        self._open = None

    def _end(self, event: Any) -> Iterator[str]:
        response = self._response(event)
        is_cut = response["status"] == "incomplete"
        if not self._items and self._open is None and response["output"]:
            # An answer without text has had no delta.
            yield from self._begin(TextItem("message"))
        if not self._items and isinstance(self._open, TextItem) and self._open.is_message:
            self._open.use_logprobs(_logprobs_of(response["output"]))
        yield from self._close(cut=is_cut)
        # vLLM calls one completed that was cut.
        kind = "response.incomplete" if is_cut else "response.completed"
        yield self._frame({"type": kind, "response": {**response, "output": self._items}})

    def fail(self, error: ServerError) -> str:
        """Return the frames that end the stream with an error."""
        failed = {
            **self._begun,
            "status": "failed",
            "error": {"code": error.code, "message": error.message},
            "output": self._items,
        }
        event = error.response_event(self._number)
        return self._frame(event) + self._frame({"type": "response.failed", "response": failed})

    def _response(self, event: Any) -> JsonObject:
        return response_of(event.response, self._stamp, self._record)

    def _within(self, events: Iterator[JsonObject]) -> Iterator[str]:
        index = {"output_index": len(self._items)}
        for made in events:
            yield self._frame(made | index)

    def _frame(self, event: JsonObject) -> str:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return named_frame(event["type"], to_json(numbered))


def _logprobs_of(output: list[JsonObject]) -> list[JsonObject]:
    """Return those of the message among the items that vLLM parsed from the whole text."""
    parts = (part for item in output if item["type"] == "message" for part in item["content"])
    return next((part["logprobs"] or [] for part in parts), [])
