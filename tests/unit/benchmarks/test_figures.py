"""Figures of scenarios: repeats of disturbed samples, saved runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.runner.command import compact_json, repeat_disturbed
from benchmarks.runner.figures import (
    Figure,
    FigureRun,
    markdown,
    read_run,
    to_json,
)
from benchmarks.runner.machine import describe_machine
from benchmarks.scenarios.bench import Bench, OutOfTimeError, Sample


def _figure(side: str, *values: float | None, name: str = "output", unit: str = "t/s") -> Figure:
    return Figure(name=name, model="m", side=side, unit=unit, values=[*values])


def _bench(folder: Path, deadline: float = 1e18) -> Bench:
    return Bench(
        models=["m"], sides=["ours"], rounds=2, quick=True, deadline=deadline, folder=folder
    )


def test_a_disturbed_sample_is_repeated_to_a_limit() -> None:
    loads = iter([0.5, 0.05, 0.0])
    taken = repeat_disturbed(lambda attempt: Sample({"n": (attempt, "")}, next(loads)))
    assert [sample.other_busy_cores for sample in taken] == [0.5, 0.05]
    assert [sample.values["n"][0] for sample in taken] == [0, 1]
    assert len(repeat_disturbed(lambda _: Sample({}, 0.5))) == 3


def test_a_sample_that_stays_disturbed_has_no_value(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    bench.take("m", "ours", 0, lambda _: Sample({"output": (5.0, "t/s")}, 0.5))
    bench.take("m", "ours", 1, lambda _: Sample({"output": (7.0, "t/s")}, 0.0))
    (figure,) = bench.figures.values()
    assert figure.values == [None, 7.0]
    assert bench.value("m", "ours", 1, "output") == 7.0


def test_a_run_ends_at_its_time_bound(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        _bench(tmp_path, time.monotonic() - 1).check_time()


def test_a_saved_run_is_read_as_it_was(tmp_path: Path) -> None:
    run = FigureRun(
        started="2026-11-26T00:00:00",
        command="c",
        machine=describe_machine(),
        load_before=0.0,
        about="Sampling",
        sides={"ours": "defaults"},
        figures=[_figure("ours", 0.25, None, name="first token", unit="s")],
        notes=["**Incomplete**"],
    )
    file = tmp_path / "2026-11-26-cpu-quick.json"
    file.write_text(to_json(run), encoding="utf-8")
    assert read_run(file) == run
    report = markdown(run)
    assert "| first token | s | 0.250 |" in report
    assert "1 of 2 values stayed disturbed." in report


def test_a_saved_object_has_a_line_for_each_field_and_each_measurement() -> None:
    fields = {"command": "c", "flags": ["avx2"], "sides": {"ours": [{"step": 1}, {"step": 2}]}}
    text = compact_json(fields)
    assert json.loads(text) == fields
    assert text.splitlines()[1:6] == [
        *(' "command": "c",', ' "flags": ["avx2"],', ' "sides": {', '  "ours": ['),
        '   {"step": 1},',
    ]
