"""Job tables, whose rows are open until a job loop ends them, and the loop."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_FAILED_TURN_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class JobTable:
    """A table with columns `id`, `owner` and `status`; the statuses of open and of ended rows."""

    name: str
    open_statuses: tuple[str, ...]
    ended_statuses: tuple[str, ...]

    @property
    def is_open(self) -> str:
        """SQL condition for open rows, equal to that of the table's partial index."""
        return f"status IN ({', '.join(repr(status) for status in self.open_statuses)})"

    def no_rows(self) -> dict[str, int]:
        """Return 0 for each status."""
        return dict.fromkeys((*self.open_statuses, *self.ended_statuses), 0)

    def count_by_status(self, db: sqlite3.Connection) -> dict[str, int]:
        """Return the number of rows for each status."""
        query = f"SELECT status, count(*) FROM {self.name} GROUP BY status"
        return self.no_rows() | dict(db.execute(query).fetchall())

    def count_open(self, db: sqlite3.Connection, owner: str | None = None) -> int:
        """Return the number of open rows of `owner`, or of all owners."""
        query = f"SELECT count(*) FROM {self.name} WHERE {self.is_open}"
        if owner is not None:
            query += " AND owner = :owner"
        (count,) = db.execute(query, {"owner": owner}).fetchone()
        return int(count)


BATCHES = JobTable(
    "batches",
    ("validating", "in_progress", "finalizing", "cancelling"),
    ("completed", "failed", "expired", "cancelled"),
)
RESPONSES = JobTable(
    "responses", ("queued", "in_progress"), ("completed", "incomplete", "failed", "cancelled")
)


class JobLoop:
    """Repeats a turn of work until it is cancelled. Used from the event loop."""

    def __init__(self, name: str, turn: Callable[[], Awaitable[float | None]]) -> None:
        """`turn` returns the seconds until the next turn, None to wait for `wake`."""
        self._name = name
        self._turn = turn
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Begin the next turn without a pause."""
        self._woken.set()

    async def run(self) -> None:
        """Run turns; a turn that raises is logged, and the next one follows after a second."""
        while True:
            self._woken.clear()
            pause_s: float | None = _FAILED_TURN_PAUSE_S
            try:
                pause_s = await self._turn()
            except Exception:
                logger.exception("%s: a turn failed", self._name)
            # Unlike `wait_for` of Python 3.11, this never loses a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()
