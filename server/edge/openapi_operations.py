"""The operations of the routes that are ours alone, as OpenAPI describes them. Pure data.

Those of the endpoints that need the engine come from its request models; see `openapi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server import errors
from server.errors import ServerError

Schema = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def _closed(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {**_object(required, optional), "additionalProperties": False}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_ANY_OBJECT: Schema = {"type": "object"}

ERROR = _object(
    {
        "error": _object(
            {"message": _TEXT, "type": _TEXT, "param": _or_null("string"), "code": _TEXT}
        )
    },
    {"type": {"const": "error", "description": "On Anthropic's routes alone."}},
)
"""The envelope of every error."""

_STATUS = _object(
    {
        "status": {"enum": ["starting", "ready", "draining", "dead"]},
        "phase": _TEXT,
        "uptime_s": {"type": "number"},
        "in_flight": _COUNT,
        "reason": _or_null("string"),
        "graphs": _object({"done": _COUNT, "total": _COUNT}),
        "eta_s": _or_null("number"),
        "detail": _TEXT,
    }
)
_MODEL = _object({"id": _TEXT, "object": {"const": "model"}})
_ADAPTER = _object(
    {"name": _TEXT, "state": {"enum": ["loading", "ready", "draining", "failed"]}},
    {"in_flight": _COUNT, "path": _TEXT},
)
_VERDICT = _object(
    {
        "valid": _FLAG,
        "reason": _or_null("string"),
        "code": _or_null("string"),
        "param": _TEXT,
        "backend": _TEXT,
        "compile_ms": _or_null("number"),
        "cached": _FLAG,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route: what it takes, what it answers, how it can fail."""

    path: str
    summary: str
    method: str = "get"
    body: Schema | None = None
    parameters: tuple[Schema, ...] = ()
    answers: Mapping[int, tuple[str, Schema | None]]
    """By status: what it means, and the schema of the JSON body, None for no or another body."""
    media_types: tuple[str, ...] = (JSON,)
    """Of the answers; the schema is that of the first."""
    failures: tuple[type[ServerError], ...] = ()
    """Besides those that every route of its scope has."""


def _path_parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}


def _probe(path: str, summary: str) -> Operation:
    return Operation(
        path=path, summary=summary, answers={200: ("Yes.", _STATUS), 503: ("No.", _STATUS)}
    )


_BODY_FAILURES = (
    errors.InvalidJsonError,
    errors.InvalidTypeError,
    errors.InvalidValueError,
    errors.MissingFieldError,
    errors.UnknownFieldError,
    errors.UnsupportedOperationError,
    errors.MediaTypeError,
    errors.BodyTooLargeError,
    errors.BodyTimeoutError,
)
_ADAPTER_FAILURES = (
    *_BODY_FAILURES,
    errors.InvalidAdapterError,
    errors.AdapterExistsError,
    errors.NoAdapterSlotError,
    errors.NotFoundError,
    errors.PermissionDeniedError,
)

PROBES = (
    _probe("/livez", "Whether the process would not be helped by a restart."),
    _probe("/readyz", "Whether new requests are taken now; with the progress of the start-up."),
    _probe("/startupz", "Whether the service has been ready once."),
    Operation(
        path="/health",
        summary="Whether the engine can answer, as vLLM says it.",
        answers={200: ("Yes.", None), 503: ("No.", None)},
        media_types=(),
    ),
)

PAGES = (
    Operation(
        path="/",
        summary="The console, a page that shows what the server does.",
        answers={200: ("The page.", None)},
        media_types=("text/html",),
    ),
    Operation(
        path="/console/{file}",
        summary="A file of the console.",
        parameters=(_path_parameter("file"),),
        answers={200: ("The file.", None)},
        media_types=("text/html", "text/css", "text/javascript", "image/svg+xml"),
        failures=(errors.RouteNotFoundError,),
    ),
)

DESCRIPTIONS = (
    Operation(
        path="/metrics",
        summary="Metrics in Prometheus' text format.",
        answers={200: ("The page.", None)},
        media_types=(TEXT,),
    ),
    Operation(
        path="/version",
        summary="Versions of what runs.",
        answers={200: ("By component.", {**_ANY_OBJECT, "additionalProperties": _TEXT})},
    ),
    Operation(
        path="/v1/server_info",
        summary="What runs here and how.",
        answers={200: ("See docs/server_info.md.", _ANY_OBJECT)},
    ),
    Operation(
        path="/openapi.json",
        summary="This document.",
        answers={200: ("OpenAPI 3.1.", _ANY_OBJECT)},
        failures=(errors.NotReadyError,),
    ),
    Operation(
        path="/v1/models",
        summary="The served model and its adapters.",
        answers={
            200: (
                "OpenAI's list.",
                _object({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}),
            )
        },
    ),
    Operation(
        path="/v1/models/{model}",
        summary="One served model or adapter.",
        parameters=(_path_parameter("model"),),
        answers={200: ("OpenAI's model object.", _MODEL)},
        failures=(errors.ModelNotFoundError,),
    ),
)

