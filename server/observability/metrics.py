"""The server's own metrics, and the `/metrics` page that combines them with the engine's.

The page is available from the first second. It has three sources: these metrics in their own
registry, vLLM's `vllm:*` in prometheus_client's default registry, and the multiprocess files of the
engine processes under `<run_dir>/metrics`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from rbln_backend.api.reports import MetricDecl
from server.admission import Admission
from server.errors import REJECTIONS
from server.host.job_pool import JobCounts
from server.lifecycle import Lifecycle, ServicePhase
from server.lora.adapter import State
from server.observability.declarations import (
    CLOSED_LABELS,
    CONNECTION_ENDS,
    KEY_LIMITS,
    MAX_ADAPTERS_SHOWN,
    OUTCOMES,
    SERVER_METRICS,
)
from server.settings import ServerSettings
from server.structured_outputs.request_constraints import GUIDES

if TYPE_CHECKING:
    from server.lora.registry import AdapterRegistry

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST

# The gauges of `observe_advice`, in the order of `_publish_advice`.
_ADVICE = (
    "rbln_bucket_suggested",
    "rbln_bucket_suggested_saving_ratio",
    "rbln_bucket_suggested_padding_ratio",
    "rbln_bucket_recorded_steps",
)


class ServerMetrics:
    """The server's metrics in their own registry.

    Updated from the event loop only; the page may be rendered in another thread.
    """

    def __init__(self, run_dir: Path) -> None:
        self._registry = CollectorRegistry()
        self._board_dir = run_dir / "metrics"
        made = {decl.name: self._make(decl) for decl in SERVER_METRICS}
        self._gauges = {k: v for k, v in made.items() if isinstance(v, Gauge)}
        self._counters = {k: v for k, v in made.items() if isinstance(v, Counter)}
        self._histograms = {k: v for k, v in made.items() if isinstance(v, Histogram)}
        # Starts series at 0: `rate` ignores the first value of a series.
        for name, values in CLOSED_LABELS.items():
            for value in values:
                self._counters[name].labels(value)
        for kind in GUIDES:
            self._counters["rbln_structured_output_requests_total"].labels(kind, "ok")

    def _make(self, decl: MetricDecl) -> Counter | Gauge | Histogram:
        if decl.kind == "counter":
            return Counter(decl.name, decl.help, decl.labels, registry=self._registry)
        if decl.kind == "gauge":
            return Gauge(decl.name, decl.help, decl.labels, registry=self._registry)
        return Histogram(
            decl.name, decl.help, decl.labels, registry=self._registry, buckets=decl.buckets
        )

    def set_versions(self, versions: Mapping[str, str]) -> None:
        """Publish the versions of the components that are labels."""
        labels = next(d.labels for d in SERVER_METRICS if d.name == "rbln_serve_build_info")
        values = [versions.get(label, "unknown") for label in labels]
        self._gauges["rbln_serve_build_info"].labels(*values).set(1)

    def observe_lifecycle(self, lifecycle: Lifecycle) -> None:
        """Publish the phase, the start-up progress and the requests in flight."""
        for phase in ServicePhase:
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
        _expect(outcome, OUTCOMES)
        requests = self._counters["rbln_http_requests_total"]
        requests.labels(route, method, str(code), outcome).inc()
        durations = self._histograms["rbln_http_request_seconds"]
        durations.labels(route, "true" if stream else "false").observe(seconds)

    def observe_open_connections(self, count: int) -> None:
        """Publish the number of client connections."""
        self._gauges["rbln_http_connections"].set(count)

    def observe_connection_end(self, reason: str) -> None:
        """Count one connection refused or closed by a limit."""
        _expect(reason, CONNECTION_ENDS)
        self._counters["rbln_http_connection_refusals_total"].labels(reason).inc()

    def observe_rejection(self, reason: str) -> None:
        """Count one request rejected by admission, or by a limit of its key."""
        _expect(reason, REJECTIONS)
        self._counters["rbln_admission_rejections_total"].labels(reason).inc()

    def observe_admission(self, admission: Admission, settings: ServerSettings) -> None:
        """Publish the admitted work and its limits."""
        for name, value in (
            ("in_flight", admission.in_flight),
            ("flex_in_flight", admission.flex_in_flight),
            ("max_in_flight", admission.limit),
            ("max_queued_tokens", admission.max_queued_tokens or 0),
            ("max_queue_seconds", settings.max_queue_s),
            ("max_request_seconds", settings.max_request_s),
        ):
            self._gauges[f"rbln_admission_{name}"].set(value)
        for key, number in admission.keys.in_flight.items():
            self._gauges["rbln_key_in_flight"].labels(key).set(number)

    def observe_key(self, key: str, outcome: str, prompt: int, completion: int) -> None:
        """Count one finished request and its tokens for an API key."""
        self._counters["rbln_key_requests_total"].labels(key, outcome).inc()
        tokens = self._counters["rbln_key_tokens_total"]
        if prompt or completion:
            tokens.labels(key, "prompt").inc(prompt)
            tokens.labels(key, "completion").inc(completion)

    def observe_key_rejection(self, key: str, limit: str) -> None:
        """Count one request rejected by a limit of its API key."""
        _expect(limit, KEY_LIMITS)
        self._counters["rbln_key_rejections_total"].labels(key, limit).inc()

    def observe_tier(self, tier: str, outcome: str) -> None:
        """Count one finished request of a service tier."""
        self._counters["rbln_tier_requests_total"].labels(tier, outcome).inc()

    def observe_guided(self, kind: str, outcome: str) -> None:
        """Count one finished request with a constrained answer."""
        _expect(kind, GUIDES)
        self._counters["rbln_structured_output_requests_total"].labels(kind, outcome).inc()

    def observe_loop_lag(self, seconds: float) -> None:
        """Record a lag of the event loop."""
        self._histograms["rbln_serve_event_loop_lag_seconds"].observe(seconds)

    def observe_advice(self, advice: Mapping[str, Any] | None) -> None:
        """Publish the tuner's advice by phase, as `advise` returns it."""
        for name in _ADVICE:
            self._gauges[name].clear()
        for phase, found in (advice or {}).items():
            if found is not None:
                self._publish_advice(phase, found)

    def _publish_advice(self, phase: str, advice: Mapping[str, Any]) -> None:
        sizes, saving, padding, steps = (self._gauges[name] for name in _ADVICE)
        for size in sorted({*advice["current"], *advice["suggested"]}):
            sizes.labels(phase, str(size)).set(size in advice["suggested"])
        saving.labels(phase).set(advice["saving"])
        padding.labels(phase, "current").set(advice["padding_now"])
        padding.labels(phase, "suggested").set(advice["padding_then"])
        steps.labels(phase).set(advice["steps"])

    def observe_batches(
        self,
        statuses: Mapping[str, int],
        values: Mapping[str, float],
        lines: Mapping[str, int],
        tokens: Mapping[str, int],
    ) -> None:
        """Publish batches by status and `values` by metric name; add finished work.

        `lines` are counts by result, `tokens` by kind.
        """
        for status, count in statuses.items():
            self._gauges["rbln_batches"].labels(status).set(count)
        for name, value in values.items():
            self._gauges[name].set(value)
        for result, count in lines.items():
            self._counters["rbln_batch_lines_total"].labels(result).inc(count)
        for kind, count in tokens.items():
            self._counters["rbln_batch_tokens_total"].labels(kind).inc(count)

    def observe_responses(self, statuses: Mapping[str, int]) -> None:
        """Publish stored responses by status."""
        for status, count in statuses.items():
            self._gauges["rbln_stored_responses"].labels(status).set(count)

    def observe_adapters(self, adapters: AdapterRegistry) -> None:
        """Publish the LoRA adapters and their number in each state."""
        listed = adapters.all()
        for state in State:
            count = sum(adapter.state is state for adapter in listed)
            self._gauges["rbln_lora_adapters"].labels(state.value).set(count)
        info = self._gauges["rbln_lora_adapter_info"]
        info.clear()
        for adapter in listed[:MAX_ADAPTERS_SHOWN]:
            slot = "" if adapter.slot is None else str(adapter.slot)
            info.labels(adapter.name, adapter.state.value, slot).set(1)

    def observe_adapter_load(self, result: str, seconds: float) -> None:
        """Count one load of a LoRA adapter, and its duration if it succeeded."""
        self._counters["rbln_lora_loads_total"].labels(result).inc()
        if result == "ok":
            self._histograms["rbln_lora_load_seconds"].observe(seconds)

    def observe_reading(self, counts: JobCounts) -> None:
        """Add the large bodies since the last call."""
        self._add_jobs(counts, "rbln_large_bodies_total", "rbln_large_body_seconds")

    def observe_grammars(self, counts: JobCounts) -> None:
        """Add the grammar checks since the last call."""
        self._add_jobs(counts, "rbln_grammar_checks_total", "rbln_grammar_compile_seconds")
        for size in counts.sizes:
            self._histograms["rbln_grammar_memory_bytes"].observe(size)

    def _add_jobs(self, counts: JobCounts, total: str, duration: str) -> None:
        for result, count in counts.results.items():
            self._counters[total].labels(result).inc(count)
        for seconds in counts.seconds:
            self._histograms[duration].observe(seconds)

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        page = generate_latest(self._registry) + generate_latest(REGISTRY)
        return page + generate_latest(self._boards())

    def decode_times(self) -> dict[int, tuple[int, float]]:
        """Return the decode steps of all engines so far and their seconds, by bucket."""
        found: defaultdict[int, dict[str, float]] = defaultdict(lambda: {"count": 0, "sum": 0})
        families = [f for f in self._boards().collect() if f.name == "rbln_bucket_step_seconds"]
        for sample in (sample for family in families for sample in family.samples):
            kind = sample.name.rpartition("_")[2]
            if sample.labels["phase"] == "decode" and kind in ("count", "sum"):
                found[int(sample.labels["bucket"])][kind] += sample.value
        return {bucket: (int(total["count"]), total["sum"]) for bucket, total in found.items()}

    def _boards(self) -> CollectorRegistry:
        """Return the metrics of the engine processes."""
        boards = CollectorRegistry()
        if self._board_dir.is_dir():
            MultiProcessCollector(boards, path=str(self._board_dir))  # type: ignore[no-untyped-call]
        return boards


def _expect(value: str, declared: Container[str]) -> None:
    """Log a label's value that is not declared: it ends no request, and no panel shows it."""
    if value not in declared:
        logger.error("metrics: the label value %r is not declared", value)
