"""Measures the lag of the event loop, which delays every request of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.25
"""Seconds between two samples."""


async def follow_event_loop(observe: Callable[[float], None], period_s: float = PERIOD_S) -> None:
    """Call `observe` every `period_s` with the lag of a timer in seconds; never returns.

    A blocked loop yields one sample: the time of the block minus the part of the period before it.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        observe(max(0.0, loop.time() - due))
