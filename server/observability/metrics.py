"""The server's own metrics, and the `/metrics` page that combines them with the engine's.

The page is available from the first second. It has three sources: these metrics in their own
registry, vLLM's `vllm:*` in prometheus_client's default registry, and the multiprocess files of the
engine processes under `<run_dir>/metrics`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

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

from rbln_backend.api.names import MetricDecl
from server.admission import Admission
from server.errors import REJECTIONS
from server.host.job_pool import GRAMMAR_RESULTS, READING_RESULTS, JobCounts
from server.lifecycle import Lifecycle, ServicePhase
from server.lora.registry import AdapterRegistry, State
from server.settings import ServerSettings
from server.structured_outputs.constraint import GUIDES

MAX_ADAPTERS_SHOWN = 100
LOAD_RESULTS = ("ok", "refused", "failed")
OUTCOMES = ("ok", "client_error", "rejected", "aborted", "timeout", "server_error")

KEY_LIMITS = ("in_flight", "requests", "tokens")
LINE_RESULTS = ("completed", "failed")
LINE_TOKENS = ("prompt", "completion")

CONNECTION_ENDS = tuple(
    "too_many_connections too_many_client_connections headers_too_large header_timeout "
    "invalid_http unsupported_transfer_encoding websocket_unsupported unread_body "
    "write_timeout".split()
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

_LABELS = {decl.name: decl.labels for decl in SERVER_METRICS}
_LABEL_VALUES: Mapping[str, tuple[str, Collection[str]]] = {
    "rbln_http_requests_total": ("outcome", OUTCOMES),
    "rbln_http_connection_refusals_total": ("reason", CONNECTION_ENDS),
    "rbln_admission_rejections_total": ("reason", REJECTIONS),
    "rbln_key_rejections_total": ("limit", KEY_LIMITS),
    "rbln_structured_output_requests_total": ("kind", GUIDES),
    "rbln_grammar_checks_total": ("result", GRAMMAR_RESULTS),
    "rbln_large_bodies_total": ("result", READING_RESULTS),
    "rbln_lora_loads_total": ("result", LOAD_RESULTS),
    "rbln_batch_lines_total": ("result", LINE_RESULTS),
    "rbln_batch_tokens_total": ("kind", LINE_TOKENS),
}
"""A label of a counter, and the values that it can have."""


logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST

# The gauges of `observe_advice`.
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
        kinds: dict[str, type[Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._metrics: dict[str, Any] = {}
        for decl in SERVER_METRICS:
            more = {"buckets": decl.buckets} if decl.kind == "histogram" else {}
            self._metrics[decl.name] = kinds[decl.kind](
                decl.name, decl.help, decl.labels, registry=self._registry, **more
            )
        # Starts series at 0: `rate` ignores the first value of a series.
        for name, (label, values) in _LABEL_VALUES.items():
            if _LABELS[name] == (label,):
                for value in values:
                    self._metrics[name].labels(value)
        for kind in GUIDES:
            self._metrics["rbln_structured_output_requests_total"].labels(kind, "ok")

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        if name in _LABEL_VALUES:
            label, values = _LABEL_VALUES[name]
            if (value := labels[_LABELS[name].index(label)]) not in values:
                # It ends no request, but no panel shows it.
                logger.error("metrics: the label value %r is not declared", value)
        self._metrics[name].labels(*labels).inc(by)

    def set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._metrics[name]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def observe(self, name: str, value: float, *labels: str) -> None:
        histogram = self._metrics[name]
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def set_versions(self, versions: Mapping[str, str]) -> None:
        name = "rbln_serve_build_info"
        self.set(name, 1, *(versions.get(label, "unknown") for label in _LABELS[name]))

    def observe_service(
        self, lifecycle: Lifecycle, admission: Admission, settings: ServerSettings
    ) -> None:
        """Publish the phase, the start-up progress, the admitted work and its limits."""
        for phase in ServicePhase:
            self.set("rbln_serve_phase", phase is lifecycle.phase, phase.label)
        done, total = lifecycle.graphs
        values = {
            "rbln_serve_startup_seconds": lifecycle.ready_after_s or 0.0,
            "rbln_serve_warmup_graphs": total,
            "rbln_serve_warmup_graphs_done": done,
            "rbln_serve_in_flight_requests": lifecycle.in_flight,
            "rbln_admission_in_flight": admission.in_flight,
            "rbln_admission_flex_in_flight": admission.flex_in_flight,
            "rbln_admission_max_in_flight": admission.limit,
            "rbln_admission_max_queued_tokens": admission.max_queued_tokens or 0,
            "rbln_admission_max_queue_seconds": settings.max_queue_s,
            "rbln_admission_max_request_seconds": settings.max_request_s,
        }
        for name, value in values.items():
            self.set(name, value)
        for key, number in admission.keys.in_flight.items():
            self.set("rbln_key_in_flight", number, key)

    def observe_advice(self, advice: Mapping[str, Any] | None) -> None:
        """Publish the tuner's advice by phase, as `advise` returns it."""
        sizes, saving, padding, steps = _ADVICE
        for name in _ADVICE:
            self._metrics[name].clear()
        for phase, phase_advice in (advice or {}).items():
            if phase_advice is None:
                continue
            for size in sorted({*phase_advice["current"], *phase_advice["suggested"]}):
                self.set(sizes, size in phase_advice["suggested"], phase, str(size))
            self.set(saving, phase_advice["saving"], phase)
            self.set(padding, phase_advice["padding_now"], phase, "current")
            self.set(padding, phase_advice["padding_then"], phase, "suggested")
            self.set(steps, phase_advice["steps"], phase)

    def observe_adapters(self, adapters: AdapterRegistry) -> None:
        """Publish the LoRA adapters and their number in each state."""
        listed = adapters.all()
        for state in State:
            count = sum(adapter.state is state for adapter in listed)
            self.set("rbln_lora_adapters", count, state.value)
        name = "rbln_lora_adapter_info"
        self._metrics[name].clear()
        for adapter in listed[:MAX_ADAPTERS_SHOWN]:
            slot = "" if adapter.slot is None else str(adapter.slot)
            self.set(name, 1, adapter.name, adapter.state.value, slot)

    def add_jobs(self, counts: JobCounts, total: str, duration: str) -> None:
        """Add the jobs since the last call to a counter and a histogram."""
        for result, count in counts.results.items():
            self.count(total, result, by=count)
        for seconds in counts.seconds:
            self.observe(duration, seconds)
        for size in counts.sizes:
            self.observe("rbln_grammar_memory_bytes", size)

    def render(self) -> bytes:
        page = generate_latest(self._registry) + generate_latest(REGISTRY)
        return page + generate_latest(self._boards())

    def decode_times(self) -> dict[int, tuple[int, float]]:
        """Return the decode steps of all engines so far and their seconds, by bucket."""
        totals: defaultdict[int, dict[str, float]] = defaultdict(lambda: {"count": 0, "sum": 0})
        families = [f for f in self._boards().collect() if f.name == "rbln_bucket_step_seconds"]
        for sample in (sample for family in families for sample in family.samples):
            kind = sample.name.rpartition("_")[2]
            if sample.labels["phase"] == "decode" and kind in ("count", "sum"):
                totals[int(sample.labels["bucket"])][kind] += sample.value
        return {bucket: (int(total["count"]), total["sum"]) for bucket, total in totals.items()}

    def _boards(self) -> CollectorRegistry:
        boards = CollectorRegistry()
        if self._board_dir.is_dir():
            MultiProcessCollector(boards, path=str(self._board_dir))  # type: ignore[no-untyped-call]
        return boards


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
