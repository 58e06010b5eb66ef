"""`/v1/models` of all models, loaded or not."""

from __future__ import annotations

import asyncio
import time

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.http.openapi import DescribedRoute
from server.model_pool.choice.model_choice import ModelChoice
from server.model_pool.pool import ModelPool
from server.model_pool.pooled_model import ModelState, PooledModel
from server.request.record import record_of
from server.routes.models import model_info, model_page
from server.wire.endpoint import JsonObject

_STARTED = int(time.time())
_TIMEOUT_S = 5.0
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_VARY = {"vary": "anthropic-version"}


def model_routes(pool: ModelPool, choice: ModelChoice) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=DescribedRoute)

    async def cards(request: Request) -> list[JsonObject]:
        listed = await asyncio.gather(*(_cards(m, request) for m in pool.models.values()))
        return [card for cards in listed for card in cards]

    @router.get("/v1/models")
    async def models(
        request: Request,
        limit: str | None = None,
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> JSONResponse:
        """List all models; those that are loaded with their adapters."""
        served = await cards(request)
        if record_of(request.scope).anthropic:
            return JSONResponse(model_page(served, limit, after_id, before_id), headers=_VARY)
        return JSONResponse({"object": "list", "data": served}, headers=_VARY)

    @router.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> JSONResponse:
        """Return one model or adapter."""
        owner = choice.named(model)
        of_owner = [card for card in await _cards(owner, request) if card["id"] == model]
        card = of_owner[0] if of_owner else _card(model, parent=owner.name)
        is_anthropic = record_of(request.scope).anthropic
        return JSONResponse(model_info(card) if is_anthropic else card, headers=_VARY)

    return router


async def _cards(model: PooledModel, request: Request) -> list[JsonObject]:
    """Return the objects of a model and its adapters, as the client's key shows them."""
    process = model.process
    if model.state in (ModelState.READY, ModelState.LEAVING) and process is not None:
        keys = {k: v for k, v in request.headers.items() if k in _KEY_HEADERS}
        if not record_of(request.scope).caller.is_admin and request.client is not None:
            keys["x-forwarded-for"] = request.client.host
        try:
            answer = await process.client.get("/v1/models", headers=keys, timeout=_TIMEOUT_S)
            answer.raise_for_status()
            return list(answer.json()["data"])
        except (httpx.HTTPError, ValueError, KeyError):
            # It ends just now.
            pass
    return [_card(model.name)]


def _card(name: str, parent: str | None = None) -> JsonObject:
    """Return the object of a model that is not loaded."""
    card = {"id": name, "object": "model", "created": _STARTED, "owned_by": "rbln-serve"}
    return card if parent is None else {**card, "parent": parent}
