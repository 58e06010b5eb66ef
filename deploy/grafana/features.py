"""Dashboard of adapters, structured output, batches, tiers and speculation."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import (
    MODEL,
    OURS,
    PLACE,
    RANGE,
    VLLM,
    increase,
    mean,
    quantile,
    quantiles,
    rate,
    ratio,
    total,
)

_ADAPTERS = (
    Panel(
        "Adapters",
        "timeseries",
        (Query(total("rbln_lora_adapters", by="state"), "{{state}}"),),
        "By state. Draining adapters wait for their last request.",
        stack=True,
    ),
    Panel(
        "Slots",
        "timeseries",
        (
            Query(total("rbln_lora_slots_used", by="instance"), "used {{instance}}"),
            Query(total("rbln_lora_slots", by="instance"), "all {{instance}}"),
        ),
        "Used slots, and --max-loras. If all are used, loads are refused.",
    ),
    Panel(
        "Adapters and their slots",
        "table",
        (
            Query(
                f"max by (instance, adapter, state, slot) (rbln_lora_adapter_info{{{OURS}}})",
                instant=True,
            ),
        ),
        "All current adapters.",
    ),
    Panel(
        "Loads",
        "timeseries",
        (Query(increase("rbln_lora_loads_total", by="result"), "{{result}}"),),
        "Loads over HTTP in the displayed range; refused: the request was invalid.",
    ),
    Panel(
        "Load time",
        "timeseries",
        quantiles("rbln_lora_load_seconds"),
        "From the request until the adapter is ready. Steps continue meanwhile.",
        "s",
    ),
    Panel(
        "Running and waiting adapters",
        "table",
        (
            Query(
                "max by (instance, running_lora_adapters, waiting_lora_adapters, max_lora) "
                f"(last_over_time(vllm:lora_requests_info{{{OURS}}}[{RANGE}]))",
                instant=True,
            ),
        ),
        "Sets of adapters that ran or waited together; the value is the time of the last one.",
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
        "Slots are allocated at start, so loads do not change it.",
        "bytes",
    ),
)

_MASK_S = "rbln_grammar_mask_seconds"
_MASKS_HELD = rate(f"{_MASK_S}_sum", OURS + ',part!="fill"')
_GUIDED = "rbln_structured_output_requests_total"

_STRUCTURED = (
    Panel(
        "Guided answers by kind",
        "timeseries",
        (Query(rate(_GUIDED, by="kind"), "{{kind}}"),),
        "Requests with a constrained answer; tools: arguments of calls.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Guided answers by outcome",
        "timeseries",
        (Query(rate(_GUIDED, by="outcome"), "{{outcome}}"),),
        "client_error: mostly schemas that the gate refused before the first byte.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Mask time of a step",
        "timeseries",
        tuple(
            Query(quantile(share, _MASK_S, by="part"), f"p{share * 100:g} {{{{part}}}}")
            for share in (0.5, 0.99)
        ),
        "fill: computing the tokens that the grammars allow, beside the graph; wait: for the rest "
        "of it; apply: masking the logits.",
        "s",
    ),
    Panel(
        "Step time spent on masks",
        "timeseries",
        (
            Query(
                ratio(
                    _MASKS_HELD,
                    f"{_MASKS_HELD} + {rate('rbln_bucket_step_seconds_sum')}",
                ),
                "masks",
            ),
        ),
        "Mask time over mask and graph time; no request gets tokens meanwhile.",
        "percentunit",
    ),
    Panel(
        "Grammar checks",
        "timeseries",
        (Query(rate("rbln_grammar_checks_total", by="result"), "{{result}}"),),
        "known: in the cache of checked grammars. timeout, crashed: the check was ended and the "
        "request refused. not_started: no process could be created.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Trial time",
        "timeseries",
        quantiles("rbln_grammar_compile_seconds"),
        "Seconds of the trial compilation of a new grammar.",
        "s",
    ),
    Panel(
        "Trials",
        "heatmap",
        (Query(rate("rbln_grammar_compile_seconds_bucket", by="le"), "{{le}}", buckets=True),),
        "Trials by seconds.",
    ),
    Panel(
        "Memory of grammars",
        "timeseries",
        quantiles("rbln_grammar_memory_bytes"),
        "Bytes of a new grammar after its check. The engine holds one for each request with it.",
        "bytes",
    ),
    Panel(
        "Answers cut at their length",
        "timeseries",
        (
            Query(rate("vllm:request_success_total", VLLM + ',finished_reason="length"'), "length"),
            Query(rate("vllm:request_success_total", VLLM + ',finished_reason="stop"'), "stop"),
        ),
        "A structured answer that ends by length is incomplete.",
        "reqps",
    ),
)

_BATCHES = (
    Panel(
        "Rows of batch lines",
        "timeseries",
        (Query(rate("rbln_background_rows_total", by="kind"), "{{kind}}"),),
        "Rows of decode steps with tokens of batch lines: of answers (padding) and of prompts "
        "(prompt) in padding of client steps, or in separate steps (alone).",
        "short",
        stack=True,
    ),
    Panel(
        "Lines answered",
        "timeseries",
        (Query(rate("rbln_batch_lines_total", by="result"), "{{result}}"),),
        "failed: with a status other than 200, in the batch's error file.",
        "short",
        stack=True,
    ),
    Panel(
        "Tokens of lines",
        "timeseries",
        (Query(rate("rbln_batch_tokens_total", by="kind"), "{{kind}}"),),
        "Tokens of answered lines, counted at the answer.",
        "short",
    ),
    Panel(
        "Lines to do, running, parked",
        "timeseries",
        (
            Query(f"sum(rbln_batch_lines_to_do{{{OURS}}})", "to do"),
            Query(f"sum(rbln_batch_lines_running{{{OURS}}})", "running"),
            Query(f"sum(rbln_background_parked{{{OURS}}})", "parked"),
        ),
        "Parked lines hold KV blocks but no row, because clients use the rows.",
        "short",
    ),
    Panel(
        "Batches by status",
        "timeseries",
        (Query(f"sum by (status) (rbln_batches{{{OURS}}})", "{{status}}"),),
        "Stored batches.",
        "short",
        stack=True,
    ),
    Panel(
        "Stored files",
        "timeseries",
        (
            Query(f"sum(rbln_stored_bytes{{{OURS}}})", "stored"),
            Query(f"min(rbln_storage_free_bytes{{{OURS}}})", "free above the floor"),
        ),
        "Bytes in --data-dir, and free bytes above --min-free-bytes; below it answers wait.",
        "bytes",
    ),
    Panel(
        "Stored responses",
        "timeseries",
        (Query(total("rbln_stored_responses", by="status"), "{{status}}"),),
        "Stored responses. queued and in_progress: in the background, or for a client.",
        stack=True,
    ),
)

_TIERS = (
    Panel(
        "Requests by tier",
        "timeseries",
        (Query(rate("rbln_tier_requests_total", by="tier"), "{{tier}}"),),
        "Finished requests by service tier; requests rejected before their body is read have none.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Flex requests by outcome",
        "timeseries",
        (
            Query(
                rate("rbln_tier_requests_total", OURS + ',tier="flex"', by="outcome"), "{{outcome}}"
            ),
        ),
        "rejected: the limit of waiting requests was reached; timeout: no row was free in time.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Answers in flight by tier",
        "timeseries",
        (
            Query(total("rbln_admission_in_flight"), "default and priority"),
            Query(total("rbln_admission_flex_in_flight"), "flex"),
            Query(total("rbln_admission_max_in_flight"), "limit of each"),
        ),
        "Flex has a separate limit: it uses rows that would be padding, and waits for them.",
    ),
)

_VERIFY = OURS + ',phase="verify"'
_BY_TOKEN = OURS + ',phase=~"decode|verify"'
_ACCEPTED = rate("rbln_draft_accepted_tokens_total", by="bucket")
_CHECKS = rate("rbln_bucket_steps_total", _VERIFY, by="bucket")
_GAIN = rate("rbln_draft_gain_total", by="bucket")
_DRAFTS = (
    Panel(
        "Drafts accepted",
        "timeseries",
        (Query(ratio(_ACCEPTED, rate("rbln_draft_tokens_total", by="bucket")), "{{bucket}}"),),
        "Share of checked drafts, by bucket: requests x tokens of each.",
        "percentunit",
    ),
    Panel(
        "Tokens a step",
        "timeseries",
        (
            Query(
                "1 + "
                + ratio(_ACCEPTED, rate("rbln_bucket_useful_rows_total", _VERIFY, by="bucket")),
                "{{bucket}}",
            ),
        ),
        "Tokens per request of a step with drafts; 1 means that none was accepted.",
        "short",
    ),
    Panel(
        "Gain of steps that check drafts",
        "timeseries",
        (Query(ratio(_GAIN, _CHECKS), "{{bucket}}"),),
        "Tokens per second relative to steps without drafts. Below 1 few steps check any.",
        "short",
    ),
    Panel(
        "Time of a step that checks, and of one that does not",
        "timeseries",
        (
            Query(
                mean("rbln_bucket_step_seconds", _BY_TOKEN, by="phase, bucket"),
                "{{phase}} {{bucket}}",
            ),
        ),
        "verify 8x4 gains if it takes less than decode 8 times its tokens per request.",
        "s",
    ),
)

FEATURES = Dashboard(
    "rbln-features",
    "rbln-serve / LoRA, structured output and batches",
    "Adapters, grammar checks, batch lines, service tiers and drafts.",
    (
        Row("LoRA", _ADAPTERS),
        Row("Structured output", _STRUCTURED),
        Row("Batches and stored responses", _BATCHES),
        Row("Service tiers", _TIERS),
        Row("Speculation", _DRAFTS),
    ),
    (*PLACE, MODEL),
)
