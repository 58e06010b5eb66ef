"""LoRA adapters and structured output."""

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
        "By state. Draining ones wait for the last request that uses them.",
        stack=True,
    ),
    Panel(
        "Slots",
        "timeseries",
        (
            Query(total("rbln_lora_slots_used", by="instance"), "used {{instance}}"),
            Query(total("rbln_lora_slots", by="instance"), "all {{instance}}"),
        ),
        "Slots that hold an adapter, and --max-loras. Full: a load is refused until one goes.",
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
        "Every adapter that is there now.",
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

_MASK_S = "rbln_grammar_mask_seconds"
_GUIDED = "rbln_structured_output_requests_total"

_STRUCTURED = (
    Panel(
        "Guided answers by kind",
        "timeseries",
        (Query(rate(_GUIDED, by="kind"), "{{kind}}"),),
        "Requests whose answer has to obey something; tools are parameters of calls.",
        "reqps",
        stack=True,
    ),
    Panel(
        "Guided answers by outcome",
        "timeseries",
        (Query(rate(_GUIDED, by="outcome"), "{{outcome}}"),),
        "client_error: mostly schemas that the gate has refused before the first byte.",
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
        "fill: finding the tokens that the grammars of a batch allow; apply: masking its logits.",
        "s",
    ),
    Panel(
        "Step time spent on masks",
        "timeseries",
        (
            Query(
                ratio(
                    rate(f"{_MASK_S}_sum"),
                    f"{rate(f'{_MASK_S}_sum')} + {rate('rbln_bucket_step_seconds_sum')}",
                ),
                "masks",
            ),
        ),
        "Masks over masks and graphs; no request makes tokens meanwhile, guided or not.",
        "percentunit",
    ),
    Panel(
        "Grammar checks",
        "timeseries",
        (Query(rate("rbln_grammar_checks_total", by="result"), "{{result}}"),),
        "known: found in the cache of checked grammars. timeout, crashed: a trial that had to be "
        "ended; the request was refused and the service is unharmed. not_started: there was no "
        "process to try it in.",
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

_BATCHES = (
    Panel(
        "What the padding earned",
        "timeseries",
        (Query(rate("rbln_background_rows_total", by="kind"), "{{kind}}"),),
        "Rows of decode steps that lines of batches had, each a token: of their answers (padding) "
        "and of their prompts (prompt) in the padding of the buckets of clients, or steps of their "
        "own (alone).",
        "short",
        stack=True,
    ),
    Panel(
        "Lines answered",
        "timeseries",
        (Query(rate("rbln_batch_lines_total", by="result"), "{{result}}"),),
        "failed: with another status than 200, in the batch's error file.",
        "short",
        stack=True,
    ),
    Panel(
        "Tokens of lines",
        "timeseries",
        (Query(rate("rbln_batch_tokens_total", by="kind"), "{{kind}}"),),
        "Of lines that are answered, when they are.",
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
        "Parked ones hold their KV blocks and no row: clients have the device.",
        "short",
    ),
    Panel(
        "Batches by status",
        "timeseries",
        (Query(f"sum by (status) (rbln_batches{{{OURS}}})", "{{status}}"),),
        "Those that are remembered.",
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
        "Bytes in --data-dir, and what its disk has above --min-free-bytes; below it answers wait.",
        "bytes",
    ),
    Panel(
        "Stored responses",
        "timeseries",
        (Query(total("rbln_stored_responses", by="status"), "{{status}}"),),
        "Those that are kept. queued and in_progress: made in the background, or for a client.",
        stack=True,
    ),
)

_TIERS = (
    Panel(
        "Requests by tier",
        "timeseries",
        (Query(rate("rbln_tier_requests_total", by="tier"), "{{tier}}"),),
        "Finished requests by the service tier that they ran in; those that were refused before "
        "their body was read have none.",
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
        "rejected: as many as the limit wait already; timeout: clients left no row in time.",
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
        "Flex is counted apart: it has rows that would be padding, and waits for them.",
    ),
)

_VERIFY = OURS + ',phase="verify"'
_BY_TOKEN = OURS + ',phase=~"decode|verify"'
_ACCEPTED = rate("rbln_draft_accepted_tokens_total", by="bucket")
_CHECKS = rate("rbln_bucket_steps_total", _VERIFY, by="bucket")
_GAIN = rate("rbln_draft_gain_total", by="bucket")
_EXPECTED = rate("rbln_draft_expected_gain_total", by="bucket")
_DRAFTS = (
    Panel(
        "Drafts accepted",
        "timeseries",
        (Query(ratio(_ACCEPTED, rate("rbln_draft_tokens_total", by="bucket")), "{{bucket}}"),),
        "Share of the drafts that were checked, by bucket: requests x tokens of each.",
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
        "What a request got of a step that checks drafts; 1 would be none accepted.",
        "short",
    ),
    Panel(
        "Gain of steps that check drafts",
        "timeseries",
        (
            Query(ratio(_GAIN, _CHECKS), "{{bucket}}"),
            Query(ratio(_EXPECTED, _CHECKS), "expected {{bucket}}"),
        ),
        "Times as many tokens a second as without drafts: what steps gave, and what they promised "
        "when their length was chosen.",
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
        "A gain: verify 8x4 takes less than as many times decode 8 as a request gets tokens of it.",
        "s",
    ),
)

FEATURES = Dashboard(
    "rbln-features",
    "rbln-serve / LoRA, structured output and batches",
    "Adapters in their slots, grammars at the gate, lines of batches in the padding.",
    (
        Row("LoRA", _ADAPTERS),
        Row("Structured output", _STRUCTURED),
        Row("Batches and stored responses", _BATCHES),
        Row("Service tiers", _TIERS),
        Row("Speculation", _DRAFTS),
    ),
    (*PLACE, MODEL),
)
