"""`/v1/models` and `/v1/models/{id}`: what is served, as OpenAI's model objects."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.errors import ModelNotFoundError, describe
from server.frontend import Frontend, JsonObject
from server.request.record import record_of
from server.request.shown_paths import ShownPaths


def models_router(frontend: Callable[[], Frontend], shown: ShownPaths) -> APIRouter:
    """Return the models' routes; the gate has made sure that there is a front end."""
    router = APIRouter()

    async def cards(request: Request) -> list[JsonObject]:
        served = await frontend().models()
        return served if record_of(request.scope).is_admin else [*map(shown.model, served)]

    @router.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": await cards(request)})

    @router.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> JSONResponse:
        served = await cards(request)
        for card in served:
            if card["id"] == model:
                return JSONResponse(card)
        names = ", ".join(repr(card["id"]) for card in served)
        raise ModelNotFoundError(
            f"The model {describe(model)} does not exist; this server has {names}.",
            param="model",
        )

    return router
