"""Dashboard of buckets: steps, step times and padding."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row, Step
from deploy.grafana.promql import OURS, PLACE, increase, mean, quantile, rate, ratio, total

_DECODE = OURS + ',phase="decode"'
_PREFILL = OURS + ',phase=~"prefill|pooling"'
_WASTE = (Step(None, "green"), Step(0.4, "orange"), Step(0.6, "red"))


def _wasted(useful: str, padded: str, selector: str, by: str = "") -> str:
    """Return the padding's share of rows or tokens."""
    waste, work = rate(padded, selector, by=by), rate(useful, selector, by=by)
    return f"{waste} / ({waste} + {work} > 0)"


_ROWS = ("rbln_bucket_useful_rows_total", "rbln_bucket_padded_rows_total", _DECODE)
_TOKENS = ("rbln_prefill_useful_tokens_total", "rbln_prefill_padded_tokens_total", OURS)


def _lost(work: str, waste: str) -> str:
    """Return the padded rows' share of decode step time, summed over buckets."""
    padded, useful = (rate(name, _DECODE, by="bucket") for name in (waste, work))
    seconds = rate("rbln_bucket_step_seconds_sum", _DECODE, by="bucket")
    whole = rate("rbln_bucket_step_seconds_sum", _DECODE)
    return f"sum({seconds} * {padded} / ({padded} + {useful} > 0)) / ({whole} > 0)"


_USE = (
    Panel(
        "Decode buckets in use",
        "heatmap",
        (Query(rate("rbln_bucket_steps_total", _DECODE, by="bucket"), "{{bucket}}"),),
        "Decode steps per second by bucket (rows).",
        width=12,
    ),
    Panel(
        "Chunks in use",
        "heatmap",
        (Query(rate("rbln_bucket_steps_total", _PREFILL, by="bucket"), "{{bucket}}"),),
        "Prefill steps per second by chunk (tokens).",
        width=12,
    ),
    Panel(
        "Steps by bucket",
        "bargauge",
        (
            Query(
                increase("rbln_bucket_steps_total", by="phase, bucket"),
                "{{phase}} {{bucket}}",
                instant=True,
            ),
        ),
        "Steps in the displayed range. An unused bucket costs start-up time and memory.",
        width=12,
    ),
    Panel(
        "Device time by bucket",
        "timeseries",
        (Query(rate("rbln_bucket_step_seconds_sum", by="phase, bucket"), "{{phase}} {{bucket}}"),),
        "Seconds of steps per second; the sum over the buckets of an engine is its utilisation.",
        "percentunit",
        width=12,
        stack=True,
    ),
)

_TIME = (
    Panel(
        "Decode step, median",
        "timeseries",
        (Query(quantile(0.5, "rbln_bucket_step_seconds", _DECODE, by="bucket"), "{{bucket}}"),),
        "Seconds of a step on the device, by bucket.",
        "s",
    ),
    Panel(
        "Decode step, p99",
        "timeseries",
        (Query(quantile(0.99, "rbln_bucket_step_seconds", _DECODE, by="bucket"), "{{bucket}}"),),
        "Far above the median: other work used the device or its host.",
        "s",
    ),
    Panel(
        "Prefill step, mean",
        "timeseries",
        (Query(mean("rbln_bucket_step_seconds", _PREFILL, by="bucket"), "{{bucket}}"),),
        "Seconds of one chunk; no decode step runs meanwhile.",
        "s",
    ),
)

_PADDING = (
    Panel(
        "Padding of decode rows",
        "timeseries",
        (
            Query(_wasted(*_ROWS), "all"),
            Query(_wasted(*_ROWS, by="bucket"), "{{bucket}}"),
        ),
        "Padding's share of rows. A bucket with much padding needs a smaller neighbour.",
        "percentunit",
        steps=_WASTE,
        maximum=1,
    ),
    Panel(
        "Padding of prefill tokens",
        "timeseries",
        (
            Query(_wasted(*_TOKENS), "all"),
            Query(_wasted(*_TOKENS, by="chunk"), "{{chunk}}"),
        ),
        "Padding's share of the tokens of chunks.",
        "percentunit",
        steps=_WASTE,
        maximum=1,
    ),
    Panel(
        "Decode time lost to padding",
        "timeseries",
        (Query(_lost(*_ROWS[:2]), "lost"),),
        "Step time weighted by the padded share of rows: the maximum saving of perfect buckets if "
        "cost were proportional to rows.",
        "percentunit",
        maximum=1,
    ),
    Panel(
        "Decode rows",
        "timeseries",
        (
            Query(rate(_ROWS[0], _DECODE), "useful"),
            Query(rate(_ROWS[1], _DECODE), "padded"),
        ),
        "Rows per second of decode steps.",
        "ops",
        width=8,
        stack=True,
    ),
    Panel(
        "Prefill tokens",
        "timeseries",
        (Query(rate(_TOKENS[0]), "useful"), Query(rate(_TOKENS[1]), "padded")),
        "Tokens per second of prefill steps.",
        "ops",
        stack=True,
    ),
    Panel(
        "Rows a decode step",
        "timeseries",
        (
            Query(
                ratio(rate(_ROWS[0], _DECODE), rate("rbln_bucket_steps_total", _DECODE)), "useful"
            ),
        ),
        "Mean number of requests in a decode step.",
    ),
)

_SAVING = "rbln_bucket_suggested_saving_ratio"
_TUNER = (
    Panel(
        "Predicted saving",
        "bargauge",
        (Query(f"max by (instance, phase) ({_SAVING}{{{OURS}}})", "{{phase}} {{instance}}"),),
        "Share of step time that the suggested sizes would have saved on recorded steps, over "
        "restarts. `rbln-serve tune` and /v1/server_info have the settings.",
        "percentunit",
        width=6,
        steps=(Step(None, "green"), Step(0.1, "orange"), Step(0.3, "red")),
        maximum=1,
    ),
    Panel(
        "Padding now and as suggested",
        "bargauge",
        (
            Query(
                f"max by (phase, sizes) (rbln_bucket_suggested_padding_ratio{{{OURS}}})",
                "{{phase}}, {{sizes}}",
            ),
        ),
        "Padding of all recorded steps, with the compiled and the suggested sizes.",
        "percentunit",
        width=6,
        steps=_WASTE,
        maximum=1,
    ),
    Panel(
        "Suggested sizes",
        "table",
        (
            Query(
                f"max by (phase, bucket) (rbln_bucket_suggested{{{OURS}}})",
                "{{phase}} {{bucket}}",
                instant=True,
            ),
        ),
        "1: suggested. 0: compiled, but not suggested.",
        width=8,
    ),
    Panel(
        "Recorded steps",
        "stat",
        (Query(total("rbln_bucket_recorded_steps", by="phase"), "{{phase}}"),),
        "Number of recorded steps behind the suggestion.",
        width=4,
    ),
)

BUCKETS = Dashboard(
    "rbln-buckets",
    "rbln-serve / Buckets and padding",
    "Use of compiled batch sizes and cost of padding.",
    (Row("Use", _USE), Row("Step time", _TIME), Row("Padding", _PADDING), Row("Tuner", _TUNER)),
    PLACE,
)
