"""What a client can be told, as exceptions, and the one table of what each looks like.

    ServerError
    +-- RequestError                 the request itself is wrong
    |   +-- InvalidJsonError         the body is not a JSON object
    |   +-- MediaTypeError           the body is not declared as JSON
    |   +-- ContentEncodingError     the body is compressed
    |   +-- BodyTooLargeError
    |   +-- MissingFieldError, InvalidTypeError, InvalidValueError, UnknownFieldError
    |   +-- UnsupportedFieldError    a known field that this service does not act on
    |   +-- ContextLengthError
    |   +-- InvalidSchemaError       a JSON schema that cannot guide an answer
    |   +-- InvalidGrammarError      a regex, choice, grammar or structural tag that cannot
    |   +-- InvalidAdapterError      a LoRA adapter that does not fit, or may not be read
    |   +-- AdapterExistsError, NoAdapterSlotError
    |   +-- AuthenticationError      no key, or a wrong one
    |   +-- PermissionDeniedError    a key that does not open this
    |   +-- BodyTimeoutError         the body did not arrive in time
    |   +-- InvalidHttpError         what came is not a request of HTTP/1.1
    |   +-- HeadersTooLargeError
    |   +-- HeaderTimeoutError       the head did not arrive in time
    |   +-- WebSocketError           a WebSocket is asked for
    |   +-- RouteNotFoundError, MethodNotAllowedError, ModelNotFoundError, NotFoundError
    |   +-- UnsupportedOperationError
    |   +-- StorageFullError         a quota of what is stored, or the disk
    +-- NotEnabledError              this server was started without it
    +-- OverloadedError              try again later, or elsewhere
    +-- ClientConnectionsError       too many connections from one address
    +-- TooManyConnectionsError      too many connections in all
    +-- QueueTimeoutError            waited too long for its turn
    +-- StorageUnavailableError      the disk of what is stored fails
    +-- NotTriedError                the machine is too busy to try a grammar
    +-- DeadlineError                the answer did not arrive in time
    +-- NotReadyError                still starting
    +-- DrainingError                going away
    +-- ReaderFailedError            the process that reads large requests is gone
    +-- EngineFailedError            the engine process is gone
    +-- InternalError                a fault of ours

Responses and SSE frames are both made from `TABLE`, and its `outcome` is the metric label.
Invariant (tests/server/vllm/test_errors.py): every class of the tree has a row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.descriptions import clip
from server.descriptions import describe as describe


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one class of error is reported; `outcome` is the label of the request metrics."""

    status: int
    type: str
    code: str
    outcome: str


class ErrorObject(TypedDict):
    """What OpenAI's clients look at."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(TypedDict):
    """The body of every error; all but `error` is there for clients of Anthropic's API alone."""

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
"""By status, where Anthropic's API has a type of its own; the other types are the same there."""
_MAX_MESSAGE = 2000
_MAX_PARAM = 200


class ServerError(Exception):
    """An error with a message for the client; `param` names the field in question.

    `headers` go with the answer; `retry_after_s` adds two, in whole seconds and milliseconds.
    OpenAI's clients read the latter first. `rejection` is the metrics' label of a limit.
    `anthropic_code` is a code of Anthropic's API that its clients act on.
    """

    rejection: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.anthropic_code = anthropic_code
        # What a client sent may be in both; it must not come back at its full length.
        self.message = clip(message, _MAX_MESSAGE)
        self.param = None if param is None else clip(param, _MAX_PARAM)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.retry_in(retry_after_s)

    def retry_in(self, seconds: float) -> None:
        """Say in the message and two headers after how many seconds to try again."""
        self.message = f"{self.message} Retry after {math.ceil(seconds)} s."
        self.headers["retry-after"] = str(math.ceil(seconds))
        self.headers["retry-after-ms"] = str(round(seconds * 1000))

    @property
    def row(self) -> ErrorRow:
        """The table's row for this class."""
        return TABLE[type(self)]

    def envelope(self) -> ErrorEnvelope:
        """Return OpenAI's error object; `code` is always a string."""
        row = self.row
        error = ErrorObject(message=self.message, type=row.type, param=self.param, code=row.code)
        return {"error": error}

    def body(self) -> bytes:
        """Return the JSON body in OpenAI's form."""
        return json.dumps(self.envelope()).encode()

    def anthropic_body(self, request_id: str | None = None) -> bytes:
        """Return the JSON body in the form of Anthropic's API, with its own `type`."""
        error: dict[str, object] = {**self.envelope()["error"]}
        error["type"] = _ANTHROPIC_TYPES.get(self.row.status, error["type"])
        if self.anthropic_code is not None:
            error["details"] = {"error_code": self.anthropic_code}
        identity = {} if request_id is None else {"request_id": request_id}
        return json.dumps({"type": "error", "error": error, **identity}).encode()

    def response_event(self, number: int) -> dict[str, object]:
        """Return the error as an event of the Responses API with the sequence number `number`.

        OpenAI documents the fields beside the type; its server and Open Responses nest them.
        """
        error = self.envelope()["error"]
        beside = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return {"type": "error", **beside, "error": error, "sequence_number": number}


