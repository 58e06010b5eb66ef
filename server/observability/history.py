"""The traffic of the last minutes, as samples that this process takes every few seconds.

The console draws them, so that a page that was just opened shows what was there before. Counts are
those of a whole interval: a burst of tokens within it is a rate over the interval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from server.observability.traffic import NO_TRAFFIC, Traffic

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
KEPT = 120
"""Ten minutes, about 30 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One interval."""

    number: Annotated[int, "1 for the first sample of this process, rising by 1."]
    at: Annotated[float, "End of the interval, in seconds since 1970."]
    seconds: Annotated[float, "Length of the interval; longer than `period_s` on a busy machine."]
    output_tokens: Annotated[int, "Tokens generated in the interval."]
    prompt_tokens: Annotated[int, "Prompt tokens of requests whose prefill ended in the interval."]
    running: Annotated[int, "Requests in the engine's batch at the end of the interval."]
    waiting: Annotated[int, "Requests that waited for their turn at that time."]
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
        """`read` returns the totals so far, None while there is no engine."""
        self._read = read
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._latest: tuple[float, Traffic] | None = None
        self._number = 0

    async def follow(self, period_s: float = PERIOD_S) -> None:
        """Take a sample every `period_s`; never ends. A failed reading leaves one sample out."""
        while True:
            try:
                await self.take()
            except Exception as error:  # noqa: BLE001 (a file that an engine is just making)
                logger.debug("No sample of the traffic: %s", error)
            await asyncio.sleep(period_s)

    async def take(self) -> None:
        """Take a sample of the work since the last call; none while there is no engine."""
        total = await asyncio.to_thread(self._read)
        now = time.monotonic()
        # Counters begin at 0: the first sample has what ran since the last call without an engine.
        latest, self._latest = self._latest, (now, total or NO_TRAFFIC)
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
        """Return the samples after that number; all where it is above the latest.

        A page that was open before this process started sends a number of the previous process.
        """
        if number > self._number:
            number = 0
        return [sample for sample in self._samples if sample.number > number]
