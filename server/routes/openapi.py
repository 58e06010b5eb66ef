"""`/openapi.json`: what this server takes and answers, for tools that read such documents."""

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
    lifecycle: Lifecycle,
    frontend: Callable[[], Frontend],
    version: str,
    root_path: str,
) -> APIRouter:
    """Return the route; before the engine is there, nobody knows what it offers."""
    router = APIRouter(route_class=DescribedRoute)
    written: list[bytes] = []

    def write(routes: Sequence[BaseRoute]) -> bytes:
        schemas = frontend().schemas()
        return json.dumps(openapi_document(routes, schemas, version, root_path)).encode()

    @router.get("/openapi.json", response_model=JsonObject, responses=failing(NotReadyError))
    async def document(request: Request) -> Response:
        """This document."""
        if not lifecycle.started and (refusal := lifecycle.refusal()) is not None:
            raise refusal
        if not written:
            # A second of pydantic's work, which the streams need not wait for.
            written.append(await asyncio.to_thread(write, request.app.routes))
        return Response(written[0], media_type="application/json")

    return router
