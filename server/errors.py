"""Exceptions with a message for the client, each with its HTTP status, code and metric label.

`RequestError` and its subclasses mean that the request is wrong. The other subclasses of
`ServerError` describe the server: overloaded, starting, draining or failed.
Invariant: every subclass sets a `code` of its own (tests/server/vllm/test_messages.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import ClassVar, Literal, NotRequired

from typing_extensions import TypedDict


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(TypedDict):
    """Body of every error; `type` and `request_id` are set for Anthropic's API only."""

    error: ErrorObject
    type: NotRequired[Literal["error"]]
    request_id: NotRequired[str]


_ANTHROPIC_TYPES: Mapping[int, str] = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types of Anthropic's API by status, where they differ from OpenAI's."""
_INVALID, _LIMIT, _AWAY = "invalid_request_error", "rate_limit_error", "service_unavailable"
_MAX_MESSAGE = 2000
_MAX_PARAM = 200


class ServerError(Exception):
    """An error with a message for the client; `param` is the path of the field in question.

    `status`, `error_type` and `code` are those of the response, `outcome` is the label of the
    request metrics. `headers` are sent with the response; `retry_after_s` adds `retry-after` in
    seconds and `retry-after-ms`, which OpenAI's clients read first. `rejection` is the metric label
    of the limit that was reached, one of `REJECTIONS`. `anthropic_code` is an error code that
    Anthropic's clients read.
    """

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    outcome: ClassVar[str] = "server_error"
    rejection: str | None = None

    def __init_subclass__(
        cls,
        *,
        code: str,
        status: int | None = None,
        error_type: str | None = None,
        outcome: str | None = None,
        rejection: str | None = None,
        meaning: str | None = None,
    ) -> None:
        cls.code = code
        cls.status = cls.status if status is None else status
        cls.error_type = error_type or cls.error_type
        cls.outcome = outcome or cls.outcome
        cls.rejection = rejection or cls.rejection
        cls.__doc__ = meaning or cls.__doc__

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_code: str | None = None,
        rejection: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rejection = rejection or self.rejection
        self.anthropic_code = anthropic_code
        # Both may contain text of the client, whose length is not bounded.
        self.message = clip(message, _MAX_MESSAGE)
        self.param = None if param is None else clip(param, _MAX_PARAM)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.retry_in(retry_after_s)

    def retry_in(self, seconds: float) -> None:
        """Add the seconds after which to retry to the message and to two headers."""
        self.message = f"{self.message} Retry after {math.ceil(seconds)} s."
        self.headers["retry-after"] = str(math.ceil(seconds))
        self.headers["retry-after-ms"] = str(math.ceil(round(seconds * 1000, 3)))

    def envelope(self) -> ErrorEnvelope:
        """Return OpenAI's error object; `code` is always a string."""
        return {
            "error": ErrorObject(
                message=self.message, type=self.error_type, param=self.param, code=self.code
            )
        }

    def body(self) -> bytes:
        return json.dumps(self.envelope()).encode()

    def anthropic_body(self, request_id: str) -> bytes:
        """Return the JSON body in the form of Anthropic's API, with its own `type`."""
        error: dict[str, object] = {**self.envelope()["error"]}
        error["type"] = _ANTHROPIC_TYPES.get(self.status, error["type"])
        if self.anthropic_code is not None:
            error["details"] = {"error_code": self.anthropic_code}
        return json.dumps({"type": "error", "error": error, "request_id": request_id}).encode()

    def response_event(self, number: int) -> dict[str, object]:
        """Return the error as an event of the Responses API with the sequence number `number`.

        OpenAI documents the fields next to `type`; its server also nests them in `error`.
        """
        error = self.envelope()["error"]
        fields = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return {"type": "error", **fields, "error": error, "sequence_number": number}


class RequestError(
    ServerError, status=400, error_type=_INVALID, code="invalid_request", outcome="client_error"
):
    """The request is wrong; sending it again does not help."""


# The table: a class each row, in the order of the documents.
# fmt: off
class InvalidJsonError(RequestError, code="invalid_json",
    meaning="The body is not a JSON object."): ...
class MediaTypeError(RequestError, status=415, code="unsupported_media_type",
    meaning="The body is declared as something else than JSON."): ...
