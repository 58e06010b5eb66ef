"""`/v1/structured_outputs/validate`: checks of grammars without an answer."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.errors import OverloadedError, UnsupportedOperationError
from server.frontend import Frontend
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.request.body import read_json_object
from server.request.rules import known_fields
from server.settings import ServerSettings
from server.structured_outputs.gate import FIELDS, Verdict, validate
from server.wire import JsonObject

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
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}


def structured_outputs_router(
    frontend: Callable[[], Frontend], settings: ServerSettings
) -> APIRouter:
    """Return the route; the gate passes requests only once there is a front end."""
    router = APIRouter(route_class=DescribedRoute)

    @router.post(
        "/v1/structured_outputs/validate",
        response_model=Verdict,
        responses=failing(*_FAILURES),
        openapi_extra=taking(_BODY),
    )
    async def answer(request: Request) -> JSONResponse:
        """Check the grammar of a structured output without generating text."""
        body = await read_json_object(request, settings)
        if (grammars := frontend().grammars) is None:
            raise UnsupportedOperationError("The served model does not generate text.")
        fields = known_fields(body, FIELDS, settings.unknown_fields)
        return JSONResponse(await validate(fields, grammars))

    return router
