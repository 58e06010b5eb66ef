"""The server's log: one line per event on stderr, as text or JSON, with the request's id.

Configures the loggers of `server`, uvicorn, asyncio and, in this process, `rbln_backend`; vLLM
configures its own, which is filtered here. Parts of the text may be written by clients. Invariants:
only records begin at the start of a line; control characters, including terminal escape codes, are
written as `\\xNN`; a record has a bounded length.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Collection
from contextvars import ContextVar
from types import TracebackType

MAX_CHARS = 4000
_MAX_LINES = 60
_MAX_REASON = 200
_MAX_FRAMES = 20
_INDENT = "\n    | "
_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
"""C0 and C1 controls without tab and line feed; a line feed begins another line."""
_BIDI = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode line separators and bidirectional controls."""
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS}
_ESCAPES |= {code: f"\\u{code:04x}" for code in _BIDI}

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def shown(text: str) -> str:
    """Return `text` bounded and escaped, with lines after the first indented behind a bar."""
    lines = clipped(text, MAX_CHARS).translate(_ESCAPES).split("\n")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"... {len(lines) - _MAX_LINES} more lines"]
    return _INDENT.join(lines)


def clipped(text: str, most: int) -> str:
    """Return a text cut to `most` characters, with the number of characters left out."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[:most]}... ({left_out} more characters)"


def exception_text(info: ExcInfo) -> str:
    """Return the traceback of an exception and of its causes, with truncated messages.

    An exception's message may quote a client's request.
    """
    parts: list[str] = []
    error: BaseException | None = info[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
        places = "".join(traceback.format_list(frames))
        reason = repr(clipped(str(error), _MAX_REASON)) if str(error) else ""
        parts.append(f"{places}{type(error).__name__}: {reason}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts.reverse()
    return "Traceback (most recent call last):\n" + "\nwhich led to:\n".join(parts)


request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the current task's request."""


FIELDS = "fields"
"""The key of `extra` under which a log call passes further fields."""
REQUEST_LOGGER = "server.http.middleware"
"""Logger of finished requests."""


class TextFormatter(logging.Formatter):
    """`12:30:05 INFO  server.service: message [request_id]`"""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback follows on further lines behind a bar."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        request_id = request_id_var.get()
        suffix = f" [{request_id}]" if request_id else ""
        line = f"{clock} {record.levelname:<7} {record.name}: {shown(record.getMessage())}{suffix}"
        failure = _failure(record)
        return line if failure is None else f"{line}\n    | {shown(failure)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (Unix seconds), level, logger, message, request_id.

    `extra={FIELDS: {...}}` of a log call adds fields to the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback is a string field."""
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": clipped(record.getMessage(), MAX_CHARS),
        }
        if request_id := request_id_var.get():
            entry["request_id"] = request_id
        entry.update(getattr(record, FIELDS, {}))
        if (failure := _failure(record)) is not None:
            entry["exception"] = clipped(failure, MAX_CHARS)
        return json.dumps(entry)


def _failure(record: logging.LogRecord) -> str | None:
    info = record.exc_info
    return None if info is None or info[0] is None else exception_text(info)


def configure(level: str, form: str) -> None:
    """Send our loggers to stderr at `level`, as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    ours = dict.fromkeys(("server", "rbln_backend"), level.upper())
    for name, least in {**ours, "uvicorn": "WARNING", "asyncio": "WARNING"}.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False


def drop_request_lines(routes: Collection[str] | None) -> None:
    """Log no line for finished requests of `routes` (templates), or of any route if None."""

    def passes(record: logging.LogRecord) -> bool:
        # Errors are other lines.
        fields = getattr(record, FIELDS, None)
        if fields is None or "route" not in fields:
            return True
        return routes is not None and fields["route"] not in routes

    logging.getLogger(REQUEST_LOGGER).addFilter(passes)


_PER_REQUEST = tuple(
    "vllm.entrypoints vllm.renderers vllm.inputs vllm.sampling_params vllm.parser "
    "vllm.tool_parsers vllm.reasoning vllm.tokenizers vllm.utils vllm.v1.engine.input_processor "
    "vllm.lora".split()
)
"""Packages that log about single requests."""
_SWALLOWING = ("vllm.parser", "vllm.tool_parsers", "vllm.reasoning")
"""Packages that log an exception and continue: the log is the only trace of it."""
_VLLM_REQUEST_LOGGER = "vllm.entrypoints.serve.utils.request_logger"
"""Logs prompts with --enable-log-requests."""


def bound_vllm_log() -> None:
    """Drop vLLM's records about single requests and bound the length of all others; idempotent.

    They have parts of requests: roles and names, prompts in exception messages, and a traceback for
    each invalid request. The server itself logs each server error. With VLLM_LOGGING_LEVEL=DEBUG
    the log stays as it is.
    """
    logger = logging.getLogger("vllm")
    if logger.isEnabledFor(logging.DEBUG):
        return
    for handler in logger.handlers:
        if _is_shown not in handler.filters:
            handler.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    """Return whether a record is logged; text of clients is removed from it."""
    if record.name != _VLLM_REQUEST_LOGGER and record.name.startswith(_PER_REQUEST):
        if record.levelno < logging.ERROR or not record.name.startswith(_SWALLOWING):
            return False
        info = record.exc_info
        kind = "" if info is None or info[0] is None else f"({info[0].__name__})"
        record.msg = f"{clipped(str(record.msg), 200)} {kind}".rstrip()
        record.args, record.exc_info, record.exc_text = (), None, None
        return True
    record.msg, record.args = shown(record.getMessage()), ()
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = shown(exception_text(record.exc_info))
    return True