WORK = (
    Operation(
        path="/v1/structured_outputs/validate",
        method="post",
        summary="Try a grammar of a structured output without generating anything.",
        body={
            "type": "object",
            "description": "Exactly one of the fields.",
            "properties": {
                "json": {"type": ["object", "string", "boolean"]},
                "regex": _TEXT,
                "choice": {"type": "array", "items": _TEXT, "minItems": 1},
                "grammar": _TEXT,
                "structural_tag": {"type": ["object", "string"]},
                "response_format": _ANY_OBJECT,
            },
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        },
        answers={200: ("The verdict.", _VERDICT)},
        failures=(*_BODY_FAILURES, errors.OverloadedError),
    ),
    Operation(
        path="/v1/load_lora_adapter",
        method="post",
        summary="Load a LoRA adapter from below --lora-root; vLLM's body and answer.",
        body=_closed(
            {"lora_name": _TEXT, "lora_path": _TEXT},
            {"load_inplace": _FLAG, "is_3d_lora_weight": {"const": False}},
        ),
        answers={200: ("It is loaded.", None)},
        media_types=(TEXT,),
        failures=_ADAPTER_FAILURES,
    ),
    Operation(
        path="/v1/unload_lora_adapter",
        method="post",
        summary="Unload a LoRA adapter once its last request has ended.",
        body=_closed({"lora_name": _TEXT}, {"lora_int_id": _or_null("integer")}),
        answers={200: ("It is gone, or going.", None)},
        media_types=(TEXT,),
        failures=_ADAPTER_FAILURES,
    ),
    Operation(
        path="/v1/lora_adapters",
        summary="Every known adapter with its state.",
        answers={200: ("The adapters.", _ANY_OBJECT)},
        failures=(errors.UnsupportedOperationError,),
    ),
    Operation(
        path="/v1/lora_adapters/{name}",
        summary="One adapter with its state.",
        parameters=(_path_parameter("name"),),
        answers={200: ("The adapter.", _ADAPTER)},
        failures=(errors.NotFoundError, errors.UnsupportedOperationError),
    ),
    Operation(
        path="/v1/lora_adapters/{name}",
        method="delete",
        summary="Unload an adapter and wait for the end of its last request.",
        parameters=(
            _path_parameter("name"),
            {
                "name": "wait",
                "in": "query",
                "schema": {"enum": ["true", "false"]},
                "description": "`false` does not wait.",
            },
        ),
        answers={200: ("It is gone.", _ANY_OBJECT), 202: ("It is going.", _ANY_OBJECT)},
        failures=(
            errors.NotFoundError,
            errors.InvalidValueError,
            errors.UnsupportedOperationError,
            errors.PermissionDeniedError,
        ),
    ),
)

ADMIN = (
    Operation(
        path="/admin/drain",
        method="post",
        summary="Take no new requests from now on; what is in flight finishes.",
        body=_closed({}, {"timeout_s": {"type": "number", "minimum": 0}, "wait": _FLAG}),
        answers={200: ("Nothing is in flight.", _ANY_OBJECT), 202: ("Not yet.", _ANY_OBJECT)},
        failures=(*_BODY_FAILURES, errors.PermissionDeniedError),
    ),
    Operation(
        path="/admin/undrain",
        method="post",
        summary="Take requests again after /admin/drain.",
        answers={200: ("Requests are taken.", _ANY_OBJECT)},
        failures=(*_BODY_FAILURES, errors.PermissionDeniedError),
    ),
)

INFERENCE_FAILURES = (
    *_BODY_FAILURES,
    errors.UnsupportedFieldError,
    errors.ContextLengthError,
    errors.InvalidSchemaError,
    errors.InvalidGrammarError,
    errors.ModelNotFoundError,
    errors.OverloadedError,
    errors.QueueTimeoutError,
    errors.DeadlineError,
)
"""How a request of the engine can fail."""
