"""Process that parses large bodies; it can be slow, grow or be killed without harm to the server.

Its replies are unpickled: both ends belong to this service.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import resource
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from server.errors import BodyTooLargeError, InternalError, ServerError
from server.frontend import ParsedRequest
from server.host.job_pool import MEMORY_BYTES, limit_growth
from server.observability.logging import bound_vllm_log, configure, request_id_var
from server.settings import ServerSettings
from server.storage.responses.storage_options import StorageOptions
from server.vllm.reading import BodyReader
from server.vllm.rendering.job import MARK, Rendered, render
from server.vllm.rules import RequestRules
from server.wire.endpoint import Endpoint

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
    from server.vllm.importing import allow_stop_strings

    allow_stop_strings(settings.max_stop)
    from server.vllm.handlers import request_models

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
