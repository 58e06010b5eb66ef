"""OpenTelemetry spans of requests, the parents of the engine's spans, and their attributes.

Names of attributes are those of semantic conventions 1.41.1, the last core release that defines
them; the repository open-telemetry/semantic-conventions-genai, where they are maintained since, has
the same ones. Only settings, sizes and identifiers become attributes, never text of prompts,
answers, tools or stop sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from server import __version__
from server.wire import Endpoint, JsonObject

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

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
    **dict.fromkeys((Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES), "chat"),
    Endpoint.COMPLETION: "text_completion",
    **dict.fromkeys((Endpoint.EMBEDDINGS, Endpoint.COHERE_EMBED), "embeddings"),
    # The conventions have no names for these.
    Endpoint.POOLING: "pooling",
    Endpoint.CLASSIFY: "classify",
    **dict.fromkeys((Endpoint.SCORE, Endpoint.SCORE_V1), "score"),
    **dict.fromkeys((Endpoint.RERANK, Endpoint.RERANK_V1, Endpoint.RERANK_V2), "rerank"),
}
"""The endpoints that run the model; the others tokenize or count tokens."""

MAX_TEXT = 256
"""Characters of a client's text in an attribute."""

OPERATIONS_BY_PATH = {endpoint.value: name for endpoint, name in OPERATIONS.items()}
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


def operation_attributes(operation: str) -> dict[str, AttributeValue]:
    """Return the attributes of an operation that are known before its request is parsed."""
    return {OPERATION: operation, PROVIDER: PROVIDER_NAME}


def request_attributes(fields: JsonObject) -> dict[str, AttributeValue]:
    """Return the attributes of a checked request's fields."""
    attributes: dict[str, AttributeValue] = {}
    for field, (name, kind) in _FIELDS.items():
        value = fields.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool):
            attributes[name] = kind(value)
    if isinstance(model := fields.get("model"), str):
        attributes[REQUEST_MODEL] = model[:MAX_TEXT]
    if isinstance(choices := fields.get("n"), int) and choices > 1:
        attributes["gen_ai.request.choice.count"] = choices
    if fields.get("stream") is True:
        attributes["gen_ai.request.stream"] = True
    if isinstance(encoding := fields.get("encoding_format"), str):
        attributes["gen_ai.request.encoding_formats"] = [encoding[:MAX_TEXT]]
    return attributes


_CONTEXT = (b"traceparent", b"tracestate")


class Tracing:
    """Begins and ends the spans of requests, by `provider` or the process's default provider.

    The default is the provider that vLLM has configured, with `--otlp-traces-endpoint`. Without it
    opentelemetry, which is optional, is not imported.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.semconv.schemas import Schemas
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        schema_url = Schemas.V1_41_1.value
        self._tracer = trace.get_tracer("rbln_serve", __version__, provider, schema_url)
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self,
        name: str,
        headers: Sequence[tuple[bytes, bytes]],
        attributes: Mapping[str, AttributeValue],
        *,
        remote: bool,
    ) -> Span:
        """Start the span of a request as a child of the context in its headers.

        `remote`: the request came over HTTP; others are internal.
        """
        kinds = self._trace.SpanKind
        parent = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in headers
            if name in _CONTEXT
        }
        return self._tracer.start_span(
            name,
            context=self._propagator.extract(parent),
            kind=kinds.SERVER if remote else kinds.INTERNAL,
            attributes=dict(attributes),
        )

    def get_trace_context(self, span: Span) -> dict[str, str]:
        """Return the trace context headers with `span` as the parent."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._trace.set_span_in_context(span))
        return headers

    def end(self, span: Span, attributes: Mapping[str, AttributeValue], *, failed: bool) -> None:
        """End a span; `failed` marks a server error."""
        span.set_attributes(attributes)
        if failed:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        span.end()
