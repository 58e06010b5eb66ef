"""Dashboard of service level, traffic and saturation."""

from __future__ import annotations

from deploy.grafana.panel import (
    BAD_ABOVE_ZERO,
    GOOD_ABOVE_99,
    Dashboard,
    Panel,
    Query,
    Row,
    Step,
    Variable,
)
from deploy.grafana.promql import (
    MODEL,
    OURS,
    PLACE,
    SERVED,
    VLLM,
    attained,
    increase,
    quantile,
    quantiles,
    rate,
    ratio,
    total,
)

TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
E2E = "vllm:e2e_request_latency_seconds"
_ANSWERS = OURS + ',route=~"/v[12]/.+"'
_LOST = SERVED + ',outcome=~"server_error|timeout"'

# Bounds of vLLM's histograms, in vLLM's spelling.
_OBJECTIVES = (
    Variable("ttft", "TTFT within", choices=("0.25", "0.5", "1.0", "2.5", "5.0"), default="1.0"),
    Variable("itl", "ITL within", choices=("0.025", "0.05", "0.1", "0.2"), default="0.1"),
    Variable("e2e", "E2E within", choices=("5.0", "10.0", "30.0", "60.0"), default="30.0"),
)


def _tile(title: str, expr: str, description: str, *, unit: str = "short") -> Panel:
    steps = GOOD_ABOVE_99 if unit == "percentunit" else (Step(None, "green"),)
    decimals = 2 if unit == "percentunit" else None
    query = (Query(expr),)
    return Panel(title, "stat", query, description, unit, 4, 4, steps, decimals=decimals)


_TILES = (
    _tile(
        "TTFT attainment",
        attained(TTFT, VLLM, "$ttft"),
        "Requests of the range whose first token came within the selected objective.",
        unit="percentunit",
    ),
    _tile(
        "ITL attainment",
        attained(ITL, VLLM, "$itl"),
        "Tokens of the range that followed the previous one within the objective.",
        unit="percentunit",
    ),
    _tile(
        "E2E attainment",
        attained(E2E, VLLM, "$e2e"),
        "Requests of the range that finished within the objective.",
        unit="percentunit",
    ),
    _tile(
        "Answered",
        f"1 - ({increase('rbln_http_requests_total', _LOST)} or vector(0)) / "
        f"({increase('rbln_http_requests_total', SERVED)} > 0)",
        "Requests of the range that ended without a server error or time-out.",
        unit="percentunit",
    ),
    _tile(
        "Ready instances",
        f'sum(rbln_serve_phase{{{OURS},phase="ready"}})',
        "Instances in phase `ready`.",
    ),
    Panel(
        "Hot-path compiles",
        "stat",
        (Query(total("rbln_recompiles_after_warmup_total")),),
        "Graphs compiled after ready, since the engines started. Must be 0.",
        width=4,
        height=4,
        steps=BAD_ABOVE_ZERO,
    ),
)

_LATENCY = (
    Panel("Time to first token", "timeseries", quantiles(TTFT, VLLM), "Including the queue.", "s"),
    Panel(
        "Inter-token latency",
        "timeseries",
        quantiles(ITL, VLLM),
        "Seconds between two tokens of one answer. Below the smallest bound, 10 ms, quantiles are "
        "interpolated from 0.",
        "s",
    ),
    Panel("End to end", "timeseries", quantiles(E2E, VLLM), "Whole requests in the engine.", "s"),
    Panel(
        "Time to first token by prompt length",
        "timeseries",
        (Query(quantile(0.9, "rbln_first_token_seconds", by="prompt"), "p90 {{prompt}}"),),
        "By tokens of the prompt: to 256, to 2048, to 16384, more. Without background requests.",
        "s",
    ),
    Panel(
        "Overtaken prompts",
        "timeseries",
        (Query(rate("rbln_prefill_overtaken_total"), "overtaken"),),
        "Prompts per second that a shorter, later one overtook (--prefill-policy shortest).",
        "ops",
    ),
    Panel(
        "Delay of overtaken prompts",
        "timeseries",
        (
            *quantiles("rbln_prefill_overtaken_seconds"),
            Query(quantile(1, "rbln_prefill_overtaken_seconds"), "longest"),
        ),
        "From the first chunk of a later prompt to the next chunk of the overtaken one.",
        "s",
    ),
)

