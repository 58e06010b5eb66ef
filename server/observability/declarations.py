"""Declarations of the server's own metrics: names, kinds, help texts, labels."""

from __future__ import annotations

from rbln_backend.reporting.stats import MetricDecl
from server.errors import REJECTIONS
from server.host.job_counts import GRAMMAR_RESULTS, READING_RESULTS
from server.structured_outputs.request_constraints import GUIDES

MAX_ADAPTERS_SHOWN = 100
LOAD_RESULTS = ("ok", "refused", "failed")
OUTCOMES = ("ok", "client_error", "rejected", "aborted", "timeout", "server_error")

BATCH_STATUSES = (
    *("validating", "in_progress", "finalizing", "cancelling"),
    *("completed", "failed", "expired", "cancelled"),
)
RESPONSE_STATUSES = ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")
LINE_RESULTS = ("completed", "failed")
LINE_TOKENS = ("prompt", "completion")

CONNECTION_ENDS = (
    *("too_many_connections", "too_many_client_connections", "headers_too_large"),
    *("header_timeout", "invalid_http", "websocket_unsupported", "unread_body", "write_timeout"),
)

SERVER_METRICS: tuple[MetricDecl, ...] = (
    MetricDecl(
        "rbln_serve_build_info",
        "gauge",
        "Always 1; the labels are the versions of the components.",
        ("version", "vllm", "torch", "python", "platform"),
    ),
    MetricDecl(
        "rbln_serve_phase",
        "gauge",
        "1 for the current phase of the service, 0 for the others.",
        ("phase",),
    ),
    MetricDecl(
        "rbln_serve_startup_seconds",
        "gauge",
        "Seconds from process start to ready; 0 until then.",
    ),
    MetricDecl(
        "rbln_serve_warmup_graphs", "gauge", "Graphs that warm-up compiles or loads, and runs."
    ),
    MetricDecl("rbln_serve_warmup_graphs_done", "gauge", "Graphs whose warm-up is complete."),
    MetricDecl(
        "rbln_serve_in_flight_requests",
        "gauge",
        "Admitted requests whose response is not complete.",
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
        "Seconds from a request's head to the last byte of its response.",
        ("route", "stream"),
        (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
    ),
    MetricDecl("rbln_http_connections", "gauge", "Open client connections."),
    MetricDecl("rbln_batches", "gauge", "Stored batches by status.", ("status",)),
    MetricDecl("rbln_stored_responses", "gauge", "Stored responses by status.", ("status",)),
    MetricDecl(
        "rbln_batch_lines_total",
        "counter",
        "Answered batch lines: with status 200 (completed) or another (failed).",
        ("result",),
    ),
    MetricDecl(
        "rbln_batch_tokens_total",
        "counter",
        "Tokens of answered batch lines by kind: prompt or completion.",
        ("kind",),
    ),
    MetricDecl(
        "rbln_batch_lines_to_do", "gauge", "Unanswered batch lines, including running ones."
    ),
    MetricDecl("rbln_batch_lines_running", "gauge", "Batch lines that run in the engine."),
    MetricDecl("rbln_stored_files", "gauge", "Files in --data-dir."),
    MetricDecl("rbln_stored_bytes", "gauge", "Bytes of files in --data-dir."),
    MetricDecl(
        "rbln_storage_free_bytes",
        "gauge",
        "Free bytes on the disk of --data-dir above --min-free-bytes.",
    ),
    MetricDecl(
        "rbln_storage_full",
        "gauge",
        "1 while batch lines or their answers wait for disk space or quota.",
    ),
    MetricDecl(
        "rbln_http_connection_refusals_total",
        "counter",
        "Client connections refused or closed by a limit; reason is one of "
        f"{', '.join(CONNECTION_ENDS)}.",
        ("reason",),
    ),
    MetricDecl(
        "rbln_key_requests_total",
        "counter",
        "Finished requests by name of the API key; outcome as in rbln_http_requests_total.",
        ("key", "outcome"),
    ),
    MetricDecl(
        "rbln_tier_requests_total",
        "counter",
        "Finished client requests by service tier; outcome as in rbln_http_requests_total.",
        ("tier", "outcome"),
    ),
    MetricDecl(
        "rbln_key_tokens_total",
        "counter",
        "Tokens processed for an API key, including aborted requests; kind is prompt or "
        "completion.",
        ("key", "kind"),
    ),
    MetricDecl(
        "rbln_admission_rejections_total",
        "counter",
        f"Rejected requests; reason is one of {', '.join(REJECTIONS)}.",
        ("reason",),
    ),
    MetricDecl(
        "rbln_admission_in_flight",
        "gauge",
        "Running and waiting sequences, counting each of `n` and each prompt.",
    ),
    MetricDecl(
        "rbln_admission_flex_in_flight",
        "gauge",
        "Sequences of the service tier flex, which rbln_admission_in_flight does not count.",
    ),
    MetricDecl(
        "rbln_admission_max_in_flight",
        "gauge",
        "Limit of rbln_admission_in_flight; 0 until the engine is ready.",
    ),
    MetricDecl(
        "rbln_admission_max_queued_tokens",
        "gauge",
        "Limit of prompt tokens that wait for prefill; 0: no limit.",
    ),
    MetricDecl(
        "rbln_admission_max_queue_seconds",
        "gauge",
        "Limit of a request's queue time in seconds; 0: no limit.",
    ),
    MetricDecl(
        "rbln_admission_max_request_seconds",
        "gauge",
        "Limit of a request's total time in seconds; 0: no limit.",
    ),
    MetricDecl(
        "rbln_grammar_checks_total",
        "counter",
        f"Checked grammars of requests; result is one of {', '.join(GRAMMAR_RESULTS)}.",
        ("result",),
    ),
    MetricDecl(
        "rbln_grammar_compile_seconds",
        "histogram",
        "Seconds for compiling a new grammar.",
        (),
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
    MetricDecl(
        "rbln_structured_output_requests_total",
        "counter",
        f"Finished requests with a constrained answer; kind is one of {', '.join(GUIDES)} (tool "
        "parameters), outcome as in rbln_http_requests_total.",
        ("kind", "outcome"),
    ),
    MetricDecl(
        "rbln_lora_adapters",
        "gauge",
        "LoRA adapters by state: loading, ready, draining or failed.",
        ("state",),
    ),
    MetricDecl(
        "rbln_lora_loads_total",
        "counter",
        "Loads of LoRA adapters over HTTP; result is ok, refused (invalid request) or failed.",
        ("result",),
    ),
    MetricDecl(
        "rbln_lora_load_seconds",
        "histogram",
        "Seconds from the request for a LoRA adapter until it is ready.",
        (),
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
    ),
    MetricDecl(
        "rbln_lora_adapter_info",
        "gauge",
        "Always 1: a LoRA adapter with its state and its slot (empty without one); at most "
        f"{MAX_ADAPTERS_SHOWN}.",
        ("adapter", "state", "slot"),
    ),
    MetricDecl(
        "rbln_large_bodies_total",
        "counter",
        "Request bodies parsed in a worker process; result is one of "
        f"{', '.join(READING_RESULTS)}.",
        ("result",),
    ),
    MetricDecl(
        "rbln_large_body_seconds",
        "histogram",
        "Seconds from a large body's last byte until it was parsed or rejected, including the "
        "wait for a worker process.",
        (),
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    MetricDecl(
        "rbln_serve_event_loop_lag_seconds",
        "histogram",
        "Seconds by which a timer of the HTTP process was late, sampled four times a second; every "
        "request is delayed as long.",
        (),
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    MetricDecl(
        "rbln_bucket_suggested",
        "gauge",
        "1 for each size that the tuner suggests for the recorded steps, across restarts; 0 for a "
        "compiled size that it would remove. Absent while nothing is recorded.",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_bucket_suggested_saving_ratio",
        "gauge",
        "Predicted share of step time that the suggested sizes would have saved.",
        ("phase",),
    ),
    MetricDecl(
        "rbln_bucket_suggested_padding_ratio",
        "gauge",
        "Share of padding in the computed work (current), and with the suggested sizes.",
        ("phase", "sizes"),
    ),
    MetricDecl(
        "rbln_bucket_recorded_steps",
        "gauge",
        "Recorded steps behind the suggestion.",
        ("phase",),
    ),
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
