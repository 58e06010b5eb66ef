"""vLLM's and pydantic's errors as ours.

Decided by class, status and parameter name, never by the text of a message. The front end is
the only user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.exceptions import (
    GracefulHTTPError,
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from server.errors import (
    ContextLengthError,
    EngineFailedError,
    InternalError,
    InvalidTypeError,
    InvalidValueError,
    MissingFieldError,
    NotFoundError,
    OverloadedError,
    RequestError,
    ServerError,
    UnsupportedOperationError,
    describe,
)
from server.frontend import JsonObject
from server.request_limits import MAX_TOKENS_FIELDS

logger = logging.getLogger(__name__)

PROMPT_FIELDS = (
    *("messages", "prompt", "input", "texts"),
    *("documents", "items", "data_2", "text_2"),
)
"""Of the fields that a body has, the first is blamed for a prompt that is too long."""

_TOO_LONG_PARAMETERS = ("input_tokens", "input_text")
_OVERLOAD_RETRY_S = 1
_JSON_TYPES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def from_exception(error: Exception, body: JsonObject) -> ServerError:
    """Return what a client is told about an exception of vLLM's serving classes."""
    for kinds, translate in _TRANSLATIONS:
        if isinstance(error, kinds):
            return translate(error, body)
    return _internal(error, body)


def from_payload(info: Mapping[str, Any], body: JsonObject) -> ServerError:
    """Return our error for the `error` object of one of vLLM's responses or SSE frames."""
    message, status, param = str(info["message"]), int(info["code"]), info.get("param")
    if status == 503:
        return OverloadedError(message)
    if status >= 500 and status != 501:
        return InternalError(message)
    if status == 404:
        return NotFoundError(message, param=param)
    if status == 501:
        return UnsupportedOperationError(message, param=param)
    return _invalid(message, param, body)


def from_validation(error: ValidationError, body: JsonObject) -> RequestError:
    """Return our error for the most telling of pydantic's complaints about `body`."""
    problem = _most_telling([dict(item) for item in error.errors(include_url=False)])
    kind = str(problem["type"])
    path = _body_path(problem["loc"], body, missing=kind == "missing")
    if kind == "missing":
        return MissingFieldError(f"The field '{path}' is missing.", param=path)
    message = str(problem["msg"]).removeprefix("Value error, ")
    value = problem.get("input")
    if _about_type(kind):
        given = _JSON_TYPES.get(type(value), type(value).__name__)
        return InvalidTypeError(
            f"Invalid type for '{path}': {message}, got {given}: {describe(value)}.", param=path
        )
    where = f"Invalid value for '{path}'" if path else "Invalid request"
    return InvalidValueError(f"{where}: {message}, got {describe(value)}.", param=path or None)


def engine_failed() -> EngineFailedError:
    """Return the error of a request that meets a dead engine."""
    return EngineFailedError("The engine has failed and the server is about to exit.")


def _internal(error: Any, _body: JsonObject) -> ServerError:
    logger.error("The engine failed on a request", exc_info=error)
    return InternalError("Internal error; the server's log has it under the request id.")


def _generate_failed(error: Any, body: JsonObject) -> ServerError:
    return from_exception(error.__cause__, body) if error.__cause__ else _internal(error, body)


def _blamed_on_request(error: Any, _body: JsonObject) -> ServerError:
    # vLLM raises builtin errors for requests as well, chat templates above all.
    logger.debug("Taken as the request's fault", exc_info=error)
    return InvalidValueError(str(error))


_Translation = Callable[[Any, JsonObject], ServerError]
_TRANSLATIONS: tuple[tuple[tuple[type[Exception], ...], _Translation], ...] = (
    ((ServerError,), lambda error, _: error),
    ((ValidationError,), from_validation),
    ((EngineDeadError,), lambda *_: engine_failed()),
    ((EngineGenerateError,), _generate_failed),
    (
        (MaxQueuedTokensError,),
        lambda *_: OverloadedError(
            "As many prompt tokens wait for their prefill as may (--max-queued-tokens).",
            rejection="queued_tokens",
        ),
    ),
    (
        (QueueOverflowError,),
        lambda *_: OverloadedError(
            "As many requests wait or run as may (--max-num-queued-reqs).",
            rejection="queued_requests",
        ),
    ),
    ((GracefulHTTPError,), lambda error, _: OverloadedError(error.message)),
    (
        (VLLMValidationError, VLLMUnprocessableEntityError),
        lambda error, body: _invalid(str(error.args[0]), error.parameter, body),
    ),
    ((VLLMNotFoundError,), lambda error, _: NotFoundError(str(error))),
    (
        (NotImplementedError,),
        lambda error, _: UnsupportedOperationError(str(error) or "The model cannot do this."),
    ),
    (
        (TemplateError,),
        lambda error, _: InvalidValueError(f"The chat template refuses the messages: {error}"),
    ),
    ((VLLMClientError, ValueError, TypeError, OverflowError), _blamed_on_request),
)
"""The first row whose class fits decides."""


def _invalid(message: str, parameter: str | None, body: JsonObject) -> RequestError:
    prompt = next((name for name in PROMPT_FIELDS if name in body), None)
    if parameter in _TOO_LONG_PARAMETERS:
        return ContextLengthError(message, param=prompt)
    if parameter in MAX_TOKENS_FIELDS and all(body.get(name) is None for name in MAX_TOKENS_FIELDS):
        # The limit was derived from what the prompt leaves, and that is nothing.
        return ContextLengthError(
            f"The prompt fills the model's whole context and leaves no room to answer: {message}",
            param=prompt,
        )
    return InvalidValueError(message, param=parameter)


def _most_telling(problems: list[dict[str, Any]]) -> dict[str, Any]:
    """Pick among the complaints of all branches of a union.

    A message is tried against every role's form; only the forms whose `role` or `type` fits
    have something to say about the rest. Of those, the branch that got furthest was meant, and
    one that took the value's type and not the value.
    """
    strangers = {
        tuple(problem["loc"][:-1])
        for problem in problems
        if problem["loc"] and problem["loc"][-1] in ("role", "type")
    }
    fitting = [
        problem
        for problem in problems
        if not any(tuple(problem["loc"][: len(branch)]) == branch for branch in strangers)
    ]
    return max(
        fitting or problems,
        key=lambda problem: (len(problem["loc"]), not _about_type(str(problem["type"]))),
    )


def _about_type(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing", "_from_float"))


def _body_path(loc: Sequence[int | str], body: object, *, missing: bool) -> str:
    """Return where in the body a complaint points, without pydantic's names of branches."""
    path, here = "", body
    for index, step in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(here, dict) and (step in here or (last and missing)):
            path, here = f"{path}.{step}" if path else str(step), here.get(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
    return path
