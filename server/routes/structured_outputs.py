"""`/v1/structured_outputs/validate`: checks of grammars without an answer."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from server.errors import (
    InvalidTypeError,
    InvalidValueError,
    OverloadedError,
    UnsupportedOperationError,
    describe,
)
from server.frontend import Frontend
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.request.body import read_json_object
from server.request.rules import known_fields
from server.settings import ServerSettings
from server.structured_outputs.constraint import (
    BACKEND,
    ConstraintKind,
    format_constraint,
    kind_constraint,
)
from server.structured_outputs.gate import GrammarGate, refusal
from server.wire import JsonObject

_FIELDS = (*(kind.value for kind in ConstraintKind), "response_format")


class Verdict(TypedDict):
    """Verdict on a constraint; `compile_ms` is null if nothing was compiled."""

    valid: bool
    reason: str | None
    code: str | None
    param: str
    backend: str
    compile_ms: float | None
    cached: bool


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
        fields = known_fields(body, _FIELDS, settings.unknown_fields)
        return JSONResponse(await _verdict(fields, grammars))

    return router


async def _verdict(body: JsonObject, gate: GrammarGate) -> Verdict:
    """Return the verdict on the one constraint in `body`.

    Raises `InvalidValueError` or `InvalidTypeError` for a body without one, and the gate's errors.
    """
    given = [name for name in _FIELDS if name in body]
    if len(given) != 1:
        raise InvalidValueError(
            f"The body must have exactly one of {', '.join(_FIELDS)}; it has "
            f"{' and '.join(given) or 'none'}."
        )
    name = given[0]
    if name == "response_format":
        found = format_constraint(body[name], name)
    else:
        found = kind_constraint(name, body[name], name)
    if not found:
        raise InvalidTypeError(
            f"The field '{name}' has no constraint of an answer: {describe(body[name])}.",
            param=name,
        )
    constraint = found[0]
    verdict, cached = await gate.verdict([constraint])
    error = None if verdict.reason is None else refusal(constraint, verdict.reason)
    seconds = verdict.seconds
    return {
        "valid": error is None,
        "reason": None if error is None else error.message,
        "code": None if error is None else error.code,
        "param": constraint.param,
        "backend": BACKEND,
        "compile_ms": None if seconds is None else round(seconds * 1000, 3),
        "cached": cached,
    }
