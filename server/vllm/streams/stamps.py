"""Additional fields of this server in vLLM's answers and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from server.request.record import RequestRecord, record_var
from server.vllm.responses.stream import response_frames
from server.vllm.streams.custom_calls import custom_call_frames
from server.wire.endpoint import Endpoint, JsonObject

_DATA = "data: {"


def put_on(answer: BaseModel, stamp: JsonObject) -> None:
    """Set the fields of an answer; fields that its model lacks are sent as well."""
    for name, value in stamp.items():
        setattr(answer, name, value)


def add_prediction_counts(usage: Any) -> None:
    """Add the counts of predicted tokens to vLLM's usage of a whole answer.

    A predicted token is *accepted* if the answer has it at its position, else *rejected*.
    """
    record = record_var.get()
    if usage is None or record is None or record.tokens.prediction is None:
        return
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    accepted, rejected = record.tokens.prediction()
    known = usage.completion_tokens_details
    usage.completion_tokens_details = CompletionTokenUsageInfo(
        # Set although it is the default: streams omit unset fields.
        reasoning_tokens=0 if known is None else known.reasoning_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
    )


def stamped_frames(
    endpoint: Endpoint, answer: AsyncGenerator[Any, None], stamp: JsonObject, record: RequestRecord
) -> AsyncGenerator[str, None]:
    """Return the frames of vLLM's stream, each object in it with the fields."""
    if endpoint is Endpoint.RESPONSES:
        return response_frames(answer, stamp, record)
    if record.custom_tools:
        answer = custom_call_frames(answer, record.custom_tools)
    return answer if endpoint.anthropic or not stamp else _marked(answer, stamp)


async def _marked(
    frames: AsyncGenerator[str, None], stamp: JsonObject
) -> AsyncGenerator[str, None]:
    """Write the fields into chunks that are text already, before all others."""
    begin = f"data: {to_json(stamp).decode()[:-1]},"
    async with aclosing(frames):
        async for frame in frames:
            yield begin + frame[len(_DATA) :] if frame.startswith(_DATA) else frame
