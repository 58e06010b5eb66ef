"""Report of device time: the hours of a window, grouped by chosen fields."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from rbln_backend.api.requests import WARMUP
from server.errors import InvalidValueError, describe
from server.storage.usage.device_usage import READY
from server.storage.usage.table import HOUR_S, KEPT_HOURS, HourAccount

_FIELDS = ("kind", "key", "model", "hour")


class UsageEntry(TypedDict, total=False):
    """Device seconds of one account; fields that are not grouped by are absent."""

    start_time: int
    kind: str
    key: str | None
    model: str
    device_seconds: float


class UsageReport(TypedDict):
    """Body of `/v1/usage`; times are in seconds since 1970."""

    object: str
    start_time: int
    end_time: int
    ready_seconds: float
    device_seconds: float
    idle_seconds: float
    warmup_seconds: float
    data: list[UsageEntry]


class UsageWindow(NamedTuple):
    """First and last hour since 1970."""

    first: int
    last: int


def window_of(start_time: str | None, end_time: str | None, now: float) -> UsageWindow:
    """Return the hours of two parameters in seconds since 1970. Raises `InvalidValueError`."""
    return UsageWindow(
        _hour("start_time", start_time, int(now) - (KEPT_HOURS - 1) * HOUR_S),
        _hour("end_time", end_time, int(now)),
    )


def _hour(name: str, text: str | None, default: int) -> int:
    """Return the hour since 1970 of a parameter. Raises `InvalidValueError`."""
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InvalidValueError(
            f"{name}: must be whole seconds since 1970, got {describe(text)}", param=name
        )
    return (default if text is None else int(text)) // HOUR_S


def grouping(text: str) -> tuple[str, ...]:
    """Return the fields of `group_by`. Raises `InvalidValueError`."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if any(name not in _FIELDS for name in names):
        known = ", ".join(_FIELDS)
        raise InvalidValueError(
            f"group_by: must be names of {known}, joined by commas, got {describe(text)}",
            param="group_by",
        )
    return names


def usage_report(
    found: Mapping[HourAccount, float],
    window: UsageWindow,
    fields: Sequence[str],
    only: Mapping[str, str | None],
) -> UsageReport:
    """Return the report; `only` are values that `data` is limited to, None for all."""
    kinds: defaultdict[str, float] = defaultdict(float)
    groups: defaultdict[tuple[Any, ...], float] = defaultdict(float)
    for (hour, account), seconds in found.items():
        kinds[account.kind] += seconds
        values = {**account._asdict(), "hour": hour}
        matches = all(wanted in (None, values[name]) for name, wanted in only.items())
        if account != READY and matches:
            groups[tuple(values[name] for name in fields)] += seconds
    ready, warm_up = kinds[READY.kind], kinds[WARMUP]
    computed = sum(kinds.values()) - ready - warm_up
    return UsageReport(
        object="usage",
        start_time=window.first * HOUR_S,
        end_time=(window.last + 1) * HOUR_S,
        ready_seconds=round(ready, 6),
        device_seconds=round(computed, 6),
        idle_seconds=round(max(0.0, ready - computed), 6),
        warmup_seconds=round(warm_up, 6),
        data=[
            _entry(dict(zip(fields, group, strict=True)), groups[group]) for group in sorted(groups)
        ],
    )


def _entry(values: dict[str, Any], seconds: float) -> UsageEntry:
    entry = UsageEntry()
    if "hour" in values:
        entry["start_time"] = values["hour"] * HOUR_S
    if "kind" in values:
        entry["kind"] = values["kind"]
    if "key" in values:
        entry["key"] = values["key"] or None
    if "model" in values:
        entry["model"] = values["model"]
    entry["device_seconds"] = round(seconds, 6)
    return entry