class RequestError(ServerError):
    """The request is wrong; sending it again does not help."""


class InvalidJsonError(RequestError):
    """The body is not a JSON object."""


class MediaTypeError(RequestError):
    """The body is declared as something else than JSON."""


class ContentEncodingError(RequestError):
    """The body is compressed, and bodies are read as they are."""


class BodyTooLargeError(RequestError):
    """The body is larger than the limit."""


class MissingFieldError(RequestError):
    """A required field is absent."""


class InvalidTypeError(RequestError):
    """A field holds a value of the wrong JSON type."""


class InvalidValueError(RequestError):
    """A field holds a value that is not allowed."""


class UnknownFieldError(RequestError):
    """A field that this service does not know."""


class UnsupportedFieldError(RequestError):
    """A field of the API that this service knows and does not act on."""


class ContextLengthError(RequestError):
    """Prompt and answer do not fit into the model's context."""


class InvalidSchemaError(RequestError):
    """A JSON schema that is too large, cyclic, not supported, or slow to compile."""


class InvalidGrammarError(RequestError):
    """Another constraint of an answer that is too large, wrong, or slow to compile."""


class InvalidAdapterError(RequestError):
    """A LoRA adapter that does not fit the served model, or lies where none may be read."""


class AdapterExistsError(RequestError):
    """A LoRA adapter of this name is loaded."""


class NoAdapterSlotError(RequestError):
    """All slots for LoRA adapters are taken."""


class AuthenticationError(RequestError):
    """The request has no key, or one that is not known."""


class PermissionDeniedError(RequestError):
    """The request's key does not open this route."""


class BodyTimeoutError(RequestError):
    """The client took too long to send the body."""


class InvalidHttpError(RequestError):
    """What the connection carries is not a request of HTTP/1.1."""


class HeadersTooLargeError(RequestError):
    """The request's line and headers are larger than the limit."""


class HeaderTimeoutError(RequestError):
    """The client took too long to send the headers."""


class WebSocketError(RequestError):
    """A WebSocket is asked for, and there are none."""


class RouteNotFoundError(RequestError):
    """No such path."""


class MethodNotAllowedError(RequestError):
    """The path exists, for other methods."""


class ModelNotFoundError(RequestError):
    """The requested model is not served here."""


class NotFoundError(RequestError):
    """The requested object does not exist."""


class UnsupportedOperationError(RequestError):
    """The served model or engine cannot do this."""


class StorageFullError(RequestError):
    """There is no room for what is to be stored."""


class NotEnabledError(ServerError):
    """This server was started without what the route is for."""


