"""Routes of LoRA adapters: vLLM's two, and our own to list, show and delete adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from server.errors import (
    AdapterExistsError,
    InvalidAdapterError,
    InvalidValueError,
    NoAdapterSlotError,
    NotFoundError,
    RequestError,
    UnsupportedFieldError,
    UnsupportedOperationError,
    describe,
    invalid_value,
)
from server.frontend import Frontend
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.lora.registry import Adapter, AdapterObject, AdapterRegistry
from server.observability.metrics import ServerMetrics
from server.request.body import read_json_object
from server.request.record import get_record
from server.request.rules import parse_body
from server.routes.models import ShownPaths
from server.settings import ServerSettings
from server.wire import JsonObject

_ACCEPTED = 202
_FAILURES = failing(
    *BODY_FAILURES, NotFoundError, InvalidAdapterError, AdapterExistsError, NoAdapterSlotError
)
_WITHOUT_LORA = failing(UnsupportedOperationError)
_UNKNOWN = failing(UnsupportedOperationError, NotFoundError)
_DRAINING = {
    _ACCEPTED: {"model": AdapterObject},
    **failing(UnsupportedOperationError, NotFoundError, InvalidValueError),
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_WAIT = Query(description="`false` does not wait.", json_schema_extra={"enum": ["true", "false"]})


class LoadAdapterBody(BaseModel):
    """Body of `/v1/load_lora_adapter`, with vLLM's fields."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(description="Name that requests will use as their model.")
    lora_path: str = Field(description="PEFT folder; a relative path starts at --lora-root.")
    load_inplace: bool = Field(False, description="Replace the adapter of that name.")
    is_3d_lora_weight: bool = Field(
        False,
        description="Only false: the shapes in the file show whether its experts are stacked.",
        json_schema_extra={"const": False},
    )


class UnloadAdapterBody(BaseModel):
    """Body of `/v1/unload_lora_adapter`, with vLLM's fields."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(description="Name of the adapter.")
    lora_int_id: int | None = Field(None, description="Its id, to remove only that load.")


def lora_router(
    frontend: Callable[[], Frontend],
    settings: ServerSettings,
    metrics: ServerMetrics,
    shown: ShownPaths,
) -> APIRouter:
    """Return the routes; the gate passes requests only once there is a front end."""
    router = APIRouter(route_class=DescribedRoute)

    @router.post("/v1/load_lora_adapter", **_changed_by(LoadAdapterBody))
    async def load(request: Request) -> PlainTextResponse:
        """Load a LoRA adapter from below --lora-root; vLLM's body and answer."""
        body = await read_json_object(request, settings)
        fields = parse_body(LoadAdapterBody, body, settings.unknown_fields)
        if fields.is_3d_lora_weight:
            raise UnsupportedFieldError(
                "'is_3d_lora_weight' is not supported: the shapes in the file show whether its "
                "experts are stacked; remove it.",
                param="is_3d_lora_weight",
            )
        name, path = fields.lora_name, fields.lora_path
        started, result = time.perf_counter(), "failed"
        try:
            await _registry(frontend()).load(name, path, replace=fields.load_inplace)
            result = "ok"
            metrics.observe("rbln_lora_load_seconds", time.perf_counter() - started)
        except RequestError:
            result = "refused"
            raise
        finally:
            metrics.count("rbln_lora_loads_total", result)
        # The text of vLLM's answer, which its clients expect.
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", **_changed_by(UnloadAdapterBody))
    async def unload(request: Request) -> PlainTextResponse:
        """Unload a LoRA adapter once its last request has ended."""
        body = await read_json_object(request, settings)
        fields = parse_body(UnloadAdapterBody, body, settings.unknown_fields)
        adapters = _registry(frontend())
        if fields.lora_int_id not in (None, adapters.get(fields.lora_name).id):
            raise NotFoundError(
                f"The adapter {describe(fields.lora_name)} has another id than "
                f"{fields.lora_int_id}.",
                param="lora_int_id",
            )
        await adapters.unload(fields.lora_name, wait=False)
        return PlainTextResponse(
            f"Success: LoRA adapter '{fields.lora_name}' removed successfully."
        )

    @router.get("/v1/lora_adapters", response_model=JsonObject, responses=_WITHOUT_LORA)
    async def list_adapters(request: Request) -> JSONResponse:
        """List all adapters with their states."""
        adapters = _registry(frontend())
        data = [_seen(adapter, request, shown) for adapter in adapters.all()]
        limits = {"max_loras": adapters.max_loras, "max_lora_rank": adapters.base.max_rank}
        return JSONResponse({"object": "list", "data": data, **limits})

    @router.get("/v1/lora_adapters/{name:path}", response_model=AdapterObject, responses=_UNKNOWN)
    async def show(name: str, request: Request) -> JSONResponse:
        """Return one adapter with its state."""
        return JSONResponse(_seen(_registry(frontend()).get(name), request, shown))

    @router.delete("/v1/lora_adapters/{name:path}", response_model=JsonObject, responses=_DRAINING)
    async def delete(
        name: str, request: Request, wait: Annotated[str, _WAIT] = "true"
    ) -> JSONResponse:
        """Unload an adapter and wait for the end of its last request."""
        adapters = _registry(frontend())
        if (waits := _BOOLEANS.get(wait.lower())) is None:
            raise invalid_value("wait", "be true or false", wait)
        adapter = await adapters.unload(name, wait=waits)
        if not adapter.gone.is_set():
            return JSONResponse(_seen(adapter, request, shown), status_code=_ACCEPTED)
        return JSONResponse({"object": "lora_adapter", "name": name, "deleted": True})

    return router


def _registry(frontend: Frontend) -> AdapterRegistry:
    if frontend.adapters is None:
        raise UnsupportedOperationError(
            "This server has no LoRA adapters: it was started without --enable-lora."
        )
    return frontend.adapters


def _changed_by(body: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a route with this body and a text response."""
    return {
        "response_class": PlainTextResponse,
        "responses": _FAILURES,
        "openapi_extra": taking(body.model_json_schema()),
    }


def _seen(adapter: Adapter, request: Request, shown: ShownPaths) -> AdapterObject:
    described = adapter.to_dict()
    return described if get_record(request.scope).caller.is_admin else shown.adapter(described)
