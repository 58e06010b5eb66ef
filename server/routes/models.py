"""`/v1/models`: the served model and adapters, in two formats; `/tokenizer_info`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from server.errors import (
    InvalidValueError,
    ModelNotFoundError,
    NotEnabledError,
    NotFoundError,
    describe,
)
from server.frontend import Frontend
from server.http.openapi import DescribedRoute, failing
from server.request.record import record_of
from server.request.shown_paths import ShownPaths
from server.wire.endpoint import JsonObject

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 1000
_UNKNOWN: JsonObject = dict.fromkeys(("capabilities", "deprecated_at", "line", "retires_at"))
_PATHS = ("_file", "_path")
"""Endings of the names of fields that hold paths."""
_VARY = {"vary": "anthropic-version"}
"""Header of requests that selects Anthropic's format."""


class ModelObject(TypedDict):
    """OpenAI's model object; vLLM adds to it."""

    id: str
    object: Literal["model"]


class ModelList(TypedDict):
    """OpenAI's list of models."""

    object: Literal["list"]
    data: list[ModelObject]


class ModelInfo(TypedDict):
    """Anthropic's model object; it has further fields."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(TypedDict):
    """One page of Anthropic's list of models."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def models_router(frontend: Callable[[], Frontend], shown: ShownPaths) -> APIRouter:
    """Return the models' routes; the gate passes requests only once there is a front end."""
    router = APIRouter(route_class=DescribedRoute)

    async def cards(request: Request) -> list[JsonObject]:
        served = await frontend().models()
        return served if record_of(request.scope).caller.is_admin else [*map(shown.model, served)]

    @router.get(
        "/v1/models",
        response_model=ModelList | ModelPage,
        responses=failing(InvalidValueError, NotFoundError),
    )
    async def models(
        request: Request,
        limit: str | None = None,
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> JSONResponse:
        """List the model and its adapters; in Anthropic's format and pages with its header."""
        served = await cards(request)
        if record_of(request.scope).anthropic:
            return JSONResponse(_model_page(served, limit, after_id, before_id), headers=_VARY)
        return JSONResponse({"object": "list", "data": served}, headers=_VARY)

    @router.get(
        "/v1/models/{model:path}",
        response_model=ModelObject | ModelInfo,
        responses=failing(ModelNotFoundError),
    )
    async def model(model: str, request: Request) -> JSONResponse:
        """Return one served model or adapter."""
        served = await cards(request)
        for card in served:
            if card["id"] == model:
                is_anthropic = record_of(request.scope).anthropic
                return JSONResponse(_model_info(card) if is_anthropic else card, headers=_VARY)
        names = ", ".join(repr(card["id"]) for card in served)
        raise ModelNotFoundError(
            f"The model {describe(model)} does not exist; this server has {names}.", param="model"
        )

    @router.get("/tokenizer_info", responses=failing(NotEnabledError))
    async def tokenizer_info(request: Request) -> JSONResponse:
        """Return the tokenizer's configuration with the chat template, as vLLM does."""
        info = await frontend().tokenizer_info()
        if info is None:
            raise NotEnabledError(
                "The tokenizer's configuration is not shown: the server was started without "
                "--enable-tokenizer-info-endpoint."
            )
        if not record_of(request.scope).caller.is_admin:
            info = {name: _shown_field(name, value, shown) for name, value in info.items()}
        return JSONResponse(info)

    return router


def _shown_field(name: str, value: object, shown: ShownPaths) -> object:
    """Return a field of a tokenizer's configuration without the layout of the file system."""
    return shown.of(value) if isinstance(value, str) and name.endswith(_PATHS) else value


def _model_info(card: JsonObject) -> JsonObject:
    """Return Anthropic's object for a model object of OpenAI's with vLLM's fields."""
    created = datetime.fromtimestamp(card.get("created", 0), UTC)
    longest = card.get("max_model_len")
    return {
        "id": card["id"],
        "type": "model",
        "display_name": card["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
        **_UNKNOWN,
    }


def _model_page(
    cards: list[JsonObject], limit: str | None, after_id: str | None, before_id: str | None
) -> JsonObject:
    """Return a page of the models after or before one of them.

    Raises `InvalidValueError`, `NotFoundError`.
    """
    models = [_model_info(card) for card in cards]
    size = _size(limit)
    first = 0 if after_id is None else _place(models, after_id, "after_id") + 1
    end = None if before_id is None else _place(models, before_id, "before_id")
    models = models[first:end]
    # The page before a model ends with its neighbour.
    page = models[-size:] if before_id is not None else models[:size]
    return {
        "data": page,
        "has_more": len(models) > size,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _size(limit: str | None) -> int:
    if limit is None:
        return _DEFAULT_LIMIT
    size = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 4 else 0
    if not 1 <= size <= _MAX_LIMIT:
        raise InvalidValueError(
            f"'limit' must be between 1 and {_MAX_LIMIT}, got {describe(limit)}.", param="limit"
        )
    return size


def _place(models: list[JsonObject], name: str, param: str) -> int:
    names = [model["id"] for model in models]
    if name not in names:
        raise NotFoundError(f"'{param}' is {describe(name)}, which is not there.", param=param)
    return names.index(name)
