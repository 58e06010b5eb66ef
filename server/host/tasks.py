"""Background tasks, blocking work in daemon threads, and imports."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def background_task(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run `work` concurrently with the block and cancel it at the block's end."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, which does not delay the exit of the process."""
    future: Future[T] = Future()
    # A thread cannot be stopped, so the future cannot be cancelled.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001
            # Includes SystemExit of a parser, which the waiting thread handles.
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=getattr(work, "__name__", "work")).start()
    return future


async def run_to_completion(work: Coroutine[object, object, T]) -> T:
    """Run `work` to its end even if the waiting task is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work`, which may block forever, in a daemon thread.

    Threads of `asyncio.to_thread` delay the exit of the process.
    """
    return await asyncio.wrap_future(in_daemon_thread(work))


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the block, then freeze the objects that exist.

    For imports, where it frees nothing and costs a fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
