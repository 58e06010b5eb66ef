"""Panels of device time by API key and model."""

from __future__ import annotations

from deploy.grafana.panel import Panel, Query
from deploy.grafana.promql import OURS, rate, total

_SECONDS = "rbln_device_seconds_total"
_STEPS = OURS + ',kind!="warmup"'

ACCOUNTING = (
    Panel(
        "Device time by key",
        "timeseries",
        (Query(f"topk(10, {rate(_SECONDS, _STEPS, by='kind, key')})", "{{kind}} {{key}}"),),
        "Seconds of steps in each second, padding included, of the ten busiest keys; the rest is "
        "idle.",
        "percentunit",
        stack=True,
    ),
    Panel(
        "Device time by model",
        "timeseries",
        (Query(rate(_SECONDS, _STEPS, by="model"), "{{model}}"),),
        "The base model, and each LoRA adapter.",
        "percentunit",
        stack=True,
    ),
    Panel(
        "Power by key",
        "timeseries",
        (
            Query(
                total("release_key_model:rbln_npu_power_watts:rate5m", by="kind, key"),
                "{{kind}} {{key}}",
            ),
        ),
        "Watts while the devices computed, if the vendor's exporter is scraped.",
        "watt",
        stack=True,
    ),
)
