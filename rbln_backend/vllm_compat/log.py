"""What of vLLM's log is heard, and how ours is written beside it."""

from __future__ import annotations

import logging

# Beginnings of warnings of vLLM 0.30 about what this platform decides, which nobody can heed.
_EXPECTED = (
    "Async scheduling not supported with",
    "max_num_scheduled_tokens is set to",
    "Inductor compilation was disabled by user settings",
    "There is a latency regression when using chunked local attention",
    "Model Runner V2 requires Triton",
    "Using custom scheduler class rbln_backend.",
)
# Ours is more talkative by one level: a dozen lines tell a start-up, vLLM takes fifty.
_OURS = {logging.WARNING: logging.INFO, logging.ERROR: logging.WARNING}


def drop_expected_warnings() -> None:
    """Keep vLLM and torch from warning of what is meant so; idempotent, imports nothing."""
    for handler in logging.getLogger("vllm").handlers:
        if _is_news not in handler.filters:
            handler.addFilter(_is_news)
    # Says that there is no Triton, whenever a model is captured.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def share_logging() -> None:
    """Let our loggers write where vLLM's do and in its format, at a level that follows its own."""
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