_TRAFFIC = (
    Panel(
        "Requests by outcome",
        "timeseries",
        (Query(rate("rbln_http_requests_total", SERVED, by="outcome"), "{{outcome}}"),),
        "One outcome per request, including those rejected while starting or draining.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Requests by route and code",
        "timeseries",
        (Query(rate("rbln_http_requests_total", SERVED, by="route, code"), "{{code}} {{route}}"),),
        "Status codes of POST requests by path template.",
        "reqps",
    ),
    Panel(
        "Tokens",
        "timeseries",
        (
            Query(rate("vllm:prompt_tokens_total", VLLM), "prompt"),
            Query(rate("vllm:prompt_tokens_cached_total", VLLM), "prompt, cached"),
            Query(rate("vllm:generation_tokens_total", VLLM), "generated"),
        ),
        "Tokens per second that the engine read and generated.",
        "ops",
    ),
    Panel(
        "Finish reasons",
        "timeseries",
        (
            Query(
                rate("vllm:request_success_total", VLLM, by="finished_reason"),
                "{{finished_reason}}",
            ),
        ),
        "Finish reasons of the engine; abort is a disconnected client or a deadline.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Prompt lengths",
        "heatmap",
        (Query(rate("vllm:request_prompt_tokens_bucket", VLLM, by="le"), "{{le}}", buckets=True),),
        "Finished requests by prompt tokens.",
    ),
    Panel(
        "Answer lengths",
        "heatmap",
        (
            Query(
                rate("vllm:request_generation_tokens_bucket", VLLM, by="le"), "{{le}}", buckets=True
            ),
        ),
        "Finished requests by answer tokens.",
    ),
)

_KEYS = (
    Panel(
        "Requests by key",
        "timeseries",
        (
            Query(
                f"topk(10, {rate('rbln_key_requests_total', by='key, outcome')})",
                "{{key}} {{outcome}}",
            ),
        ),
        "The ten busiest keys.",
        "reqps",
        width=12,
        stack=True,
    ),
    Panel(
        "Tokens by key",
        "timeseries",
        (Query(f"topk(10, {rate('rbln_key_tokens_total', by='key, kind')})", "{{key}} {{kind}}"),),
        "Prompt and generated tokens of the ten busiest keys.",
        "ops",
        width=12,
        stack=True,
    ),
    Panel(
        "In flight by key",
        "timeseries",
        (Query(f"topk(10, {total('rbln_key_in_flight', by='key')})", "{{key}}"),),
        "Requests in flight of the ten busiest keys.",
        "short",
        width=12,
        stack=True,
    ),
    Panel(
        "Refused by limits of a key",
        "timeseries",
        (
            Query(
                f"topk(10, {rate('rbln_key_rejections_total', by='key, limit')})",
                "{{key}} {{limit}}",
            ),
        ),
        "Requests that a limit of their key refused: requests in flight, requests or tokens per "
        "minute.",
        "reqps",
        width=12,
        stack=True,
    ),
)

