"""The server's own metrics: one declaration, and the page that joins them with the engine's.

`/metrics` answers from the first second on. It joins three sources: these metrics in a
registry of their own, vLLM's `vllm:*` in prometheus_client's default registry, untouched, and
the engine processes' boards under `<run_dir>/metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from rbln_backend.stats import MetricDecl
from server.lifecycle import Lifecycle, Phase

CONTENT_TYPE = CONTENT_TYPE_LATEST
OUTCOMES = ("ok", "client_error", "rejected", "aborted", "timeout", "server_error")

SERVER_METRICS: tuple[MetricDecl, ...] = (
    MetricDecl(
        "rbln_serve_build_info",
        "gauge",
        "Always 1; the labels are the versions of what runs.",
        ("version", "vllm", "torch", "python", "platform"),
    ),
    MetricDecl(
        "rbln_serve_phase",
        "gauge",
        "1 for the phase that the service is in, 0 for the others.",
        ("phase",),
    ),
    MetricDecl(
        "rbln_serve_startup_seconds",
        "gauge",
        "Seconds from process start to ready; 0 until then.",
    ),
    MetricDecl(
        "rbln_serve_warmup_graphs", "gauge", "Graphs that start-up compiles or loads and runs."
    ),
    MetricDecl("rbln_serve_warmup_graphs_done", "gauge", "Graphs that start-up is done with."),
    MetricDecl(
        "rbln_serve_in_flight_requests",
        "gauge",
        "Requests that were admitted and have not sent their last byte.",
    ),
    MetricDecl(
        "rbln_http_requests_total",
        "counter",
        f"Finished HTTP requests; outcome is one of {', '.join(OUTCOMES)}.",
        ("route", "method", "code", "outcome"),
    ),
    MetricDecl(
        "rbln_http_request_seconds",
        "histogram",
        "Seconds from a request's head to the last byte of its answer.",
        ("route", "stream"),
        (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
    ),
)


class ServerMetrics:
    """The server's metrics in a registry of their own. Used from the event loop only."""

    def __init__(self, run_dir: Path) -> None:
        self._registry = CollectorRegistry()
        self._board_dir = run_dir / "metrics"
        made = {decl.name: self._make(decl) for decl in SERVER_METRICS}
        self._gauges = {k: v for k, v in made.items() if isinstance(v, Gauge)}
        requests = made["rbln_http_requests_total"]
        seconds = made["rbln_http_request_seconds"]
        assert isinstance(requests, Counter)
        assert isinstance(seconds, Histogram)
        self._requests, self._seconds = requests, seconds

    def _make(self, decl: MetricDecl) -> Counter | Gauge | Histogram:
        if decl.kind == "counter":
            return Counter(decl.name, decl.help, decl.labels, registry=self._registry)
        if decl.kind == "gauge":
            return Gauge(decl.name, decl.help, decl.labels, registry=self._registry)
        return Histogram(
            decl.name, decl.help, decl.labels, registry=self._registry, buckets=decl.buckets
        )

    def set_versions(self, versions: Mapping[str, str]) -> None:
        """Publish what runs; components that are not labels are left out."""
        labels = next(d.labels for d in SERVER_METRICS if d.name == "rbln_serve_build_info")
        values = [versions.get(label, "unknown") for label in labels]
        self._gauges["rbln_serve_build_info"].labels(*values).set(1)

    def observe_lifecycle(self, lifecycle: Lifecycle) -> None:
        """Publish the phase, the start-up progress and the requests in flight."""
        for phase in Phase:
            self._gauges["rbln_serve_phase"].labels(phase.label).set(phase is lifecycle.phase)
        self._gauges["rbln_serve_startup_seconds"].set(lifecycle.ready_after_s or 0.0)
        done, total = lifecycle.graphs
        self._gauges["rbln_serve_warmup_graphs"].set(total)
        self._gauges["rbln_serve_warmup_graphs_done"].set(done)
        self._gauges["rbln_serve_in_flight_requests"].set(lifecycle.in_flight)

    def observe_request(
        self, *, route: str, method: str, code: int, outcome: str, stream: bool, seconds: float
    ) -> None:
        """Count one finished request; `route` is a path template, never a raw path."""
        assert outcome in OUTCOMES, outcome
        self._requests.labels(route, method, str(code), outcome).inc()
        self._seconds.labels(route, "true" if stream else "false").observe(seconds)

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        page = generate_latest(self._registry) + generate_latest(REGISTRY)
        if not self._board_dir.is_dir():
            return page
        boards = CollectorRegistry()
        MultiProcessCollector(boards, path=str(self._board_dir))  # type: ignore[no-untyped-call]
        return page + generate_latest(boards)
