"""The server's own metrics as they are declared: names, kinds, helps, labels. Pure data."""

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
    MetricDecl("rbln_http_connections", "gauge", "Open client connections."),
    MetricDecl("rbln_batches", "gauge", "Batches that are remembered, by status.", ("status",)),
    MetricDecl(
        "rbln_stored_responses", "gauge", "Responses that are kept, by status.", ("status",)
    ),
    MetricDecl(
        "rbln_batch_lines_total",
        "counter",
        "Lines of batches that have an answer: with status 200 (completed) or another (failed).",
        ("result",),
    ),
    MetricDecl(
        "rbln_batch_tokens_total",
        "counter",
        "Tokens of lines of batches that have an answer, by kind: prompt or completion.",
        ("kind",),
    ),
    MetricDecl(
        "rbln_batch_lines_to_do", "gauge", "Lines of batches without an answer, those that run too."
    ),
    MetricDecl("rbln_batch_lines_running", "gauge", "Lines of batches that the engine has."),
    MetricDecl("rbln_stored_files", "gauge", "Files in --data-dir."),
    MetricDecl("rbln_stored_bytes", "gauge", "Bytes of files in --data-dir."),
    MetricDecl(
        "rbln_storage_free_bytes",
        "gauge",
        "Bytes that the disk of --data-dir has above the floor of --min-free-bytes.",
    ),
    MetricDecl(
        "rbln_storage_full",
        "gauge",
        "1 while lines of batches, or their answers, wait for room on the disk or in the quota.",
    ),
    MetricDecl(
        "rbln_http_connection_refusals_total",
        "counter",
        "Client connections that a limit refused or ended; reason is one of "
        f"{', '.join(CONNECTION_ENDS)}.",
        ("reason",),
    ),
    MetricDecl(
        "rbln_key_requests_total",
        "counter",
        "Finished requests by the name of the key that they came with; `outcome` as above.",
        ("key", "outcome"),
    ),
    MetricDecl(
        "rbln_tier_requests_total",
        "counter",
        "Finished requests of clients by the service tier that they ran in; `outcome` as above.",
        ("tier", "outcome"),
    ),
    MetricDecl(
        "rbln_key_tokens_total",
        "counter",
        "Tokens that the engine worked on for a key, those of aborted requests included; `kind` is "
        "`prompt` or `completion`.",
        ("key", "kind"),
    ),
    MetricDecl(
        "rbln_admission_rejections_total",
        "counter",
        f"Refused requests; reason is one of {', '.join(REJECTIONS)}.",
        ("reason",),
    ),
    MetricDecl(
        "rbln_admission_in_flight",
        "gauge",
        "Answers that run or wait, counting each of `n` and each prompt.",
    ),
    MetricDecl(
        "rbln_admission_flex_in_flight",
        "gauge",
        "Those of the service tier flex, which are not in rbln_admission_in_flight.",
    ),
    MetricDecl(
        "rbln_admission_max_in_flight",
        "gauge",
        "How many of them may; 0 until the engine is there.",
    ),
    MetricDecl(
        "rbln_admission_max_queued_tokens",
        "gauge",
        "Prompt tokens that may wait for their prefill; 0 is any number.",
    ),
    MetricDecl(
        "rbln_admission_max_queue_seconds",
        "gauge",
        "Seconds that a request may wait for its turn; 0 is any time.",
    ),
    MetricDecl(
        "rbln_admission_max_request_seconds",
        "gauge",
        "Seconds that a request may take in all; 0 is any time.",
    ),
    MetricDecl(
        "rbln_grammar_checks_total",
        "counter",
        f"Grammars of requests that were checked; result is one of {', '.join(GRAMMAR_RESULTS)}.",
        ("result",),
    ),
    MetricDecl(
        "rbln_grammar_compile_seconds",
        "histogram",
        "Seconds that the trial of a new grammar took.",
        (),
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
    MetricDecl(
        "rbln_structured_output_requests_total",
        "counter",
        f"Finished requests whose answer was to obey something; kind is one of {', '.join(GUIDES)} "
        "(parameters of tools), outcome as in rbln_http_requests_total.",
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
        "Loads of LoRA adapters over HTTP; result is ok, refused (the wish is at fault) or failed.",
        ("result",),
    ),
    MetricDecl(
        "rbln_lora_load_seconds",
        "histogram",
        "Seconds from the wish for a LoRA adapter to its being ready.",
        (),
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
    ),
    MetricDecl(
        "rbln_lora_adapter_info",
        "gauge",
        "Always 1: an adapter that is there, with its state and its slot, empty while it has none; "
        f"at most {MAX_ADAPTERS_SHOWN}.",
        ("adapter", "state", "slot"),
    ),
    MetricDecl(
        "rbln_large_bodies_total",
        "counter",
        "Request bodies that were read beside the event loop; result is one of "
        f"{', '.join(READING_RESULTS)}.",
        ("result",),
    ),
    MetricDecl(
        "rbln_large_body_seconds",
        "histogram",
        "Seconds from a large body's last byte until it was read or refused, the wait for the "
        "process that reads included.",
        (),
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    MetricDecl(
        "rbln_serve_event_loop_lag_seconds",
        "histogram",
        "Seconds by which a timer of the HTTP process was late, looked at four times a second. "
        "Every request waits as long.",
        (),
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    MetricDecl(
        "rbln_bucket_suggested",
        "gauge",
        "1 for each size that the tuner suggests for what has run, over restarts; 0 for a compiled "
        "size that it would leave out. Nothing while nothing is recorded.",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_bucket_suggested_saving_ratio",
        "gauge",
        "Share of the steps' time that the suggested sizes would have saved, as predicted.",
        ("phase",),
    ),
    MetricDecl(
        "rbln_bucket_suggested_padding_ratio",
        "gauge",
        "Share of what was computed that was padding (current), or would have been (suggested).",
        ("phase", "sizes"),
    ),
    MetricDecl(
        "rbln_bucket_recorded_steps",
        "gauge",
        "Steps that the suggestion rests on.",
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
