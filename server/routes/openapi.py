"""`/openapi.json`: what this server takes and answers, for tools that read such documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from fastapi import APIRouter, Response

from server.edge.openapi import openapi_document
from server.frontend import Frontend
from server.lifecycle import Lifecycle


def openapi_router(
    lifecycle: Lifecycle,
    frontend: Callable[[], Frontend],
    version: str,
    root_path: str,
    *,
    console: bool,
) -> APIRouter:
    """Return the route; before the engine is there, nobody knows what it offers."""
    router = APIRouter()
    written: list[bytes] = []

    def write() -> bytes:
        schemas = frontend().schemas()
        return json.dumps(openapi_document(schemas, version, root_path, console=console)).encode()

    @router.get("/openapi.json")
    async def document() -> Response:
        if not lifecycle.started and (refusal := lifecycle.refusal()) is not None:
            raise refusal
        if not written:
            # A second of pydantic's work, which the streams need not wait for.
            written.append(await asyncio.to_thread(write))
        return Response(written[0], media_type="application/json")

    return router
