"""The server's own metrics, and the `/metrics` page that combines them with the engine's.

The page is available from the first second. It has three sources: these metrics in their own
registry, vLLM's `vllm:*` in prometheus_client's default registry, and the multiprocess files of the
engine processes under `<run_dir>/metrics`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
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
from server.host.job_pool import GRAMMAR_RESULTS, READING_RESULTS, JobCounts
from server.lifecycle import Lifecycle, ServicePhase
from server.lora.adapter import State
from server.settings import ServerSettings
from server.structured_outputs.request_constraints import GUIDES

if TYPE_CHECKING:
    from server.lora.registry import AdapterRegistry


MAX_ADAPTERS_SHOWN = 100
LOAD_RESULTS = ("ok", "refused", "failed")
OUTCOMES = ("ok", "client_error", "rejected", "aborted", "timeout", "server_error")

KEY_LIMITS = ("in_flight", "requests", "tokens")
LINE_RESULTS = ("completed", "failed")
LINE_TOKENS = ("prompt", "completion")

CONNECTION_ENDS = (
    *("too_many_connections", "too_many_client_connections", "headers_too_large"),
    *("header_timeout", "invalid_http", "unsupported_transfer_encoding", "websocket_unsupported"),
    *("unread_body", "write_timeout"),
)


def _counter(name: str, about: str, labels: str = "") -> MetricDecl:
    return MetricDecl(name, "counter", about, tuple(labels.split()))


def _gauge(name: str, about: str, labels: str = "") -> MetricDecl:
    return MetricDecl(name, "gauge", about, tuple(labels.split()))


def _histogram(name: str, about: str, buckets: tuple[float, ...], labels: str = "") -> MetricDecl:
    return MetricDecl(name, "histogram", about, tuple(labels.split()), buckets)


SERVER_METRICS: tuple[MetricDecl, ...] = (
    _gauge(
        "rbln_serve_build_info",
        "Always 1; the labels are the versions of the components.",
        "version vllm torch python platform",
    ),
    _gauge(
        "rbln_serve_phase", "1 for the current phase of the service, 0 for the others.", "phase"
    ),
    _gauge("rbln_serve_startup_seconds", "Seconds from process start to ready; 0 until then."),
    _gauge("rbln_serve_warmup_graphs", "Graphs that warm-up compiles or loads, and runs."),
    _gauge("rbln_serve_warmup_graphs_done", "Graphs whose warm-up is complete."),
    _gauge("rbln_serve_in_flight_requests", "Admitted requests whose response is not complete."),
    _counter(
        "rbln_http_requests_total",
        f"Finished HTTP requests; outcome is one of {', '.join(OUTCOMES)}.",
        "route method code outcome",
    ),
    _histogram(
        "rbln_http_request_seconds",
        "Seconds from a request's head to the last byte of its response.",
        (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
        "route stream",
    ),
    _gauge("rbln_http_connections", "Open client connections."),
    _gauge("rbln_batches", "Stored batches by status.", "status"),
    _gauge("rbln_stored_responses", "Stored responses by status.", "status"),
    _counter(
        "rbln_batch_lines_total",
        "Answered batch lines: with status 200 (completed) or another (failed).",
        "result",
    ),
    _counter(
        "rbln_batch_tokens_total",
        "Tokens of answered batch lines by kind: prompt or completion.",
        "kind",
    ),
    _gauge("rbln_batch_lines_to_do", "Unanswered batch lines, including running ones."),
    _gauge("rbln_batch_lines_running", "Batch lines that run in the engine."),
    _gauge("rbln_stored_files", "Files in --data-dir."),
    _gauge("rbln_stored_bytes", "Bytes of files in --data-dir."),
    _gauge(
        "rbln_storage_free_bytes", "Free bytes on the disk of --data-dir above --min-free-bytes."
    ),
    _gauge(
        "rbln_storage_full", "1 while batch lines or their answers wait for disk space or quota."
    ),
    _counter(
        "rbln_http_connection_refusals_total",
        "Client connections refused or closed by a limit; reason is one of "
        f"{', '.join(CONNECTION_ENDS)}.",
        "reason",
    ),
    _counter(
        "rbln_key_requests_total",
        "Finished requests by name of the API key; outcome as in rbln_http_requests_total.",
        "key outcome",
    ),
    _gauge("rbln_key_in_flight", "Requests in flight by name of the API key.", "key"),
    _counter(
        "rbln_key_rejections_total",
        f"Requests rejected by a limit of their API key; limit is one of {', '.join(KEY_LIMITS)}.",
        "key limit",
    ),
    _counter(
        "rbln_tier_requests_total",
        "Finished client requests by service tier; outcome as in rbln_http_requests_total.",
        "tier outcome",
    ),
    _counter(
        "rbln_key_tokens_total",
        "Tokens processed for an API key, including aborted requests; kind is prompt or "
        "completion.",
        "key kind",
    ),
    _counter(
        "rbln_admission_rejections_total",
        f"Rejected requests; reason is one of {', '.join(REJECTIONS)}.",
        "reason",
    ),
    _gauge(
        "rbln_admission_in_flight",
        "Running and waiting sequences, counting each of `n` and each prompt.",
    ),
    _gauge(
        "rbln_admission_flex_in_flight",
        "Sequences of the service tier flex, which rbln_admission_in_flight does not count.",
    ),
    _gauge(
        "rbln_admission_max_in_flight",
        "Limit of rbln_admission_in_flight; 0 until the engine is ready.",
    ),
    _gauge(
        "rbln_admission_max_queued_tokens",
        "Limit of prompt tokens that wait for prefill; 0: no limit.",
    ),
    _gauge(
        "rbln_admission_max_queue_seconds",
        "Limit of a request's queue time in seconds; 0: no limit.",
    ),
    _gauge(
        "rbln_admission_max_request_seconds",
        "Limit of a request's total time in seconds; 0: no limit.",
    ),
    _counter(
        "rbln_grammar_checks_total",
        f"Checked grammars of requests; result is one of {', '.join(GRAMMAR_RESULTS)}.",
        "result",
    ),
    _histogram(
        "rbln_grammar_compile_seconds",
        "Seconds for compiling a new grammar.",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
    _histogram(
        "rbln_grammar_memory_bytes",
        "Memory of a new grammar after its check, in bytes; more than 64 MiB are refused.",
        tuple(float(1 << power) for power in range(16, 27, 2)),
    ),
    _counter(
        "rbln_structured_output_requests_total",
        f"Finished requests with a constrained answer; kind is one of {', '.join(GUIDES)} (tool "
        "parameters), outcome as in rbln_http_requests_total.",
        "kind outcome",
    ),
    _gauge(
        "rbln_lora_adapters", "LoRA adapters by state: loading, ready, draining or failed.", "state"
    ),
    _counter(
        "rbln_lora_loads_total",
        "Loads of LoRA adapters over HTTP; result is ok, refused (invalid request) or failed.",
        "result",
    ),
    _histogram(
        "rbln_lora_load_seconds",
        "Seconds from the request for a LoRA adapter until it is ready.",
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
    ),
    _gauge(
        "rbln_lora_adapter_info",
        "Always 1: a LoRA adapter with its state and its slot (empty without one); at most "
        f"{MAX_ADAPTERS_SHOWN}.",
        "adapter state slot",
    ),
    _counter(
        "rbln_large_bodies_total",
        "Request bodies parsed in a worker process; result is one of "
        f"{', '.join(READING_RESULTS)}.",
        "result",
    ),
    _histogram(
        "rbln_large_body_seconds",
        "Seconds from a large body's last byte until it was parsed or rejected, including the "
        "wait for a worker process.",
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    _histogram(
        "rbln_serve_event_loop_lag_seconds",
        "Seconds by which a timer of the HTTP process was late, sampled four times a second; every "
        "request is delayed as long.",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    _gauge(
        "rbln_bucket_suggested",
        "1 for each size that the tuner suggests for the recorded steps, across restarts; 0 for a "
        "compiled size that it would remove. Absent while nothing is recorded.",
        "phase bucket",
    ),
    _gauge(
        "rbln_bucket_suggested_saving_ratio",
        "Predicted share of step time that the suggested sizes would have saved.",
        "phase",
    ),
    _gauge(
        "rbln_bucket_suggested_padding_ratio",
        "Share of padding in the computed work (current), and with the suggested sizes.",
        "phase sizes",
    ),
    _gauge("rbln_bucket_recorded_steps", "Recorded steps behind the suggestion.", "phase"),
)

# The values that the only label of a counter can have.
CLOSED_LABELS = {
    "rbln_admission_rejections_total": REJECTIONS,
    "rbln_http_connection_refusals_total": CONNECTION_ENDS,
    "rbln_grammar_checks_total": GRAMMAR_RESULTS,
    "rbln_large_bodies_total": READING_RESULTS,
    "rbln_lora_loads_total": LOAD_RESULTS,
    "rbln_batch_lines_total": LINE_RESULTS,
    "rbln_batch_tokens_total": LINE_TOKENS,
}


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


_LAG_PERIOD_S = 0.25
"""Seconds between two samples."""


async def follow_event_loop(
    observe: Callable[[float], None], period_s: float = _LAG_PERIOD_S
) -> None:
    """Call `observe` every `period_s` with the lag of a timer in seconds; never returns.

    A blocked loop yields one sample: the time of the block minus the part of the period before it.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        observe(max(0.0, loop.time() - due))
