"""Headers with the limits of a key, in OpenAI's and in Anthropic's form."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from server.key_limits.ledger import RateState

_FIELDS = ("limit", "remaining", "reset")


def rate_headers(
    rates: Mapping[str, RateState], *, anthropic: bool, wall_s: float | None = None
) -> dict[str, str]:
    """Return the headers of the limited rates; `wall_s` is the time of day as `time.time`."""
    headers: dict[str, str] = {}
    now = time.time() if wall_s is None else wall_s
    for unit, rate in rates.items():
        if anthropic:
            names = [f"anthropic-ratelimit-{unit}-{field}" for field in _FIELDS]
            reset = _time_of_day(now + rate.reset_s)
        else:
            names = [f"x-ratelimit-{field}-{unit}" for field in _FIELDS]
            reset = duration(rate.reset_s)
        headers.update(zip(names, (str(rate.limit), str(rate.remaining), reset), strict=True))
    return headers


def duration(seconds: float) -> str:
    """Return a time span as OpenAI writes it: `12ms`, `1.5s`, `6m0s`; rounded up."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{shown}" if minutes else shown


def _time_of_day(seconds: float) -> str:
    """Return a time as RFC 3339 in whole seconds, rounded up."""
    moment = datetime.fromtimestamp(math.ceil(seconds), tz=UTC)
    return moment.isoformat().replace("+00:00", "Z")
