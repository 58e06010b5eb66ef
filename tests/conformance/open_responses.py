"""Schemas of responses and their events, from Open Responses' field tables (version 2026-04-24).

A field that the tables call optional may be absent, and not null; one that is nullable must be
there. Further fields are allowed. OpenAI's reference has more events; of those that both have, the
fields agree, but for reasoning, whose deltas are named as OpenAI names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

_STRICT = ConfigDict(strict=True, extra="allow")
Count = Annotated[int, Field(ge=0)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class Open(TypedDict):
    """An object that may have further fields."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]


class TopLogprob(Open):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class OutputText(Open):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: NotRequired[list[Logprob]]


class Text(Open):
    type: Literal["input_text", "reasoning_text", "summary_text", "text"]
    text: str


class Refusal(Open):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[OutputText | Text | Refusal, Field(discriminator="type")]


class Message(Open):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[Part]
    phase: NotRequired[Literal["commentary", "final_answer"]]


class FunctionCall(Open):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class FunctionCallOutput(Open):
    type: Literal["function_call_output"]
    id: str
    call_id: str
    output: str | list[Part]
    status: ItemStatus


class Reasoning(Open):
    type: Literal["reasoning"]
    id: str
    content: NotRequired[list[Part]]
    summary: list[Part]
    encrypted_content: NotRequired[str]


class Compaction(Open):
    type: Literal["compaction"]
    id: str
    encrypted_content: str
    created_by: NotRequired[str]


Item = Annotated[
    Message | FunctionCall | FunctionCallOutput | Reasoning | Compaction,
    Field(discriminator="type"),
]


class Function(Open):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class FunctionChoice(Open):
    type: Literal["function"]
    name: NotRequired[str]


class AllowedTools(Open):
    type: Literal["allowed_tools"]
    tools: list[FunctionChoice]
    mode: Literal["none", "auto", "required"]


class PlainFormat(Open):
    type: Literal["text", "json_object"]


class SchemaFormat(Open):
    type: Literal["json_schema"]
    name: str
    description: str | None
    schema: dict[str, Any] | None
    strict: bool


class TextConfig(Open):
    format: PlainFormat | SchemaFormat
    verbosity: NotRequired[Literal["low", "medium", "high"]]


class ReasoningConfig(Open):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
    summary: Literal["auto", "concise", "detailed"] | None


class InputDetails(Open):
    cached_tokens: Count
    cache_write_tokens: NotRequired[Count]


class OutputDetails(Open):
    reasoning_tokens: Count


class Usage(Open):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class IncompleteDetails(Open):
    reason: str


class ResponseError(Open):
    code: str
    message: str


class Response(Open):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: IncompleteDetails | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Item]
    error: ResponseError | None
    tools: list[Function]
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: TextConfig
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: Count
    temperature: float
    reasoning: ReasoningConfig | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None


class CompactedResponse(Open):
    id: str
    object: Literal["response.compaction"]
    output: list[Item]
    created_at: int
    usage: Usage


class _Event(Open):
    sequence_number: Count


class _Snapshot(_Event):
    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.failed",
        "response.incomplete",
    ]
    response: Response


class _ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Count
    item: Item


class _Within(_Event):
    item_id: str
    output_index: Count


class _PartEvent(_Within):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Count
    part: Part


class _TextDelta(_Within):
    type: Literal["response.output_text.delta"]
    content_index: Count
    delta: str
    logprobs: NotRequired[list[Logprob]]


class _TextDone(_Within):
    type: Literal["response.output_text.done"]
    content_index: Count
    text: str
    logprobs: NotRequired[list[Logprob]]


class _ReasoningDelta(_Within):
    type: Literal["response.reasoning_text.delta"]
    content_index: Count
    delta: str


class _ReasoningDone(_Within):
    type: Literal["response.reasoning_text.done"]
    content_index: Count
    text: str


class _ArgumentsDelta(_Within):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class _ArgumentsDone(_Within):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


class _ErrorPayload(Open):
    type: str
    code: str | None
    message: str
    param: str | None


class _Error(_Event):
    type: Literal["error"]
    error: _ErrorPayload


_EVENT: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _Snapshot
        | _ItemEvent
        | _PartEvent
        | _TextDelta
        | _TextDone
        | _ReasoningDelta
        | _ReasoningDone
        | _ArgumentsDelta
        | _ArgumentsDone
        | _Error,
        Field(discriminator="type"),
    ]
)
_RESPONSE = TypeAdapter(Response)
_COMPACTED = TypeAdapter(CompactedResponse)


def check_response(text: str | bytes) -> dict[str, Any]:
    """Validate a response and return it. Raises `ValidationError`."""
    return dict(_RESPONSE.validate_json(text))


def check_compacted(text: str | bytes) -> dict[str, Any]:
    """Validate a compacted response and return it. Raises `ValidationError`."""
    return dict(_COMPACTED.validate_json(text))


def check_stream(text: str) -> list[dict[str, Any]]:
    """Validate the frames of a stream and return their events. Raises `ValidationError`."""
    events = []
    for frame in text.split("\n\n"):
        lines = dict(
            line.split(": ", 1) for line in frame.splitlines() if line[:1] not in ("", ":")
        )
        if not lines or lines["data"] == "[DONE]":
            continue
        events.append(dict(_EVENT.validate_json(lines["data"])))
        assert lines["event"] == events[-1]["type"]
    return events
