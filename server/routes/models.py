"""`/v1/models`: the served model and adapters, in two formats; `/tokenizer_info`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path, PurePath
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
    invalid_value,
)
from server.frontend import Frontend
from server.http.openapi import DescribedRoute, failing
from server.lora.registry import AdapterObject
from server.request.record import get_record
from server.wire import JsonObject

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
        return served if get_record(request.scope).caller.is_admin else [*map(shown.model, served)]

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
        if get_record(request.scope).anthropic:
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
                is_anthropic = get_record(request.scope).anthropic
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
        if not get_record(request.scope).caller.is_admin:
            info = {
                name: shown.of(value) if isinstance(value, str) and name.endswith(_PATHS) else value
                for name, value in info.items()
            }
        return JSONResponse(info)

    return router


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
    names = [model["id"] for model in models]
    size = _DEFAULT_LIMIT
    if limit is not None:
        size = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 4 else 0
    if not 1 <= size <= _MAX_LIMIT:
        raise invalid_value("limit", f"be between 1 and {_MAX_LIMIT}", limit)
    for param, name in (("after_id", after_id), ("before_id", before_id)):
        if name is not None and name not in names:
            raise NotFoundError(f"'{param}' is {describe(name)}, which is not there.", param=param)
    first = 0 if after_id is None else names.index(after_id) + 1
    end = None if before_id is None else names.index(before_id)
    models = models[first:end]
    # The page before a model ends with its neighbour.
    page = models[-size:] if before_id is not None else models[:size]
    return {
        "data": page,
        "has_more": len(models) > size,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


# Paths as clients see them, without the layout of the server's file system.

_NO_PATHS = ("root_path",)
"""Fields that are parts of URLs and begin with a slash."""


class ShownPaths:
    """Turns absolute paths into paths below a folder that clients know, else the last part."""

    def __init__(self, known: Path | None) -> None:
        """`known` is the folder that clients load adapters from, None where they cannot."""
        self._known = None if known is None else known.resolve()

    def of(self, path: str) -> str:
        """Return the visible form of a path; names and relative paths are returned unchanged."""
        parts = PurePath(path)
        if not parts.is_absolute():
            return path
        if self._known is not None and parts.is_relative_to(self._known):
            return str(parts.relative_to(self._known))
        return parts.name

    def model(self, card: JsonObject) -> JsonObject:
        """Return a model object, whose `root` may be a path."""
        return {**card, "root": self.of(card["root"])} if card.get("root") else card

    def adapter(self, described: AdapterObject) -> AdapterObject:
        """Return an adapter's description with its path replaced, in its error too."""
        path, error = described["path"], described["error"]
        shown = self.of(path)
        return {**described, "path": shown, "error": error and error.replace(path, shown)}

    def every(self, value: object) -> object:
        """Return JSON with every absolute path in it replaced."""
        if isinstance(value, dict):
            return {k: v if k in _NO_PATHS else self.every(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.every(item) for item in value]
        return self.of(value) if isinstance(value, str) else value
