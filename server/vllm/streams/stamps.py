"""Fields that an answer has for this server's sake, put on vLLM's answers and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from server.request.record import record_var
from server.vllm.responses.stream import response_frames
from server.wire.endpoint import Endpoint, JsonObject

_DATA = "data: {"


def put_on(answer: BaseModel, stamp: JsonObject) -> None:
    """Give an answer the fields; one that its model does not have is sent as well."""
    for name, value in stamp.items():
        setattr(answer, name, value)


def stamped_frames(
    endpoint: Endpoint, answer: AsyncGenerator[Any, None], stamp: JsonObject
) -> AsyncGenerator[str, None]:
    """Return the frames of vLLM's stream, each object in it with the fields."""
    if endpoint is Endpoint.RESPONSES:
        return response_frames(answer, stamp, record_var.get())
    return answer if endpoint.anthropic or not stamp else _marked(answer, stamp)


async def _marked(
    frames: AsyncGenerator[str, None], stamp: JsonObject
) -> AsyncGenerator[str, None]:
    """Write the fields into chunks that are text already, before all others."""
    begin = f"data: {to_json(stamp).decode()[:-1]},"
    async with aclosing(frames):
        async for frame in frames:
            yield begin + frame[len(_DATA) :] if frame.startswith(_DATA) else frame
