"""One OpenTelemetry span for each request, around those of the engine.

Imported only when traces are asked for. The spans go where vLLM sends its own, by way of the
provider that it has set up; a request's trace context is replaced by the span's, so that the
engine's spans become its children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Headers = Sequence[tuple[bytes, bytes]]

_CONTEXT = (b"traceparent", b"tracestate")


class Tracing:
    """Begins and ends the spans of requests."""

    def __init__(self) -> None:
        self._tracer = get_tracer("rbln_serve")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, headers: Headers, name: str, attributes: Mapping[str, str]
    ) -> tuple[Span, list[tuple[bytes, bytes]]]:
        """Return a span below the one that the headers name, and the headers naming it instead."""
        above = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in headers
            if name in _CONTEXT
        }
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(above),
            kind=SpanKind.SERVER,
            attributes=dict(attributes),
        )
        below: dict[str, str] = {}
        self._propagator.inject(below, set_span_in_context(span))
        kept = [item for item in headers if item[0] not in _CONTEXT]
        return span, [*kept, *((k.encode("ascii"), v.encode("latin-1")) for k, v in below.items())]

    def end(self, span: Span, status: int, attributes: Mapping[str, str | int]) -> None:
        """End a span; statuses of 500 and more are errors."""
        span.set_attribute("http.response.status_code", status)
        for name, value in attributes.items():
            span.set_attribute(name, value)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()
