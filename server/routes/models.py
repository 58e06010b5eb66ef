"""`/v1/models` and `/v1/models/{id}`: what is served, as OpenAI's model objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from server.edge.openapi import DescribedRoute, failing
from server.errors import ModelNotFoundError, describe
from server.frontend import Frontend, JsonObject
from server.request.record import record_of
from server.request.shown_paths import ShownPaths


class ModelObject(TypedDict):
    """OpenAI's model object; vLLM adds to it."""

    id: str
    object: Literal["model"]


class ModelList(TypedDict):
    """OpenAI's list of models."""

    object: Literal["list"]
    data: list[ModelObject]


def models_router(frontend: Callable[[], Frontend], shown: ShownPaths) -> APIRouter:
    """Return the models' routes; the gate has made sure that there is a front end."""
    router = APIRouter(route_class=DescribedRoute)

    async def cards(request: Request) -> list[JsonObject]:
        served = await frontend().models()
        return served if record_of(request.scope).is_admin else [*map(shown.model, served)]

    @router.get("/v1/models", response_model=ModelList)
    async def models(request: Request) -> JSONResponse:
        """The served model and its adapters."""
        return JSONResponse({"object": "list", "data": await cards(request)})

    @router.get(
        "/v1/models/{model:path}",
        response_model=ModelObject,
        responses=failing(ModelNotFoundError),
    )
    async def model(model: str, request: Request) -> JSONResponse:
        """One served model or adapter."""
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
