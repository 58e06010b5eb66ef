"""OpenTelemetry spans of requests, the parents of the engine's spans.

Imported only with `--otlp-traces-endpoint`. The spans use the provider that vLLM has configured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server import __version__
from server.observability.genai import AttributeValue

SCHEMA_URL = Schemas.V1_41_1.value
"""The release of the semantic conventions for attribute names."""
_CONTEXT = (b"traceparent", b"tracestate")


class Tracing:
    """Begins and ends the spans of requests, by `provider` or the process's default provider."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("rbln_serve", __version__, provider, SCHEMA_URL)
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
        parent = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in headers
            if name in _CONTEXT
        }
        return self._tracer.start_span(
            name,
            context=self._propagator.extract(parent),
            kind=SpanKind.SERVER if remote else SpanKind.INTERNAL,
            attributes=dict(attributes),
        )

    def context_of(self, span: Span) -> dict[str, str]:
        """Return the trace context headers with `span` as the parent."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span))
        return headers

    def end(self, span: Span, attributes: Mapping[str, AttributeValue], *, failed: bool) -> None:
        """End a span; `failed` marks a server error."""
        span.set_attributes(attributes)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end()
