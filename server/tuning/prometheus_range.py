"""Step sizes from Prometheus' samples of a server.

Counters have the number of steps by bucket, their rows or tokens, and their seconds. Between two
samples only the mean size is known, so a finer resolution is more accurate. Servers under one
selector are added up.
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
# Prometheus rejects queries with more points per series.
_MOST_POINTS = 11_000
_ROWS = "rbln_bucket_useful_rows_total"
_COUNTERS = {
    "rbln_bucket_steps_total": "steps",
    "rbln_bucket_step_seconds_sum": "seconds",
    _ROWS: "held",
    "rbln_prefill_useful_tokens_total": "held",
}


def read_range(url: str, selector: str, start: float, end: float, step_s: float) -> Usage:
    """Return the steps from `start` to `end`, in Unix seconds, and the buckets in `about`.

    `step_s` is the time between two samples. Raises `ValueError` with the reason.
    """
    if end <= start or step_s <= 0:
        raise ValueError(f"the range from {start} to {end} is empty")
    if (end - start) / step_s > _MOST_POINTS:
        least = math.ceil((end - start) / _MOST_POINTS)
        raise ValueError(f"--resolution must be {least} s or more for so long a range")
    name = f'__name__=~"{"|".join(_COUNTERS)}"'
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
    """Return increases since the previous sample by counter, then phase, bucket and time."""
    found: dict[str, dict[tuple[str, int, float], float]]
    found = defaultdict(lambda: defaultdict(float))
    for one in series:
        labels = one["metric"]
        name, phase = labels["__name__"], labels.get("phase", "prefill")
        # A step that checks drafts runs in the bucket of its requests.
        phase = "decode" if phase == "verify" else phase
        # Chunks have one row each; their tokens are counted instead.
        if phase not in PHASES or (name == _ROWS and phase == "prefill"):
            continue
        bucket = int((labels.get("bucket") or labels["chunk"]).partition("x")[0])
        # From raw samples: rate() extrapolates.
        samples = [(float(at), float(value)) for at, value in one["values"]]
        for (_, before), (at, now) in pairwise(samples):
            # A counter that decreases was reset by a restart.
            found[_COUNTERS[name]][phase, bucket, at] += now - before if now >= before else now
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
