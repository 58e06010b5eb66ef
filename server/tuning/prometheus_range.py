"""Sizes of steps from what Prometheus has scraped of a server.

Counters say by bucket how many steps ran, how many rows or tokens they held and how long they took.
Between two samples the mean size is known, not each size: the finer the resolution, the nearer to
what ran. Several servers under one selector are taken together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx

from rbln_backend.bucketing.usage import PHASES, Usage

_TIMEOUT_S = 60.0
# Prometheus refuses more points than this for one series.
_MOST_POINTS = 11_000
_ROWS = "rbln_bucket_useful_rows_total"
_TOLD = {
    "rbln_bucket_steps_total": "steps",
    "rbln_bucket_step_seconds_sum": "seconds",
    _ROWS: "held",
    "rbln_prefill_useful_tokens_total": "held",
}


def read_range(url: str, selector: str, start: float, end: float, step_s: float) -> Usage:
    """Return what ran from `start` to `end`, in Unix seconds, and the present buckets in `about`.

    `step_s` is between two samples. Raises `ValueError` with the reason.
    """
    if end <= start or step_s <= 0:
        raise ValueError(f"the range from {start} to {end} is empty")
    if (end - start) / step_s > _MOST_POINTS:
        least = math.ceil((end - start) / _MOST_POINTS)
        raise ValueError(f"--resolution must be {least} s or more for so long a range")
    name = f'__name__=~"{"|".join(_TOLD)}"'
    expr = f"{{{name},{selector}}}" if selector else f"{{{name}}}"
    added = _increases(_query(url, {"query": expr, "start": start, "end": end, "step": step_s}))
    usage = Usage()
    for (phase, bucket, at), count in added["steps"].items():
        if (number := round(count)) >= 1:
            size = math.ceil(added["held"][phase, bucket, at] / count - 1e-6)
            seconds = added["seconds"][phase, bucket, at]
            usage.phases[phase].note(min(max(1, size), bucket), bucket, seconds, number)
    if not usage.steps:
        raise ValueError(f"{url} has no steps of a server with {{{selector}}} in this range")
    for wanted in PHASES:
        found = {bucket for phase, bucket, _ in added["steps"] if phase == wanted}
        usage.about[f"{wanted}_buckets"] = sorted(found)
    return usage


def _increases(
    series: Sequence[Mapping[str, Any]],
) -> Mapping[str, Mapping[tuple[str, int, float], float]]:
    """What was added since the sample before, by what it is and then phase, bucket and time."""
    found: dict[str, dict[tuple[str, int, float], float]]
    found = defaultdict(lambda: defaultdict(float))
    for one in series:
        labels = one["metric"]
        name, phase = labels["__name__"], labels.get("phase", "prefill")
        # A step that checks drafts runs in the bucket of its requests.
        phase = "decode" if phase == "verify" else phase
        # Of chunks the tokens are told, whose rows are one each.
        if phase not in PHASES or (name == _ROWS and phase == "prefill"):
            continue
        bucket = int((labels.get("bucket") or labels["chunk"]).partition("x")[0])
        # From raw samples: rate() would extrapolate, and steps are whole.
        samples = [(float(at), float(value)) for at, value in one["values"]]
        for (_, before), (at, now) in pairwise(samples):
            # A counter that falls was begun anew by a restart.
            found[_TOLD[name]][phase, bucket, at] += now - before if now >= before else now
    return found


def _query(url: str, params: Mapping[str, str | float]) -> Sequence[Mapping[str, Any]]:
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/api/v1/query_range", params=params, timeout=_TIMEOUT_S
        )
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{url} does not answer as Prometheus does: {error}") from error
    if body.get("status") != "success":
        reason = body.get("error", answer.status_code)
        raise ValueError(f"{url} refuses {params['query']}: {reason}")
    series: Sequence[Mapping[str, Any]] = body["data"]["result"]
    return series
