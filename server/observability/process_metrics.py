"""Metrics of several HTTP processes: files of each process, summed when `/metrics` is read.

prometheus_client's multiprocess mode: a process counts in files of its own, which stay when it
ends, so that no sum becomes smaller. In the main process only vLLM's metrics are in files: ours
have gauges whose series are removed, which files cannot.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from server.settings import export_metrics_folder

_VLLM = "vllm:"


def count_in_files(run_dir: Path, *, only_vllm: bool = False) -> None:
    """Count new metrics in files from now on; with `only_vllm` those of vLLM alone.

    Gauges are in files of the main process alone, which has `only_vllm`: the engines report to it.
    """
    folder = _folder(run_dir)
    folder.mkdir(exist_ok=True)
    export_metrics_folder(folder)
    # Their gauges have no file where series are removed.
    warnings.filterwarnings("ignore", message=".*multi-process mode", module="prometheus_client")
    files = values.MultiProcessValue(os.getpid)  # type: ignore[no-untyped-call]
    memory = values.MutexValue

    def value(kind: str, metric: str, *args: Any, **kwargs: Any) -> Any:
        in_files = metric.startswith(_VLLM) if only_vllm else kind != "gauge"
        chosen = files if in_files else memory
        return chosen(kind, metric, *args, **kwargs)

    values.ValueClass = value


def is_of_vllm(family: Metric) -> bool:
    """Return whether the processes have the metric in files."""
    return family.name.startswith(_VLLM)


def families_in_files(run_dir: Path) -> list[Metric]:
    """Return the metrics of all processes, summed."""
    folder = _folder(run_dir)
    if not folder.is_dir():
        return []
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    return list(registry.collect())


def add_samples(family: Metric, more: Iterable[Sample]) -> None:
    """Add the samples of a counter or histogram to those of `family`."""
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in (*family.samples, *more):
        key = sample.name, tuple(sorted(sample.labels.items()))
        known = totals.get(key)
        totals[key] = sample if known is None else known._replace(value=known.value + sample.value)
    family.samples = list(totals.values())


def _folder(run_dir: Path) -> Path:
    return run_dir / "http-metrics"
