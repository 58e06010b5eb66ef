"""How late the event loop is: what every request of this process waits for, whatever it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.25
"""Seconds between two looks."""


async def follow_event_loop(observe: Callable[[float], None], period_s: float = PERIOD_S) -> None:
    """Tell `observe` every `period_s` by how many seconds a timer was late; never ends.

    Something that holds the loop for longer than a period is seen once, as long as it lasted, less
    the part of the period that had passed.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        observe(max(0.0, loop.time() - due))
