"""Tasks that live as long as a block, and work that blocks for as long as it likes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def while_running(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run `work` beside the block and cancel it at the block's end."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that a process exit does not wait for."""
    future: Future[T] = Future()
    # From here on nobody can cancel it: a thread cannot be stopped.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001
            # Also SystemExit of a parser: it belongs to whoever waits, not to this thread.
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=getattr(work, "__name__", "work")).start()
    return future


async def to_its_end(work: Coroutine[object, object, T]) -> T:
    """Run `work` to its end, also where the waiting task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def aside(work: Callable[[], T]) -> T:
    """Run `work`, which may block for ever, beside the event loop and the process's exit.

    `asyncio.to_thread` is for what ends: its threads are waited for at the exit.
    """
    return await asyncio.wrap_future(in_daemon_thread(work))
