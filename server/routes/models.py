"""`/v1/models` and `/v1/models/{id}`: what is served, as OpenAI's model objects."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from server.errors import ModelNotFoundError, describe
from server.frontend import Frontend


def models_router(frontend: Callable[[], Frontend]) -> APIRouter:
    """Return the models' routes; the gate has made sure that there is a front end."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": await frontend().models()})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> JSONResponse:
        served = await frontend().models()
        for card in served:
            if card["id"] == model:
                return JSONResponse(card)
        names = ", ".join(repr(card["id"]) for card in served)
        raise ModelNotFoundError(
            f"The model {describe(model)} does not exist; this server has {names}.",
            param="model",
        )

    return router
