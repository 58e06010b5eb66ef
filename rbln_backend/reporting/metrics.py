"""Declarations of the engine's metrics."""

from __future__ import annotations

from dataclasses import dataclass

_COMPILE_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0)
_LOCK_BUCKETS = (0.001, 0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0)
_STEP_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06),
    *(0.12, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0),
)
_FIRST_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 25.0, 50.0, 100.0, 250.0),
)
_MASK_BUCKETS = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.5),
)


@dataclass(frozen=True, slots=True)
class MetricDecl:
    """One metric: `kind` is counter, gauge or histogram; `buckets` are a histogram's bounds.

    `across_ranks` combines several ranks' gauges with the same labels: mostrecent, sum or max.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    across_ranks: str = "mostrecent"


METRICS: tuple[MetricDecl, ...] = (
    MetricDecl(
        "rbln_compile_seconds",
        "histogram",
        "Seconds to compile a graph or load it from the store, by kind (prefill, decode, verify, "
        "logits, pooling) and result (compiled, loaded). Each rank counts its own.",
        ("kind", "result"),
        _COMPILE_BUCKETS,
    ),
    MetricDecl(
        "rbln_graphs",
        "gauge",
        "Graphs in memory, by kind and result (compiled, loaded).",
        ("kind", "result"),
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_compile_cache_requests_total",
        "counter",
        "Look-ups in the artifact store, by result (hit, miss, corrupt, bypass).",
        ("result",),
    ),
    MetricDecl(
        "rbln_compile_cache_writes_total",
        "counter",
        "Writes of artifacts to the store, by result (stored, failed, read_only).",
        ("result",),
    ),
    MetricDecl("rbln_compile_cache_size_bytes", "gauge", "Bytes of all artifacts in the store."),
    MetricDecl("rbln_compile_cache_entries", "gauge", "Artifacts in the store."),
    MetricDecl(
        "rbln_compile_cache_lock_wait_seconds",
        "histogram",
        "Seconds spent waiting for another process that compiled the same graph.",
        (),
        _LOCK_BUCKETS,
    ),
    MetricDecl(
        "rbln_recompiles_after_warmup_total",
        "counter",
        "Hot-path compiles: shapes that a step needed and warm-up did not compile. Must stay 0. "
        "Each rank counts its own.",
        ("kind",),
    ),
    MetricDecl(
        "rbln_bucket_steps_total",
        "counter",
        "Steps run, by phase (prefill, decode, verify, pooling) and bucket (tokens of a chunk, "
        "rows of a batch); counted once per engine, for any number of ranks.",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_bucket_step_seconds",
        "histogram",
        "Seconds of one step on the device, by phase and bucket; of the first rank.",
        ("phase", "bucket"),
        _STEP_BUCKETS,
    ),
    MetricDecl(
        "rbln_bucket_useful_rows_total",
        "counter",
        "Rows of steps that held a request, by phase and bucket; in prefill, the requests.",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_bucket_padded_rows_total",
        "counter",
        "Rows of steps that were padding, by phase and bucket.",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_prefill_useful_tokens_total",
        "counter",
        "Prompt tokens computed in prefill steps, by chunk size.",
        ("chunk",),
    ),
    MetricDecl(
        "rbln_prefill_padded_tokens_total",
        "counter",
        "Tokens of prefill steps that were padding, by chunk size.",
        ("chunk",),
    ),
    MetricDecl(
        "rbln_kv_tier_reads_total",
        "counter",
        "Pages of prefixes looked up in the KV tiers, by result (memory, folder, miss, damaged).",
        ("result",),
    ),
    MetricDecl(
        "rbln_kv_tier_writes_total",
        "counter",
        "Pages of prefixes given to the KV tiers, by result (memory, folder, failed).",
        ("result",),
    ),
    MetricDecl(
        "rbln_kv_tier_tokens_total",
        "counter",
        "Tokens whose keys and values came back from the KV tiers.",
    ),
    MetricDecl(
        "rbln_kv_tier_bytes",
        "gauge",
        "Bytes that each KV tier holds (memory, folder); a folder's of all its servers.",
        ("tier",),
    ),
    MetricDecl(
        "rbln_prefix_hit_tokens_total",
        "counter",
        "Tokens found in the prefix cache: in shared blocks (block), in copied heads of blocks "
        "(sub_block), in models with window layers only (window).",
        ("kind",),
    ),
    MetricDecl(
        "rbln_draft_tokens_total",
        "counter",
        "Draft tokens that steps checked, by bucket (requests x tokens of each).",
        ("bucket",),
    ),
    MetricDecl(
        "rbln_draft_accepted_tokens_total",
        "counter",
        "Accepted draft tokens, by bucket.",
        ("bucket",),
    ),
    MetricDecl(
        "rbln_draft_gain_total",
        "counter",
        "Sum over steps with drafts of their measured tokens per second relative to a step "
        "without, by bucket.",
        ("bucket",),
    ),
    MetricDecl(
        "rbln_background_rows_total",
        "counter",
        "Rows of decode steps with background requests: answer tokens in padding of the "
        "foreground's bucket (padding), prompt tokens there (prompt), or steps without a "
        "foreground (alone).",
        ("kind",),
    ),
    MetricDecl(
        "rbln_first_token_seconds",
        "histogram",
        "Seconds from a request's arrival to its first token, by tokens of the prompt (to_256, "
        "to_2048, to_16384, more); background requests are not counted.",
        ("prompt",),
        _FIRST_TOKEN_BUCKETS,
    ),
    MetricDecl(
        "rbln_prefill_overtaken_total",
        "counter",
        "Prompts that waited, or continued later, while a prompt that arrived later was computed "
        "(prefill_policy shortest).",
    ),
    MetricDecl(
        "rbln_prefill_overtaken_seconds",
        "histogram",
        "Seconds from the first chunk of a later prompt to the next chunk of the overtaken one.",
        (),
        _FIRST_TOKEN_BUCKETS,
    ),
    MetricDecl(
        "rbln_background_parked",
        "gauge",
        "Background requests that hold KV blocks but no row.",
    ),
    MetricDecl(
        "rbln_background_preemptions_total",
        "counter",
        "Background requests that lost their KV blocks to the foreground.",
    ),
    MetricDecl(
        "rbln_kv_blocks",
        "gauge",
        "KV blocks for requests, by KV cache group and its kind (paged, window).",
        ("group", "kind"),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_kv_blocks_used",
        "gauge",
        "KV blocks in use by requests, by KV cache group and its kind (paged, window).",
        ("group", "kind"),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_window_log_pages",
        "gauge",
        "Pages of the prefix log of a sliding window, by KV cache group.",
        ("group",),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_window_log_pages_used",
        "gauge",
        "Pages of the prefix log that hold a prefix, by KV cache group.",
        ("group",),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_startup_phase_seconds",
        "gauge",
        "Seconds of a start-up phase (init, load, compile, warmup), slowest rank.",
        ("phase",),
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_engine_last_step_timestamp_seconds",
        "gauge",
        "Unix time of the end of an engine's latest step; before the first step, of its ready "
        "state.",
        ("engine",),
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_grammar_mask_seconds",
        "histogram",
        "Seconds of a step spent on grammars, by part: fill (compute the allowed tokens, beside "
        "the forward pass), wait (for the rest of it, after the forward pass) and apply (mask the "
        "logits).",
        ("part",),
        _MASK_BUCKETS,
    ),
    MetricDecl(
        "rbln_lora_slots",
        "gauge",
        "LoRA adapter slots of an engine.",
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_lora_slots_used",
        "gauge",
        "LoRA adapter slots in use; the maximum over engines.",
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_device_memory_bytes",
        "gauge",
        "Device memory in use by kind (weights, kv, lora), all ranks together.",
        ("kind",),
        across_ranks="sum",
    ),
)
