"""`/v1/structured_outputs/validate`: whether a grammar would be taken, and why not."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.errors import UnsupportedOperationError
from server.frontend import Frontend
from server.request.body import read_json_object
from server.settings import ServerSettings
from server.structured_outputs.validation import validate


def structured_outputs_router(
    frontend: Callable[[], Frontend], settings: ServerSettings
) -> APIRouter:
    """Return the route; the gate of the lifecycle has made sure that there is a front end."""
    router = APIRouter()

    @router.post("/v1/structured_outputs/validate")
    async def answer(request: Request) -> JSONResponse:
        body = await read_json_object(request, settings)
        if (grammars := frontend().grammars) is None:
            raise UnsupportedOperationError("The served model does not generate text.")
        return JSONResponse(await validate(body, grammars))

    return router