class ContentEncodingError(RequestError, status=415, code="unsupported_content_encoding",
    meaning="The body is compressed; only uncompressed bodies are accepted."): ...
class BodyTooLargeError(RequestError, status=413, code="body_too_large",
    meaning="The body is larger than the limit."): ...
class MissingFieldError(RequestError, code="missing_field",
    meaning="A required field is absent."): ...
class InvalidTypeError(RequestError, code="invalid_type",
    meaning="A field holds a value of the wrong JSON type."): ...
class InvalidValueError(RequestError, code="invalid_value",
    meaning="A field holds a value that is not allowed."): ...
class UnknownFieldError(RequestError, code="unknown_field",
    meaning="A field that no request model has."): ...
class UnsupportedFieldError(RequestError, code="unsupported_field",
    meaning="A documented field of the API that this server does not support."): ...
class ContextLengthError(RequestError, code="context_length_exceeded",
    meaning="Prompt and answer do not fit into the model's context."): ...
class InvalidSchemaError(RequestError, code="invalid_json_schema",
    meaning="A JSON schema that is too large, cyclic, not supported, or slow to compile."): ...
class InvalidGrammarError(RequestError, code="invalid_grammar",
    meaning="A regex, choice, grammar or structural tag that is too large, wrong or "
    "slow to compile."): ...
class InvalidAdapterError(RequestError, code="invalid_adapter",
    meaning="A LoRA adapter that does not fit the served model, or lies outside --lora-root."): ...
class AdapterExistsError(RequestError, code="adapter_exists",
    meaning="A LoRA adapter of this name is loaded."): ...
class NoAdapterSlotError(RequestError, status=409, code="no_adapter_slot",
    meaning="All slots for LoRA adapters are in use."): ...
class AuthenticationError(RequestError, status=401, error_type="authentication_error",
    code="invalid_api_key",
    meaning="The request has no API key, or an unknown one."): ...
class PermissionDeniedError(RequestError, status=403, error_type="permission_error",
    code="permission_denied",
    meaning="The request's API key is not allowed on this route."): ...
class BodyTimeoutError(RequestError, status=408, code="body_timeout",
    meaning="The client took too long to send the body."): ...
class InvalidHttpError(RequestError, code="invalid_http",
    meaning="The bytes received are not an HTTP/1.1 request."): ...
class HeadersTooLargeError(RequestError, status=431, code="headers_too_large",
    meaning="The request's line and headers are larger than the limit."): ...
class HeaderTimeoutError(RequestError, status=408, code="header_timeout",
    meaning="The client took too long to send the headers."): ...
class OriginError(RequestError, code="origin_refused",
    meaning="A page of this origin may not send this request."): ...
class TransferCodingError(RequestError, status=501, code="unsupported_transfer_encoding",
    meaning="The body has a transfer coding besides chunked."): ...
class WebSocketError(RequestError, code="websocket_unsupported",
    meaning="The request asks for a WebSocket upgrade, which is not supported."): ...
class RouteNotFoundError(RequestError, status=404, code="route_not_found",
    meaning="No such path."): ...
class MethodNotAllowedError(RequestError, status=405, code="method_not_allowed",
    meaning="The path exists, but not for this method."): ...
class HeadlessError(RequestError, status=404, code="headless",
    meaning="A headless server has no API."): ...
class ModelNotFoundError(RequestError, status=404, code="model_not_found",
    meaning="The requested model is not served here."): ...
class NotFoundError(RequestError, status=404, code="not_found",
    meaning="The requested object does not exist."): ...
class UnsupportedOperationError(RequestError, code="unsupported_operation",
    meaning="The served model or engine cannot do this."): ...
class StorageFullError(RequestError, status=507, code="storage_full",
    meaning="A storage quota, or the disk, is full."): ...
class NotEnabledError(ServerError, status=501, error_type=_INVALID, code="not_enabled",
    outcome="client_error",
    meaning="The option that this route needs was not given at start."): ...
class OverloadedError(ServerError, status=429, error_type=_LIMIT, code="overloaded",
    outcome="rejected", rejection="engine",
    meaning="A limit of running and waiting work is reached; `rejection` is one of "
    "`REJECTIONS`."): ...
