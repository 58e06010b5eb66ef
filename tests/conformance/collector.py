"""A collector of OpenTelemetry spans, as far as a test needs one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass
class Collector(service.TraceServiceServicer):
    """Keeps every span that it is sent; `endpoint` is where to send them."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    scopes: dict[bytes, tuple[str, str, str]] = field(default_factory=dict)
    """Name, version and schema URL of what recorded a span, by the span's id."""
    services: set[str] = field(default_factory=set)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own name)
        for group in request.resource_spans:
            self.services.add(attributes(group.resource)["service.name"])
            for scope in group.scope_spans:
                about = scope.scope.name, scope.scope.version, scope.schema_url
                self.scopes |= {span.span_id: about for span in scope.spans}
                self.spans.extend(scope.spans)
        return messages.ExportTraceServiceResponse()

    def wait_for(self, trace_id: str, count: int, timeout_s: float = 20.0) -> list[Any]:
        """Return the spans of a trace once there are so many of them."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [span for span in self.spans if span.trace_id.hex() == trace_id]
            if len(found) >= count:
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{len(self.spans)} spans, but not {count} of trace {trace_id}")


@contextmanager
def collecting() -> Iterator[Collector]:
    """Collect spans on a free port for the length of the block."""
    server = grpc.server(ThreadPoolExecutor(1))
    collector = Collector()
    service.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span, or of a resource, by name."""
    return {item.key: _plain(item.value) for item in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)
