"""Merges the metrics pages of several processes into one, with a label `model_name`.

Invariant: counters and histograms of a model continue over its loads: what ended processes had
counted is added to the counts of the running one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_ADDED = ("counter", "histogram", "summary")
_LABEL = "model_name"


@dataclass
class MetricFamily:
    """One metric: its header lines, and its samples by name with labels."""

    kind: str = "untyped"
    header: list[str] = field(default_factory=list)
    samples: dict[str, float] = field(default_factory=dict)


Families = dict[str, MetricFamily]


def parse_page(text: str, model: str) -> Families:
    """Return the families of a page in Prometheus' text format, labelled with the model."""
    families: Families = {}
    current = MetricFamily()
    for line in text.splitlines():
        words = line.split(" ", 3)
        if line.startswith("#"):
            if len(words) == 4 and words[1] in ("HELP", "TYPE"):
                current = families.setdefault(words[2], MetricFamily())
                current.header.append(line)
                current.kind = words[3] if words[1] == "TYPE" else current.kind
        elif (found := _SAMPLE.fullmatch(line)) is not None:
            labels = found[2] or ""
            if f'{_LABEL}="' not in labels:
                labels = f"{labels}{',' if labels else ''}{_LABEL}={quoted(model)}"
            current.samples[f"{found[1]}{{{labels}}}"] = float(found[3])
    return families


def add_counts(total: Families, ended: Families) -> None:
    """Add the counters and histograms of `ended` to those of `total`."""
    for name, family in ended.items():
        if family.kind not in _ADDED:
            continue
        mine = total.setdefault(name, MetricFamily(family.kind, family.header))
        for sample, value in family.samples.items():
            mine.samples[sample] = mine.samples.get(sample, 0.0) + value


def join_pages(pages: Iterable[Families]) -> Families:
    """Return all families, those of one name as one; the samples of equal labels are added."""
    joined: Families = {}
    for page in pages:
        for name, family in page.items():
            mine = joined.setdefault(name, MetricFamily(family.kind, family.header))
            for sample, value in family.samples.items():
                mine.samples[sample] = mine.samples.get(sample, 0.0) + value
    return joined


def render_page(families: Mapping[str, MetricFamily]) -> str:
    """Return the page in Prometheus' text format."""
    lines: list[str] = []
    for family in families.values():
        lines += family.header
        lines += [f"{sample} {value!r}" for sample, value in family.samples.items()]
    return "\n".join(lines) + "\n"


def gauge(name: str, about: str, values: Mapping[str, float], kind: str = "gauge") -> Families:
    """Return a family of one metric with values by their labels, such as `model_name="a"`."""
    samples = {f"{name}{{{labels}}}" if labels else name: v for labels, v in values.items()}
    header = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return {name: MetricFamily(kind, header, samples)}


def quoted(value: str) -> str:
    """Return a label's value in quotes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
