"""What starts took is remembered per configuration, and guessed before the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rbln_backend.reporting.start_costs import ReadyTimes, StartCosts


def test_a_first_start_is_guessed_from_its_sizes(tmp_path: Path) -> None:
    costs = StartCosts(tmp_path, ("model", 4))
    small = costs.phases_s(weight_bytes=10**6, graphs=12, layers=5)
    large = costs.phases_s(weight_bytes=10**10, graphs=12, layers=32)
    assert large["load"] > small["load"] + 10
    assert large["compile"] > 3 * small["compile"]
    assert costs.kernels_s() > 1


def test_a_second_start_expects_stored_graphs_and_the_load_of_the_first(tmp_path: Path) -> None:
    first = StartCosts(tmp_path, ("model", 4))
    first.keep({"load": 7.5, "warmup": 0.25})
    first.keep_kernels(33.0)
    again = StartCosts(tmp_path, ("model", 4))
    phases = again.phases_s(weight_bytes=1, graphs=12, layers=32)
    assert (phases["load"], phases["warmup"]) == (7.5, 0.25)
    other = StartCosts(tmp_path, ("model", 8)).phases_s(weight_bytes=1, graphs=12, layers=32)
    assert phases["compile"] < other["compile"]
    assert again.kernels_s() == 33.0


def test_what_cannot_be_kept_or_read_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "rbln").write_text("a file where the folder would be")
    costs = StartCosts(tmp_path, "model")
    guessed = costs.phases_s(weight_bytes=0, graphs=1, layers=1)
    costs.keep({"load": 99.0, "warmup": 99.0})
    assert costs.phases_s(weight_bytes=0, graphs=1, layers=1) == guessed


@pytest.mark.parametrize("text", ['{"kernels": ', "[" * 100_000, '{"kernels": NaN}', "[1]"])
def test_a_damaged_file_is_as_good_as_none_and_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "rbln").mkdir()
    file = tmp_path / "rbln" / "start_costs.json"
    file.write_text(text)
    costs = StartCosts(tmp_path, "model")
    assert costs.kernels_s() > 1
    costs.keep_kernels(12.0)
    assert json.loads(file.read_text()) == {"kernels": 12.0}
    assert [path.name for path in file.parent.iterdir()] == ["start_costs.json"]


@pytest.mark.parametrize(
    "value", ["1e400", "-1.0", '"9"', "{}", '{"load": 1.0}', '{"load": 1.0, "warmup": "x"}', "NaN"]
)
def test_a_value_that_is_no_time_is_as_good_as_none(tmp_path: Path, value: str) -> None:
    costs = StartCosts(tmp_path, "model")
    guessed = costs.phases_s(weight_bytes=0, graphs=1, layers=1)
    costs.keep({"load": 99.0, "warmup": 99.0})
    file = tmp_path / "rbln" / "start_costs.json"
    (key,) = json.loads(file.read_text())
    file.write_text(f'{{"{key}": {value}, "kernels": {value}, "ready-x": {value}}}')
    assert costs.phases_s(weight_bytes=0, graphs=1, layers=1) == guessed
    assert 0 < costs.kernels_s() < 1000
    assert ReadyTimes(tmp_path, ["a"]).expected_s() == 20.0


def test_a_command_line_takes_what_it_took_and_another_what_the_last_one_took(
    tmp_path: Path,
) -> None:
    served, other = ReadyTimes(tmp_path, ["a"]), ReadyTimes(tmp_path, ["b"])
    assert served.expected_s() > 1
    served.keep(9.5)
    StartCosts(tmp_path, "model").keep_kernels(99.0)
    other.keep(4.25)
    assert ReadyTimes(tmp_path, ["a"]).expected_s() == 9.5
    assert ReadyTimes(tmp_path, ["c"]).expected_s() == 4.25
