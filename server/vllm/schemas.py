"""JSON schemas of vLLM's request and answer models, for the server's OpenAPI document."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from openai.types.responses.response import ToolChoice
from openai.types.responses.response_error import ResponseError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from typing_extensions import TypedDict
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensResponse,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse, ResponseUsage
from vllm.entrypoints.pooling.classify.protocol import ClassificationResponse
from vllm.entrypoints.pooling.embed.protocol import CohereEmbedResponse, EmbeddingResponse
from vllm.entrypoints.pooling.pooling.protocol import PoolingResponse
from vllm.entrypoints.pooling.scoring.protocol import RerankResponse, ScoreResponse
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeResponse, TokenizeResponse

from server.frontend import WireSchemas
from server.structured_outputs.custom_tools import (
    CALL_SCHEMA,
    CHOICE_SCHEMA,
    TOOL_SCHEMA,
)
from server.tools import ALLOWED_SCHEMA, FIELD
from server.vllm.handlers import RenderedPrompts
from server.wire import Endpoint, JsonObject


class TextFormat(TypedDict, total=False):
    """Format and verbosity of the text of an answer."""

    format: dict[str, Any]
    verbosity: str


class ResponseObject(ResponsesResponse):
    """vLLM's response with the fields that `server.vllm.responses` adds or changes."""

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


_REF = "#/components/schemas/{model}"
_ANSWERS: Mapping[Endpoint, type[BaseModel]] = {
    Endpoint.CHAT: ChatCompletionResponse,
    Endpoint.COMPLETION: CompletionResponse,
    Endpoint.RESPONSES: ResponseObject,
    Endpoint.INPUT_TOKENS: InputTokens,
    Endpoint.COMPACT: CompactedResponse,
    Endpoint.MESSAGES: AnthropicMessagesResponse,
    Endpoint.COUNT_TOKENS: AnthropicCountTokensResponse,
    Endpoint.RENDER_CHAT: GenerateRequest,
    Endpoint.RENDER_COMPLETION: RenderedPrompts,
    Endpoint.TOKENIZE: TokenizeResponse,
    Endpoint.DETOKENIZE: DetokenizeResponse,
    Endpoint.EMBEDDINGS: EmbeddingResponse,
    Endpoint.COHERE_EMBED: CohereEmbedResponse,
    Endpoint.POOLING: PoolingResponse,
    Endpoint.CLASSIFY: ClassificationResponse,
    Endpoint.SCORE: ScoreResponse,
    Endpoint.SCORE_V1: ScoreResponse,
    Endpoint.RERANK: RerankResponse,
    Endpoint.RERANK_V1: RerankResponse,
    Endpoint.RERANK_V2: RerankResponse,
}

_NEVER_STREAMS = (
    *(Endpoint.INPUT_TOKENS, Endpoint.COMPACT),
    *(Endpoint.RENDER_CHAT, Endpoint.RENDER_COMPLETION),
)
"""Endpoints whose request model has `stream`, without effect."""


def wire_schemas(
    forms: Mapping[Endpoint, Collection[type[BaseModel]]],
    extra_fields: Mapping[Endpoint, Mapping[str, JsonObject]],
    without: Mapping[Endpoint, Collection[str]],
    closed: bool,
) -> WireSchemas:
    """Return the schemas of the endpoints, each with the forms of its request.

    `extra_fields` are accepted in addition to the model's fields, of which those of `without` are
    removed. `closed`: other fields are rejected.
    """
    answers = {endpoint: _ANSWERS[endpoint] for endpoint in forms}
    models = [(model, "validation") for form in forms.values() for model in form]
    models += [(model, "serialization") for model in answers.values()]
    unique: list[Any] = list(dict.fromkeys(models))
    references, document = models_json_schema(unique, ref_template=_REF)
    definitions: dict[str, JsonObject] = document.get("$defs", {})
    requests: dict[Endpoint, JsonObject] = {}
    for endpoint, form in forms.items():
        schemas = [references[(model, "validation")] for model in form]
        for schema in schemas:
            definition = definitions[schema["$ref"].rpartition("/")[2]]
            given = definition.get("properties", {})
            own = {k: v for k, v in given.items() if k not in without[endpoint]}
            definition["properties"] = {**extra_fields[endpoint], **own}
            if endpoint.chats:
                _add_forms_of_chats(definition["properties"], definitions)
            # vLLM's models accept any field; this server rejects unknown ones.
            definition["additionalProperties"] = not closed
        requests[endpoint] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return WireSchemas(
        requests=requests,
        answers={name: references[(model, "serialization")] for name, model in answers.items()},
        definitions=definitions,
        streaming={
            endpoint
            for endpoint, form in forms.items()
            if endpoint not in _NEVER_STREAMS
            and any("stream" in model.model_fields for model in form)
        },
    )


def _add_forms_of_chats(properties: JsonObject, definitions: dict[str, JsonObject]) -> None:
    """Add the forms of tools, choices and calls that vLLM's models of chats lack."""
    properties[FIELD] = _with_forms(properties[FIELD], ALLOWED_SCHEMA, CHOICE_SCHEMA)
    offered = [
        {**form, "items": _with_forms(form["items"], TOOL_SCHEMA)} if "items" in form else form
        for form in properties["tools"]["anyOf"]
    ]
    properties["tools"] = {**properties["tools"], "anyOf": offered}
    message = definitions["ChatMessage"]["properties"]
    calls = message["tool_calls"]
    message["tool_calls"] = {**calls, "items": _with_forms(calls["items"], CALL_SCHEMA)}


def _with_forms(schema: JsonObject, *forms: JsonObject) -> JsonObject:
    """Return a schema that allows these forms, too, each of them once."""
    known = schema.get("anyOf", [schema])
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "$ref")}
    return {**rest, "anyOf": [*known, *(form for form in forms if form not in known)]}
