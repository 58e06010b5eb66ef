"""Operators' controls: `/admin` drains and resumes; prefix cache and profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from server.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedOperationError,
    describe,
    invalid_value,
)
from server.frontend import Frontend, Profiler
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.lifecycle import Lifecycle, ServiceStatus
from server.request.body import read_json_object
from server.request.rules import known_fields
from server.settings import ServerSettings
from server.wire import JsonObject

_REASON = "POST /admin/drain"
_MAX_WAIT_S = 3600.0
_SWITCHES = ("true", "false")
_PREEMPTS = Query(
    description="`true` preempts the running requests; they compute their prompts again.",
    json_schema_extra={"enum": list(_SWITCHES)},
)
_EXTERNAL = Query(
    description="`true` also removes what the KV tiers hold of this model.",
    json_schema_extra={"enum": list(_SWITCHES)},
)


class DrainBody(BaseModel):
    """The optional body of `/admin/drain`."""

    model_config = ConfigDict(extra="forbid")

    wait: bool = Field(False, description="Respond when no request is in flight.")
    timeout_s: float | None = Field(
        None, gt=0, le=_MAX_WAIT_S, description="Maximum wait in seconds; requires `wait`."
    )


_FIELDS = tuple(DrainBody.model_fields)


def admin_router(settings: ServerSettings, lifecycle: Lifecycle) -> APIRouter:
    """Return the routes; callers are authorized by the middleware."""
    router = APIRouter(route_class=DescribedRoute)

    def report() -> JSONResponse:
        return JSONResponse(lifecycle.status(), status_code=202 if lifecycle.in_flight else 200)

    @router.post(
        "/admin/drain",
        response_model=ServiceStatus,
        responses=failing(*BODY_FAILURES) | {202: {"model": ServiceStatus}},
        openapi_extra=taking(DrainBody.model_json_schema(), required=False),
    )
    async def drain(request: Request) -> JSONResponse:
        """Reject new requests; requests in flight finish."""
        wait_s = await _wait_s(request, settings)
        lifecycle.ask_for_drain(_REASON)
        if wait_s:
            await lifecycle.wait_idle(wait_s)
        return report()

    @router.post("/admin/undrain", response_model=ServiceStatus)
    async def undrain() -> JSONResponse:
        """Accept requests again after /admin/drain."""
        lifecycle.take_drain_back()
        return JSONResponse(lifecycle.status())

    return router


def cache_router(frontend: Callable[[], Frontend]) -> APIRouter:
    router = APIRouter(route_class=DescribedRoute)

    @router.post("/reset_prefix_cache", responses=failing(InvalidValueError))
    async def reset_prefix_cache(
        reset_running_requests: Annotated[str, _PREEMPTS] = "false",
        reset_external: Annotated[str, _EXTERNAL] = "false",
    ) -> dict[str, bool]:
        """Forget the KV of all prompts.

        `success` is false while requests hold blocks, and for tiers that there are not.
        """
        switches = {
            "reset_running_requests": reset_running_requests,
            "reset_external": reset_external,
        }
        for name, value in switches.items():
            if value not in _SWITCHES:
                raise invalid_value(name, "be true or false", value)
        done = await frontend().reset_prefix_cache(
            preempt=reset_running_requests == "true", tiers=reset_external == "true"
        )
        return {"success": done}

    return router


def profile_router(frontend: Callable[[], Frontend]) -> APIRouter:
    router = APIRouter(route_class=DescribedRoute)
    failures = failing(UnsupportedOperationError)

    def profiler() -> Profiler:
        engine_profiler = frontend().profiler
        if engine_profiler is None:
            raise UnsupportedOperationError(
                "Profiling is off; start the server with RBLN_PROFILER=1."
            )
        return engine_profiler

    @router.post("/start_profile", responses=failures, response_class=Response)
    async def start_profile() -> Response:
        """Start profiling the engine's steps; a running profile continues."""
        await profiler().start_profile()
        return Response()

    @router.post("/stop_profile", responses=failures, response_class=Response)
    async def stop_profile() -> Response:
        """Write the running profile, if there is one."""
        await profiler().stop_profile()
        return Response()

    return router


async def _wait_s(request: Request, settings: ServerSettings) -> float:
    """Return the seconds for which the response waits for requests in flight, 0: no wait."""
    has_body = request.headers.get("content-length", "0") != "0" or (
        "transfer-encoding" in request.headers
    )
    body: JsonObject = await read_json_object(request, settings) if has_body else {}
    body = known_fields(body, _FIELDS, settings.unknown_fields)
    wait, seconds = body.get("wait", False), body.get("timeout_s")
    if not isinstance(wait, bool):
        raise InvalidTypeError(f"'wait' must be a boolean, got {describe(wait)}.", param="wait")
    if seconds is None:
        return settings.drain_timeout_s if wait else 0.0
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidTypeError(
            f"'timeout_s' must be a number of seconds, got {describe(seconds)}.", param="timeout_s"
        )
    if not wait or not 0 < seconds <= _MAX_WAIT_S:
        raise InvalidValueError(
            f"'timeout_s' must be more than 0 and at most {_MAX_WAIT_S:g}, together with "
            f"'wait': true; got {describe(seconds)}.",
            param="timeout_s",
        )
    return float(seconds)
