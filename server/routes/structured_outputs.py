"""`/v1/structured_outputs/validate` and `explain`: grammars without an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.errors import OverloadedError, UnsupportedOperationError
from server.frontend import Frontend
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.request.body import read_json_object
from server.request.fields.rules import known_fields
from server.settings import ServerSettings
from server.structured_outputs.constraint import Undeclared
from server.structured_outputs.explaining.explanation import MAX_SEED
from server.structured_outputs.gate import GrammarGate
from server.structured_outputs.undeclared_option import UNDECLARED, WORDS
from server.structured_outputs.validation import (
    FIELDS,
    SEED,
    ExplainedVerdict,
    Verdict,
    explain,
    validate,
)
from server.wire.endpoint import JsonObject

_FAILURES = (*BODY_FAILURES, OverloadedError)
_BODY: JsonObject = {
    "type": "object",
    "description": "One constraint.",
    "properties": {
        "json": {"type": ["object", "string", "boolean"]},
        **{name: {"type": "string"} for name in ("regex", "grammar")},
        "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "structural_tag": {"type": ["object", "string"]},
        "response_format": {"type": "object"},
        UNDECLARED: {"enum": [*WORDS, None]},
    },
    "minProperties": 1,
    "maxProperties": 2,
    "additionalProperties": False,
}
_EXPLAIN_BODY = {
    **_BODY,
    "properties": {
        **_BODY["properties"],
        SEED: {
            "type": ["integer", "null"],
            "minimum": 0,
            "maximum": MAX_SEED,
            "description": "Selects the samples.",
        },
    },
    "maxProperties": 3,
}


def structured_outputs_router(
    frontend: Callable[[], Frontend], settings: ServerSettings
) -> APIRouter:
    """Return the route; the gate passes requests only once there is a front end."""
    router = APIRouter(route_class=DescribedRoute)
    default = Undeclared(settings.undeclared_properties)

    async def read(request: Request, names: Sequence[str]) -> tuple[JsonObject, GrammarGate]:
        body = await read_json_object(request, settings)
        if (grammars := frontend().grammars) is None:
            raise UnsupportedOperationError("The served model does not generate text.")
        return known_fields(body, names, settings.unknown_fields), grammars

    @router.post(
        "/v1/structured_outputs/validate",
        response_model=Verdict,
        responses=failing(*_FAILURES),
        openapi_extra=taking(_BODY),
    )
    async def answer(request: Request) -> JSONResponse:
        """Check the grammar of a structured output without generating text."""
        body, grammars = await read(request, (*FIELDS, UNDECLARED))
        return JSONResponse(await validate(body, grammars, default))

    @router.post(
        "/v1/structured_outputs/explain",
        response_model=ExplainedVerdict,
        responses=failing(*_FAILURES),
        openapi_extra=taking(_EXPLAIN_BODY),
    )
    async def answer_explained(request: Request) -> JSONResponse:
        """Check a grammar and return what it enforces, its size and sample texts."""
        body, grammars = await read(request, (*FIELDS, UNDECLARED, SEED))
        return JSONResponse(await explain(body, grammars, default))

    return router
