"""vLLM's request models by form, and JSON schemas of them and of the answers.

Prompts that are cut leave room for an answer. Requests that are rendered and not run have classes
of their own: the schemas of their fields differ. Import this after `allow_stop_strings`: vLLM's
models take the limit as they are made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from openai.types.responses.response import ToolChoice
from openai.types.responses.response_error import ResponseError
from pydantic import BaseModel, PrivateAttr, RootModel, model_validator
from pydantic.json_schema import models_json_schema
from typing_extensions import TypedDict
from vllm.config import ModelConfig
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.pooling.classify import protocol as classify
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.pooling.pooling import protocol as pooling
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.tokenize import protocol as tokenize
from vllm.renderers import TokenizeParams

from server.frontend import WireSchemas
from server.structured_outputs.custom_tools import CALL_SCHEMA, CHOICE_SCHEMA, TOOL_SCHEMA
from server.tools import ALLOWED_SCHEMA, FIELD
from server.wire import Endpoint, JsonObject


def leaving_room(params: TokenizeParams) -> TokenizeParams:
    """Return the parameters of a prompt; where it is cut, its answer may have at least one token.

    vLLM cuts a prompt whose answer has no limit to the whole context.
    """
    truncated, total = params.truncate_prompt_tokens, params.max_total_tokens
    if truncated is None or total is None or params.max_output_tokens:
        return params
    most = total - 1
    return replace(params, truncate_prompt_tokens=most if truncated < 0 else min(truncated, most))


class ChatCompletionRequest(chat.ChatCompletionRequest):
    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return leaving_room(super().build_tok_params(model_config))


class RenderCompletionRequest(completion.CompletionRequest):
    """A request for the prompts and the sampling parameters of a completion."""

    @model_validator(mode="before")
    @classmethod
    def normalize_null_max_tokens(cls, data: Any) -> Any:
        """Take null as absent; vLLM's method sets its default, as if it had been sent."""
        if isinstance(data, dict) and data.get("max_tokens") is None:
            return {name: value for name, value in data.items() if name != "max_tokens"}
        return data

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        most = model_config.max_model_len - (self.max_tokens or 0)
        is_default = "max_tokens" not in self.model_fields_set
        # What a client has not limited takes the room that is left.
        free = is_default and (self.truncate_prompt_tokens or 0) > most
        request = self.model_copy(update={"max_tokens": 0}) if free else self
        return leaving_room(completion.CompletionRequest.build_tok_params(request, model_config))


class CompletionRequest(RenderCompletionRequest):
    _echoed: Any = PrivateAttr(None)

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the prompts, for echoes with the tokens' places."""
        params = super().build_tok_params(model_config)
        return replace(params, return_token_offsets=bool(self.echo))


class RenderedPrompts(RootModel[list[GenerateRequest]]):
    """Rendered requests of the prompts of a completion."""


class RenderChatRequest(ChatCompletionRequest):
    """A request for the prompt and the sampling parameters of a chat."""


class ResponseRequest(responses.ResponsesRequest):
    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the rendered prompt.

        The chat template has written the special tokens, as in chats; vLLM adds them again.
        """
        params = leaving_room(super().build_tok_params(model_config))
        return replace(params, add_special_tokens=False)


class InputTokensRequest(ResponseRequest):
    """A request for the number of tokens that a response's prompt would have."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the rendered prompt, unlimited unless truncated."""
        params = super().build_tok_params(model_config)
        is_cut = params.truncate_prompt_tokens is not None
        return params if is_cut else replace(params, max_total_tokens=None)


class CompactRequest(ResponseRequest):
    """A request for a compacted conversation."""


