"""Calls of custom tools in chat answers, made from vLLM's calls of functions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json, to_json

from server.structured_outputs.tool_inputs.custom_tools import KIND
from server.structured_outputs.tool_inputs.input_reader import InputReader, input_of
from server.wire.endpoint import JsonObject

_DATA = "data: "
_CALLS = '"tool_calls":['
_FINISHED = '"finish_reason":"'


def with_custom_calls(body: bytes, names: Collection[str]) -> bytes:
    """Return a whole chat answer whose calls of the tools `names` are those of custom tools."""
    answer: JsonObject = from_json(body)
    for choice in answer["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls") or []
        message["tool_calls"] = [_custom_call(call, names) for call in calls]
    return to_json(answer)


def _custom_call(call: JsonObject, names: Collection[str]) -> JsonObject:
    function = call["function"]
    if function["name"] not in names:
        return call
    made = {"name": function["name"], "input": input_of(function["arguments"])}
    rest = {name: value for name, value in call.items() if name != "function"}
    return {**rest, "type": KIND, KIND: made}


async def custom_call_frames(
    frames: AsyncGenerator[str, None], names: Collection[str]
) -> AsyncGenerator[str, None]:
    """Yield the frames of a streamed chat whose calls of `names` are those of custom tools."""
    stream = _CallStream(names)
    async with aclosing(frames):
        async for frame in frames:
            if frame.startswith(_DATA) and (_CALLS in frame or _FINISHED in frame):
                yield stream.converted(frame)
            else:
                yield frame


class _CallStream:
    """Calls of one stream; keys are the numbers of a choice and of a call in it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._readers: dict[tuple[int, int], InputReader | None] = {}

    def converted(self, frame: str) -> str:
        """Return a frame in which each piece of arguments is one of an input."""
        chunk: JsonObject = from_json(frame[len(_DATA) :].strip())
        for choice in chunk["choices"]:
            delta, number = choice["delta"], choice["index"]
            pieces = [self._piece(number, call) for call in delta.get("tool_calls") or ()]
            if choice.get("finish_reason") is not None:
                pieces += self._rest(number)
            if pieces:
                delta["tool_calls"] = pieces
        return f"{_DATA}{to_json(chunk).decode()}\n\n"

    def _piece(self, number: int, call: Any) -> JsonObject:
        key, function = (number, call["index"]), call.get("function") or {}
        if key not in self._readers:
            custom = function.get("name") in self._names
            self._readers[key] = InputReader() if custom else None
        reader = self._readers[key]
        if reader is None:
            made: JsonObject = call
            return made
        text = {"input": reader.read(function.get("arguments") or "")}
        if function.get("name") is None:
            return {"index": call["index"], KIND: text}
        named = {"name": function["name"], **text}
        return {"index": call["index"], "id": call["id"], "type": KIND, KIND: named}

    def _rest(self, number: int) -> list[JsonObject]:
        """Return the text that calls of a choice hold back at its end."""
        rest = [
            (index, reader.end())
            for (choice, index), reader in self._readers.items()
            if choice == number and reader is not None
        ]
        return [{"index": index, KIND: {"input": text}} for index, text in rest if text]
