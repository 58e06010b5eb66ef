"""Handlers of requests by form: vLLM's serving methods, and the bodies and frames of their answers.

An answer gets additional fields, and its id and finish reasons become attributes of the request's
span. Streams are searched, not parsed, and their text is not stored.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from server.observability.tracing import (
    FINISH_REASONS,
    OPERATIONS,
    RESPONSE_ID,
    RESPONSE_MODEL,
    operation_attributes,
    request_attributes,
)
from server.request.record import RequestRecord
from server.vllm.messages import Messages
from server.vllm.models import RenderedPrompts, request_models
from server.vllm.parser import object_call_parser
from server.vllm.patches import adapt_serving
from server.vllm.responses import Responses, compacted_json, response_frames, response_json
from server.vllm.sampling import add_prediction_counts
from server.vllm.serving import Chats, Completions, custom_call_frames, with_custom_calls
from server.wire import Endpoint, JsonObject

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_ANTHROPIC = "anthropic_serving_messages"
_RESPONSES = "openai_serving_responses"
_SERVED_BY = {
    "chat": ("openai_serving_chat", "create_chat_completion"),
    "completion": ("openai_serving_completion", "create_completion"),
    "responses": (_RESPONSES, "create_responses"),
    "input_tokens": (_RESPONSES, "count_input_tokens"),
    "compact": (_RESPONSES, "create_responses"),
    "messages": (_ANTHROPIC, "create_messages"),
    "count_tokens": (_ANTHROPIC, "count_tokens"),
    "render_chat": ("serving_render", "answer_chat"),
    "render_completion": ("serving_render", "answer_completion"),
    **dict.fromkeys(("tokenize", "tokenize_chat"), ("serving_tokenization", "create_tokenize")),
    "detokenize": ("serving_tokenization", "create_detokenize"),
    **dict.fromkeys(
        (
            "embeddings",
            "embeddings_chat",
            "embeddings_chats",
            "embeddings_chat_input",
            "embeddings_chats_input",
            "cohere_embed",
        ),
        ("serving_embedding", "__call__"),
    ),
    **dict.fromkeys(("pooling", "pooling_chat"), ("serving_pooling", "__call__")),
    **dict.fromkeys(("classify", "classify_chat"), ("serving_classification", "__call__")),
    **dict.fromkeys(
        ("score", "score_items", "score_data", "score_text", "rerank"),
        ("serving_scores", "__call__"),
    ),
}
"""Attribute of vLLM's application state and method that serve a form."""
_DATA = "data: {"
_ID = re.compile(r'"id": ?"([\w.:-]{1,200})"')
# A quote inside a text of JSON has a backslash before it, so that no text of an answer matches.
_REASON = re.compile(r'"finish_reason": ?"(\w{1,40})"')
_ANTHROPIC_REASON = re.compile(r'"stop_reason": ?"(\w{1,40})"')
_INCOMPLETE = r'"incomplete_details": ?\{"reason": ?"(\w{1,40})"'
_RESPONSE_END = re.compile(
    rf"event: response\.(?:(completed|failed)\n|incomplete\n[^\n]*?{_INCOMPLETE})"
)
_MARGIN = 1000
"""Bytes at the start of an answer, where its id is, and at its end, with Anthropic's reason."""

ToBody = Callable[[Any, JsonObject, RequestRecord], bytes]
"""Returns the JSON body of vLLM's answer, with additional fields."""


class Renders(ServingRender):
    """Takes the HTTP request, too, and returns one model for the prompts of a completion."""

    async def answer_chat(self, request: Any, _: Any) -> GenerateRequest | ErrorResponse:
        return await self.render_chat_request(request)

    async def answer_completion(self, request: Any, _: Any) -> RenderedPrompts | ErrorResponse:
        result = await self.render_completion_request(request)
        return result if isinstance(result, ErrorResponse) else RenderedPrompts(result)


_SUBCLASSES: Mapping[type, type] = {
    OpenAIServingChat: Chats,
    OpenAIServingCompletion: Completions,
    OpenAIServingResponses: Responses,
    AnthropicServingMessages: Messages,
    ServingRender: Renders,
}
"""Our subclasses of vLLM's serving classes. Those of pooling models have no streams."""


def adapted(serving: Any) -> Any:
    """Return a copy of one of vLLM's serving instances that is of our subclass, with our parser."""
    subclass = _SUBCLASSES.get(type(serving), type(serving))
    return adapt_serving(serving, subclass, object_call_parser)


def _body(answer: BaseModel, extra_fields: JsonObject, _: RequestRecord) -> bytes:
    for name, value in extra_fields.items():
        # Fields that the answer's model lacks are sent as well.
        setattr(answer, name, value)
    add_prediction_counts(getattr(answer, "usage", None))
    return answer.model_dump_json().encode()


