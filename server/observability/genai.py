"""Attributes of spans by OpenTelemetry's semantic conventions for generative AI.

Names are those of semantic conventions 1.41.1, the last core release that defines them; the
repository open-telemetry/semantic-conventions-genai, where they are maintained since, has the same
ones. Only settings, sizes and identifiers become attributes, never text of prompts, answers, tools
or stop sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from server.wire.endpoint import Endpoint, JsonObject

AttributeValue = str | bool | int | float | Sequence[str]

PROVIDER_NAME = "rbln_serve"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"

OPERATIONS: Mapping[Endpoint, str] = {
    Endpoint.CHAT: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.COMPLETION: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.COHERE_EMBED: "embeddings",
    # The conventions have no names for these.
    Endpoint.POOLING: "pooling",
    Endpoint.CLASSIFY: "classify",
    Endpoint.SCORE: "score",
    Endpoint.SCORE_V1: "score",
    Endpoint.RERANK: "rerank",
    Endpoint.RERANK_V1: "rerank",
    Endpoint.RERANK_V2: "rerank",
}
"""The endpoints that run the model; the others tokenize or count tokens."""

MAX_TEXT = 256
"""Characters of a client's text in an attribute."""

_OPERATIONS_BY_PATH = {endpoint.value: name for endpoint, name in OPERATIONS.items()}
_FIELDS: Mapping[str, tuple[str, Callable[[float], int | float]]] = {
    "max_tokens": ("gen_ai.request.max_tokens", int),
    "max_completion_tokens": ("gen_ai.request.max_tokens", int),
    "max_output_tokens": ("gen_ai.request.max_tokens", int),
    "temperature": ("gen_ai.request.temperature", float),
    "top_p": ("gen_ai.request.top_p", float),
    "top_k": ("gen_ai.request.top_k", int),
    "seed": ("gen_ai.request.seed", int),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", float),
    "presence_penalty": ("gen_ai.request.presence_penalty", float),
    "dimensions": ("gen_ai.embeddings.dimension.count", int),
}
"""Numbers of requests, by the APIs' names of the fields."""


def operation_of(path: str) -> str | None:
    """Return the operation of a route; None if the model does not run."""
    return _OPERATIONS_BY_PATH.get(path)


def operation_attributes(operation: str) -> dict[str, AttributeValue]:
    """Return the attributes of an operation that are known before its request is parsed."""
    return {OPERATION: operation, PROVIDER: PROVIDER_NAME}


def request_attributes(fields: JsonObject) -> dict[str, AttributeValue]:
    """Return the attributes of a checked request's fields."""
    found: dict[str, AttributeValue] = {}
    for field, (name, kind) in _FIELDS.items():
        value = fields.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = kind(value)
    if isinstance(model := fields.get("model"), str):
        found[REQUEST_MODEL] = model[:MAX_TEXT]
    if isinstance(choices := fields.get("n"), int) and choices > 1:
        found["gen_ai.request.choice.count"] = choices
    if fields.get("stream") is True:
        found["gen_ai.request.stream"] = True
    if isinstance(encoding := fields.get("encoding_format"), str):
        found["gen_ai.request.encoding_formats"] = [encoding[:MAX_TEXT]]
    return found
