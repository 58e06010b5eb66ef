"""Lines of the log: what clients write begins none of them, and is short."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from server.observability.logging import (
    MAX_CHARS,
    JsonFormatter,
    TextFormatter,
    bound_vllm_log,
    exception_text,
    shown,
)

FORGED = "x\n12:00:00 INFO    server.service: all is well\r\x1b[2J\x07\u2028\u202e\x85end"
HUGE = "secret " * 200_000


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("server.x", logging.ERROR, "f", 1, message, args, info)


def failed(message: str) -> ValueError:
    """An error with a cause, both of which quote a client."""
    try:
        try:
            raise KeyError(message)
        except KeyError as cause:
            raise ValueError(message) from cause
    except ValueError as error:
        return error


def test_controls_are_escaped_and_lines_indented() -> None:
    line = TextFormatter().format(record("Ignored: %s", FORGED, error=failed(FORGED)))
    first, *others = line.split("\n")
    assert "server.x: Ignored: x" in first
    assert all(other.startswith("    | ") for other in others)
    assert not set("\r\x1b\x07\u2028\u202e\x85") & set(line)
    assert "\\x1b[2J" in line
    entry = json.loads(JsonFormatter().format(record("%s", FORGED, error=failed(FORGED))))
    assert entry["message"] == FORGED
    assert "\n" not in JsonFormatter().format(record("%s", FORGED))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_lines_have_a_length(formatter: logging.Formatter) -> None:
    whole = formatter.format(record("%s", HUGE, error=failed(HUGE)))
    assert len(whole) < 3 * MAX_CHARS
    assert "more characters" in whole
    assert len(shown("\n" * 100_000)) < 2 * MAX_CHARS


def test_tracebacks_have_causes_frames_and_short_messages() -> None:
    error = failed("a reason " + HUGE)
    text = exception_text((ValueError, error, error.__traceback__))
    assert text.count("in failed") == 2
    assert text.index("KeyError: ") < text.index("which led to:") < text.index("ValueError: ")
    assert "a reason" in text
    assert len(text) < 2000


@pytest.fixture
def vllm_log() -> Iterator[io.StringIO]:
    """Return the output of vLLM's handler after `bound_vllm_log`."""
    logger = logging.getLogger("vllm")
    kept = logger.handlers, logger.level, logger.propagate
    stream = io.StringIO()
    logger.handlers, logger.propagate = [logging.StreamHandler(stream)], False
    logger.setLevel(logging.INFO)
    bound_vllm_log()
    bound_vllm_log()
    assert len(logger.handlers[0].filters) == 1
    yield stream
    logger.handlers, logger.level, logger.propagate = kept


def test_vllms_modules_log_nothing_that_clients_wrote(vllm_log: io.StringIO) -> None:
    logging.getLogger("vllm.renderers.hf").warning("Chat template rejected: %s", FORGED)
    try:
        raise failed("secret")
    except ValueError:
        logging.getLogger("vllm.entrypoints.openai.serving").exception("Error in stream: secret")
        logging.getLogger("vllm.tool_parsers.hermes").exception("Error in extracting a call")
    logging.getLogger("vllm.tool_parsers.hermes").error("Error in %s", "secret")
    logging.getLogger("vllm.v1.metrics").info("Engine 000: %s", FORGED)
    lines = vllm_log.getvalue().splitlines()
    assert lines[0] == "Error in extracting a call (ValueError)"
    assert lines[1] == "Error in %s"
    assert lines[2] == "Engine 000: x"
    assert all(line.startswith("    | ") for line in lines[3:])
    assert "secret" not in vllm_log.getvalue()
    assert "\x1b" not in vllm_log.getvalue()


def test_debug_level_leaves_vllms_log_as_it_is(vllm_log: io.StringIO) -> None:
    logger = logging.getLogger("vllm")
    logger.handlers[0].filters.clear()
    logger.setLevel(logging.DEBUG)
    bound_vllm_log()
    logging.getLogger("vllm.renderers.hf").warning("Chat template rejected: %s", "a")
    assert vllm_log.getvalue() == "Chat template rejected: a\n"