def _chat_body(answer: BaseModel, extra_fields: JsonObject, record: RequestRecord) -> bytes:
    whole = _body(answer, extra_fields, record)
    return with_custom_calls(whole, record.custom_tools) if record.custom_tools else whole


_BODIES: Mapping[str, ToBody] = {
    "chat": _chat_body,
    "responses": response_json,
    "compact": compacted_json,
    "count_tokens": lambda answer, *_: answer.model_dump_json(exclude_none=True).encode(),
    **dict.fromkeys(
        ("render_chat", "render_completion"), lambda answer, *_: answer.model_dump_json().encode()
    ),
}


@dataclass(frozen=True, slots=True)
class Handler:
    """Request model, serving method (if offered) and answer serializer of one form."""

    model: type[BaseModel]
    serve: Callable[[Any, Request], Awaitable[Any]] | None
    to_body: ToBody


def handlers(state: State) -> dict[str, Handler]:
    """Return the handler of each form; a model offers the forms of its tasks only."""
    by_form = {}
    for form, model in request_models().items():
        name, method = _SERVED_BY[form]
        # A model has the serving classes of its tasks only.
        serving, serve = getattr(state, name, None), None
        if serving is not None:
            serve = getattr(adapted(serving), method)
        by_form[form] = Handler(model, serve, _BODIES.get(form, _body))
    return by_form


def extended_frames(
    endpoint: Endpoint,
    answer: AsyncGenerator[Any, None],
    extra_fields: JsonObject,
    record: RequestRecord,
) -> AsyncGenerator[str, None]:
    """Return the frames of vLLM's stream, each object in it with the fields."""
    if endpoint is Endpoint.RESPONSES:
        return response_frames(answer, extra_fields, record)
    if record.custom_tools:
        answer = custom_call_frames(answer, record.custom_tools)
    return answer if endpoint.anthropic or not extra_fields else _marked(answer, extra_fields)


async def _marked(
    frames: AsyncGenerator[str, None], extra_fields: JsonObject
) -> AsyncGenerator[str, None]:
    """Write the fields into chunks that are text already, before all others."""
    begin = f"data: {to_json(extra_fields).decode()[:-1]},"
    async with aclosing(frames):
        async for frame in frames:
            yield begin + frame[len(_DATA) :] if frame.startswith(_DATA) else frame


def describe_request(span: Span, endpoint: Endpoint, fields: JsonObject) -> None:
    if endpoint in OPERATIONS:
        # The path of /invocations does not say the operation.
        of_operation = operation_attributes(OPERATIONS[endpoint])
        span.set_attributes(of_operation | request_attributes(fields))


def name_model(span: Span, endpoint: Endpoint, model: str) -> None:
    """Name a request's span after its operation and the served model or adapter that answers."""
    if endpoint in OPERATIONS:
        span.update_name(f"{OPERATIONS[endpoint]} {model}")
        span.set_attribute(RESPONSE_MODEL, model)


def describe_answer(span: Span, answer: object) -> None:
    reasons: list[Any]
    if isinstance(answer, Response):
        # It is JSON already.
        body = bytes(answer.body)
        match = _ID.search(body[:_MARGIN].decode(errors="replace"))
        identity = None if match is None else match[1]
        reasons = _ANTHROPIC_REASON.findall(body[-_MARGIN:].decode(errors="replace"))
    else:
        identity = getattr(answer, "id", None)
        if (choices := getattr(answer, "choices", None)) is not None:
            reasons = [choice.finish_reason for choice in choices]
        else:
            details = getattr(answer, "incomplete_details", None)
            reasons = [getattr(details, "reason", None) or getattr(answer, "status", None)]
    if isinstance(identity, str):
        span.set_attribute(RESPONSE_ID, identity)
    if reasons := [reason for reason in reasons if isinstance(reason, str)]:
        span.set_attribute(FINISH_REASONS, reasons)


async def described_frames(
    record: RequestRecord, endpoint: Endpoint, frames: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Yield the frames of a stream; their id and finish reasons are set on the request's span."""
    pattern = _RESPONSE_END if endpoint is Endpoint.RESPONSES else _REASON
    if endpoint.anthropic:
        pattern = _ANTHROPIC_REASON
    named = False
    reasons: list[str] = []
    async with aclosing(frames):
        async for frame in frames:
            span = record.span
            if span is not None:
                if not named and (identity := _ID.search(frame)) is not None:
                    named = True
                    span.set_attribute(RESPONSE_ID, identity[1])
                if matches := pattern.findall(frame):
                    reasons += ["".join(groups) for groups in matches]
                    span.set_attribute(FINISH_REASONS, reasons)
            yield frame
