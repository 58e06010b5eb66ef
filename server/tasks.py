"""Tasks that live as long as a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def while_running(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run `work` beside the block and cancel it at the block's end."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
