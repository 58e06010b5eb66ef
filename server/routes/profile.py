"""`/start_profile` and `/stop_profile`: vLLM's names for a profile of the engine's steps."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import Response

from server.errors import UnsupportedOperationError
from server.frontend import Frontend, Profiler
from server.http.openapi import DescribedRoute, failing


def profile_router(frontend: Callable[[], Frontend]) -> APIRouter:
    """Return the routes; callers are authorized by the middleware."""
    router = APIRouter(route_class=DescribedRoute)
    failures = failing(UnsupportedOperationError)

    def profiler() -> Profiler:
        found = frontend().profiler
        if found is None:
            raise UnsupportedOperationError(
                "Profiling is off; start the server with RBLN_PROFILER=1."
            )
        return found

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
