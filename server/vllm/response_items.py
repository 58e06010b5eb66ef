"""Output items of a response while they are generated: ids, events, final form.

Of an item, `opening` yields the events that announce it, `grow` those for one of vLLM's (deltas of
the item, nothing for others), and `closing` those that end it; `cut`: the response is incomplete
and ends here. `final` returns the item of the response, once it is closed.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from server.structured_outputs.custom_tools import CALL, InputReader, input_of
from server.tools import is_whole
from server.wire import JsonObject

_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", CALL: "ctc_"}
Events = Iterator[JsonObject]
"""Events without the two fields that the stream adds, `sequence_number` and `output_index`."""


def _new_id(kind: str) -> str:
    return _ID_PREFIXES[kind] + uuid.uuid4().hex


class TextItem:
    """A message or reasoning, with one part of text."""

    def __init__(self, kind: str) -> None:
        """`kind` is `message` or `reasoning`."""
        self.is_message = kind == "message"
        self._name = "output_text" if self.is_message else "reasoning_text"
        self._delta = f"response.{self._name}.delta"
        head: JsonObject = {"role": "assistant"} if self.is_message else {"summary": []}
        self._item: JsonObject = {
            "id": _new_id(kind),
            "type": kind,
            "status": "in_progress",
            **head,
            "content": [],
        }
        self._place = {"item_id": self._item["id"], "content_index": 0}
        self._texts: list[str] = []
        self.logprobs: list[JsonObject] = []

    def opening(self) -> Events:
        yield {"type": "response.output_item.added", "item": self._item}
        yield {"type": "response.content_part.added", **self._place, "part": self._part("")}

    def grow(self, event: Any) -> Events:
        if event.type != self._delta:
            return
        self._texts.append(event.delta)
        made = {"type": self._delta, **self._place, "delta": event.delta}
        if self.is_message:
            made["logprobs"] = [one.model_dump() for one in event.logprobs or ()]
            self.logprobs += made["logprobs"]
        yield made

    def closing(self, *, cut: bool) -> Events:
        text = "".join(self._texts)
        part = self._part(text)
        done = {"type": f"response.{self._name}.done", **self._place, "text": text}
        yield done | ({"logprobs": self.logprobs} if self.is_message else {})
        yield {"type": "response.content_part.done", **self._place, "part": part}
        status = "incomplete" if cut else "completed"
        self._item = {**self._item, "status": status, "content": [part]}
        yield {"type": "response.output_item.done", "item": self._item}

    def final(self) -> JsonObject:
        return self._item

    def _part(self, text: str) -> JsonObject:
        part: JsonObject = {"type": self._name, "text": text}
        return part | ({"annotations": [], "logprobs": self.logprobs} if self.is_message else {})


_ARGUMENTS = "response.function_call_arguments"
"""Prefix of the types of vLLM's events about arguments."""


class _ClientCall:
    """A call that the client runs; its text, in one field of the item, grows with the arguments."""

    _kind: ClassVar[str]
    _field: ClassVar[str]
    _events: ClassVar[str]
    """Prefix of the types of the text's events."""

    def __init__(self, added: Any) -> None:
        """`added` is the item as vLLM announces it."""
        self._item: JsonObject = {
            "id": _new_id(self._kind),
            "type": self._kind,
            "status": "in_progress",
            "call_id": added.call_id,
            "name": added.name,
            self._field: "",
        }
        self._arguments: list[str] = []
        self._pieces: list[str] = []

    def opening(self) -> Events:
        yield {"type": "response.output_item.added", "item": self._item}

    def grow(self, event: Any) -> Events:
        if event.type == f"{_ARGUMENTS}.delta":
            self._arguments.append(event.delta)
            yield from self._grow(event.delta)

    def closing(self, *, cut: bool) -> Events:
        yield from self._rest()
        text = "".join(self._pieces)
        cut = cut and not is_whole("".join(self._arguments))
        if not cut:
            # Clients run calls at this event.
            done = {"type": f"{self._events}.done", "item_id": self._item["id"]}
            yield {**done, **self._named(), self._field: text}
        status = "incomplete" if cut else "completed"
        self._item = {**self._item, "status": status, self._field: text}
        yield {"type": "response.output_item.done", "item": self._item}

    def final(self) -> JsonObject:
        return self._item

    def _grow(self, arguments: str) -> Events:
        yield self._piece(arguments)

    def _rest(self) -> Events:
        """Yield the text that was held back."""
        yield from ()

    def _named(self) -> JsonObject:
        """Return what the last event of the text repeats of the item."""
        return {}

    def _piece(self, text: str) -> JsonObject:
        self._pieces.append(text)
        return {"type": f"{self._events}.delta", "item_id": self._item["id"], "delta": text}


class FunctionCall(_ClientCall):
    """A call of a client's function."""

    _kind, _field = "function_call", "arguments"
    _events = _ARGUMENTS

    def __init__(self, added: Any) -> None:
        super().__init__(added)
        if (namespace := getattr(added, "namespace", None)) is not None:
            self._item["namespace"] = namespace

    def _named(self) -> JsonObject:
        return {"name": self._item["name"]}


class CustomToolCall(_ClientCall):
    """A call of a client's custom tool, with the input that the arguments hold."""

    _kind, _field = CALL, "input"
    _events = "response.custom_tool_call_input"

    def __init__(self, added: Any) -> None:
        super().__init__(added)
        self._reader = InputReader()

    def _grow(self, arguments: str) -> Events:
        yield from self._known(self._reader.read(arguments))

    def _rest(self) -> Events:
        yield from self._known(self._reader.end())

    def _known(self, text: str) -> Events:
        if text:
            yield self._piece(text)


def custom_call(item: JsonObject) -> JsonObject:
    """Return the call of a custom tool for vLLM's whole call of the function in its place."""
    kept = {k: v for k, v in item.items() if k not in ("arguments", "namespace")}
    return {**kept, "id": _new_id(CALL), "type": CALL, "input": input_of(item["arguments"])}


class ServerToolCall:
    """A call of a built-in tool of gpt-oss; vLLM's events are passed on."""

    def __init__(self) -> None:
        self._item: JsonObject = {}

    def opening(self) -> Events:
        """Yield nothing: vLLM's own event is passed on by `grow`."""
        return iter(())

    def grow(self, event: Any) -> Events:
        made: JsonObject = event.model_dump(mode="json", by_alias=True, exclude_none=True)
        if "item" in made:
            self._item = made["item"]
        yield made

    def closing(self, *, cut: bool) -> Events:  # noqa: ARG002 (it was ended before)
        """Yield nothing: vLLM has ended it."""
        return iter(())

    def final(self) -> JsonObject:
        return self._item


OutputItem = TextItem | FunctionCall | CustomToolCall | ServerToolCall


def output_item(added: Any, custom_tools: Collection[str]) -> OutputItem:
    """Return the item that vLLM's `response.output_item.added` announces.

    Calls of the functions that replace `custom_tools` are calls of those.
    """
    if added.type == "function_call" and added.name in custom_tools:
        return CustomToolCall(added)
    if added.type == "function_call":
        return FunctionCall(added)
    if added.type in ("message", "reasoning"):
        return TextItem(added.type)
    return ServerToolCall()
