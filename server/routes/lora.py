"""LoRA adapters over HTTP: vLLM's two routes, and those that list, show and delete them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from server.errors import (
    InvalidValueError,
    NotFoundError,
    RequestError,
    UnsupportedOperationError,
    describe,
)
from server.frontend import Frontend, JsonObject
from server.lora.adapter import Adapter
from server.lora.bodies import LoadAdapterBody, UnloadAdapterBody, parse_body
from server.lora.registry import AdapterRegistry
from server.observability.metrics import ServerMetrics
from server.request.body import read_json_object
from server.request.record import record_of
from server.request.shown_paths import ShownPaths
from server.settings import ServerSettings

_ACCEPTED = 202
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def lora_router(
    frontend: Callable[[], Frontend],
    settings: ServerSettings,
    metrics: ServerMetrics,
    shown: ShownPaths,
) -> APIRouter:
    """Return the adapters' routes; the gate has made sure that there is a front end."""
    router = APIRouter()

    def registry() -> AdapterRegistry:
        adapters = frontend().adapters
        if adapters is None:
            raise UnsupportedOperationError(
                "This server has no LoRA adapters: it was started without --enable-lora."
            )
        return adapters

    @router.post("/v1/load_lora_adapter")
    async def load(request: Request) -> PlainTextResponse:
        body = await read_json_object(request, settings)
        wish = parse_body(LoadAdapterBody, body, settings.unknown_fields)
        with _counted(metrics):
            await registry().load(wish.lora_name, wish.lora_path, replace=wish.load_inplace)
        # The line that vLLM answers; its clients look for it.
        return PlainTextResponse(f"Success: LoRA adapter '{wish.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> PlainTextResponse:
        body = await read_json_object(request, settings)
        wish = parse_body(UnloadAdapterBody, body, settings.unknown_fields)
        adapters = registry()
        if wish.lora_int_id not in (None, adapters.get(wish.lora_name).id):
            raise NotFoundError(
                f"The adapter {describe(wish.lora_name)} has another id than {wish.lora_int_id}.",
                param="lora_int_id",
            )
        await adapters.unload(wish.lora_name, wait=False)
        return PlainTextResponse(f"Success: LoRA adapter '{wish.lora_name}' removed successfully.")

    @router.get("/v1/lora_adapters")
    async def every(request: Request) -> JSONResponse:
        adapters = registry()
        data = [_seen(adapter, request, shown) for adapter in adapters.every()]
        limits = {"max_loras": adapters.limits.max_loras, "max_lora_rank": adapters.base.max_rank}
        return JSONResponse({"object": "list", "data": data, **limits})

    @router.get("/v1/lora_adapters/{name:path}")
    async def show(name: str, request: Request) -> JSONResponse:
        return JSONResponse(_seen(registry().get(name), request, shown))

    @router.delete("/v1/lora_adapters/{name:path}")
    async def delete(name: str, request: Request) -> JSONResponse:
        wait = _wait(request)
        adapter = await registry().unload(name, wait=wait)
        if not adapter.gone.is_set():
            return JSONResponse(_seen(adapter, request, shown), status_code=_ACCEPTED)
        return JSONResponse({"object": "lora_adapter", "name": name, "deleted": True})

    return router


def _seen(adapter: Adapter, request: Request, shown: ShownPaths) -> JsonObject:
    told = adapter.to_dict()
    return told if record_of(request.scope).is_admin else shown.adapter(told)


@contextmanager
def _counted(metrics: ServerMetrics) -> Iterator[None]:
    started, result = time.perf_counter(), "failed"
    try:
        yield
        result = "ok"
    except RequestError:
        result = "refused"
        raise
    finally:
        metrics.observe_adapter_load(result, time.perf_counter() - started)


def _wait(request: Request) -> bool:
    given = request.query_params.get("wait", "true")
    if (wait := _BOOLEANS.get(given.lower())) is None:
        raise InvalidValueError(
            f"'wait' must be true or false, got {describe(given)}.", param="wait"
        )
    return wait
