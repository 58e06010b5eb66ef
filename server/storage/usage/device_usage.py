"""Device seconds of each API key and model by hour, collected from the engines' counters.

The engines count; this class only adds the growth of their counters to the current hour. With
--data-dir the hours are stored and survive restarts, without it they are those of this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rbln_backend.api.reports import DeviceAccount, DeviceTime
from server.host.tasks import background_task
from server.lifecycle import Lifecycle
from server.storage.database import Database
from server.storage.usage.table import (
    HOUR_S,
    KEPT_HOURS,
    HourAccount,
    add_seconds,
    read_seconds,
)

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Seconds between two readings; device time near the end of an hour may count in the next one."""
READY = DeviceAccount("ready", "", "")
"""Account of the seconds in which engines were ready, whether they computed or not."""


class DeviceUsage:
    """Hourly device seconds. Used from the event loop; reading the counters runs in a thread."""

    def __init__(
        self,
        read: Callable[[], DeviceTime],
        lifecycle: Lifecycle,
        database: Database | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`read` returns the engines' counters, `clock` the seconds since 1970."""
        self._read, self._lifecycle = read, lifecycle
        self._database, self._clock = database, clock
        self._counted: dict[DeviceAccount, float] = {}
        self._hours: defaultdict[HourAccount, float] = defaultdict(float)
        """Seconds that are not stored yet; without a database, all of them."""
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read the counters every `PERIOD_S` and once at the end of the block."""
        try:
            async with background_task(self._follow()):
                yield
        finally:
            await self._try_to_take()

    async def seconds(self, first_hour: int, last_hour: int) -> dict[HourAccount, float]:
        """Return the seconds of hours since 1970, both ends included, up to now.

        Raises `StorageUnavailableError` where the database cannot be read.
        """
        async with self._lock:
            await self._take()
            if self._database is not None:
                return await self._database.read(read_seconds, first_hour, last_hour)
            held = self._hours.items()
            return {p: seconds for p, seconds in held if first_hour <= p.hour <= last_hour}

    async def _follow(self) -> None:
        while True:
            await self._try_to_take()
            await asyncio.sleep(PERIOD_S)

    async def _try_to_take(self) -> None:
        try:
            async with self._lock:
                await self._take()
        except Exception as error:  # noqa: BLE001 (a full disk, or a file that an engine creates)
            logger.warning("Device time is not stored yet: %s", error)

    async def _take(self) -> None:
        """Add the growth of the counters to the current hour, and store it."""
        read = await asyncio.to_thread(self._read)
        hour = int(self._clock()) // HOUR_S
        ready_s = self._lifecycle.uptime_s - (self._lifecycle.ready_after_s or 0.0)
        counts = {**read.seconds, READY: ready_s * read.engines if read.engines else 0.0}
        for account, seconds in counts.items():
            if (growth := seconds - self._counted.get(account, 0.0)) > 0:
                self._hours[HourAccount(hour, account)] += growth
                self._counted[account] = seconds
        if self._database is not None and self._hours:
            await self._database.run(add_seconds, dict(self._hours))
            self._hours.clear()
        for place in [place for place in self._hours if place.hour <= hour - KEPT_HOURS]:
            del self._hours[place]
