"""The benchmark of what metrics cost: its seam switches all of them, its report reckons right."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.metrics.calls import A_GAUGE, A_STEP, time_calls
from benchmarks.metrics.report import Pairs, Run, markdown
from benchmarks.metrics.unmetered import Switch, install, plugin_folder, recorders
from benchmarks.runner.command import raw_numbers
from benchmarks.runner.machine import Machine
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.worker.step.metrics import StepMetrics
from server.observability.metrics import ServerMetrics


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    made = Switch(tmp_path / "switch")
    undo = install(made)
    yield made
    undo()


def test_the_switch_decides_what_is_recorded(switch: Switch, tmp_path: Path) -> None:
    board = MetricsBoard(tmp_path, 0)
    spec = GraphSpec.of(Phase.DECODE, 8)
    steps = StepMetrics(board, [spec])
    for metered, counted in ((True, 1), (False, 1), (True, 2)):
        # As another process would turn it.
        Switch(tmp_path / "switch").turn(metered=metered)
        steps.record(spec, 1, 1, 0.1)
        assert board.value("rbln_bucket_steps_total", phase="decode", bucket=8) == counted


def test_what_was_installed_can_be_undone(tmp_path: Path) -> None:
    before = StepMetrics.record
    install(Switch(tmp_path / "switch"))()
    assert StepMetrics.record is before


def test_no_recorder_of_the_server_is_left_out() -> None:
    named = {name for owner, name in recorders() if owner is ServerMetrics}
    methods = {name for name, _ in inspect.getmembers(ServerMetrics, inspect.isfunction)}
    # What a scrape asks for is part of the scrape.
    at_scrapes = {f"observe_{x}" for x in ("lifecycle", "admission", "adapters", "grammars")}
    at_scrapes |= {"observe_advice", "observe_batches", "observe_responses"}
    assert named == {name for name in methods if name.startswith("observe_")} - at_scrapes


def test_the_plugin_is_one_that_vllm_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin_folder(tmp_path / "plugin").turn(metered=False)
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    (start,) = [point.load() for point in found if point.name == "bench_unmetered"]
    before = [(owner, name, getattr(owner, name)) for owner, name in recorders()]
    try:
        start()
        assert StepMetrics.record(None, None, 1, 1, 0.1) is None
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def test_every_kind_of_call_is_timed(tmp_path: Path) -> None:
    calls = time_calls(tmp_path, [1, 2])
    assert {A_STEP, A_GAUGE} <= set(calls)
    assert all(seconds > 0 for seconds in calls.values())


def test_the_report_says_whether_the_target_is_met() -> None:
    machine = Machine(
        cpu="c", lscpu={}, flags=[], cores=2, memory_bytes=0, kernel="k", versions={}, commit=""
    )
    pairs = Pairs("batch 1", "µs a step", [(102.0, 100.0), (100.5, 100.0), (100.4, 100.0)], 0.0)
    run = Run(
        started="2026-01-01T00:00:00",
        command="c",
        machine=machine,
        load_before=0.0,
        model="15m",
        calls={A_STEP: 4e-6, A_GAUGE: 1e-6},
        steps=[pairs],
        loads=[],
    )
    report = markdown(run)
    assert "**met** (largest median +0.50%)" in report
    assert "batch 1: 5.00% of a step" in report
    slow = Pairs("HTTP", "ms a token", [(103.0, 100.0)], 0.0)
    dearer = replace(run, loads=[slow])
    assert "missed by 2.00%" in markdown(dearer)
    assert '"label": "HTTP"' in raw_numbers(dearer)
