"""`/openapi.json`: the OpenAPI document of this server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response
from starlette.routing import BaseRoute

from server.errors import NotReadyError
from server.frontend import Frontend
from server.http.openapi import DescribedRoute, failing, openapi_document
from server.lifecycle import Lifecycle
from server.wire.endpoint import JsonObject


def openapi_router(
    lifecycle: Lifecycle, frontend: Callable[[], Frontend], version: str, root_path: str
) -> APIRouter:
    """Return the route; the document exists once the engine has started."""
    router = APIRouter(route_class=DescribedRoute)
    written: list[bytes] = []

    def write(routes: Sequence[BaseRoute]) -> bytes:
        schemas = frontend().schemas()
        return json.dumps(openapi_document(routes, schemas, version, root_path)).encode()

    @router.get("/openapi.json", response_model=JsonObject, responses=failing(NotReadyError))
    async def document(request: Request) -> Response:
        """Return the OpenAPI document."""
        if not lifecycle.started and (refusal := lifecycle.refusal()) is not None:
            raise refusal
        if not written:
            # Takes about a second, so it runs in a thread.
            written.append(await asyncio.to_thread(write, request.app.routes))
        return Response(written[0], media_type="application/json")

    return router
