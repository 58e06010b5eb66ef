"""Suppression of vLLM's expected warnings, and log handlers shared with vLLM."""

from __future__ import annotations

import logging

# Prefixes of vLLM 0.30's warnings about decisions of this platform, which users cannot change.
_EXPECTED = (
    "Async scheduling not supported with",
    "max_num_scheduled_tokens is set to",
    "Inductor compilation was disabled by user settings",
    "There is a latency regression when using chunked local attention",
    "Model Runner V2 requires Triton",
    "Using custom scheduler class rbln_backend.",
)
# Our loggers are one level more verbose: a start-up logs a dozen lines, vLLM's fifty.
_OURS = {logging.WARNING: logging.INFO, logging.ERROR: logging.WARNING}


def drop_expected_warnings() -> None:
    """Suppress warnings of vLLM and torch about intended behaviour; idempotent, imports nothing."""
    for handler in logging.getLogger("vllm").handlers:
        if _is_news not in handler.filters:
            handler.addFilter(_is_news)
    # Warns about missing Triton at every capture.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def share_logging() -> None:
    """Give our loggers vLLM's handlers and format, at a level that follows vLLM's."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("rbln_backend")
    level = _OURS.get(theirs.level, theirs.level)
    ours.handlers = [_like(handler, level) for handler in theirs.handlers]
    ours.setLevel(level)
    ours.propagate = False


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.getMessage()).startswith(_EXPECTED)


def _like(handler: logging.Handler, level: int) -> logging.Handler:
    if not isinstance(handler, logging.StreamHandler):
        return handler
    twin: logging.Handler = logging.StreamHandler(handler.stream)
    twin.setFormatter(handler.formatter)
    twin.setLevel(level)
    return twin