class RateLimitError(ServerError, status=429, error_type=_LIMIT, code="rate_limit_exceeded",
    outcome="rejected",
    meaning="A limit of the request's API key is reached; `rejection` is one of `REJECTIONS`."): ...
class ClientConnectionsError(ServerError, status=429, error_type=_LIMIT,
    code="too_many_client_connections", outcome="rejected",
    meaning="A client address has reached its limit of connections."): ...
class TooManyConnectionsError(ServerError, status=503, error_type=_AWAY,
    code="too_many_connections", outcome="rejected",
    meaning="The server has reached its limit of connections."): ...
class QueueTimeoutError(ServerError, status=503, error_type=_AWAY, code="queue_timeout",
    outcome="timeout", rejection="queue_timeout",
    meaning="The request waited in the queue for longer than --max-queue-s."): ...
class DeadlineError(ServerError, status=504, error_type="timeout_error", code="deadline_exceeded",
    outcome="timeout",
    meaning="The request's deadline passed before the answer was complete."): ...
class StorageUnavailableError(ServerError, status=503, error_type=_AWAY, code="storage_unavailable",
    meaning="The data directory cannot be read or written."): ...
class NotTriedError(ServerError, status=503, error_type=_AWAY, code="grammar_not_tried",
    outcome="timeout",
    meaning="A grammar could not be compiled in time because the machine is busy."): ...
class NotReadyError(ServerError, status=503, error_type=_AWAY, code="not_ready", outcome="rejected",
    meaning="The service is still starting."): ...
class DrainingError(ServerError, status=503, error_type=_AWAY, code="draining", outcome="rejected",
    meaning="The service is shutting down or drained: new requests are rejected, and those that "
    "outlast the drain time-out are ended."): ...
class ReaderFailedError(ServerError, status=503, error_type=_AWAY, code="reader_failed",
    meaning="The process that parses large requests exited; the next request starts another."): ...
class EngineFailedError(ServerError, status=503, error_type=_AWAY, code="engine_failed",
    meaning="The engine process has exited; the service is about to exit."): ...
class InternalError(ServerError, code="internal_error",
    meaning="A fault of the server; its log has the details under the request id."): ...
# fmt: on


def invalid_value(path: str, must: str, value: object) -> InvalidValueError:
    """Return the error of a value; `must` begins with a verb, as in "be 1 to 4"."""
    return InvalidValueError(f"'{path}' must {must}, got {describe(value)}.", param=path)


REJECTIONS = """
    in_flight queued_tokens queued_requests grammars reading engine queue_timeout background
    conversations key_in_flight key_requests key_tokens
""".split()
"""Limits that reject work: admission permits, vLLM's two queue limits, the queues of grammars and
of large bodies, an unnamed limit of vLLM, time in queue, background responses, limits of a key."""


# Short renderings of client values, for messages and logs.

_JSON_TYPES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def describe(value: object, limit: int = 80) -> str:
    """Return a short rendering of a request's value for a message, `limit` characters at most."""
    if isinstance(value, dict | list):
        kind = "object" if isinstance(value, dict) else "array"
        if len(value) > 4 or not _is_small(value):
            return f"an {kind} of {len(value)} items"
    # Cut first: rendering a text of megabytes is slow.
    return clip(_words(value[:limit] if isinstance(value, str) else value), limit)


def json_type(value: object) -> str:
    """Return the JSON type of a decoded value with its article, for messages."""
    return _JSON_TYPES.get(type(value), type(value).__name__)


def _words(value: object) -> str:
    """Return a value as Python writes it, but with JSON's words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_words, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_words(inner)}' for name, inner in value.items())}}}"
    return repr(value)


def _is_small(value: object) -> bool:
    """Return True if a container is small enough to be rendered."""
    level = [value]
    for _ in range(4):
        below: list[object] = []
        for item in level:
            if isinstance(item, str) and len(item) > 80:
                return False
            below += item if isinstance(item, list) else ()
            below += (*item, *item.values()) if isinstance(item, dict) else ()
        if not below:
            return True
        if len(below) > 32:
            return False
        level = below
    return False


def clip(text: str, limit: int) -> str:
    """Return a text, cut to `limit` characters where it is longer."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
