"""Reads bodies: small ones at once, large ones in a process of their own, beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from server.errors import InternalError, OverloadedError, ReaderFailedError, RequestError
from server.frontend import ParsedRequest, StorageOptions
from server.host.job_counts import JobCounts
from server.host.job_pool import (
    JobCrashedError,
    JobPool,
    JobTimeoutError,
    PoolFullError,
    WorkerStartError,
)
from server.observability.logging import request_id_var
from server.vllm.reading_process import answer_of, job_bytes, rendered_of
from server.vllm.rendering.job import Rendered
from server.wire.endpoint import Endpoint

SMALL_BYTES = 32 * 1024
SMALL_CONTAINERS = 160
"""Objects and arrays, or brackets in texts: a body of so few is read within milliseconds."""
HUGE_BYTES = 1 << 20
"""A body of more takes a second or more to read, as do conversations that are continued."""
_MAX_HUGE_WAITING = 8
_RETRY_S = 2.0


class Reader(Protocol):
    """Reads a body on the spot."""

    def read(
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None
    ) -> ParsedRequest | StorageOptions:
        """Return what a body asks for. Raises the `ServerError` of what is wrong with it."""
        ...


def is_small(raw: bytes, before: bytes = b"") -> bool:
    """Return True if a body, with its earlier turns, can be read on the event loop."""
    if len(raw) + len(before) > SMALL_BYTES:
        return False
    return sum(text.count(b"{") + text.count(b"[") for text in (raw, before)) <= SMALL_CONTAINERS


class RequestReader:
    """Used from one event loop. Invariant: what is read on it is small."""

    def __init__(self, here: Reader, pool: JobPool) -> None:
        self._here = here
        self._pool = pool
        self._counts = JobCounts()
        self._huge = asyncio.Lock()
        self._huge_waiting = 0

    async def read(
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None
    ) -> ParsedRequest | StorageOptions:
        """Return what a body asks for.

        Raises the `ServerError` of what is wrong with it; `OverloadedError` where too many large
        ones wait, or one takes longer than it may.
        """
        if is_small(raw, before or b""):
            return self._here.read(endpoint, raw, before)
        began = time.perf_counter()
        try:
            async with self._turn(len(raw) + len(before or b"")):
                job = job_bytes(endpoint, raw, before, request_id_var.get())
                parsed = answer_of(await self._exchange(job, "read"))
        except RequestError:
            self._counts.note("refused", time.perf_counter() - began)
            raise
        self._counts.note("ok", time.perf_counter() - began)
        return parsed

    @asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        """Have huge bodies wait for each other, so that others wait for one of them at most."""
        if size <= HUGE_BYTES:
            yield
            return
        if self._huge_waiting >= _MAX_HUGE_WAITING:
            self._counts.note("overloaded")
            raise _overloaded(f"{self._huge_waiting} requests of megabytes wait to be read.")
        self._huge_waiting += 1
        try:
            async with self._huge:
                yield
        finally:
            self._huge_waiting -= 1

    async def render(self, job: bytes) -> Rendered:
        """Return what a chat template makes of a large conversation.

        Requests that come here are admitted already, and wait. Raises a `ServerError` where the
        rendering takes more time or memory than it may.
        """
        return rendered_of(await self._exchange(job, "render", waits=True))

    def take_counts(self) -> JobCounts:
        """Return what was done with large bodies since the last call."""
        counts, self._counts = self._counts, JobCounts()
        return counts

    async def _exchange(self, job: bytes, does: str, *, waits: bool = False) -> bytes:
        try:
            return await self._pool.run(job, waits=waits)
        except PoolFullError:
            self._counts.note("overloaded")
            raise _overloaded("Too many large requests wait to be read.") from None
        except JobTimeoutError:
            self._counts.note("timeout", self._pool.timeout_s)
            raise _overloaded(
                f"The request took longer than {self._pool.timeout_s:g} s to {does} "
                "(--read-timeout-s)."
            ) from None
        except JobCrashedError as error:
            self._counts.note("crashed")
            raise ReaderFailedError(
                f"The process that reads large requests was ended {error} before it had {does} "
                "this one.",
                retry_after_s=_RETRY_S,
            ) from None
        except WorkerStartError as error:
            self._counts.note("not_started")
            raise InternalError(f"Large requests cannot be read: {error}.") from None


def _overloaded(message: str) -> OverloadedError:
    return OverloadedError(message, rejection="reading", retry_after_s=_RETRY_S)
