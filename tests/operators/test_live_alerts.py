"""Alerts that fire on a real server in trouble: a bad store, a restart, a stall, and what hurts it.

One story in several tests, in order: the first server fills a store and dies, the store is damaged,
a second server takes its place at the same address, with a warm-up that leaves a graph out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.kernel_cache import share_kernels
from tests.operators.forgetful_plan import plugin_folder
from tests.operators.prometheus_process import Prometheus
from tests.server.real_server import RealServer

pytestmark = [
    *(pytest.mark.engine, pytest.mark.slow, pytest.mark.wide),
    pytest.mark.timeout(900),
]

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
        """Wait until an alert fires."""
        self.prometheus.until(f'ALERTS{{alertname="{alert}",alertstate="firing"}}', PATIENCE_S)

    def is_silent(self, *alerts: str) -> None:
        """Check that none of these alerts fires."""
        assert not self.prometheus.firing() & set(alerts)

    def complete(self, prompt: list[int], **more: object) -> int:
        """Return the status of a completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
        with httpx.Client(base_url=self.server.url, timeout=PATIENCE_S) as client:
            return client.post(COMPLETIONS, json=body).status_code


@pytest.fixture(scope="module")
def story(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    cache = share_kernels(folder / "cache")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"rbln": {"cache_root": str(cache), "hot_path_policy": "warn"}}
    flags = ["--port", str(port), "--additional-config", json.dumps(options)]
    checkpoint = checkpoints("llama")
    targets = {"rbln-serve": f"127.0.0.1:{port}"}
    with Prometheus(folder / "prometheus", targets, BOUNDS) as prometheus:
        with RealServer(checkpoint, _sub(folder, "first"), *flags) as first:
            first.until_ready()
            prometheus.until('rbln_serve_phase{phase="ready"} == 1')
            story = Story(first, prometheus)
            story.is_silent("RblnCorruptCache", "RblnColdCache", "RblnRestarted", "RblnPadding")
            os.kill(first.engine_pid(), signal.SIGKILL)
            story.fires("RblnTargetDown")
            assert first.process.wait(30) != 0
        _harm(cache / "rbln" / "graphs")
        with (
            _path_with(plugin_folder(folder / "plugin")),
            RealServer(checkpoint, _sub(folder, "second"), *flags) as second,
        ):
            second.until_ready()
            yield Story(second, prometheus)


def test_a_restart_a_damaged_entry_and_missing_ones_are_seen(story: Story) -> None:
    story.fires("RblnRestarted")
    story.fires("RblnCorruptCache")
    story.fires("RblnColdCache")
    story.is_silent("RblnCrashLoop", "RblnStartupStuck", "RblnEngineDead", "RblnNoTargets")


def test_prompts_much_smaller_than_the_smallest_chunk_are_padding(story: Story) -> None:
    for _ in range(5):
        # One token alone would run as a row of a decode batch, without padding.
        assert story.complete([30, 31]) == 200
        time.sleep(1)
    story.fires("RblnPadding")


def test_a_compile_on_the_hot_path_is_seen(story: Story) -> None:
    story.is_silent("RblnHotPathCompile")
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda n: story.complete([40 + n], max_tokens=150), range(4))
        assert list(answers) == [200] * 4
    assert story.server.metric('rbln_recompiles_after_warmup_total{kind="decode"}') == 1
    story.fires("RblnHotPathCompile")


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


def test_a_held_up_event_loop_is_seen(story: Story) -> None:
    # Of a machine that is busy with other tests, too: whether it was silent before says nothing.
    for _ in range(8):
        os.kill(story.server.process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(story.server.process.pid, signal.SIGCONT)
        time.sleep(0.3)
    story.fires("RblnEventLoopLag")


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


def _sub(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


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


@contextmanager
def _path_with(folder: Path) -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
