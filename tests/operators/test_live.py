"""A real Prometheus over a real server: every expression is evaluated, and some alerts fire."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rbln_backend.reports.metrics import METRICS
from server.observability.metrics import SERVER_METRICS
from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.debian_tools import debian_tool
from tests.kernel_cache import share_kernels
from tests.operators.dashboards import DASHBOARDS, names_of, panels, variables
from tests.operators.forgetful_plan import plugin_folder
from tests.operators.prometheus_process import RULE_FILES, Prometheus, read_rules
from tests.operators.scene import Scene, bound, running_scene
from tests.operators.vendor_exporter import VENDOR_LABELS, VENDOR_METRICS
from tests.ports import free_port
from tests.server.real_server import RealServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Panel -> why it may show nothing here.
MAY_BE_EMPTY = {
    "Tokens by key": "the server has no keys",
    "Refused by limits of a key": "likewise",
    "KV tiers": "the server has none",
    "KV read from prefill servers": "no server has NixlConnector",
    "Failed reads from prefill servers": "likewise",
    "Drafts accepted": "the server does not speculate",
    "Gain of steps that check drafts": "likewise",
}
# Servers with NixlConnector have them; the scene has none.
NIXL_METRICS = ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_num_failed_transfers_total")
# Of Prometheus itself, and those that deploy/prometheus/prometheus.yml puts on targets.
TARGET_LABELS = {"job", "instance", "hostname", "namespace", "release", "pod"}
# What may fire on a machine that is busy with other tests.
SLOWNESS = {
    *"RblnSlowTokens RblnSlowFirstToken RblnColdCache RblnPadding RblnEventLoopLag".split(),
    "RblnEventLoopHeld",
}
_SCRAPED = 'absent(ALERTS{alertname="RblnTargetDown",alertstate="firing"})'
"""Beside a load a scrape may take longer than it is given: the target is down for a while."""
# The burst fills the KV cache on some machines.
_PREEMPTIONS = "vllm:num_preemptions_total"


@pytest.fixture(scope="module")
def scene(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    with running_scene(checkpoints, tmp_path_factory.mktemp("scene")) as found:
        yield found


@pytest.fixture(scope="module")
def loaded(scene: Scene) -> Scene:
    scene.prometheus.until(_SCRAPED)
    calm = scene.prometheus.firing()
    assert calm <= SLOWNESS | {"RblnStartupStuck"}
    scene.load(seconds=4)
    return scene


def test_names_are_told_from_words() -> None:
    found = names_of('sum by (a) (x:y_z{b=~"c}",d!="e"}[5m]) / on (f) group_left (g) (h > 0) or 1')
    assert found.metrics == {"x:y_z": {"b", "d"}, "h": set()}
    assert found.grouped == {"a", "f", "g"}


def known_labels(scene: Scene) -> dict[str, set[str]]:
    """Every metric that there can be, and its labels."""
    known: dict[str, set[str]] = {}
    for decl in (*SERVER_METRICS, *METRICS):
        for suffix in ("_bucket", "_sum", "_count") if decl.kind == "histogram" else ("",):
            known[decl.name + suffix] = {*decl.labels, *(("le",) if suffix == "_bucket" else ())}
    for family in text_string_to_metric_families(scene.server.client.get("/metrics").text):
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    known |= {name: set(VENDOR_LABELS) for name in VENDOR_METRICS} | {"up": set(), "rbln_up": set()}
    known |= {name: {"engine", "model_name"} for name in NIXL_METRICS}
    known["rbln_npu_device_status"] = {*VENDOR_LABELS, "state"}
    for rule in read_rules("rules.yml"):
        known[rule["record"]] = names_of(rule["expr"]).grouped | set(rule.get("labels", ()))
    return {name: labels | TARGET_LABELS for name, labels in known.items()}


def expressions() -> list[tuple[str, str]]:
    """Every expression of dashboards, rules, alerts and runbooks, with where it stands."""
    found = [
        (f"{dashboard['uid']}: {panel['title']}", bound(target["expr"]))
        for dashboard in DASHBOARDS
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
    for name in RULE_FILES:
        found += [
            (rule.get("alert", rule.get("record")), rule["expr"]) for rule in read_rules(name)
        ]
    for path in sorted((ROOT / "docs" / "runbooks").glob("*.md")):
        blocks = re.findall(r"```promql\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        found += [(path.name, line) for block in blocks for line in block.strip().splitlines()]
    return found


def test_every_expression_parses_and_names_what_exists(loaded: Scene) -> None:
    known = known_labels(loaded)
    wrong = []
    for where, expr in expressions():
        loaded.prometheus.now(expr)
        names = names_of(expr)
        assert names.metrics, expr
        for metric, labels in names.metrics.items():
            wrong += [f"{where}: {metric} {x}" for x in labels - known.get(metric, set())]
            wrong += [f"{where}: no {metric}"] * (metric not in known)
        anywhere = set().union(*(known.get(metric, set()) for metric in names.metrics))
        wrong += [f"{where}: nothing has {label}" for label in names.grouped - anywhere]
    assert wrong == []


def test_every_variable_has_values(loaded: Scene) -> None:
    for variable in variables():
        if variable["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["definition"]
            ).groups()
            series = loaded.prometheus.now(bound(metric))
            # Kubernetes alone has namespaces.
            assert label == "namespace" or any(one["metric"].get(label) for one in series), variable


def test_every_choice_of_an_objective_is_a_bound(loaded: Scene) -> None:
    metrics = {
        "ttft": "vllm:time_to_first_token_seconds_bucket",
        "itl": "vllm:inter_token_latency_seconds_bucket",
        "e2e": "vllm:e2e_request_latency_seconds_bucket",
    }
    choices = {one["name"]: one["query"] for one in variables() if one["type"] == "custom"}
    assert choices.keys() == metrics.keys()
    for name, values in choices.items():
        for value in values.split(","):
            assert loaded.prometheus.now(f'{metrics[name]}{{le="{value}"}}'), (name, value)


def _has_data(series: list[dict[str, Any]]) -> bool:
    values = [value for one in series for value in one.get("values", [one.get("value")])]
    return any(not math.isnan(float(value[1])) for value in values)


def test_every_panel_shows_what_the_load_made(loaded: Scene) -> None:
    shown = [panel for dashboard in DASHBOARDS for panel in panels(dashboard)]
    empty = {
        panel["title"]
        for panel in shown
        for target in panel["targets"]
        if not _has_data(loaded.series(target))
    }
    assert empty <= set(MAY_BE_EMPTY)
    assert set(MAY_BE_EMPTY) <= {panel["title"] for panel in shown}


def test_our_metrics_follow_the_naming_rules(loaded: Scene) -> None:
    lines = loaded.server.client.get("/metrics").text.splitlines(keepends=True)
    ours = "".join(x for x in lines if x.startswith(("rbln_", "# HELP rbln_", "# TYPE rbln_")))
    command = [debian_tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_there_is_reason(loaded: Scene) -> None:
    """The last test of this module: it ends the server."""
    prometheus = loaded.prometheus
    health = {
        rule["name"]: rule["lastError"] if "lastError" in rule else rule["health"]
        for group in prometheus.ask("rules")["groups"]
        for rule in group["rules"]
    }
    assert set(health.values()) == {"ok"}, health
    fires = 'ALERTS{{alertname="{}",alertstate="firing"}}'
    prometheus.until(fires.format("RblnOverload"))
    preempted = {"RblnPreemptions"} if prometheus.now(f"{_PREEMPTIONS} > 0") else set()
    prometheus.until(_SCRAPED)
    assert prometheus.firing() <= SLOWNESS | {"RblnOverload"} | preempted

    loaded.devices.values |= {"rbln_npu_temperature": 88.0}
    loaded.devices.state = "fault"
    prometheus.until(fires.format("RblnNpuUnhealthy"))
    prometheus.until(fires.format("RblnNpuHot"))

    os.kill(loaded.server.engine_pid(), signal.SIGKILL)
    prometheus.until(fires.format("RblnTargetDown"))
    assert loaded.server.process.wait(30) != 0


# -------------------------------------------------------------------------------------- live alerts
# One story in several tests, in order: the first server fills a store and dies, the store is
# damaged, a second server takes its place at the same address, with a warm-up that leaves a graph
# out.
# A minute is long, and the graphs of a tiny model compile in seconds.
BOUNDS = {"RblnEngineStalled": ("> 60", "> 3"), "RblnColdCache": ("> 30", "> 0")}
COMPLETIONS = "/v1/completions"
PATIENCE_S = 120.0


class Story:
    """The server that runs now, and Prometheus, which knows only their common address."""

    def __init__(self, server: RealServer, prometheus: Prometheus) -> None:
        self.server = server
        self.prometheus = prometheus

    def fires(self, alert: str) -> None:
        self.prometheus.until(f'ALERTS{{alertname="{alert}",alertstate="firing"}}', PATIENCE_S)

    def is_silent(self, *alerts: str) -> None:
        assert not self.prometheus.firing() & set(alerts)

    def complete(self, prompt: list[int], **more: object) -> int:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
        with httpx.Client(base_url=self.server.url, timeout=PATIENCE_S) as client:
            return client.post(COMPLETIONS, json=body).status_code


@pytest.fixture(scope="module")
def story(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    cache = share_kernels(folder / "cache")
    port = free_port()
    options = {"rbln": {"cache_root": str(cache), "hot_path_policy": "warn"}}
    flags = ["--port", str(port), "--additional-config", json.dumps(options)]
    checkpoint = checkpoints("llama")
    targets = {"rbln-serve": f"127.0.0.1:{port}"}
    with Prometheus(folder / "prometheus", targets, BOUNDS) as prometheus:
        for name in ("first", "second"):
            (folder / name).mkdir()
        with RealServer(checkpoint, folder / "first", *flags) as first:
            first.until_ready()
            prometheus.until('rbln_serve_phase{phase="ready"} == 1')
            story = Story(first, prometheus)
            story.is_silent("RblnCorruptCache", "RblnColdCache", "RblnRestarted", "RblnPadding")
            os.kill(first.engine_pid(), signal.SIGKILL)
            story.fires("RblnTargetDown")
            assert first.process.wait(30) != 0
        _harm(cache / "rbln" / "graphs")
        with pytest.MonkeyPatch.context() as patch:
            path = os.pathsep.join([str(plugin_folder(folder / "plugin")), str(ROOT)])
            patch.setenv("PYTHONPATH", path)
            with RealServer(checkpoint, folder / "second", *flags) as second:
                second.until_ready()
                yield Story(second, prometheus)


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_a_restart_a_damaged_entry_and_missing_ones_are_seen(story: Story) -> None:
    story.fires("RblnRestarted")
    story.fires("RblnCorruptCache")
    story.fires("RblnColdCache")
    story.is_silent("RblnCrashLoop", "RblnStartupStuck", "RblnEngineDead", "RblnNoTargets")


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_prompts_much_smaller_than_the_smallest_chunk_are_padding(story: Story) -> None:
    for _ in range(5):
        # One token alone would run as a row of a decode batch, without padding.
        assert story.complete([30, 31]) == 200
        time.sleep(1)
    story.fires("RblnPadding")


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_a_compile_on_the_hot_path_is_seen(story: Story) -> None:
    story.is_silent("RblnHotPathCompile")
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda n: story.complete([40 + n], max_tokens=150), range(4))
        assert list(answers) == [200] * 4
    assert story.server.metric('rbln_recompiles_after_warmup_total{kind="decode"}') == 1
    story.fires("RblnHotPathCompile")


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_a_trial_of_a_grammar_that_breaks_its_process_is_seen(story: Story) -> None:
    assert story.complete([30], structured_outputs={"regex": "a+"}) == 200
    story.is_silent("RblnGrammarTrialCrash")
    found = re.findall(r"started process (\d+): grammar trials", story.server.log.read_text())
    trial = int(found[-1])
    os.kill(trial, signal.SIGSTOP)
    killer = threading.Timer(0.5, os.kill, (trial, signal.SIGKILL))
    killer.start()
    assert story.complete([30], structured_outputs={"regex": "b+"}) == 400
    killer.join()
    story.fires("RblnGrammarTrialCrash")


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_a_held_up_event_loop_is_seen(story: Story) -> None:
    # Of a machine that is busy with other tests, too: whether it was silent before says nothing.
    for _ in range(8):
        os.kill(story.server.process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(story.server.process.pid, signal.SIGCONT)
        time.sleep(0.3)
    story.fires("RblnEventLoopLag")


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_an_engine_that_stands_still_with_work_to_do_is_seen(story: Story) -> None:
    story.is_silent("RblnEngineStalled")
    engine = story.server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(story.complete, [30])
            story.fires("RblnEngineStalled")
            os.kill(engine, signal.SIGCONT)
            assert answer.result(PATIENCE_S) == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    story.prometheus.until(
        'absent(ALERTS{alertname="RblnEngineStalled",alertstate="firing"})', PATIENCE_S
    )


def _harm(graphs: Path) -> None:
    """Damage one entry of a store, and take two away: one may be what the plan forgets."""
    damaged, gone, also_gone, *rest = sorted({path.parent for path in graphs.rglob("program.json")})
    assert rest
    program = damaged / "program.json"
    data = bytearray(program.read_bytes())
    data[100] ^= 0xFF
    program.write_bytes(bytes(data))
    for entry in (gone, also_gone):
        shutil.rmtree(entry)
