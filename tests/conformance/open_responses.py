"""Schemas of responses and their events, from Open Responses' field tables (version 2026-04-24).

A field that the tables call optional may be absent, and not null; one that is nullable must be
there. Further fields are allowed. OpenAI's reference has more events; of those that both have, the
fields agree, but for reasoning, whose deltas are named as OpenAI names them.
"""

from typing import Annotated, Any, Literal, NotRequired, Union

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

Fields = dict[str, Any]
Count = Annotated[int, Field(ge=0)]


def form(name: str, fields: Fields, kind: str = "") -> Any:
    """Return an object that may have further fields; `kind` has the texts of its `type`."""
    kinds = {"type": Literal[tuple(kind.split())]} if kind else {}
    made = TypedDict(name, kinds | fields)  # type: ignore[operator]
    made.__pydantic_config__ = ConfigDict(strict=True, extra="allow")
    return made


ItemStatus = Literal["in_progress", "completed", "incomplete"]
TopLogprob = form("TopLogprob", {"token": str, "logprob": float, "bytes": list[int]})
Logprob = form(
    "Logprob",
    {"token": str, "logprob": float, "bytes": list[int], "top_logprobs": list[TopLogprob]},
)
_LOGPROBS: Fields = {"logprobs": NotRequired[list[Logprob]]}
OutputText = form("OutputText", {"text": str, "annotations": list[Any]} | _LOGPROBS, "output_text")
Text = form("Text", {"text": str}, "input_text reasoning_text summary_text text")
Refusal = form("Refusal", {"refusal": str}, "refusal")
Part = Annotated[OutputText | Text | Refusal, Field(discriminator="type")]

_ROLE = Literal["user", "assistant", "system", "developer"]
_PHASE = NotRequired[Literal["commentary", "final_answer"]]
_ITEM: Fields = {"id": str, "status": ItemStatus}
Message = form(
    "Message", _ITEM | {"role": _ROLE, "content": list[Part], "phase": _PHASE}, "message"
)
FunctionCall = form(
    "FunctionCall", _ITEM | {"call_id": str, "name": str, "arguments": str}, "function_call"
)
FunctionCallOutput = form(
    "FunctionCallOutput",
    _ITEM | {"call_id": str, "output": str | list[Part]},
    "function_call_output",
)
Reasoning = form(
    "Reasoning",
    {"id": str, "content": NotRequired[list[Part]], "summary": list[Part]}
    | {"encrypted_content": NotRequired[str]},
    "reasoning",
)
Compaction = form(
    "Compaction",
    {"id": str, "encrypted_content": str, "created_by": NotRequired[str]},
    "compaction",
)
Item = Annotated[
    Message | FunctionCall | FunctionCallOutput | Reasoning | Compaction,
    Field(discriminator="type"),
]

_ABOUT: Fields = {"name": str, "description": str | None}
_SCHEMA = dict[str, Any] | None
Function = form("Function", _ABOUT | {"parameters": _SCHEMA, "strict": bool | None}, "function")
FunctionChoice = form("FunctionChoice", {"name": NotRequired[str]}, "function")
_MODE = Literal["none", "auto", "required"]
AllowedTools = form("AllowedTools", {"tools": list[FunctionChoice], "mode": _MODE}, "allowed_tools")
PlainFormat = form("PlainFormat", {}, "text json_object")
SchemaFormat = form("SchemaFormat", _ABOUT | {"schema": _SCHEMA, "strict": bool}, "json_schema")
_VERBOSITY = NotRequired[Literal["low", "medium", "high"]]
TextConfig = form("TextConfig", {"format": PlainFormat | SchemaFormat, "verbosity": _VERBOSITY})
_EFFORT = Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
_SUMMARY = Literal["auto", "concise", "detailed"] | None
ReasoningConfig = form("ReasoningConfig", {"effort": _EFFORT, "summary": _SUMMARY})
InputDetails = form(
    "InputDetails", {"cached_tokens": Count, "cache_write_tokens": NotRequired[Count]}
)
OutputDetails = form("OutputDetails", {"reasoning_tokens": Count})
Usage = form(
    "Usage",
    dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), Count)
    | {"input_tokens_details": InputDetails, "output_tokens_details": OutputDetails},
)
IncompleteDetails = form("IncompleteDetails", {"reason": str})
ResponseError = form("ResponseError", {"code": str, "message": str})
_STATUS = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Response = form(
    "Response",
    dict.fromkeys("id model service_tier".split(), str)
    | dict.fromkeys("previous_response_id instructions".split(), str | None)
    | dict.fromkeys("safety_identifier prompt_cache_key".split(), str | None)
    | dict.fromkeys("top_p presence_penalty frequency_penalty temperature".split(), float)
    | dict.fromkeys("parallel_tool_calls store background".split(), bool)
    | dict.fromkeys("completed_at max_output_tokens max_tool_calls".split(), int | None)
    | {"object": Literal["response"], "created_at": int, "top_logprobs": Count, "status": _STATUS}
    | {"incomplete_details": IncompleteDetails | None, "error": ResponseError | None}
    | {"output": list[Item], "tools": list[Function], "metadata": dict[str, str]}
    | {"tool_choice": _MODE | FunctionChoice | AllowedTools, "text": TextConfig}
    | {"truncation": Literal["auto", "disabled"], "reasoning": ReasoningConfig | None}
    | {"usage": Usage | None},
)
CompactedResponse = form(
    "CompactedResponse",
    {"id": str, "object": Literal["response.compaction"], "output": list[Item]}
    | {"created_at": int, "usage": Usage},
)

_EVENT_FIELDS: Fields = {"sequence_number": Count}
_WITHIN: Fields = _EVENT_FIELDS | {"item_id": str, "output_index": Count}
_PART: Fields = _WITHIN | {"content_index": Count}
_ERROR: Fields = {"code": str | None, "message": str, "param": str | None, "type": str}
_SNAPSHOTS = "created queued in_progress completed failed incomplete"
# Name -> its types without `response.`, and its fields.
_EVENTS: dict[str, tuple[str, Fields]] = {
    "Snapshot": (_SNAPSHOTS, _EVENT_FIELDS | {"response": Response}),
    "ItemEvent": (
        "output_item.added output_item.done",
        _EVENT_FIELDS | {"output_index": Count, "item": Item},
    ),
    "PartEvent": ("content_part.added content_part.done", _PART | {"part": Part}),
    "TextDelta": ("output_text.delta", _PART | _LOGPROBS | {"delta": str}),
    "TextDone": ("output_text.done", _PART | _LOGPROBS | {"text": str}),
    "ReasoningDelta": ("reasoning_text.delta", _PART | {"delta": str}),
    "ReasoningDone": ("reasoning_text.done", _PART | {"text": str}),
    "ArgumentsDelta": ("function_call_arguments.delta", _WITHIN | {"delta": str}),
    "ArgumentsDone": ("function_call_arguments.done", _WITHIN | {"arguments": str}),
}
_FORMS = [
    form(name, fields, " ".join(f"response.{kind}" for kind in kinds.split()))
    for name, (kinds, fields) in _EVENTS.items()
]
_FORMS.append(form("Error", _EVENT_FIELDS | {"error": form("ErrorPayload", _ERROR)}, "error"))
_EVENT: TypeAdapter[Any] = TypeAdapter(
    Annotated[Union[tuple(_FORMS)], Field(discriminator="type")]  # noqa: UP007
)
_RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)
_COMPACTED: TypeAdapter[Any] = TypeAdapter(CompactedResponse)


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
