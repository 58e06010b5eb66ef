"""Totals of the engine's work so far, read from the metrics of vLLM and of the engine processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import REGISTRY, Metric
from prometheus_client.multiprocess import MultiProcessCollector

_VLLM = (
    *("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
)
_ROWS = ("rbln_bucket_useful_rows_total", "rbln_bucket_padded_rows_total")
_DECODE = ("decode", "verify")
"""Phases whose rows are requests; a verify step checks draft tokens."""
_TOKENS = ("rbln_prefill_useful_tokens_total", "rbln_prefill_padded_tokens_total")
_COUNTERS = "counter_*.db"
"""Multiprocess files of counters; histograms, most of the data, have other files."""


@dataclass(frozen=True, slots=True)
class PaddedWork:
    """Computed rows or tokens: of requests, and of padding."""

    useful: int
    padded: int

    def since(self, before: PaddedWork) -> PaddedWork:
        """Return the difference to an earlier total."""
        return PaddedWork(self.useful - before.useful, self.padded - before.padded)

    def share(self) -> float | None:
        """Return the share of padding; None if nothing was computed."""
        total = self.useful + self.padded
        return round(self.padded / total, 4) if total > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counters since the start and current gauges, summed over all engines."""

    output_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    decode: PaddedWork = PaddedWork(0, 0)
    prefill: PaddedWork = PaddedWork(0, 0)


def read_traffic(board_dir: Path) -> Traffic | None:
    """Return the totals; None before vLLM has metrics. Takes about 1 ms for one engine."""
    vllm = _samples(REGISTRY.restricted_registry(_VLLM).collect())
    if _VLLM[0] not in vllm:
        return None
    output, prompt, running, waiting, usage = (vllm[name] for name in _VLLM)
    boards = _samples(_counters(board_dir))
    return Traffic(
        output_tokens=int(sum(output)),
        prompt_tokens=int(sum(prompt)),
        running=int(sum(running)),
        waiting=int(sum(waiting)),
        kv_cache_usage=sum(usage) / max(1, len(usage)),
        decode=_work(boards, [f"{phase} {{}}" for phase in _DECODE], _ROWS),
        prefill=_work(boards, ["{}"], _TOKENS),
    )


def _work(boards: Mapping[str, list[float]], keys: list[str], names: tuple[str, str]) -> PaddedWork:
    """Return the sums over `keys` of two counters: useful work and padding."""
    useful, padded = (sum(sum(boards[key.format(name)]) for key in keys) for name in names)
    return PaddedWork(int(useful), int(padded))


def _counters(board_dir: Path) -> Iterable[Metric]:
    files = [str(path) for path in board_dir.glob(_COUNTERS)]
    if not files:
        return ()
    found: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return found


def _samples(metrics: Iterable[Metric]) -> defaultdict[str, list[float]]:
    """Return values by name, and those with a phase by phase and name as well."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample in (sample for metric in metrics for sample in metric.samples):
        found[sample.name].append(sample.value)
        if "phase" in sample.labels:
            found[f"{sample.labels['phase']} {sample.name}"].append(sample.value)
    return found
