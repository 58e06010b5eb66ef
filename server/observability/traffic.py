"""The engine's work: totals so far, samples of the last ten minutes, and advice on bucket sizes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from rbln_backend.api.names import read_descriptions
from rbln_backend.usage import UsageFile, advise
from server.host.tasks import in_thread

_VLLM = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
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
    files = [str(path) for path in board_dir.glob(_COUNTERS)]
    merged = MultiProcessCollector.merge(files) if files else ()  # type: ignore[no-untyped-call]
    boards = _samples(merged)
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


def _samples(metrics: Iterable[Metric]) -> defaultdict[str, list[float]]:
    """Return values by name, and those with a phase by phase and name as well."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in (sample for metric in metrics for sample in metric.samples):
        values[sample.name].append(sample.value)
        if "phase" in sample.labels:
            values[f"{sample.labels['phase']} {sample.name}"].append(sample.value)
    return values


logger = logging.getLogger(__name__)

PERIOD_S = 5.0
KEPT = 120
"""Number of samples: ten minutes, about 30 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    number: Annotated[int, "1 for the first sample of this process, rising by 1."]
    at: Annotated[float, "End of the interval, in seconds since 1970."]
    seconds: Annotated[float, "Length of the interval; longer than `period_s` on a busy machine."]
    output_tokens: Annotated[int, "Tokens generated in the interval."]
    prompt_tokens: Annotated[int, "Prompt tokens of requests whose prefill ended in the interval."]
    running: Annotated[int, "Requests in the engine's batch at the end of the interval."]
    waiting: Annotated[int, "Requests in the queue at that time."]
    kv_cache_usage: Annotated[float, "Share of the paged KV blocks in use at that time, 0 to 1."]
    decode_padding: Annotated[
        float | None, "Share of padding in the rows of decode steps; null: no step."
    ]
    prefill_padding: Annotated[
        float | None, "Share of padding in the tokens of prefill steps; null: no step."
    ]


class History:
    """The latest samples, which the console draws, so that a new page shows past traffic.

    Counts cover a whole interval: a burst of tokens appears as a rate over the interval. Used from
    the event loop; `read` runs in a thread.
    """

    def __init__(self, read: Callable[[], Traffic | None]) -> None:
        """Sample the totals that `read` returns; it returns None without an engine."""
        self._read = read
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._latest: tuple[float, Traffic] | None = None
        self._number = 0

    async def follow(self, period_s: float = PERIOD_S) -> None:
        """Take a sample every `period_s`; never returns. A failed read skips one sample."""
        while True:
            try:
                await self.take()
            except Exception as error:  # noqa: BLE001 (an engine may be creating the files)
                logger.debug("No sample of the traffic: %s", error)
            await asyncio.sleep(period_s)

    async def take(self) -> None:
        """Add a sample of the work since the last call; does nothing without an engine."""
        total = await asyncio.to_thread(self._read)
        now = time.monotonic()
        # Counters begin at 0: the first sample covers the time since the last call.
        latest, self._latest = self._latest, (now, total or Traffic())
        if latest is None or total is None:
            return
        began, before = latest
        self._number += 1
        self._samples.append(
            Sample(
                number=self._number,
                at=round(time.time(), 3),
                seconds=round(now - began, 3),
                output_tokens=total.output_tokens - before.output_tokens,
                prompt_tokens=total.prompt_tokens - before.prompt_tokens,
                running=total.running,
                waiting=total.waiting,
                kv_cache_usage=round(total.kv_cache_usage, 4),
                decode_padding=total.decode.since(before.decode).share(),
                prefill_padding=total.prefill.since(before.prefill).share(),
            )
        )

    def after(self, number: int) -> list[Sample]:
        """Return the samples after `number`; all of them if it is above the latest.

        A page opened before a restart sends a number of the previous process.
        """
        if number > self._number:
            number = 0
        return [sample for sample in self._samples if sample.number > number]


_ADVICE_PERIOD_S = 60.0
"""The period at which the engine writes its record."""
_FIRST_ADVICE_PERIOD_S = 5.0


class BucketAdvice:
    """The advice on the usage record of the engine in `run_dir`.

    Computed in a thread: the record is in the cache root, a mount that may hang.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._changed_at: int | None = None
        self._advice: dict[str, Any] | None = None

    async def latest(self) -> dict[str, Any] | None:
        """Return the advice, at most a minute old; None while there is none."""
        period_s = _FIRST_ADVICE_PERIOD_S if self._advice is None else _ADVICE_PERIOD_S
        if (now := self._clock()) - self._looked_at < period_s:
            return self._advice
        self._looked_at = now

        def look() -> dict[str, Any] | None:
            ranks = read_descriptions(self._run_dir)
            return self._read(ranks[0].get("buckets") if ranks else None)

        return await in_thread(look)

    async def of(self, buckets: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the current advice; `buckets` is the `buckets` section of the engine's report."""
        return await in_thread(partial(self._read, buckets))

    def _read(self, buckets: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if buckets is None or buckets["usage_file"] is None:
            return None
        path = Path(buckets["usage_file"])
        with self._lock:
            try:
                changed_at = path.stat().st_mtime_ns
                if changed_at != self._changed_at:
                    usage = UsageFile(path).read()
                    self._advice = advise(usage) if usage.steps else None
                    self._changed_at = changed_at
            except (OSError, ValueError):
                # The next step that is written moves a damaged file away.
                return None
            return self._advice
