"""Declarations of the server's own metrics: names, kinds, help texts, labels."""

from __future__ import annotations

from rbln_backend.api.reports import MetricDecl
from server.errors import REJECTIONS
from server.host.job_pool import GRAMMAR_RESULTS, READING_RESULTS
from server.structured_outputs.request_constraints import GUIDES

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
