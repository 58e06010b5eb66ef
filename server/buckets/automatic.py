"""`AutoBuckets`: the tuner's advice on the recent steps, applied without a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rbln_backend.bucketing.usage import Usage
from server.buckets.changes import BucketChanges
from server.buckets.effect import advice_on, is_worse, since
from server.buckets.engine_buckets import BucketPort, Tables
from server.errors import ServerError
from server.host.tasks import background_task

logger = logging.getLogger(__name__)

LEAST_PERIOD_S = 3600.0
"""Least seconds between two changes by the advice."""


class AutoBuckets:
    """Compares the steps of each window with the tuner's best sizes for them.

    The sizes change if the prediction saves at least a share of the step time, and change back if
    the next windows measure longer steps. Used from the event loop only.
    """

    def __init__(
        self,
        changes: BucketChanges,
        port: Callable[[], BucketPort | None],
        *,
        window_s: float,
        least_saving: float,
        applies: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `applies` false only changes back are made, of sizes that a request had chosen as
        `auto`.
        """
        self._changes, self._port, self._window_s = changes, port, window_s
        self._least_saving, self._applies, self._clock = least_saving, applies, clock
        self._latest: Usage | None = None
        self._changed_at = float("-inf")

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Look at the steps of each window within the block; then stop changes."""
        async with background_task(self._follow()):
            yield
        self._changes.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._window_s)
            try:
                await self.look()
            except ServerError as error:
                logger.info("Buckets are not tuned: %s", error)

    async def look(self) -> None:
        """End a window: change the sizes for its steps, or back, where that pays."""
        port = self._port()
        total = None if port is None else await port.usage()
        if total is None or self._changes.is_running:
            return
        earlier, self._latest = self._latest, total
        if await self._returned() or earlier is None or not self._applies:
            return
        if self._clock() - self._changed_at < LEAST_PERIOD_S:
            return
        state = await self._changes.state()
        present: Tables = {phase: state[phase] for phase in ("decode", "prefill")}
        wanted, predicted, saving = advice_on(since(total, earlier), present)
        if state["refusal"] is None and wanted != present and saving >= self._least_saving:
            self._changed_at = self._clock()
            await self._changes.begin(wanted, "auto", predicted)

    async def _returned(self) -> bool:
        """Change back if the last change was by advice and steps take longer since."""
        last = self._changes.last
        if last is None or last[1] != "auto":
            return False
        found = await self._changes.effect()
        if found is None or not is_worse(*found):
            return False
        logger.warning("Buckets change back: measured %s", found[0])
        await self._changes.begin(last[0], "revert")
        return True
