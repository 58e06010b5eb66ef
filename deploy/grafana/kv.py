"""Dashboard of KV cache groups and prefix reuse."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import MODEL, OURS, PLACE, VLLM, increase, rate, ratio, total

_GROUP = "instance, group, kind"

_BLOCKS = (
    Panel(
        "Blocks in use by group",
        "timeseries",
        (
            Query(
                ratio(
                    total("rbln_kv_blocks_used", by=_GROUP),
                    total("rbln_kv_blocks", by=_GROUP),
                ),
                "{{instance}} {{kind}} {{group}}",
            ),
        ),
        "Share of each KV cache group in use. A window group has one block per row and is full "
        "with the batch, which is no shortage.",
        "percentunit",
        maximum=1,
    ),
    Panel(
        "Blocks",
        "timeseries",
        (
            Query(total("rbln_kv_blocks_used", by="group, kind"), "{{kind}} {{group}} used"),
            Query(total("rbln_kv_blocks", by="group, kind"), "{{kind}} {{group}}"),
        ),
        "Blocks in use by requests, and their total.",
    ),
    Panel(
        "Preemptions",
        "timeseries",
        (Query(increase("vllm:num_preemptions_total", VLLM, by="instance"), "{{instance}}"),),
        "Requests preempted for lack of blocks in the displayed range.",
    ),
    Panel(
        "Memory of KV caches",
        "timeseries",
        (
            Query(
                total("rbln_device_memory_bytes", OURS + ',kind="kv"', by="instance"),
                "{{instance}}",
            ),
        ),
        "All groups and window logs, all ranks.",
        "bytes",
    ),
    Panel(
        "Waiting for capacity",
        "timeseries",
        (
            Query(
                total(
                    "vllm:num_requests_waiting_by_reason",
                    VLLM + ',reason="capacity"',
                    by="instance",
                ),
                "{{instance}}",
            ),
        ),
        "Requests without a free row or block.",
    ),
)

_PREFIX = (
    Panel(
        "Prefix hit ratio",
        "timeseries",
        (
            Query(
                ratio(
                    rate("vllm:prefix_cache_hits_total", VLLM),
                    rate("vllm:prefix_cache_queries_total", VLLM),
                ),
                "tokens found",
            ),
        ),
        "Share of looked-up prompt tokens that the cache had.",
        "percentunit",
        maximum=1,
    ),
    Panel(
        "Tokens saved by kind",
        "timeseries",
        (Query(rate("rbln_prefix_hit_tokens_total", by="kind"), "{{kind}}"),),
        "In shared blocks, in copied heads of blocks, in models with window layers only.",
        "ops",
        stack=True,
    ),
    Panel(
        "KV tiers",
        "timeseries",
        (
            Query(rate("rbln_kv_tier_reads_total", by="result"), "read: {{result}}"),
            Query(rate("rbln_kv_tier_writes_total", by="result"), "written: {{result}}"),
        ),
        "Pages read from host memory or files, missing or damaged, and pages written.",
        "ops",
    ),
    Panel(
        "KV read from prefill servers",
        "timeseries",
        (Query(rate("vllm:nixl_bytes_transferred_sum", VLLM), "bytes"),),
        "With NixlConnector: keys and values of prompts that another server computed.",
        "Bps",
    ),
    Panel(
        "Failed reads from prefill servers",
        "timeseries",
        (Query(rate("vllm:nixl_num_failed_transfers_total", VLLM), "transfers"),),
        "Their requests get an error, or are computed here with kv_load_failure_policy recompute.",
        "ops",
    ),
    Panel(
        "Prompt tokens by source",
        "timeseries",
        (Query(rate("vllm:prompt_tokens_by_source_total", VLLM, by="source"), "{{source}}"),),
        "Computed here, found in the prefix cache, or received.",
        "ops",
        stack=True,
    ),
    Panel(
        "Computed tokens of a prompt",
        "heatmap",
        (
            Query(
                rate("vllm:request_prefill_kv_computed_tokens_bucket", VLLM, by="le"),
                "{{le}}",
                buckets=True,
            ),
        ),
        "Finished requests by computed prompt tokens.",
    ),
    Panel(
        "Window log",
        "timeseries",
        (
            Query(
                ratio(
                    total("rbln_window_log_pages_used", by="instance, group"),
                    total("rbln_window_log_pages", by="instance, group"),
                ),
                "{{instance}} group {{group}}",
            ),
        ),
        "Pages of the log that hold a prefix. Full is normal: the oldest are reused.",
        "percentunit",
        maximum=1,
    ),
)

KV = Dashboard(
    "rbln-kv",
    "rbln-serve / KV cache and prefixes",
    "Free KV blocks and savings of prefix reuse.",
    (Row("Blocks", _BLOCKS), Row("Prefixes", _PREFIX)),
    (*PLACE, MODEL),
)
