"""Table of device seconds by hour and account."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import NamedTuple

from rbln_backend.api.reports import DeviceAccount

HOUR_S = 3600
KEPT_HOURS = 24 * 400
"""Hours after which rows are deleted: 400 days."""


class HourAccount(NamedTuple):
    """An hour since 1970 and an account."""

    hour: int
    account: DeviceAccount


HourlySeconds = Mapping[HourAccount, float]


def add_seconds(db: sqlite3.Connection, added: HourlySeconds) -> None:
    """Add seconds to the rows of their hours; delete the hours that are too old."""
    rows = [(place.hour, *place.account, seconds) for place, seconds in added.items()]
    db.executemany(
        "INSERT INTO device_time VALUES (?, ?, ?, ?, ?) ON CONFLICT (hour, kind, key, model) "
        "DO UPDATE SET seconds = seconds + excluded.seconds",
        rows,
    )
    newest = max(place.hour for place in added)
    db.execute("DELETE FROM device_time WHERE hour <= ?", (newest - KEPT_HOURS,))


def read_seconds(db: sqlite3.Connection, first: int, last: int) -> dict[HourAccount, float]:
    """Return the seconds of the hours from `first` to `last`, both included."""
    query = "SELECT hour, kind, key, model, seconds FROM device_time WHERE hour BETWEEN ? AND ?"
    found = db.execute(query, (first, last)).fetchall()
    return {HourAccount(row[0], DeviceAccount(*row[1:4])): row[4] for row in found}