def request_models() -> dict[str, type[BaseModel]]:
    """Return vLLM's request models by the form (`server.request.endpoints`) of a request."""
    return {
        "chat": ChatCompletionRequest,
        "completion": CompletionRequest,
        "responses": ResponseRequest,
        "input_tokens": InputTokensRequest,
        "compact": CompactRequest,
        "messages": anthropic.AnthropicMessagesRequest,
        "count_tokens": anthropic.AnthropicCountTokensRequest,
        "render_chat": RenderChatRequest,
        "render_completion": RenderCompletionRequest,
        "tokenize": tokenize.TokenizeCompletionRequest,
        "tokenize_chat": tokenize.TokenizeChatRequest,
        "detokenize": tokenize.DetokenizeRequest,
        "embeddings": embed.EmbeddingCompletionRequest,
        "embeddings_chat": embed.EmbeddingChatRequest,
        "embeddings_chats": embed.EmbeddingBatchChatRequest,
        "embeddings_chat_input": embed.EmbeddingChatInputRequest,
        "embeddings_chats_input": embed.EmbeddingBatchChatInputRequest,
        "cohere_embed": embed.CohereEmbedRequest,
        "pooling": pooling.PoolingCompletionRequest,
        "pooling_chat": pooling.PoolingChatRequest,
        "classify": classify.ClassificationCompletionRequest,
        "classify_chat": classify.ClassificationChatRequest,
        "score": scoring.ScoreQueriesDocumentsRequest,
        "score_items": scoring.ScoreQueriesItemsRequest,
        "score_data": scoring.ScoreDataRequest,
        "score_text": scoring.ScoreTextRequest,
        "rerank": scoring.RerankRequest,
    }


class TextFormat(TypedDict, total=False):
    """Format and verbosity of the text of an answer."""

    format: dict[str, Any]
    verbosity: str


class ResponseObject(responses.ResponsesResponse):
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
    usage: responses.ResponseUsage


_REF = "#/components/schemas/{model}"
_ANSWERS: Mapping[Endpoint, type[BaseModel]] = {
    Endpoint.CHAT: chat.ChatCompletionResponse,
    Endpoint.COMPLETION: completion.CompletionResponse,
    Endpoint.RESPONSES: ResponseObject,
    Endpoint.INPUT_TOKENS: InputTokens,
    Endpoint.COMPACT: CompactedResponse,
    Endpoint.MESSAGES: anthropic.AnthropicMessagesResponse,
    Endpoint.COUNT_TOKENS: anthropic.AnthropicCountTokensResponse,
    Endpoint.RENDER_CHAT: GenerateRequest,
    Endpoint.RENDER_COMPLETION: RenderedPrompts,
    Endpoint.TOKENIZE: tokenize.TokenizeResponse,
    Endpoint.DETOKENIZE: tokenize.DetokenizeResponse,
    Endpoint.EMBEDDINGS: embed.EmbeddingResponse,
    Endpoint.COHERE_EMBED: embed.CohereEmbedResponse,
    Endpoint.POOLING: pooling.PoolingResponse,
    Endpoint.CLASSIFY: classify.ClassificationResponse,
    Endpoint.SCORE: scoring.ScoreResponse,
    Endpoint.SCORE_V1: scoring.ScoreResponse,
    Endpoint.RERANK: scoring.RerankResponse,
    Endpoint.RERANK_V1: scoring.RerankResponse,
    Endpoint.RERANK_V2: scoring.RerankResponse,
}

_NEVER_STREAMS = (
    Endpoint.INPUT_TOKENS,
    Endpoint.COMPACT,
    Endpoint.RENDER_CHAT,
    Endpoint.RENDER_COMPLETION,
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
            accepted = {k: v for k, v in given.items() if k not in without[endpoint]}
            definition["properties"] = {**extra_fields[endpoint], **accepted}
            if endpoint.chats:
                # Add the forms of tools, choices and calls that vLLM's models of chats lack.
                properties = definition["properties"]
                properties[FIELD] = _with_forms(properties[FIELD], ALLOWED_SCHEMA, CHOICE_SCHEMA)
                offered = [
                    {**form, "items": _with_forms(form["items"], TOOL_SCHEMA)}
                    if "items" in form
                    else form
                    for form in properties["tools"]["anyOf"]
                ]
                properties["tools"] = {**properties["tools"], "anyOf": offered}
                message = definitions["ChatMessage"]["properties"]
                calls = message["tool_calls"]
                message["tool_calls"] = {**calls, "items": _with_forms(calls["items"], CALL_SCHEMA)}
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


def _with_forms(schema: JsonObject, *forms: JsonObject) -> JsonObject:
    """Return a schema that allows these forms, too, each of them once."""
    known = schema.get("anyOf", [schema])
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "$ref")}
    return {**rest, "anyOf": [*known, *(form for form in forms if form not in known)]}