class OverloadedError(ServerError):
    """More work waits than is allowed to; `rejection` is one of `REJECTIONS`."""

    def __init__(
        self,
        message: str,
        *,
        rejection: str = "engine",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.rejection = rejection


class ClientConnectionsError(ServerError):
    """One address has as many connections as it may."""


class TooManyConnectionsError(ServerError):
    """There are as many connections as there may be."""


class QueueTimeoutError(ServerError):
    """The request waited for its turn for longer than it may."""

    rejection = "queue_timeout"


class DeadlineError(ServerError):
    """The time that the request had is over."""


class StorageUnavailableError(ServerError):
    """The data directory cannot be read or written now."""


class NotTriedError(ServerError):
    """The machine was too busy to try a grammar; another time it will not be."""


class NotReadyError(ServerError):
    """The service is still starting."""


class DrainingError(ServerError):
    """The service finishes its requests and takes no new ones."""


class ReaderFailedError(ServerError):
    """The process that reads large requests ended at work; the next request starts another."""


class EngineFailedError(ServerError):
    """The engine process is gone; the service is about to exit."""


class InternalError(ServerError):
    """A fault of ours; the log has the details under the request id."""


REJECTIONS = (
    *("in_flight", "queued_tokens", "queued_requests", "grammars", "reading", "engine"),
    *("queue_timeout", "background", "conversations"),
)
"""What work is refused for: permits, vLLM's two limits, the grammar gate's queue, that
of large bodies, vLLM without saying which, time in queue, responses in the background."""

_INVALID, _LIMIT, _AWAY = "invalid_request_error", "rate_limit_error", "service_unavailable"

TABLE: dict[type[ServerError], ErrorRow] = {
    ServerError: ErrorRow(500, "server_error", "internal_error", "server_error"),
    RequestError: ErrorRow(400, _INVALID, "invalid_request", "client_error"),
    InvalidJsonError: ErrorRow(400, _INVALID, "invalid_json", "client_error"),
    MediaTypeError: ErrorRow(415, _INVALID, "unsupported_media_type", "client_error"),
    ContentEncodingError: ErrorRow(415, _INVALID, "unsupported_content_encoding", "client_error"),
    BodyTooLargeError: ErrorRow(413, _INVALID, "body_too_large", "client_error"),
    MissingFieldError: ErrorRow(400, _INVALID, "missing_field", "client_error"),
    InvalidTypeError: ErrorRow(400, _INVALID, "invalid_type", "client_error"),
    InvalidValueError: ErrorRow(400, _INVALID, "invalid_value", "client_error"),
    UnknownFieldError: ErrorRow(400, _INVALID, "unknown_field", "client_error"),
    UnsupportedFieldError: ErrorRow(400, _INVALID, "unsupported_field", "client_error"),
    ContextLengthError: ErrorRow(400, _INVALID, "context_length_exceeded", "client_error"),
    InvalidSchemaError: ErrorRow(400, _INVALID, "invalid_json_schema", "client_error"),
    InvalidGrammarError: ErrorRow(400, _INVALID, "invalid_grammar", "client_error"),
    InvalidAdapterError: ErrorRow(400, _INVALID, "invalid_adapter", "client_error"),
    AdapterExistsError: ErrorRow(400, _INVALID, "adapter_exists", "client_error"),
    NoAdapterSlotError: ErrorRow(409, _INVALID, "no_adapter_slot", "client_error"),
    AuthenticationError: ErrorRow(401, "authentication_error", "invalid_api_key", "client_error"),
    PermissionDeniedError: ErrorRow(403, "permission_error", "permission_denied", "client_error"),
    BodyTimeoutError: ErrorRow(408, _INVALID, "body_timeout", "client_error"),
    InvalidHttpError: ErrorRow(400, _INVALID, "invalid_http", "client_error"),
    HeadersTooLargeError: ErrorRow(431, _INVALID, "headers_too_large", "client_error"),
    HeaderTimeoutError: ErrorRow(408, _INVALID, "header_timeout", "client_error"),
    WebSocketError: ErrorRow(400, _INVALID, "websocket_unsupported", "client_error"),
    RouteNotFoundError: ErrorRow(404, _INVALID, "route_not_found", "client_error"),
    MethodNotAllowedError: ErrorRow(405, _INVALID, "method_not_allowed", "client_error"),
    ModelNotFoundError: ErrorRow(404, _INVALID, "model_not_found", "client_error"),
    NotFoundError: ErrorRow(404, _INVALID, "not_found", "client_error"),
    UnsupportedOperationError: ErrorRow(400, _INVALID, "unsupported_operation", "client_error"),
    StorageFullError: ErrorRow(507, _INVALID, "storage_full", "client_error"),
    NotEnabledError: ErrorRow(501, _INVALID, "not_enabled", "client_error"),
    OverloadedError: ErrorRow(429, _LIMIT, "overloaded", "rejected"),
    ClientConnectionsError: ErrorRow(429, _LIMIT, "too_many_client_connections", "rejected"),
    TooManyConnectionsError: ErrorRow(503, _AWAY, "too_many_connections", "rejected"),
    QueueTimeoutError: ErrorRow(503, _AWAY, "queue_timeout", "timeout"),
    StorageUnavailableError: ErrorRow(503, _AWAY, "storage_unavailable", "server_error"),
    NotTriedError: ErrorRow(503, _AWAY, "grammar_not_tried", "timeout"),
    DeadlineError: ErrorRow(504, "timeout_error", "deadline_exceeded", "timeout"),
    NotReadyError: ErrorRow(503, _AWAY, "not_ready", "rejected"),
    DrainingError: ErrorRow(503, _AWAY, "draining", "rejected"),
    ReaderFailedError: ErrorRow(503, _AWAY, "reader_failed", "server_error"),
    EngineFailedError: ErrorRow(503, _AWAY, "engine_failed", "server_error"),
    InternalError: ErrorRow(500, "server_error", "internal_error", "server_error"),
}
