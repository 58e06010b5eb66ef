"""LoRA adapters and structured output."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import MODEL, OURS, PLACE, RANGE, VLLM, increase, quantiles, rate, total

_ADAPTERS = (
    Panel(
        "Adapters",
        "timeseries",
        (Query(total("rbln_lora_adapters", by="state"), "{{state}}"),),
        "By state. Draining ones wait for the last request that uses them.",
        stack=True,
    ),
    Panel(
        "Loads",
        "timeseries",
        (Query(increase("rbln_lora_loads_total", by="result"), "{{result}}"),),
        "Loads over HTTP during the range shown; refused means that the request was at fault.",
    ),
    Panel(
        "Load time",
        "timeseries",
        quantiles("rbln_lora_load_seconds"),
        "From the request to the adapter's being ready. Steps go on meanwhile.",
        "s",
    ),
    Panel(
        "Adapters at work",
        "table",
        (
            Query(
                "max by (instance, running_lora_adapters, waiting_lora_adapters, max_lora) "
                f"(last_over_time(vllm:lora_requests_info{{{OURS}}}[{RANGE}]))",
                instant=True,
            ),
        ),
        "Sets of adapters that ran or waited together; the value is when that was last so.",
        "s",
        width=16,
    ),
    Panel(
        "Memory of adapters",
        "timeseries",
        (
            Query(
                total("rbln_device_memory_bytes", OURS + ',kind="lora"', by="instance"),
                "{{instance}}",
            ),
        ),
        "Slots are allocated at start: loading an adapter changes nothing here.",
        "bytes",
    ),
)

_STRUCTURED = (
    Panel(
        "Grammar checks",
        "timeseries",
        (Query(rate("rbln_grammar_checks_total", by="result"), "{{result}}"),),
        "known: found in the cache of checked grammars. timeout, crashed: a trial that had to be "
        "ended; the request was refused and the service is unharmed.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Trial time",
        "timeseries",
        quantiles("rbln_grammar_compile_seconds"),
        "Seconds of the trial compile of a grammar that was not known.",
        "s",
    ),
    Panel(
        "Trials",
        "heatmap",
        (Query(rate("rbln_grammar_compile_seconds_bucket", by="le"), "{{le}}", buckets=True),),
        "Trials by the seconds that they took.",
    ),
    Panel(
        "Answers cut at their length",
        "timeseries",
        (
            Query(rate("vllm:request_success_total", VLLM + ',finished_reason="length"'), "length"),
            Query(rate("vllm:request_success_total", VLLM + ',finished_reason="stop"'), "stop"),
        ),
        "A structured answer that ends by its length is not complete.",
        "reqps",
    ),
)

FEATURES = Dashboard(
    "rbln-features",
    "rbln-serve / LoRA and structured output",
    "Adapters in their slots, grammars at the gate.",
    (Row("LoRA", _ADAPTERS), Row("Structured output", _STRUCTURED)),
    (*PLACE, MODEL),
)
