"""Figures of scenarios: the strongest peer, repeats of disturbed samples, curves, saved runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.runner import targets
from benchmarks.runner.command import repeat_disturbed
from benchmarks.runner.curves import CURVES, Curve, Fit, draw, fits, slope
from benchmarks.runner.figures import (
    Figure,
    FigureRun,
    find,
    markdown,
    ratios_to_vllm,
    read_run,
    to_json,
)
from benchmarks.runner.machine import describe_machine
from benchmarks.runner.targets import Target, result_in
from benchmarks.scenarios.bench import Bench, OutOfTimeError, Sample
from benchmarks.scenarios.growth_in_process import METERED


def _figure(side: str, *values: float | None, name: str = "output", unit: str = "t/s") -> Figure:
    return Figure(name=name, model="m", side=side, unit=unit, values=[*values])


def _bench(folder: Path, deadline: float = 1e18) -> Bench:
    return Bench(
        models=["m"], sides=["ours"], rounds=2, quick=True, deadline=deadline, folder=folder
    )


def test_the_better_configuration_of_vllm_decides_each_round() -> None:
    ours = _figure("ours", 20.0, 20.0, None)
    figures = [ours, _figure("vllm-cpu", 10.0, 5.0, 1.0)]
    # Without all cores, the strongest peer was not measured.
    assert ratios_to_vllm(figures, ours, lower=False) == []
    figures.append(_figure("vllm-cpu-all-cores", 8.0, None, 1.0))
    assert ratios_to_vllm(figures, ours, lower=False) == [2.0, 4.0]
    assert ratios_to_vllm(figures, ours, lower=True) == [2.5, 4.0]
    target = Target(part="1", scenario="s", model="m", figure="output", over="vLLM", least=3.5)
    result = result_in(target, figures, "")
    assert (result.verdict, result.bound) == ("missed by 14%", "≥ 3.5 ×")


def test_a_target_is_compared_with_another_figure_of_ours() -> None:
    figures = [_figure("ours", 9.0, name="seed"), _figure("ours", 10.0, name="greedy")]
    target = Target(part="5", scenario="s", model="m", figure="seed", over="greedy", least=0.9)
    assert result_in(target, figures, "").verdict == "met"
    assert result_in(target, figures[:1], "").verdict == "not measured"


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


def test_a_saved_run_is_read_as_it_was_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    old, new = tmp_path / "2026-11-25-cpu-quick.json", tmp_path / "2026-11-26-cpu-quick.json"
    new.write_text(to_json(run), encoding="utf-8")
    old.write_text(to_json(run).replace("0.25", "9.0"), encoding="utf-8")
    assert read_run(new) == run
    report = markdown(run)
    assert "| first token | s | 0.250 |" in report
    assert "1 of 2 values stayed disturbed." in report
    target = Target(part="1", scenario="quick", model="m", figure="first token", most=0.4)
    monkeypatch.setattr(targets, "RESULTS", tmp_path)
    monkeypatch.setattr(targets, "TARGETS", (target,))
    (result,) = targets.saved_results()
    assert (result.verdict, result.source) == ("met", new.stem)


def test_every_target_has_one_bound_and_a_scenario_that_gives_its_unit() -> None:
    for target in targets.TARGETS:
        assert (target.least is None) != (target.most is None), target
    names = [(t.scenario, t.model, t.name) for t in targets.TARGETS]
    assert len(set(names)) == len(names)


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    assert slope([(10, 3.0), (100, 30.0), (1000, 300.0)]) == pytest.approx(1.0)
    assert slope([(1, 2.0), (10, 200.0)]) == pytest.approx(2.0)
    # A constant share hides the growth at the small sizes.
    points = tuple((n, 1e4 + n * n) for n in (1, 10, 100, 1000, 10_000))
    fit = Fit(Curve("c", (1, 10_000), 1.0, ""), "s", points)
    assert fit.exponent < 1.15 < fit.tail
    assert fit.verdict == "**grows faster, by 0.85**"


def test_curves_are_drawn_from_undisturbed_figures(tmp_path: Path) -> None:
    curve = CURVES[0]
    figures = [
        Figure(name=curve.name, model="m", side="ours", unit="ms", values=[None, cost], size=size)
        for size, cost in ((128, 8.0), (512, 8.5))
    ]
    figures.append(
        Figure(name=curve.name, model="m", side="ours", unit="ms", values=[None], size=9)
    )
    (fit,) = fits(figures)
    assert fit.points == ((128, 8.0), (512, 8.5))
    draw([fit], tmp_path / "curves.svg")
    assert "</svg>" in (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert find(figures, curve.name, "m") is not None


@pytest.mark.parametrize("part", METERED)
def test_the_costs_of_stored_objects_are_measured_on_the_servers_code(
    tmp_path: Path, part: str
) -> None:
    curves = {curve.name for curve in CURVES}
    with METERED[part](tmp_path, 20) as take:
        values = take(0).values
    assert part in values
    assert set(values) <= curves
    assert all(value > 0 for value, _ in values.values())
