"""Sizes of steps from what Prometheus has scraped of a server.

Counters say by bucket how many steps ran, how many rows or tokens they held and how long they took.
Between two samples the mean size is known, not each size: the finer the resolution, the nearer to
what ran. Several servers under one selector are taken together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from rbln_backend.bucketing.usage import PHASES, Usage

_TIMEOUT_S = 60.0
# Prometheus refuses more points than this for one series.
_MOST_POINTS = 11_000
_HELD = {
    "decode": ("rbln_bucket_useful_rows_total", 'phase="decode"', "bucket"),
    "prefill": ("rbln_prefill_useful_tokens_total", "", "chunk"),
}


@dataclass(frozen=True, slots=True)
class Range:
    """Where to ask for which time: Unix seconds, `step_s` between two samples."""

    url: str
    start: float
    end: float
    step_s: float
    selector: str = ""

    def __post_init__(self) -> None:
        if self.end <= self.start or self.step_s <= 0:
            raise ValueError(f"the range from {self.start} to {self.end} is empty")
        if (self.end - self.start) / self.step_s > _MOST_POINTS:
            least = math.ceil((self.end - self.start) / _MOST_POINTS)
            raise ValueError(f"--resolution must be {least} s or more for so long a range")


def read_range(asked: Range) -> Usage:
    """Return what ran, and the present buckets in `about`. Raises `ValueError` with the reason."""
    usage = Usage()
    with httpx.Client(base_url=asked.url, timeout=_TIMEOUT_S) as client:
        for phase in PHASES:
            _read_phase(client, asked, phase, usage)
    if not usage.steps:
        raise ValueError(
            f"{asked.url} has no steps of a server with {{{asked.selector}}} in this range"
        )
    return usage


def _read_phase(client: httpx.Client, asked: Range, phase: str, usage: Usage) -> None:
    held, matcher, label = _HELD[phase]
    of_phase = f'phase="{phase}"'
    steps = _increases(client, asked, "rbln_bucket_steps_total", of_phase, "bucket")
    seconds = _increases(client, asked, "rbln_bucket_step_seconds_sum", of_phase, "bucket")
    sizes = _increases(client, asked, held, matcher, label)
    noted = usage.phases[phase]
    for bucket, by_time in steps.items():
        for time, count in by_time.items():
            number = round(count)
            if number < 1:
                continue
            mean = sizes.get(bucket, {}).get(time, 0.0) / count
            size = min(max(1, math.ceil(mean - 1e-6)), bucket)
            noted.steps_by_size[size] = noted.steps_by_size.get(size, 0) + number
            noted.steps_by_bucket[bucket] = noted.steps_by_bucket.get(bucket, 0) + number
            spent = seconds.get(bucket, {}).get(time, 0.0)
            noted.seconds_by_bucket[bucket] = noted.seconds_by_bucket.get(bucket, 0.0) + spent
    usage.about[f"{phase}_buckets"] = sorted(steps)


def _increases(
    client: httpx.Client, asked: Range, metric: str, matcher: str, label: str
) -> dict[int, dict[float, float]]:
    """By bucket and time what was added since the sample before."""
    matchers = ",".join(part for part in (matcher, asked.selector) if part)
    # From raw samples: rate() would extrapolate, and steps are whole.
    series = _query(client, asked, f"{metric}{{{matchers}}}")
    found: dict[int, dict[float, float]] = {}
    for one in series:
        by_time = found.setdefault(int(one["metric"][label]), {})
        for time, more in _differences(one["values"]):
            by_time[time] = by_time.get(time, 0.0) + more
    return found


def _query(client: httpx.Client, asked: Range, expr: str) -> Sequence[Mapping[str, Any]]:
    params: dict[str, str | float] = {
        "query": expr,
        "start": asked.start,
        "end": asked.end,
        "step": asked.step_s,
    }
    try:
        answer = client.get("/api/v1/query_range", params=params)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{asked.url} does not answer as Prometheus does: {error}") from error
    if body.get("status") != "success":
        raise ValueError(f"{asked.url} refuses {expr}: {body.get('error', answer.status_code)}")
    series: Sequence[Mapping[str, Any]] = body["data"]["result"]
    return series


def _differences(values: Sequence[tuple[float, str]]) -> Iterator[tuple[float, float]]:
    """A counter that falls was begun anew by a restart."""
    for (_, before), (time, now) in pairwise(values):
        more = float(now) - float(before)
        yield float(time), more if more >= 0 else float(now)
