"""Reads small bodies on the event loop, and large ones in another process, which may be killed.

That process renders the chat templates of large conversations, too. Jobs and answers are pickled:
both ends belong to this service.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import pickle
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from server import bounds
from server.errors import (
    BodyTooLargeError,
    InternalError,
    InvalidValueError,
    OverloadedError,
    ReaderFailedError,
    RequestError,
    ServerError,
)
from server.frontend import ParsedRequest
from server.host.job_pool import (
    MEMORY_BYTES,
    JobCounts,
    JobCrashedError,
    JobPool,
    JobTimeoutError,
    PoolFullError,
    WorkerStartError,
    limit_growth,
)
from server.observability.logging import bound_vllm_log, configure, request_id_var
from server.settings import ServerSettings
from server.storage.response_table import StorageOptions
from server.vllm.reading import BodyReader, RequestRules
from server.vllm.rendering import MARK, Rendered, render
from server.wire import Endpoint

SMALL_BYTES = 32 * 1024
SMALL_CONTAINERS = 160
"""Most objects and arrays, brackets in texts included, of a body parsed within milliseconds."""
HUGE_BYTES = 1 << 20
"""Larger bodies take a second or more to parse."""
_SMALL_JOB_BYTES = 4 * SMALL_BYTES
"""Size of a job that renders a small conversation: its template may be longer than the text."""
_MAX_HUGE_WAITING = 8
_RETRY_S = 2.0


def is_small(raw: bytes, before: bytes = b"") -> bool:
    """Return True if a body, with its earlier turns, can be read on the event loop."""
    if len(raw) + len(before) > SMALL_BYTES:
        return False
    return sum(text.count(b"{") + text.count(b"[") for text in (raw, before)) <= SMALL_CONTAINERS


class RequestReader:
    """Reads bodies from one event loop; only small bodies are parsed on it."""

    def __init__(self, here: BodyReader, pool: JobPool) -> None:
        self._here = here
        self._pool = pool
        self._counts = JobCounts()
        self._huge = asyncio.Lock()
        self._huge_waiting = 0

    async def read(
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None
    ) -> ParsedRequest | StorageOptions:
        """Parse a body.

        Raises the `ServerError` of the first check that fails, and `OverloadedError` if too many
        large bodies wait or one takes longer than `bounds.READ_TIMEOUT_S`.
        """
        if is_small(raw, before or b""):
            return self._here.read(endpoint, raw, before)
        began = time.perf_counter()
        try:
            async with self._turn(len(raw) + len(before or b"")):
                job = job_bytes(endpoint, raw, before, request_id_var.get())
                parsed: ParsedRequest | StorageOptions = answer_of(
                    await self._exchange(job, "read", self._pool.timeout_s)
                )
        except RequestError:
            self._counts.note("refused", time.perf_counter() - began)
            raise
        self._counts.note("ok", time.perf_counter() - began)
        return parsed

    @asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        """Serialize huge bodies, so that other bodies wait for at most one of them."""
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
        """Render a chat template over a conversation.

        The request is admitted already, so it waits for a process. Raises a `ServerError` if
        rendering exceeds its limit of time or memory; of time, `InvalidValueError` for a small one.
        """
        small = len(job) <= _SMALL_JOB_BYTES
        limit_s = bounds.RENDER_TIMEOUT_S if small else self._pool.timeout_s
        rendered: Rendered = answer_of(await self._exchange(job, "render", limit_s, waits=True))
        return rendered

    def take_counts(self) -> JobCounts:
        counts, self._counts = self._counts, JobCounts()
        return counts

    async def _exchange(
        self, job: bytes, does: str, limit_s: float, *, waits: bool = False
    ) -> bytes:
        try:
            return await self._pool.run(job, limit_s / self._pool.timeout_s, waits=waits)
        except PoolFullError:
            self._counts.note("overloaded")
            raise _overloaded("Too many large requests wait to be read.") from None
        except JobTimeoutError:
            self._counts.note("timeout", limit_s)
            if limit_s < self._pool.timeout_s:
                raise InvalidValueError(
                    f"The chat template takes longer than {limit_s:g} s to render the conversation."
                ) from None
            raise _overloaded(f"The request took longer than {limit_s:g} s to {does}.") from None
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


logger = logging.getLogger(__name__)

_NICENESS = 10
_KEPT_BYTES = 64 << 20
"""Growth of the process beyond which freed memory is returned to the system at once."""


def job_bytes(
    endpoint: Endpoint, raw: bytes, before: bytes | None, request_id: str | None
) -> bytes:
    """Return a job: endpoint, earlier items of the conversation, and body."""
    size = -1 if before is None else len(before)
    return f"{endpoint.name} {size} {request_id or ''}\n".encode() + (before or b"") + raw


def answer_of(data: bytes) -> Any:
    """Return the reply of a job: a parsed body or a rendered prompt.

    Raises the `ServerError` that it holds.
    """
    answer = pickle.loads(data)  # noqa: S301 (written by `serve_reading`, below)
    if isinstance(answer, ServerError):
        raise answer
    return answer


def serve_reading(pipe: Connection, rules: RequestRules, settings: ServerSettings) -> None:
    """Answer jobs until the pipe ends; the first message says that the process is ready."""
    import setproctitle

    setproctitle.setproctitle("rbln-serve: reading requests")
    os.nice(_NICENESS)
    configure(settings.log_level, settings.log_format)
    bound_vllm_log()
    from server.vllm.patches import allow_stop_strings

    allow_stop_strings(settings.max_stop)
    from server.vllm.request_models import request_models

    reader = BodyReader(rules, request_models())
    reader.build_validators()
    before = _resident_bytes()
    limit_growth()
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            pipe.send_bytes(_answer(reader, pipe.recv_bytes()))
            if _resident_bytes() - before > _KEPT_BYTES:
                ctypes.CDLL(None).malloc_trim(0)


def _answer(reader: BodyReader, job: bytes) -> bytes:
    answer: ParsedRequest | StorageOptions | Rendered | ServerError
    try:
        answer = render(job) if job.startswith(MARK) else _read(reader, job)
    except MemoryError:
        answer = BodyTooLargeError(
            f"The request needs more than {MEMORY_BYTES >> 20} MiB of memory to be read."
        )
    except ServerError as error:
        answer = error
    except Exception:
        # The boundary of the process: one request must not end it.
        logger.exception("A request could not be read")
        answer = InternalError("Internal error; the server's log has it under the request id.")
    return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)


def _read(reader: BodyReader, job: bytes) -> ParsedRequest | StorageOptions:
    head, _, rest = job.partition(b"\n")
    endpoint, size, request_id = head.decode().split(" ", 2)
    before = None if size == "-1" else rest[: int(size)]
    request_id_var.set(request_id or None)
    body = rest[len(before or b"") :]
    return reader.read(Endpoint[endpoint], body, before, is_large=True)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(statm[1]) * resource.getpagesize()
