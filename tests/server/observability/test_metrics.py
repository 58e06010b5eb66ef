"""The server's own metrics: guides of answers, the tuner's advice, adapters, the event loop."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rbln_backend.reports.info import BucketsInfo, DescriptionWriter
from rbln_backend.usage import Usage, UsageFile, about_engine
from server.host.tasks import background_task
from server.observability.metrics import (
    MAX_ADAPTERS_SHOWN,
    OUTCOMES,
    ServerMetrics,
    follow_event_loop,
)
from server.observability.traffic import BucketAdvice
from server.structured_outputs.constraint import GUIDES, constraints_of, kind_of
from server.wire import Endpoint
from tests.server.adapter_folders import write_adapter
from tests.server.scripted_adapters import ScriptedPort, registry

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def values(metrics: ServerMetrics, name: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [s for family in families for s in family.samples if s.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def recorded(run_dir: Path, sizes: dict[int, int]) -> UsageFile:
    """Let an engine of one decode bucket, 8, have run decode steps of these sizes."""
    usage = Usage(about=about_engine("m", "cpu", decode_buckets=(8,), prefill_buckets=(64,)))
    for size, steps in sizes.items():
        for _ in range(steps):
            usage.phases["decode"].note(size, 8, 0.01)
    usage.phases["decode"].note(1, 1, 0.004 * 12, 12)
    file = UsageFile(run_dir / "usage.json")
    file.add(usage)
    info = BucketsInfo(decode=[8], prefill=[64], usage_file=str(file.path))
    DescriptionWriter(run_dir, 0).write("buckets", info)
    return file


def test_a_label_value_that_nobody_declared_ends_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = ServerMetrics(tmp_path)
    metrics.count("rbln_http_requests_total", "/", "GET", "200", "new")
    metrics.count("rbln_structured_output_requests_total", "new", "ok")
    metrics.count("rbln_admission_rejections_total", "new")
    metrics.count("rbln_key_rejections_total", "key", "new")
    metrics.count("rbln_http_connection_refusals_total", "new")
    assert values(metrics, "rbln_admission_rejections_total")["new",] == 1
    assert len(caplog.records) == 5


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, "json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_each_guide_has_a_name(fields: dict[str, Any], kind: str) -> None:
    assert kind_of(constraints_of(Endpoint.CHAT, fields)) == kind
    assert kind in GUIDES


def test_guided_answers_are_counted_within_bounds(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path)
    name = "rbln_structured_output_requests_total"
    assert set(values(metrics, name).values()) == {0.0}
    for kind in GUIDES:
        for outcome in OUTCOMES:
            metrics.count(name, kind, outcome)
    assert set(values(metrics, name).values()) == {1.0}
    assert len(values(metrics, name)) == len(GUIDES) * len(OUTCOMES)


async def test_what_holds_the_event_loop_is_seen(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path)
    observe = partial(metrics.observe, "rbln_serve_event_loop_lag_seconds")
    async with background_task(follow_event_loop(observe, period_s=0.01)):
        while not values(metrics, "rbln_serve_event_loop_lag_seconds_count").get((), 0):
            await asyncio.sleep(0.01)
        time.sleep(0.6)  # noqa: ASYNC251 (what must not happen)
        await asyncio.sleep(0.05)
    late = values(metrics, "rbln_serve_event_loop_lag_seconds_bucket")
    assert late["+Inf",] > late["0.5",]
    assert values(metrics, "rbln_serve_event_loop_lag_seconds_sum")[()] > 0.5


async def test_the_tuners_advice_is_published_and_renewed(tmp_path: Path) -> None:
    now = 0.0
    metrics, advice = ServerMetrics(tmp_path), BucketAdvice(tmp_path, clock=lambda: now)
    metrics.observe_advice(await advice.latest())
    assert values(metrics, "rbln_bucket_suggested") == {}

    file = recorded(tmp_path, {1: 36, 5: 12})
    metrics.observe_advice(await advice.latest())
    assert values(metrics, "rbln_bucket_suggested") == {}, "looked at again within seconds"
    now = 6.0
    metrics.observe_advice(await advice.latest())
    kept = {("decode", "1"): 1.0, ("decode", "5"): 1.0, ("decode", "8"): 1.0}
    assert _by_phase(values(metrics, "rbln_bucket_suggested")) == kept
    saving = values(metrics, "rbln_bucket_suggested_saving_ratio")["decode",]
    assert 0.2 < saving < 0.7
    padding = values(metrics, "rbln_bucket_suggested_padding_ratio")
    assert padding["decode", "current"] > 0.5
    assert padding["decode", "suggested"] == 0.0
    assert values(metrics, "rbln_bucket_recorded_steps") == {("decode",): 60.0}

    # Another minute, other traffic: what is no longer suggested is gone.
    other = Usage(about=about_engine("m", "cpu", decode_buckets=(4, 8), prefill_buckets=(64,)))
    for _ in range(10_000):
        other.phases["decode"].note(8, 8, 0.01)
    file.path.unlink()
    file.add(other)
    now = 30.0
    assert (await advice.latest() or {})["decode"]["steps"] == 60
    now = 70.0
    metrics.observe_advice(await advice.latest())
    found = _by_phase(values(metrics, "rbln_bucket_suggested"))
    assert found == {("decode", "4"): 1.0, ("decode", "8"): 1.0}


def _by_phase(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """The samples under (phase, bucket), in whatever order a page has the labels."""
    return {tuple(sorted(labels, reverse=True)): value for labels, value in found.items()}


async def test_adapters_are_shown_while_they_are_there(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    metrics, adapters = ServerMetrics(tmp_path), registry(ScriptedPort(), tmp_path)
    await adapters.load("one", "a")
    metrics.observe_adapters(adapters)
    assert {"one", "ready"} <= set(*values(metrics, "rbln_lora_adapter_info"))
    assert values(metrics, "rbln_lora_adapters")["ready",] == 1
    await adapters.unload("one", wait=True)
    metrics.observe_adapters(adapters)
    assert values(metrics, "rbln_lora_adapter_info") == {}
    assert adapters.limits.max_loras <= MAX_ADAPTERS_SHOWN
