"""Translate vLLM's and pydantic's errors to `ServerError`.

The class, status and parameter name decide, never the text of a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.exceptions import (
    GenerationError,
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
    json_type,
)
from server.request.tables import MAX_TOKENS_FIELDS
from server.vllm.sampling import no_token_left
from server.wire import JsonObject

logger = logging.getLogger(__name__)

TOO_LONG_PARAMETERS = ("input_tokens", "input_text")
"""Parameters that vLLM names for a prompt longer than the context."""

_WORDS: Mapping[str, str] = {
    "dict_type": "Input should be an object",
    "iterable_type": "Input should be an array",
    "model_type": "Input should be an object",
}
"""Messages of pydantic by the type of its error, where they name Python's types."""
_ENGINES_OWN = "Message"
"""Branch of a message of gpt-oss, which vLLM makes itself."""


class RefusedError(Exception):
    """An error response of vLLM's serving classes: message, status and parameter."""

    def __init__(self, message: str, status: int, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param


class NoTokenLeftError(GenerationError):
    """The fields of a request forbid every token at a position of its answer."""


class BacklogError(MaxQueuedTokensError):
    """vLLM's error with the waiting prompt tokens and their limit."""

    def __init__(self, waiting: int, limit: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated upstream
        self.message = (
            f"{waiting} prompt tokens wait for their prefill, and at most {limit} may "
            "(--max-queued-tokens)."
        )
        self.args = (self.message,)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Parts of a request that its errors name: fields that hold one value, and its prompt field.

    `max_model_len` is the model's context in tokens, None where it does not matter.
    `forbidding` are the fields that forbid tokens, `guided`: the answer has to satisfy a grammar.
    """

    fields: JsonObject
    prompt: str | None
    max_model_len: int | None = None
    forbidding: Sequence[str] = ()
    guided: bool = False


def from_exception(error: Exception, context: RequestContext) -> ServerError:
    if isinstance(error.__cause__, ServerError):
        # vLLM wraps every exception of a chat template.
        return error.__cause__
    for kinds, translate in _TRANSLATIONS:
        if isinstance(error, kinds):
            return translate(error, context)
    return _internal(error, context)


def from_validation(error: ValidationError, body: object, body_path: str = "") -> RequestError:
    """Return the client's error for the most specific of pydantic's errors about `body`.

    `place` is the path of `body` within the request, empty for the whole.
    """
    problem = _most_specific(error.errors(include_url=False, include_context=False))
    kind = str(problem["type"])
    path = _body_path(problem["loc"], body, body_path, missing=kind == "missing")
    if kind == "missing":
        return MissingFieldError(f"The field '{path}' is missing.", param=path)
    message = _WORDS.get(kind, str(problem["msg"]).removeprefix("Value error, "))
    value = problem.get("input")
    if _about_type(kind):
        json_kind = json_type(value)
        where = f"Invalid type for '{path}'" if path else "Invalid request"
        shown = json_kind if value is None else f"{json_kind}: {describe(value)}"
        text = f"{where}: {message}, got {shown}."
        return InvalidTypeError(text, param=path or None)
    where = f"Invalid value for '{path}'" if path else "Invalid request"
    return InvalidValueError(f"{where}: {message}, got {describe(value)}.", param=path or None)


def engine_failed() -> EngineFailedError:
    return EngineFailedError("The engine has failed and the server is about to exit.")


def _internal(error: Any, _context: RequestContext) -> ServerError:
    logger.error("The engine failed on a request", exc_info=error)
    return InternalError("Internal error; the server's log has it under the request id.")


def _not_generated(error: Any, context: RequestContext) -> ServerError:
    """The engine ends an answer with an error where no token is left to sample."""
    # Stop ids are forbidden before the minimum length, and in the middle of a grammar.
    holds_stops = context.guided or "min_tokens" in context.forbidding
    names = [n for n in context.forbidding if n != "stop_token_ids" or holds_stops]
    if names and (context.guided or isinstance(error, NoTokenLeftError)):
        return no_token_left(names, guided=context.guided)
    return _internal(error, context)


def _invalid_request(error: Any, _context: RequestContext) -> ServerError:
    # vLLM raises builtin errors for requests as well, chat templates above all.
    logger.debug("Reported as a client error", exc_info=error)
    return InvalidValueError(str(error))


def _refused(error: Any, context: RequestContext) -> ServerError:
    if error.status == 503:
        return OverloadedError(error.message)
    if error.status == 501:
        return UnsupportedOperationError(error.message, param=error.param)
    if error.status >= 500:
        return InternalError(error.message)
    if error.status == 404:
        return NotFoundError(error.message, param=error.param)
    return _invalid(error.message, error.param, context)


_TRANSLATIONS: tuple[
    tuple[tuple[type[Exception], ...], Callable[[Any, RequestContext], ServerError]], ...
] = (
    ((ServerError,), lambda error, _: error),
    ((ValidationError,), lambda error, context: from_validation(error, context.fields)),
    ((RefusedError,), _refused),
    ((EngineDeadError,), lambda *_: engine_failed()),
    (
        (EngineGenerateError,),
        lambda error, context: (
            from_exception(error.__cause__, context)
            if error.__cause__
            else _internal(error, context)
        ),
    ),
    ((GenerationError,), _not_generated),
    ((BacklogError,), lambda error, _: OverloadedError(str(error), rejection="queued_tokens")),
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
        lambda error, context: _invalid(
            # Empty for a template that raises an error without a reason, or needs all memory.
            str(error.args[0]) or "The chat template refuses the conversation.",
            error.parameter,
            context,
            getattr(error, "value", None),
        ),
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
    ((VLLMClientError, ValueError, TypeError, OverflowError), _invalid_request),
)
"""The first row whose class fits decides."""


def _invalid(
    message: str, parameter: str | None, context: RequestContext, size: object = None
) -> RequestError:
    if parameter in TOO_LONG_PARAMETERS:
        return too_long(message if size is None else _length(parameter, size), context)
    limited = any(context.fields.get(name) is not None for name in MAX_TOKENS_FIELDS)
    if parameter in MAX_TOKENS_FIELDS and not limited:
        # The limit was derived from what the prompt leaves, and that is nothing.
        return too_long("The prompt fills the whole context and leaves no room to answer", context)
    names = _SENT_NAMES.get(parameter or "", ())
    name = next((name for name in names if context.fields.get(name) is not None), parameter)
    if name is not None and name not in message:
        message = f"'{name}': {message}"
    return InvalidValueError(message, param=name)


_SENT_NAMES: Mapping[str, Sequence[str]] = {
    "logprobs": ("top_logprobs",),
    "max_tokens": ("max_output_tokens", "max_completion_tokens"),
    "extra_args": ("vllm_xargs",),
}
"""Fields from which vLLM sets a sampling parameter of another name."""


def _length(parameter: str | None, size: object) -> str:
    return f"The prompt has {size} {'tokens' if parameter == 'input_tokens' else 'characters'}"


def too_long(length: str, context: RequestContext) -> ContextLengthError:
    """Return the error of a prompt that is too long; `length` describes its length."""
    most = context.max_model_len
    limit = "" if most is None else f"; this model's context is {most} tokens"
    wanted = next((n for n in MAX_TOKENS_FIELDS if context.fields.get(n) is not None), None)
    answer = "" if wanted is None else f", of which '{wanted}' takes {context.fields[wanted]}"
    return ContextLengthError(
        f"{length}{limit}{answer}. Shorten the prompt"
        f"{'' if wanted is None else f', or lower {wanted!r}'}.",
        param=context.prompt,
    )


_BRANCH = ("role", "type")
"""Fields that select a branch of a union."""


def _most_specific(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Select among the errors of all branches of a union, in linear time.

    A `role` or `type` that is no text fits no branch and is selected. Otherwise pydantic validates
    a message by the form of every role, and only forms whose `role` or `type` fits matter. Of their
    errors, the deepest is selected; among equals, one about a value rather than its type.
    """
    problems = [one for one in problems if _ENGINES_OWN not in one["loc"]] or problems
    locs = [tuple(problem["loc"]) for problem in problems]
    wrong = [
        problem
        for problem, loc in zip(problems, locs, strict=True)
        if loc and loc[-1] in _BRANCH and not isinstance(problem["input"], str | dict)
    ]
    if wrong:
        return wrong[0]
    unknown_branches = {loc[:-1] for loc in locs if loc and loc[-1] in _BRANCH}
    fitting = [
        problem
        for problem, loc in zip(problems, locs, strict=True)
        if not any(loc[:length] in unknown_branches for length in range(len(loc) + 1))
    ]
    return max(
        fitting or problems,
        key=lambda problem: (len(problem["loc"]), not _about_type(str(problem["type"]))),
    )


def _about_type(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing", "_from_float"))


def _body_path(loc: Sequence[int | str], body: object, path: str, *, missing: bool) -> str:
    """Return the path of an error below `path`, without pydantic's names of branches."""
    here = body
    for index, step in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(here, dict) and (step in here or (last and missing)):
            path, here = f"{path}.{step}" if path else str(step), here.get(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
    return path
