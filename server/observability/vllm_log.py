"""Filter of vLLM's log in the API process and the worker that parses large bodies.

vLLM's modules log parts of requests: roles and names, prompts in exception messages, and a
traceback for each invalid request. The server itself logs each server error.
"""

from __future__ import annotations

import logging

from server.observability.log_text import ExcInfo, clipped, exception_text, shown

_PER_REQUEST = (
    *("vllm.entrypoints", "vllm.renderers", "vllm.inputs", "vllm.sampling_params"),
    *("vllm.parser", "vllm.tool_parsers", "vllm.reasoning"),
    *("vllm.tokenizers", "vllm.utils", "vllm.v1.engine.input_processor", "vllm.lora"),
)
"""Packages that log about single requests."""
_SWALLOWING = ("vllm.parser", "vllm.tool_parsers", "vllm.reasoning")
"""Packages that log an exception and continue: the log is the only trace of it."""
_REQUEST_LOGGER = "vllm.entrypoints.serve.utils.request_logger"
"""Logs prompts with --enable-log-requests."""


def bound_vllm_log() -> None:
    """Drop vLLM's records about single requests and bound the length of all others; idempotent.

    With VLLM_LOGGING_LEVEL=DEBUG the log stays as it is.
    """
    logger = logging.getLogger("vllm")
    if logger.isEnabledFor(logging.DEBUG):
        return
    for handler in logger.handlers:
        if _is_shown not in handler.filters:
            handler.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    """Return whether a record is logged; text of clients is removed from it."""
    if record.name != _REQUEST_LOGGER and record.name.startswith(_PER_REQUEST):
        if record.levelno < logging.ERROR or not record.name.startswith(_SWALLOWING):
            return False
        record.msg = f"{clipped(str(record.msg), 200)} {_kind(record.exc_info)}".rstrip()
        record.args, record.exc_info, record.exc_text = (), None, None
        return True
    record.msg, record.args = shown(record.getMessage()), ()
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = shown(exception_text(record.exc_info))
    return True


def _kind(info: ExcInfo | tuple[None, None, None] | None) -> str:
    return "" if info is None or info[0] is None else f"({info[0].__name__})"
