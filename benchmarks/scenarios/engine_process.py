"""Time of a decode step in the engine process outside its graph, by `step_profile`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.in_process.step_report import OUTSIDE_ROW
from benchmarks.scenarios.bench import Bench, Sample, Values

MODELS = ("160m",)
SIDES = ("ours",)
MINUTES = 6
_BATCHES = (1, 8, 32)


def run(bench: Bench) -> None:
    """Fill the figures."""
    for model in bench.models:
        for number in range(bench.rounds):
            bench.check_time()
            bench.take(model, "ours", number, lambda _, m=model: _sample(bench, m))  # type: ignore[misc]


def _sample(bench: Bench, model: str) -> Sample:
    file = bench.folder / "steps.json"
    words = ["--model", model, "--batch", *map(str, _BATCHES), "--json", str(file)]
    steps = ["--steps", "50" if bench.quick else "600"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks", "step_profile", *words, *steps],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    values: Values = {}
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    for result in results:
        name = f"engine process outside the graph, batch {result['batch']}"
        values[name] = (result["parts"][OUTSIDE_ROW][0], "µs")
    return Sample(values, max(result["other_busy_cores"] for result in results))
