"""The JSON schemas of what the Responses API returns, for the server's OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from openai.types.responses.response import ToolChoice
from openai.types.responses.response_error import ResponseError
from pydantic import BaseModel
from typing_extensions import TypedDict
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse, ResponseUsage


class TextFormat(TypedDict, total=False):
    """Format and verbosity of the text of an answer."""

    format: dict[str, Any]
    verbosity: str


class ResponseObject(ResponsesResponse):
    """vLLM's response with the fields that `server.vllm.responses.answer` adds or changes."""

    completed_at: int | None
    error: ResponseError | None
    max_output_tokens: int | None  # type: ignore[assignment]
    text: TextFormat  # type: ignore[assignment]
    tool_choice: ToolChoice | dict[str, Any]  # type: ignore[assignment]
    tools: list[dict[str, Any]]  # type: ignore[assignment]
    service_tier: Literal["default", "flex", "priority"]
    top_logprobs: int
    store: bool
    safety_identifier: str | None
    prompt_cache_key: str | None


class InputTokens(BaseModel):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedResponse(BaseModel):
    """A conversation as the messages that stay and a summary of the rest."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage
