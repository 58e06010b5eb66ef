"""Pages of other origins: the CORS headers."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import OriginError, ServerError
from server.http.error_responses import send_error
from server.request.record import record_of
from server.settings import ServerSettings


class OriginsMiddleware(CORSMiddleware):
    """Starlette's middleware, which refuses a preflight request with the error envelope."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            await super().__call__(scope, receive, send)
        except ServerError as error:
            await send_error(error, send, record_of(scope))

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the response of an allowed preflight request. Raises `OriginError`."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        failed = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        headers = {k: v for k, v in response.headers.items() if not k.startswith("content-")}
        raise OriginError(
            f"The preflight request of this page is refused for its: {failed} (--allowed-origins, "
            "--allowed-methods, --allowed-headers).",
            headers=headers,
        )


def allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    """Allow pages of other origins to call the API and read the gate's errors."""
    if not settings.allowed_origins:
        return
    app.add_middleware(
        OriginsMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=("x-request-id", "request-id", "retry-after", "retry-after-ms"),
    )
