"""Sizes of steps from what Prometheus has scraped of a server.

Counters say by bucket how many steps ran, how many rows or tokens they held and how long they took.
Between two samples the mean size is known, not each size: the finer the resolution, the nearer to
what ran. Several servers under one selector are taken together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

    def read(self) -> Usage:
        """Return what ran, and the present buckets in `about`.

        Raises `ValueError` with the reason.
        """
        if self.end <= self.start or self.step_s <= 0:
            raise ValueError(f"the range from {self.start} to {self.end} is empty")
        if (self.end - self.start) / self.step_s > _MOST_POINTS:
            least = math.ceil((self.end - self.start) / _MOST_POINTS)
            raise ValueError(f"--resolution must be {least} s or more for so long a range")
        usage = Usage()
        with httpx.Client(base_url=self.url, timeout=_TIMEOUT_S) as client:
            for phase in PHASES:
                self._read_phase(client, phase, usage)
        if not usage.steps:
            raise ValueError(
                f"{self.url} has no steps of a server with {{{self.selector}}} in this range"
            )
        return usage

    def _read_phase(self, client: httpx.Client, phase: str, usage: Usage) -> None:
        of_phase = f'phase="{phase}"'
        steps = self._increases(client, "rbln_bucket_steps_total", of_phase, "bucket")
        seconds = self._increases(client, "rbln_bucket_step_seconds_sum", of_phase, "bucket")
        held = self._increases(client, *_HELD[phase])
        for (bucket, at), count in steps.items():
            if (number := round(count)) >= 1:
                size = math.ceil(held[bucket, at] / count - 1e-6)
                size = min(max(1, size), bucket)
                usage.phases[phase].note(size, bucket, seconds[bucket, at], number)
        usage.about[f"{phase}_buckets"] = sorted({bucket for bucket, _ in steps})

    def _increases(
        self, client: httpx.Client, metric: str, matcher: str, label: str
    ) -> dict[tuple[int, float], float]:
        """What was added since the sample before, by bucket and time."""
        matchers = ",".join(part for part in (matcher, self.selector) if part)
        found: dict[tuple[int, float], float] = defaultdict(float)
        # From raw samples: rate() would extrapolate, and steps are whole.
        for one in self._query(client, f"{metric}{{{matchers}}}"):
            bucket = int(one["metric"][label])
            samples = [(float(at), float(value)) for at, value in one["values"]]
            for (_, before), (at, now) in pairwise(samples):
                # A counter that falls was begun anew by a restart.
                found[bucket, at] += now - before if now >= before else now
        return found

    def _query(self, client: httpx.Client, expr: str) -> Sequence[Mapping[str, Any]]:
        span = {"start": self.start, "end": self.end, "step": self.step_s}
        try:
            answer = client.get("/api/v1/query_range", params={"query": expr, **span})
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ValueError(f"{self.url} does not answer as Prometheus does: {error}") from error
        if body.get("status") != "success":
            raise ValueError(f"{self.url} refuses {expr}: {body.get('error', answer.status_code)}")
        series: Sequence[Mapping[str, Any]] = body["data"]["result"]
        return series
