"""docs/dev/results.md and README's table of speed, from the saved results.

Each row of docs/dev/results.md is a result file, how it was measured, and the pages that quote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.engines.sides import VLLM_NAMES
from benchmarks.runner.command import RESULTS
from benchmarks.runner.figures import Figure, find, ratios, read_run, shown

RESULT_BLOCKS = (
    "# Measurements and where they are quoted",
    "Look up which file of `benchmarks/results` backs a figure, and repeat it with the command "
    "([benchmarks](../../benchmarks/README.md)). Beside each report lie its figures by round "
    "(`.json`). *Disturbed* counts samples during which other processes used more than a tenth of "
    "a core: such times are no measurement. Reports since 26 November 2026 leave them out "
    "of every figure; in earlier ones only ratios within a round count. Reports written before "
    "that count existed leave it empty. Nothing here was measured on an NPU.",
    "Figures of other pages that no file here backs are marked there as *no result file*.",
)
RESULT_HEADER = ("Result", "Command", "Processor, two cores each", "Disturbed", "Quoted in")

README_BEGIN = "<!-- Written by docs/generate.py from benchmarks/results. -->"
_MODELS = ("15m", "160m", "1.2b")
_MANY = 100
"""Ratios above it are those of a load that hardly began in its time budget."""
_DEFAULT, _ALL_CORES = VLLM_NAMES
_AMD_AVX2, _AMD, _INTEL = (
    "amd-epyc-2core-avx2",
    "amd-epyc-2core-avx512-bf16",
    "intel-r-xeon-r-processor-2-80ghz-2core-avx512f",
)
PROCESSORS = {
    ("25", "1"): "AMD EPYC Zen 3, AVX2",
    ("25", "17"): "AMD EPYC Zen 4, AVX-512 with bf16",
    ("26", "2"): "AMD EPYC Zen 5, AVX-512 with bf16",
    ("6", "106"): "Intel Xeon Ice Lake 2.8 GHz, AVX-512",
}
"""CPU family and model, as reports have them from `lscpu` -> processor."""
_README = "[README](../../README.md#what-ran-where)"
_QUANTIZED = "[quantization](../quantization.md#speed-and-memory)"
_QUOTED: dict[str, str] = {
    f"2026-11-21-{_AMD_AVX2}-compare": _README,
    f"2026-11-23-{_INTEL}-quantized-1.2b": _QUANTIZED,
    f"2026-11-23-{_INTEL}-quantized-gpt-oss-0.9b": _QUANTIZED,
    f"2026-11-24-{_AMD}-compare": _README,
    f"2026-11-24-{_AMD}-quantized-1.2b": _QUANTIZED,
    f"2026-11-24-{_AMD}-quantized-1.2b-fp8-awq": _QUANTIZED,
    f"2026-11-24-{_AMD}-quantized-gpt-oss-0.9b": _QUANTIZED,
    f"2026-11-28-{_AMD}-compare": _README,
}
"""Result -> the pages with its figures. A result that is missing here is quoted nowhere."""


def result_rows() -> Iterable[tuple[str, ...]]:
    """Yield a row for each result. Raises `ValueError` for a quotation without a result."""
    reports = {path.stem: path for path in sorted(RESULTS.glob("*.md"))}
    if absent := _QUOTED.keys() - reports.keys():
        raise ValueError(f"docs/results_page.py: there is no result {sorted(absent)}")
    for stem, path in reports.items():
        text = path.read_text(encoding="utf-8")
        command = re.search(r"`python -m (benchmarks[. ][^`]*)`", text)
        yield (
            f"[{stem.partition('core-')[2]}, {stem[:10]}](../../benchmarks/results/{path.name})",
            f"`{_shortened(command[1])}`" if command else "",
            processor_of(text),
            disturbance_of(text),
            _QUOTED.get(stem, ""),
        )


def processor_of(text: str) -> str:
    """Return the processor of a report. Raises `ValueError` for one without a name here."""
    found = re.search(r"CPU family (\d+), Model (\d+)", text)
    if found is None or found.groups() not in PROCESSORS:
        raise ValueError(f"docs/results_page.py: PROCESSORS lacks {found and found[0]}")
    return PROCESSORS[found.group(1), found.group(2)]


def _shortened(command: str) -> str:
    """Return the command without folders of the machine that ran it."""
    return re.sub(r"/\S*/", "", command)


def disturbance_of(text: str) -> str:
    """Return how many samples other processes disturbed, by part of the report."""
    found = re.findall(r"in (\d+ of \d+) samples other processes kept more than 0\.1", text)
    return ", ".join(found)


def comparison_table() -> Iterator[str]:
    """Yield the lines of README's table: the newest comparison of each model, by processor."""
    yield (
        "| processor | model | tokens/s, 1 / 8 | × vLLM CPU, all cores | × vLLM CPU, default "
        "| × llama.cpp's decode speed | samples disturbed |"
    )
    yield "|---|---|---|---|---|---|---|"
    saved = [
        (path.with_suffix(".md"), read_run(path).figures)
        for path in sorted(RESULTS.glob("*-compare*.json"), reverse=True)
    ]
    for words in PROCESSORS.values():
        runs = [run for run in saved if processor_of(run[0].read_text("utf-8")) == words]
        previous = None
        for model in _MODELS:
            run = next((r for r in runs if find(r[1], "output, 1 at once", model)), None)
            if run is None:
                continue
            report, figures = run
            place = "" if report == previous else f"{words}, {report.name[:10]}"
            yield f"| {place} | {model} | {_cells(report, figures, model)} |"
            previous = report


def _cells(report: Path, figures: Sequence[Figure], model: str) -> str:
    rates = [find(figures, f"output, {count} at once", model) for count in (1, 8)]
    disturbed = disturbance_of(_section(report, model)) or "none reported"
    cells = [
        " / ".join("–" if rate is None else shown(rate.known, "").split()[0] for rate in rates),
        *(
            _ratios(figures, model, "output, {} at once", side, faster=True)
            for side in (_ALL_CORES, _DEFAULT)
        ),
        _ratios(figures, model, "decode step, batch {}", "llama.cpp", faster=False),
        f"[{disturbed}](benchmarks/results/{report.name})",
    ]
    return " | ".join(cells)


def _section(report: Path, model: str) -> str:
    """Return the part of a report on a model."""
    text = report.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(model)}:.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[0] if found else ""


def _ratios(figures: Sequence[Figure], model: str, name: str, side: str, *, faster: bool) -> str:
    """Return how many times as fast ours is with 1 and 8, "–" where a side was not measured."""
    cells = []
    for count in (1, 8):
        ours, theirs = (find(figures, name.format(count), model, s) for s in ("ours", side))
        found = []
        if ours and theirs:
            found = ratios(ours, theirs) if faster else ratios(theirs, ours)
        middle = sorted(found)[len(found) // 2] if found else 0.0
        cells.append("–" if not found else f"{middle:.2f}" if middle < _MANY else f"> {_MANY}")
    return " / ".join(cells)