_SATURATION = (
    Panel(
        "Running and waiting",
        "timeseries",
        (
            Query(total("vllm:num_requests_running", VLLM), "running"),
            Query(
                total("vllm:num_requests_waiting_by_reason", VLLM, by="reason"),
                "waiting: {{reason}}",
            ),
        ),
        "Requests in the engine. Waiting for capacity means a full batch or KV cache.",
    ),
    Panel(
        "Queue time",
        "timeseries",
        quantiles("vllm:request_queue_time_seconds", VLLM),
        "Seconds from arrival in the engine to the first step.",
        "s",
    ),
    Panel(
        "KV cache in use",
        "timeseries",
        (Query(f"max by (instance) (vllm:kv_cache_usage_perc{{{VLLM}}})", "{{instance}}"),),
        "Share of the paged blocks in use by requests.",
        "percentunit",
        maximum=1,
    ),
    Panel(
        "Admission",
        "timeseries",
        (
            Query(total("rbln_admission_in_flight"), "in flight"),
            Query(total("rbln_admission_max_in_flight"), "limit"),
            Query(total("rbln_serve_in_flight_requests"), "HTTP requests"),
        ),
        "Running and waiting answers (each of n and of several prompts counts), and their limit.",
    ),
    Panel(
        "Time limits",
        "stat",
        (
            Query(f"max(rbln_admission_max_queue_seconds{{{OURS}}})", "queue"),
            Query(f"max(rbln_admission_max_request_seconds{{{OURS}}})", "request"),
        ),
        "Maximum seconds of a request in the queue and in total; 0 is no limit.",
        "s",
        width=4,
    ),
    Panel(
        "Queue limit",
        "stat",
        (Query(total("rbln_admission_max_queued_tokens"), "tokens"),),
        "Maximum prompt tokens that wait for prefill, all instances together; 0 is no limit.",
        width=4,
    ),
    Panel(
        "Rejections",
        "timeseries",
        (Query(rate("rbln_admission_rejections_total", by="reason"), "{{reason}}"),),
        "Requests rejected under load, by limit.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Preemptions",
        "timeseries",
        (Query(rate("vllm:num_preemptions_total", VLLM, by="instance"), "{{instance}}"),),
        "Requests preempted for lack of KV blocks; their tokens are computed again.",
        "ops",
    ),
)

_PROCESS = (
    Panel(
        "Seconds since the last step",
        "timeseries",
        (
            Query(
                "time() - max by (instance, engine) "
                f"(rbln_engine_last_step_timestamp_seconds{{{OURS}}})",
                "{{instance}} engine {{engine}}",
            ),
        ),
        "Grows while the engine is idle. Growth while requests run is a stall.",
        "s",
    ),
    Panel(
        "Event-loop lag",
        "timeseries",
        (
            *(
                Query(
                    quantile(share, "rbln_serve_event_loop_lag_seconds", by="instance"),
                    f"p{share * 100:g} {{{{instance}}}}",
                )
                for share in (0.5, 0.99)
            ),
        ),
        "Delay of timers in the HTTP process, which all requests share. Above 0.1 s the process is "
        "blocked or lacks CPU.",
        "s",
    ),
    Panel(
        "Large bodies",
        "timeseries",
        (
            Query(rate("rbln_large_bodies_total", by="result"), "{{result}}"),
            *quantiles("rbln_large_body_seconds"),
        ),
        "Bodies read in a separate process by result, and seconds. timeout, crashed: the process "
        "was replaced; the request got 429.",
        "short",
    ),
    Panel(
        "API process",
        "timeseries",
        (
            Query(rate("process_cpu_seconds_total", by="instance"), "CPU {{instance}}"),
            Query(
                ratio(
                    total("process_open_fds", by="instance"),
                    total("process_max_fds", by="instance"),
                ),
                "open files {{instance}}",
            ),
        ),
        "The HTTP process only: processor cores in use and share of file descriptors.",
        "percentunit",
    ),
    Panel(
        "Request time by route",
        "timeseries",
        (
            Query(
                quantile(0.9, "rbln_http_request_seconds", _ANSWERS, by="route, stream"),
                "{{route}} stream={{stream}}",
            ),
        ),
        "p90 of seconds from a request's head to the last byte of its answer, without probes.",
        "s",
    ),
)

OVERVIEW = Dashboard(
    "rbln-overview",
    "rbln-serve / Overview",
    "Service level, traffic and saturation.",
    (
        Row("Service level", (*_TILES, *_LATENCY)),
        Row("Traffic", _TRAFFIC),
        Row("Saturation", _SATURATION),
        Row("Keys", _KEYS),
        Row("Process", _PROCESS),
    ),
    (*PLACE, MODEL, *_OBJECTIVES),
)
