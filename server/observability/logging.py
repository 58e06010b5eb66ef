"""The server's log: one line per event on stderr, as text or JSON, with the request's id.

Configures the loggers of `server`, uvicorn, asyncio and, in this process, `rbln_backend`; vLLM
configures its own.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Collection
from contextvars import ContextVar

from server.observability.log_text import MAX_CHARS, clipped, exception_text, shown

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the current task's request."""


FIELDS = "fields"
REQUEST_LOGGER = "server.http.middleware"
"""Logger of finished requests."""
"""The key of `extra` under which a log call passes further fields."""


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
    for name in ("server", "rbln_backend"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    for name in ("uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING)
        logger.propagate = False


def drop_request_lines(routes: Collection[str] | None) -> None:
    """Log no line for finished requests of `routes` (templates), or of any route if None."""
    logging.getLogger(REQUEST_LOGGER).addFilter(_RouteFilter(routes))


class _RouteFilter(logging.Filter):
    """Drops the lines of finished requests; errors are other lines, which pass."""

    def __init__(self, routes: Collection[str] | None) -> None:
        super().__init__()
        self._routes = routes

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        fields = getattr(record, FIELDS, None)
        if fields is None or "route" not in fields:
            return True
        return self._routes is not None and fields["route"] not in self._routes
