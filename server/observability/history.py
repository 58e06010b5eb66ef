"""The traffic of the last ten minutes, as samples of five seconds.

The console draws them, so that a newly opened page shows past traffic. Counts cover a whole
interval: a burst of tokens appears as a rate over the interval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from server.observability.traffic import Traffic

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
KEPT = 120
"""Number of samples: ten minutes, about 30 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One interval."""

    number: Annotated[int, "1 for the first sample of this process, rising by 1."]
    at: Annotated[float, "End of the interval, in seconds since 1970."]
    seconds: Annotated[float, "Length of the interval; longer than `period_s` on a busy machine."]
    output_tokens: Annotated[int, "Tokens generated in the interval."]
    prompt_tokens: Annotated[int, "Prompt tokens of requests whose prefill ended in the interval."]
    running: Annotated[int, "Requests in the engine's batch at the end of the interval."]
    waiting: Annotated[int, "Requests in the queue at that time."]
    kv_cache_usage: Annotated[float, "Share of the paged KV blocks in use at that time, 0 to 1."]
    decode_padding: Annotated[
        float | None, "Share of padding in the rows of decode steps; null: no step."
    ]
    prefill_padding: Annotated[
        float | None, "Share of padding in the tokens of prefill steps; null: no step."
    ]


class History:
    """The latest samples. Used from the event loop; `read` runs in a thread."""

    def __init__(self, read: Callable[[], Traffic | None]) -> None:
        """Sample the totals that `read` returns; it returns None without an engine."""
        self._read = read
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._latest: tuple[float, Traffic] | None = None
        self._number = 0

    async def follow(self, period_s: float = PERIOD_S) -> None:
        """Take a sample every `period_s`; never returns. A failed read skips one sample."""
        while True:
            try:
                await self.take()
            except Exception as error:  # noqa: BLE001 (an engine may be creating the files)
                logger.debug("No sample of the traffic: %s", error)
            await asyncio.sleep(period_s)

    async def take(self) -> None:
        """Add a sample of the work since the last call; does nothing without an engine."""
        total = await asyncio.to_thread(self._read)
        now = time.monotonic()
        # Counters begin at 0: the first sample covers the time since the last call.
        latest, self._latest = self._latest, (now, total or Traffic())
        if latest is None or total is None:
            return
        began, before = latest
        self._number += 1
        self._samples.append(
            Sample(
                number=self._number,
                at=round(time.time(), 3),
                seconds=round(now - began, 3),
                output_tokens=total.output_tokens - before.output_tokens,
                prompt_tokens=total.prompt_tokens - before.prompt_tokens,
                running=total.running,
                waiting=total.waiting,
                kv_cache_usage=round(total.kv_cache_usage, 4),
                decode_padding=total.decode.since(before.decode).share(),
                prefill_padding=total.prefill.since(before.prefill).share(),
            )
        )

    def after(self, number: int) -> list[Sample]:
        """Return the samples after `number`; all of them if it is above the latest.

        A page opened before a restart sends a number of the previous process.
        """
        if number > self._number:
            number = 0
        return [sample for sample in self._samples if sample.number > number]
