"""Rows of docs/results.md: each result file, how it was measured, and the pages that quote it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

RESULT_BLOCKS = (
    "# Measurements and where they are quoted",
    "Look up which file of `benchmarks/results` backs a figure, and repeat it with the command "
    "([benchmarks](../benchmarks/README.md)). Beside each report lie its raw numbers (`.json` "
    "or `.jsonl`). *Disturbed* counts samples during which other processes used more than a "
    "tenth of a core: such times are no measurement. Reports since 26 November 2026 leave them out "
    "of every figure; in earlier ones only ratios within a round count. Reports written before "
    "that count existed leave it empty. Nothing here was measured on an NPU. [Targets](targets.md) "
    "lists the bounds that these figures meet or miss.",
    "Figures of other pages that no file here backs are marked there as *no result file*.",
)
RESULT_HEADER = ("Result", "Command", "Processor, two cores each", "Disturbed", "Quoted in")

_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
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
_README = "[README](../README.md#what-ran-where)"
_QUANTIZED = "[quantization](quantization.md#speed-and-memory)"
_MOE = "[moe](moe.md)"
_QUOTED: dict[str, str] = {
    f"2026-11-21-{_AMD_AVX2}-compare": _README,
    f"2026-11-21-{_AMD_AVX2}-compare-1.2b": _README,
    f"2026-11-21-{_AMD_AVX2}-compare-15m-http": _README,
    f"2026-11-21-{_AMD_AVX2}-step_profile": "[decision 15]"
    "(decisions/0015-async-scheduling-is-left-off.md), [decision 17]"
    "(decisions/0017-graphs-are-recorded-and-repeated.md)",
    f"2026-11-22-{_AMD}-experts": _MOE,
    f"2026-11-22-{_AMD}-start_up": "[compile_cache](compile_cache.md)",
    f"2026-11-22-{_AMD}-world_size": "[parallelism](parallelism.md)",
    f"2026-11-22-{_INTEL}-storm": "[decision 35]"
    "(decisions/0035-large-bodies-are-read-beside-the-event-loop.md)",
    f"2026-11-23-{_INTEL}-agents": "[decision 39]"
    "(decisions/0039-every-documented-field-has-a-treatment.md)",
    f"2026-11-23-{_INTEL}-speculation": "[speculation](speculation.md#cost)",
    f"2026-11-23-{_INTEL}-quantized-1.2b": _QUANTIZED,
    f"2026-11-23-{_INTEL}-quantized-gpt-oss-0.9b": _QUANTIZED,
    f"2026-11-23-{_AMD}-padding": "[batches](batches.md)",
    f"2026-11-24-{_AMD}-compare": _README,
    f"2026-11-24-{_AMD}-long_prompt": "[decision 59]"
    "(decisions/0059-scores-are-products-of-pairs.md)",
    f"2026-11-24-{_AMD}-prompts_at_once": "[decision 52]"
    "(decisions/0052-prompts-lie-end-to-end-in-a-chunk.md)",
    f"2026-11-24-{_AMD}-quantized-1.2b": _QUANTIZED,
    f"2026-11-24-{_AMD}-quantized-1.2b-fp8-awq": _QUANTIZED,
    f"2026-11-24-{_AMD}-quantized-gpt-oss-0.9b": _QUANTIZED,
    f"2026-11-24-{_AMD}-same-file": "[gguf](gguf.md)",
}
"""Result -> the pages with its figures. A result that is missing here is quoted nowhere."""


def result_rows() -> Iterable[tuple[str, ...]]:
    """Yield a row for each result. Raises `ValueError` for a quotation without a result."""
    reports = {path.stem: path for path in sorted(_RESULTS.glob("*.md"))}
    if absent := _QUOTED.keys() - reports.keys():
        raise ValueError(f"docs/results_page.py: there is no result {sorted(absent)}")
    for stem, path in reports.items():
        text = path.read_text(encoding="utf-8")
        command = re.search(r"`python -m (benchmarks[. ][^`]*)`", text)
        yield (
            f"[{stem.partition('core-')[2]}, {stem[:10]}](../benchmarks/results/{path.name})",
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
