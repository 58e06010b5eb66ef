"""Tables of the pages that come from saved results: measurements, published models, alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engines.sides import VLLM_NAMES
from benchmarks.runner.command import RESULTS, Figure, find, ratios, read_run, shown

DOCS = Path(__file__).resolve().parent
PUBLISHED = DOCS / "published.json"
_RULES = DOCS.parent / "deploy" / "prometheus"
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_MODELS = ("15m", "160m", "1.2b")
_MANY = 100
"""Ratios above it are those of a load that hardly began in its time budget."""
_DEFAULT, _ALL_CORES = VLLM_NAMES
PROCESSORS = {
    ("25", "1"): "AMD EPYC Zen 3, AVX2",
    ("25", "17"): "AMD EPYC Zen 4, AVX-512 with bf16",
    ("26", "2"): "AMD EPYC Zen 5, AVX-512 with bf16",
    ("6", "106"): "Intel Xeon Ice Lake 2.8 GHz, AVX-512",
}
"""CPU family and model, as reports have them from `lscpu` -> processor."""


def code(text: str) -> str:
    """Return `text` as Markdown's code."""
    return f"`{text}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def alerts() -> str:
    """Return the alerts with links to their runbooks; those that are off by default come last."""
    rows = []
    for default, file in (("on", "alerts.yml"), ("off", "alerts.extended.yml")):
        groups = yaml.safe_load((_RULES / file).read_text(encoding="utf-8"))["groups"]
        for rule in (rule for group in groups for rule in group["rules"]):
            name = rule["alert"]
            summary = _LABEL.sub(r"`<\1>`", rule["annotations"]["summary"])
            severity = ", ".join(rule["labels"].values())
            after = str(rule.get("for", "at once"))
            rows.append((f"[{name}](runbooks/{name}.md)", default, severity, after, summary))
    return table(("Alert", "Default", "Severity", "After", "Summary"), rows)


def load_published() -> dict[str, Any]:
    """Return the results of docs/published.py by model."""
    published: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return published


def published_models() -> str:
    """Return the results of docs/published.py; models that run come first."""
    rows = []
    for name, result in sorted(load_published().items(), key=lambda item: "reason" in item[1]):
        if "reason" in result:
            rows.append((name, "no", "", "", result["reason"]))
            continue
        size = f"{_size(result['weight_bytes'])}, {result['dtype']}"
        if result["quantized_layers"]:
            size = f"{size}; {result['quantized_layers']}"
        flags = code(result["flags"]) if result["flags"] else ""
        caches = ", ".join(result["kv_caches"]) or "none"
        rows.append((name, "pools" if result["task"] == "pools" else "yes", size, caches, flags))
    return table(("Model", "Runs", "Weights", "KV caches", "With, or why not"), rows)


def _size(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):,.0f} MiB"


def result_files() -> str:
    """Return every saved report with its command, processor and disturbed samples."""
    rows = []
    for path in sorted(RESULTS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        command = re.search(r"`python -m (benchmarks[. ][^`]*)`", text)
        # Without folders of the machine that ran it.
        shortened = code(re.sub(r"/\S*/", "", command[1])) if command else ""
        name = f"{path.stem.partition('core-')[2]}, {path.stem[:10]}"
        link = f"[{name}](../../benchmarks/results/{path.name})"
        rows.append((link, shortened, _processor(text), _disturbance(text)))
    return table(("Result", "Command", "Processor, two cores each", "Disturbed"), rows)


def comparisons() -> str:
    """Return the newest comparison of each model with its peers, by processor."""
    rows = []
    runs = _comparisons()
    for processor in PROCESSORS.values():
        for model in _MODELS:
            for report, text, figures in runs:
                if _processor(text) == processor and find(figures, "output, 1 at once", model):
                    link = f"[{report.name[:10]}](../../benchmarks/results/{report.name})"
                    rows.append(
                        (
                            processor,
                            model,
                            _rates(figures, model),
                            _ratios(figures, model, "output, {} at once", _ALL_CORES),
                            _ratios(figures, model, "output, {} at once", _DEFAULT),
                            _ratios(figures, model, "decode step, batch {}", "llama.cpp"),
                            _disturbance(_section(text, model)) or "none reported",
                            link,
                        )
                    )
                    break
    header = ("Processor", "Model", "Tokens/s, 1 / 8", "× vLLM CPU, all cores")
    header += ("× vLLM CPU, default", "× llama.cpp's decode speed", "Disturbed", "Report")
    return table(header, rows)


def speed() -> str:
    """Return README's rows: the newest run of all models beside vLLM's fastest configuration."""
    for report, text, figures in _comparisons():
        ours = [find(figures, "output, 1 at once", model) for model in _MODELS]
        theirs = [find(figures, "output, 1 at once", model, _ALL_CORES) for model in _MODELS]
        if all(ours) and all(theirs):
            columns = (_MODELS, *zip(*_speed_cells(figures), strict=True))
            where = f"[{_processor(text)}, {report.name[:10]}](benchmarks/results/{report.name})"
            header = ("Model", "Tokens/s, 1 / 8 requests", "× vLLM CPU, 1 / 8")
            return f"{where}:\n\n{table(header, zip(*columns, strict=True))}"
    raise ValueError("no saved comparison has all models and vLLM on all cores")


def _speed_cells(figures: Sequence[Figure]) -> Iterable[tuple[str, str]]:
    for model in _MODELS:
        yield (
            _rates(figures, model),
            _ratios(figures, model, "output, {} at once", _ALL_CORES),
        )


def _comparisons() -> list[tuple[Path, str, Sequence[Figure]]]:
    """Return report, its text and figures of each saved comparison, the newest first."""
    paths = sorted(RESULTS.glob("*-compare*.json"), reverse=True)
    reports = [(path.with_suffix(".md"), read_run(path).figures) for path in paths]
    return [(report, report.read_text(encoding="utf-8"), figures) for report, figures in reports]


def _processor(text: str) -> str:
    match = re.search(r"CPU family (\d+), Model (\d+)", text)
    if match is None or match.groups() not in PROCESSORS:
        raise ValueError(f"docs/saved_tables.py: PROCESSORS lacks {match and match[0]}")
    return PROCESSORS[match[1], match[2]]


def _disturbance(text: str) -> str:
    """Return how many samples other processes disturbed, by part of the report."""
    return ", ".join(
        re.findall(r"in (\d+ of \d+) samples other processes kept more than 0\.1", text)
    )


def _section(text: str, model: str) -> str:
    """Return the part of a report on a model."""
    match = re.search(rf"^## {re.escape(model)}:.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return match[0] if match else ""


def _rates(figures: Sequence[Figure], model: str) -> str:
    rates = [find(figures, f"output, {count} at once", model) for count in (1, 8)]
    return " / ".join("–" if rate is None else shown(rate.known, "").split()[0] for rate in rates)


def _ratios(figures: Sequence[Figure], model: str, name: str, side: str) -> str:
    """Return how many times as fast ours is with 1 and 8, "–" where a side was not measured.

    `name` is a rate, or a time if it is a step's.
    """
    cells = []
    for count in (1, 8):
        ours, theirs = (find(figures, name.format(count), model, s) for s in ("ours", side))
        if not (ours and theirs):
            cells.append("–")
            continue
        found = ratios(theirs, ours) if name.startswith("decode step") else ratios(ours, theirs)
        middle = sorted(found)[len(found) // 2] if found else 0.0
        cells.append("–" if not found else f"{middle:.2f}" if middle < _MANY else f"> {_MANY}")
    return " / ".join(cells)
